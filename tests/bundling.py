"""A fleet of fake hosts with real facts behind the real engine, a plan for it, and bundles made of it by the verbs."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fleetfake import PROVIDERS, World

from gpuchange import bundle, engine, inventory
from gpuchange.cli import main

FACTS = json.loads((Path(__file__).parent / "cases" / "facts" / "two_h100.json").read_text())
LOOKING = {"preflight_host", "owner_marker", "record_host"}
"""Roles that change nothing on a host."""
HOSTS = ("h1", "h2")
PLAN = """\
version: 1
name: test
reason: because
inventory: inventory.yaml
hosts: [all]
rollout: {max_unavailable: 1, canary: 0, stop_after_failures: 5, unreachable_timeout: 10s}
"""
INVENTORY = "all:\n  hosts:\n    h1: {ansible_host: 10.0.0.1}\n    h2: {ansible_host: 10.0.0.2, rack: r7}\n"


def facts(host: str) -> dict[str, Any]:
    """Facts of one of the fleet: machine-id, boot-id and cards are its own."""
    own = copy.deepcopy(FACTS)
    number = int(hashlib.sha256(host.encode()).hexdigest()[:8], 16)
    own.update(machine_id=f"{number:032x}", boot_id=f"boot-of-{host}")
    own["smi"]["out"] = own["smi"]["out"].replace("GPU-", f"GPU-{host}")
    return own


class Quiet(engine.Engine):
    def _knock(self) -> None:
        """The addresses of the fleet belong to nobody."""


@dataclass(repr=False)
class Fleet(World):
    """`facts`: what each host says of itself when looked at; `moves`: the packages that its preflight would move."""

    facts: dict[str, dict[str, Any]] = field(default_factory=lambda: {host: facts(host) for host in HOSTS})
    moves: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    before: Callable[[Any], None] = lambda _request: None  # called as a play begins

    def play(self, request: Any, log_dir: Path) -> Any:
        self.before(request)
        return super().play(request, log_dir)

    def _report(self, request: Any, host: str, state: str) -> dict[str, Any]:
        report = super()._report(request, host, state)
        report["machine_id"] = self.facts[host]["machine_id"]
        if request.role in ("preflight_host", "record_host", "seal_host"):
            report |= {"facts": copy.deepcopy(self.facts[host])}
        if request.role == "preflight_host":
            report["moves"] = self.moves.get(host, [{"name": "libcudnn9", "from": "9.1.0-1", "to": "9.8.0-1"}])
            report["state"] = "done"
        return report

    @property
    def changed(self) -> list[tuple[str, str, str]]:
        """What was done to hosts, beyond looking."""
        return [row for row in self.ledger if row[1] not in LOOKING]


@dataclass(repr=False)
class Desk:
    """Where an operator sits: a directory with plan and inventory, a state directory, keys."""

    home: Path
    fleet: Fleet

    @property
    def state(self) -> Path:
        return self.home / "changes"

    def run(self, *arguments: str) -> int:
        return main(["--state-dir", str(self.state), *arguments])

    def fresh(self) -> None:
        """The fleet and the state directory as they were at first."""
        fleet = Fleet()
        vars(self.fleet).update(vars(fleet))
        shutil.rmtree(self.state, ignore_errors=True)

    def plan(self, name: str = "b", *more: str) -> Path:
        """A bundle made by `gpuchange plan -o`."""
        path = self.home / name
        assert self.run("plan", str(self.home / "plan.yaml"), "-o", str(path), "--author", "alice", *more) == 0
        return path

    def kept(self) -> list[Path]:
        """The change directories."""
        return sorted(path for path in self.state.glob("[!.]*") if path.is_dir())

    def key(self, name: str) -> Path:
        """An SSH key, made when first asked for."""
        path = self.home / f"key-{name}"
        if not path.exists():
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(path)]
            subprocess.run(command, check=True, capture_output=True)
        return path

    def signers(self, **keys: str) -> Path:
        """An allowed_signers file: identity → name of the key."""
        lines = [f"{who} {Path(f'{self.key(key)}.pub').read_text()}" for who, key in keys.items()]
        path = self.home / "allowed_signers"
        path.write_text("".join(lines))
        path.chmod(0o644)
        return path


def edited(path: Path, change: Callable[[dict[str, Any]], None], coherent: bool = True) -> Path:
    """A copy of the bundle whose fields `change` altered; `coherent`: with the digest that then fits."""
    fields = json.loads(path.read_text())
    change(fields)
    if coherent:
        fields["digest"] = bundle.digest_of(fields["content"])
    made = path.with_name(f"{path.name}-edited")
    made.write_text(bundle.canonical(fields) + "\n")
    return made


class Resolver:
    """Ansible's own answers about inventories, asked for once a content: asking takes a second."""

    def __init__(self) -> None:
        self.real, self.known = inventory.resolve, dict[Any, inventory.Inventory]()

    def __call__(self, sources: Any, limit: Any, hosts: Any, *, vault_ids: Any = ()) -> inventory.Inventory:
        content = tuple(Path(source).read_bytes() if Path(source).is_file() else source for source in sources)
        key = (content, limit, tuple(hosts))
        if key not in self.known:
            self.known[key] = self.real(sources, limit, hosts, vault_ids=vault_ids)
        return self.known[key]


RESOLVER = Resolver()


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Two fake hosts, h1 and h2, behind the real engine and command line."""
    made = Desk(tmp_path, Fleet())
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    (tmp_path / "plan.yaml").write_text(PLAN)
    monkeypatch.setattr("gpuchange.providers.PROVIDERS", PROVIDERS)
    monkeypatch.setattr("gpuchange.engine.Engine", partial(Quiet, player=made.fleet.play))
    monkeypatch.setattr("gpuchange.change.inventory.resolve", RESOLVER)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("GPUCHANGE_REQUIRE_APPROVALS", raising=False)
    monkeypatch.delenv("GPUCHANGE_ALLOWED_SIGNERS", raising=False)
    return made
