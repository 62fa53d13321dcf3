"""Generic tests over the phase table: whatever row is added must keep these."""

from __future__ import annotations

import pytest

from gpuchange.phase import NOTHING_TO_UNDO, Irreversible, Phase, Play
from gpuchange.phases import PHASES

NAMES = [phase.name for phase in PHASES]
ROWS = pytest.mark.parametrize("row", PHASES, ids=NAMES)


def position(name: str) -> int:
    return NAMES.index(name)


def test_the_order_is_the_product() -> None:
    assert NAMES == (
        ["preflight", "record", "backup", "drain", "seal", "baseline", "change", "stack", "verify", "release", "watch"]
    )


def test_a_row_cannot_be_made_without_an_undo() -> None:
    with pytest.raises(TypeError, match="undo"):
        Phase("new", "Does something.", do=Play("new", "apply"))  # type: ignore[call-arg]


@ROWS
def test_every_row_says_what_it_does_and_how_it_is_taken_back(row: Phase) -> None:
    assert row.does.endswith(".") and row.does[0].isupper() and len(row.does) < 100
    assert isinstance(row.undo, Play | Irreversible) or row.undo is NOTHING_TO_UNDO
    assert not isinstance(row.undo, Irreversible) or row.undo.why


@ROWS
def test_undo_is_the_other_tasks_of_the_same_roles(row: Phase) -> None:
    if isinstance(row.undo, Play):
        assert row.undo.phase == row.do.phase
        assert {row.do.tasks, row.undo.tasks} == {"apply", "undo"}


@ROWS
def test_a_row_plays_its_own_roles_or_those_of_an_earlier_row_in_reverse(row: Phase) -> None:
    own = row.do.phase == row.name
    assert own == (row.do.tasks == "apply") == (not row.reverse)
    assert own or position(row.do.phase) < position(row.name)


def test_one_row_takes_hosts_out_and_one_brings_them_back() -> None:
    out = [phase for phase in PHASES if phase.takes_out]
    back = [phase for phase in PHASES if phase.brings_back]
    assert [phase.name for phase in out] == ["drain"] and [phase.name for phase in back] == ["release"]


def test_release_mirrors_drain() -> None:
    drain, release = PHASES[position("drain")], PHASES[position("release")]
    assert (release.do, release.undo, release.reverse) == (drain.undo, drain.do, not drain.reverse)


@ROWS
def test_what_has_to_be_taken_back_happens_while_the_host_is_out(row: Phase) -> None:
    if row.undo is not NOTHING_TO_UNDO:
        assert position("drain") <= position(row.name) <= position("release")


def test_the_rollback_is_proved_before_the_host_serves_again() -> None:
    """Going back: everything that changes is undone first, then seal proves it, then drain is undone."""
    changing = [position(name) for name in ("change", "stack")]
    assert position("drain") < position("seal") < min(changing)
    assert max(changing) < position("verify") < position("release") < position("watch")
    assert isinstance(PHASES[position("seal")].undo, Play)
