"""Fixtures over a real lab. Needs root on a Debian-like machine; elsewhere the tests are skipped, saying why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from field import HOSTS, Field
from playing import Player

from gpuchange.errors import LabError
from gpuchange.lab import Lab, state
from gpuchange.lab.tools import require_machine

HERE = Path(__file__).parent


LONGEST_FIRST = (
    *("test_kill_resume", "test_orphaned_work", "test_cut_off", "test_stack_apt", "test_proved_rollback"),
    *("test_two_controllers", "test_cases_stack", "test_apply", "test_drain", "test_stack_runfile", "test_cases_cuda"),
    *(
        "test_bundle_on_hosts",
        "test_card_change",
        "test_cases_data",
        "test_cases_apt",
        "test_dry_run",
        "test_lab_crash",
    ),
    *("test_failure", "test_lab_gpu", "test_lab_hosts", "test_record", "test_secrets", "test_ways_in"),
)
"""Modules that take minutes, so that no worker is left alone with one at the end; the others follow, a minute at most.
It counts with --no-loadscope-reorder: of itself pytest-xdist begins with the modules that have the most tests.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.lab)
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    if HERE not in item.path.parents:
        return -1
    return LONGEST_FIRST.index(item.path.stem) if item.path.stem in LONGEST_FIRST else len(LONGEST_FIRST)


def lab_name(worker: str = "") -> str:
    """One lab a pytest-xdist worker; GPUCHANGE_TEST_LAB names it, so that several test runs share a machine."""
    base = os.environ.get("GPUCHANGE_TEST_LAB") or f"test-{os.getppid() if worker else os.getpid()}"
    return f"{base}-{worker}" if worker else base


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A lab of 3 GPU hosts with 2 cards each and lb1; torn down at the end unless it was up before."""
    try:
        require_machine()
    except LabError as error:
        pytest.skip(str(error))
    name = lab_name(os.environ.get("PYTEST_XDIST_WORKER", ""))
    was_up = state.exists(name)
    if was_up:  # as an earlier run left it
        made = Lab.load(name)
        made.restore("start")
    else:
        made = Lab.up(name, hosts=3, gpus=2)
    yield made
    if not was_up:
        made.down()


@pytest.fixture(scope="session")
def field_lab() -> Iterator[Lab]:
    """A lab of its own with hosts for runs side by side."""
    try:
        require_machine()
    except LabError as error:
        pytest.skip(str(error))
    name = f"{lab_name(os.environ.get('PYTEST_XDIST_WORKER', ''))}-field"
    was_up = state.exists(name)
    made = Lab.up(name, hosts=HOSTS)
    if was_up:
        made.restore("start")
    yield made
    if not was_up:
        made.down()


@pytest.fixture(scope="session")
def field(field_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Field:
    """Its hosts, given out one by one."""
    return Field(field_lab, tmp_path_factory.mktemp("field"))


def of_module(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """The selected tests of this module, in their order."""
    return [item for item in request.session.items if getattr(item, "module", None) is request.module]


@pytest.fixture(scope="module", autouse=True)
def lab_as_first_laid_out(request: pytest.FixtureRequest) -> None:
    """No module finds what another one left in the shared lab: on several workers their order is anybody's guess."""
    if any("lab" in getattr(item, "fixturenames", ()) for item in of_module(request)):
        request.getfixturevalue("lab").restore("start")


def as_first_laid_out(request: pytest.FixtureRequest) -> bool:
    """Whether nothing has touched the lab since it was put back for this module: that takes its time with each host."""
    return of_module(request)[0] is request.node


@pytest.fixture
def fresh_hosts(lab: Lab, request: pytest.FixtureRequest) -> Lab:
    """The lab with every host as first laid out, running, and all in service at HAProxy."""
    if not as_first_laid_out(request):
        lab.restore("start")
    return lab


@pytest.fixture
def player(lab: Lab, request: pytest.FixtureRequest) -> Player:
    """A fresh host and a change of its own."""
    if not as_first_laid_out(request):
        lab.host("gpu1").restore("start")
    return Player(lab, "gpu1", "c-" + request.node.name[5:40].replace("_", "-").strip("-"))
