"""What evidence becomes: one table of situations, and the rules that all providers share."""

from __future__ import annotations

from typing import Any

import pytest

from gpuchange.judging import Situation, judge
from gpuchange.providers.contract import HostView, Params, Provider
from gpuchange.reports import Failed, Report, Reported, Silent, Unreachable
from gpuchange.states import Kind

PROVIDER = Provider("drain", "x", "does", Params, Report)


def situation(tasks: str = "apply", **more: Any) -> Situation:
    view = HostView("h1", {}, {}, direction=more.pop("direction", "do"), waited=more.pop("waited", 0.0))
    return Situation(provider=more.pop("provider", PROVIDER), view=view, tasks=tasks, **more)


def said(state: str, **more: Any) -> Reported:
    return Reported("h1", {"state": state, **more}, "h1")


CASES = [
    (situation(), said("done"), Kind.ACCEPTED),
    (situation(), said("not_done", why="no"), Kind.REJECTED),
    (situation(), said("running"), Kind.AGAIN),
    (situation(), said("unknown"), Kind.HELD),
    (situation("probe"), said("done"), Kind.ACCEPTED),
    (situation("probe"), said("not_done"), Kind.NOT_DONE),
    (situation("probe"), said("running"), Kind.AGAIN),
    (situation("probe"), said("unknown"), Kind.HELD),
    (situation("probe", was_silent=True), said("not_done"), Kind.REJECTED),
    (situation(), said("nonsense"), Kind.REJECTED),
    (situation("probe"), said("nonsense"), Kind.HELD),
    (situation(), Failed("h1", "boom"), Kind.REJECTED),
    (situation("probe"), Failed("h1", "boom"), Kind.HELD),
    (situation(), Failed("h1", "no", refused={"kind": "locked"}), Kind.HELD),
    (situation(), Unreachable("h1", "gone"), Kind.LOST),
    (situation(before_change=True), Unreachable("h1", "gone"), Kind.REJECTED),
    (situation(lost_waited=600.0), Unreachable("h1", "gone"), Kind.HELD),
    (situation(), Silent("h1", "no word"), Kind.LOST),
    (situation(lost=2), Silent("h1", "no word"), Kind.HELD),
    (situation(lost=2, stopping=True), Silent("h1", "ended by a second Ctrl-C"), Kind.LOST),
    (situation(before_change=True), Silent("h1", "no word"), Kind.REJECTED),
    (situation(before_change=True, stopping=True), Silent("h1", "ended by a second Ctrl-C"), Kind.LOST),
]


@pytest.mark.parametrize(("given", "evidence", "kind"), CASES)
def test_evidence_becomes(given: Situation, evidence: Any, kind: Kind) -> None:
    assert judge(given, evidence).kind == kind


def test_unreachable_says_where_and_backs_off() -> None:
    waits = [judge(situation(lost=n), Unreachable("h1", "x", "lb1")).data["after"] for n in range(8)]
    assert waits == sorted(waits) and waits[-1] == 30.0
    assert "lb1 unreachable" in judge(situation(), Unreachable("h1", "x", "lb1")).data["why"]


def test_a_play_that_we_ended_is_lost_and_no_failure() -> None:
    for given in (situation(), situation(before_change=True), situation(lost=9)):
        outcome = judge(given, Silent("h1", "ended", stopped=True))
        assert outcome.kind == Kind.LOST and outcome.data["silent"] is False


def test_waits_add_up_so_that_judges_can_bound_them() -> None:
    assert judge(situation(waited=10.0), said("running")).data["waited"] == 12.0


def test_undo_asks_the_other_judge() -> None:
    from gpuchange.reports import Verdict

    odd = Provider("drain", "x", "does", Params, Report, judge_undo=lambda _view, _report: Verdict.hold("unequal"))
    assert judge(situation("undo", direction="undo", provider=odd), said("done")).kind == Kind.HELD
    assert judge(situation("undo", direction="do", provider=odd), said("done")).kind == Kind.ACCEPTED


def test_only_reports_that_speak_of_it_say_as_wanted() -> None:
    assert judge(situation(), said("done", as_wanted=True)).data["as_wanted"] is True
    assert "as_wanted" not in judge(situation(), said("done")).data
