"""Package transactions in an operator's words: comparison by number, moves, unmet targets."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuchange.checks.packages import (
    Move,
    Transaction,
    component_lines,
    count_line,
    direction,
    sealed_packages,
    version_key,
)
from gpuchange.providers.contract import HostView
from gpuchange.providers.preflight.apt import AptPreflightReport
from gpuchange.providers.preflight.apt import judge as judge_preflight
from gpuchange.providers.stack.apt import AptStack, AptStackReport, args, judge, judge_undo, preview
from gpuchange.providers.stacks import LONGEST_REBOOT_S

TRANSACTION = {
    "install": {"nvidia-driver-570": "570.172.08-0ubuntu1"},
    "remove": ["nvidia-driver-550"],
    "driver": "570.172.08",
}
BODY = {
    "state": "done",
    "transaction": TRANSACTION,
    "before": {"driver": "550.54.15", "cuda": ""},
    "after": {"driver": "570.172.08", "cuda": "12.8.1"},
    "moves": [
        {"name": "nvidia-driver-550", "from": "550.54.15-0ubuntu1", "to": ""},
        {"name": "nvidia-driver-570", "from": "", "to": "570.172.08-0ubuntu1"},
    ],
    "reboot_needed": True,
    "sizes": {"download": 1},
}


def view(**more: object) -> HostView:
    last = {"preflight/apt": BODY, "seal/host": {"facts": {"packages": {"packages": {"x": "1"}, "holds": ["x"]}}}}
    return HostView("gpu1", {"stack": {"driver": "570.172.08"}}, {}, last=last, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("570.86.10", "570.172.08", "upgrade"),
        ("12.10.0", "12.9.1", "downgrade"),
        ("9.1.0.70-1", "9.1.0.70-1", "keep"),
        ("", "1", "install"),
        ("1.0~rc1", "1.0", "upgrade"),
    ],
)
def test_versions_are_compared_by_number(old: str, new: str, word: str) -> None:
    assert direction(old, new) == word


numbers = st.lists(st.integers(0, 2000), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))


@pytest.mark.skipif(not shutil.which("dpkg"), reason="dpkg is the judge")
@settings(max_examples=25, deadline=None)
@given(numbers, numbers)
def test_order_agrees_with_dpkg(one: str, two: str) -> None:
    theirs = subprocess.run(["dpkg", "--compare-versions", one, "lt", two], check=False).returncode == 0
    assert (version_key(one) < version_key(two)) == theirs


def test_moves_are_said_in_words() -> None:
    assert component_lines(BODY["before"], BODY["after"]) == (  # type: ignore[arg-type]
        "driver 550.54.15 → 570.172.08 (upgrade)",
        "CUDA absent → 12.8.1 (install)",
    )
    moves = [Move.model_validate(move) for move in BODY["moves"]]  # type: ignore[attr-defined]
    assert count_line(moves) == "2 packages: 1 new, 1 removed"
    assert count_line([]) == ""


def test_preview_names_versions_and_the_reboot() -> None:
    lines = preview(view(), AptStackReport(state="not_done"))
    assert lines[0] == "driver 550.54.15 → 570.172.08 (upgrade)" and lines[-1] == "one reboot: the driver changes"


def test_accept_needs_every_package_and_the_loaded_driver() -> None:
    good = {"nvidia-driver-570": "570.172.08-0ubuntu1"}
    loaded = {"loaded": "570.172.08"}
    assert judge(view(), AptStackReport(state="done", installed=good, driver=loaded)).outcome == "accept"
    wrong = judge(view(), AptStackReport(state="done", installed={**good, "nvidia-driver-550": "550"}, driver=loaded))
    assert wrong.outcome == "reject" and "nvidia-driver-550 is still installed" in wrong.why
    old = judge(view(), AptStackReport(state="done", installed=good, driver={"loaded": "550.54.15"}))
    assert old.outcome == "reject" and "loaded driver is 550.54.15, not 570.172.08" in old.why


def test_a_reboot_that_never_comes_is_held_not_awaited_for_ever() -> None:
    report = AptStackReport(state="running", why="host answered but has not rebooted yet", rebooting=True)
    assert judge(view(waited=10.0), report).outcome == "again"
    assert judge(view(waited=LONGEST_REBOOT_S + 1), report).outcome == "hold"
    assert judge_undo(view(waited=LONGEST_REBOOT_S + 1, direction="undo"), report).outcome == "hold"


def test_going_back_is_judged_as_installed() -> None:
    restored = {"state": "not_done", "why": "rebooted, but the card is gone", "installed": {"a": "1"}}
    assert judge_undo(view(direction="undo"), AptStackReport(**restored, left=0)).outcome == "accept"
    assert judge_undo(view(direction="undo"), AptStackReport(**restored, left=1)).outcome == "reject"


@pytest.mark.case("rollback-impossible-old-deb-gone")
def test_no_way_back_must_be_accepted_for_that_host() -> None:
    report = AptPreflightReport.model_validate({**BODY, "not_obtainable": ["libcudnn8 8.9.7"]})
    refused = judge_preflight(view(), report)
    assert refused.outcome == "reject" and "cannot guarantee rollback for libcudnn8 8.9.7" in refused.why
    accepting = HostView("gpu1", {"accept_irreversible": ["gpu1"]}, {})
    assert judge_preflight(accepting, report).outcome == "accept"


def test_args_carry_the_accepted_transaction_and_the_seal() -> None:
    built = args(view(retries=2), "undo")
    assert built["generation"] == 2
    assert built["transaction"] == TRANSACTION
    assert built["sealed"] == {"versions": {"x": "1"}, "holds": ["x"], "auto": [], "alternatives": {}, "driver": ""}
    assert sealed_packages({}, "") is None


def test_unmet_says_what_is_wrong() -> None:
    assert Transaction.model_validate(TRANSACTION).unmet({}) == (
        "nvidia-driver-570 is absent, not 570.172.08-0ubuntu1",
    )


def test_a_stack_without_a_version_is_refused() -> None:
    with pytest.raises(ValueError, match="names no version"):
        AptStack()
