"""Changes on disk with fake hosts (fleetfake.py), for the engine's tests: begin it, run it, read what it says."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuchange import change as changes
from gpuchange import engine as engines
from gpuchange.change import Change, Connection
from gpuchange.states import Event, Status
from tests.fleetfake import PROVIDERS, World

TEMPLATES = "GPUCHANGE_TEST_TEMPLATES"  # a directory that outlives the tests' own: many runs share what is slow to make

PLAN = """\
version: 1
name: test
reason: because
ticket: OPS-7
inventory: inventory.yaml
hosts: [all]
rollout: {max_unavailable: 1, canary: 0, unreachable_timeout: 1s}
"""


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuchange.providers.PROVIDERS", PROVIDERS)


@pytest.fixture
def begin(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, registry: None) -> Callable[..., Path]:
    def create(hosts: int = 1) -> Path:
        template = _template(Path(os.environ.get(TEMPLATES) or tmp_path_factory.getbasetemp()), hosts)
        return Path(shutil.copytree(template, tmp_path / f"{time.monotonic_ns()}" / template.name))

    return create


def _template(base: Path, hosts: int) -> Path:
    """A change that has just been created, made once: asking Ansible for the inventory is slow."""
    root = base / f"change-of-{hosts}"
    if not root.exists():
        names = "".join(f"    h{n}: {{ansible_connection: local}}\n" for n in range(1, hosts + 1))
        root.mkdir()
        (root / "inventory.yaml").write_text(f"all:\n  hosts:\n{names}")
        (root / "plan.yaml").write_text(PLAN)
        changes.create(root / "state", root / "plan.yaml", Connection())
    return next((root / "state").iterdir())


def run(
    home: Path,
    world: World,
    connection: Connection | None = None,
    last_phase: str = "",
    only_back: bool = False,
    **more: Any,
) -> int:
    engine = engines.Engine(home, connection or Connection(), player=world.play, **more)
    try:
        return engine.run(last_phase=last_phase, only_back=only_back)
    finally:
        engine.close()


def events(home: Path) -> list[Event]:
    change = Change.open(home, readonly=True)
    try:
        return list(change.journal.events())
    finally:
        change.journal.close()


def statuses(home: Path, host: str = "h1") -> dict[str, Status]:
    change = Change.open(home, readonly=True)
    try:
        return {"/".join(key): step.status for key, step in change.state.hosts[host].steps.items()}
    finally:
        change.journal.close()


def acted(world: World, host: str = "h1") -> list[str]:
    return [f"{role}.{what}" for name, role, what in world.ledger if name == host]


class Crash(BaseException):
    pass


def crash_at(home: Path, world: World, moment: Callable[[Event], bool]) -> None:
    """Run a change until the first event that `moment` says, and lose the controller there."""

    def observer(event: Event, _state: Any) -> None:
        if moment(event):
            raise Crash

    engine = engines.Engine(home, Connection(), [observer], player=world.play)
    try:
        engine.run()
        engine.close()
    except Crash:
        engine.change.journal.close()
