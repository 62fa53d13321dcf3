"""Steps that wait for hands: asked in words, confirmed once, heard by a running controller and by the next one."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuchange import confirming, orders
from gpuchange.change import Change, Connection, create
from gpuchange.cli import main
from gpuchange.confirming import Confirmations, Question, confirmation
from gpuchange.engine import Engine
from gpuchange.errors import IllegalTransition, NeedsOperator
from gpuchange.providers.contract import HostView
from gpuchange.reports import Report, Verdict
from gpuchange.states import Event, Kind
from gpuchange.waiting import wait_until
from tests.fleetfake import PROVIDERS, World

RUN = ("h1", "seal", "host", "do")
PLAN = """\
version: 1
name: hands
reason: because
inventory: inventory.yaml
hosts: [all]
rollout: {max_unavailable: 1, canary: 0, unreachable_timeout: 10s}
"""
LONG = 3600.0  # seconds: a test that waits for the next look instead of being woken never ends in time


def hands(view: HostView, _report: Report) -> Verdict:
    if view.confirmed:
        return Verdict.accept(f"confirmed, remembered {view.memo['told']}")
    return Verdict.again(LONG, "waits for hands", asks=("turn the key",), memo={"told": 1 + view.memo.get("told", 0)})


@pytest.fixture
def change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A change of one host whose seal asks to turn a key."""
    rows = tuple(replace(row, judge=hands) if row.phase == "seal" else row for row in PROVIDERS)
    monkeypatch.setattr("gpuchange.providers.PROVIDERS", rows)
    monkeypatch.setenv("GPUCHANGE_STATE", str(tmp_path / "changes"))
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "inventory.yaml").write_text("all:\n  hosts:\n    h1: {ansible_connection: local}\n")
    (tmp_path / "plan.yaml").write_text(PLAN)
    return create(tmp_path / "changes", tmp_path / "plan.yaml", Connection())


def carried(change: Path, world: World, codes: list[int]) -> threading.Thread:
    """A controller at work in a thread of its own, from opening the journal to closing it."""

    def work() -> None:
        engine = Engine(change, Connection(), player=world.play)
        try:
            codes.append(engine.run())
        finally:
            engine.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def asked(change: Path) -> Any:
    found = Change.open(change, readonly=True)
    try:
        return found.hands.of("h1")
    finally:
        found.journal.close()


def until_asked(change: Path) -> None:
    wait_until(lambda: asked(change), timeout=30, what="the question", interval=0.05)


def stopped_while_asking(change: Path, world: World) -> None:
    """A controller that was told to stop once the question stood."""
    engine = Engine(change, Connection(), player=world.play)
    engine.observers.append(lambda event, _state: engine.stop() if event.data.get("asks") else None)
    engine.run()
    engine.close()


def test_a_running_controller_hears_it_at_once_and_remembers_what_it_had_noted(
    change: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    thread = carried(change, World(), codes)
    until_asked(change)
    assert main(["status"]) == 0
    said = capsys.readouterr().out
    assert "h1: turn the key" in said and f"next: gpuchange confirm {change.name} h1" in said
    assert main(["confirm", change.name, "h1"]) == 0
    thread.join(30)
    assert codes == [0]
    said = capsys.readouterr().out
    assert f"confirmed for h1: turn the key\nnext: gpuchange status {change.name}" in said
    assert list((change / "orders").iterdir()) == []
    assert asked(change) is None


def test_without_a_controller_it_is_journalled_and_the_next_one_goes_on(
    change: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World()
    stopped_while_asking(change, world)
    assert main(["confirm", change.name, "h1"]) == 0
    assert f"next: gpuchange resume {change.name}" in capsys.readouterr().out
    engine = Engine(change, Connection(), player=world.play)
    assert engine.run() == 0
    assert "confirmed, remembered 1" in str([e.data for e in engine.change.journal.events() if e.phase == "seal"])
    engine.close()


def test_a_note_left_for_a_controller_that_then_died_is_taken_by_the_next(change: Path) -> None:
    world = World()
    stopped_while_asking(change, world)
    run, question = asked(change)
    confirming.leave(change, confirmation(run, question, "somebody"))
    engine = Engine(change, Connection(), player=world.play)
    assert engine.run() == 0
    engine.close()


def test_a_note_that_answers_no_standing_question_is_dropped(change: Path) -> None:
    """Taken but not yet removed when the controller was killed, meant for an older question, or no note at all."""
    world = World()
    stopped_while_asking(change, world)
    run, question = asked(change)
    confirming.leave(change, confirmation(run, question._replace(seq=question.seq - 1), "too early"))
    confirming.leave(change, confirmation(("h9", *run[1:]), question, "a stranger"))
    (change / "orders" / "broken.json").write_text("{")
    engine = Engine(change, Connection(), player=world.play)
    engine.stop()
    engine.run()
    engine.close()
    assert asked(change) is not None
    assert list((change / "orders").iterdir()) == []


def test_only_what_is_asked_for_can_be_confirmed(change: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["confirm", change.name, "h1"]) == 5
    assert "h1 waits for no confirmation" in capsys.readouterr().err
    assert main(["confirm", change.name, "h7"]) == 64
    assert "its hosts: h1" in capsys.readouterr().err
    stopped_while_asking(change, World())
    assert orders.confirm(change, "h1", "me") is None
    with pytest.raises(NeedsOperator):
        orders.confirm(change, "h1", "me")


def event(kind: Kind, seq: int, direction: str = "do", **data: Any) -> Event:
    return Event(kind, "h1", "seal", "host", direction, data=data, seq=seq)


def test_a_question_stands_while_it_is_asked_again_and_falls_with_every_other_answer() -> None:
    folded = Confirmations()
    folded.fold(event(Kind.AGAIN, 5, asks=["turn"], memo={"a": 1}))
    for kind in (Kind.STARTED, Kind.LOST, Kind.PROBING):
        folded.fold(event(kind, 6))
    folded.fold(event(Kind.AGAIN, 9, asks=["turn it"]))
    assert folded.of("h1") == (RUN, Question(5, ("turn it",)))
    assert folded.of("h2") is None
    assert folded.memos[RUN] == {"a": 1}
    for ends in (
        event(Kind.AGAIN, 10),
        event(Kind.ACCEPTED, 10),
        event(Kind.HELD, 10),
        Event(Kind.TURNED, "h1", seq=10),
    ):
        folded.fold(event(Kind.AGAIN, 9, asks=["turn it"]))
        folded.fold(ends)
        assert folded.of("h1") is None, ends


def test_a_confirmation_counts_for_its_direction_only() -> None:
    folded = Confirmations()
    folded.fold(event(Kind.AGAIN, 5, asks=["turn"]))
    note = confirmation(RUN, folded.asked[RUN], "me")
    assert folded.fits(note)
    folded.fold(note)
    assert not folded.fits(note)
    assert folded.confirmed == {RUN}


def test_a_confirmation_for_a_step_that_the_change_has_not_is_refused(change: Path) -> None:
    found = Change.open(change, readonly=True)
    found.journal.close()
    stranger = confirmation(("h1", "seal", "nobody", "do"), Question(1, ("turn",)), "me")
    with pytest.raises(IllegalTransition):
        found.state.apply(stranger)
