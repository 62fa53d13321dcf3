"""Whatever is altered in a journal is found, and its row named."""

from __future__ import annotations

import sqlite3
import zlib
from pathlib import Path
from typing import Any

import pytest

from gpuchange.errors import GpuchangeError, JournalError
from gpuchange.journal import FILE, Journal
from tests.journalling import COLUMNS, META, altered, event, fault

pytest_plugins = ["tests.journalling"]


# -- tampering --------------------------------------------------------------------------------------------------------


def test_an_untouched_journal_is_sound(written: Path) -> None:
    with Journal.open(written, readonly=True) as opened:
        opened.verify()
        opened.verify(opened.head())
        opened.verify((0, opened._genesis))


def test_the_database_itself_refuses_to_change_or_drop_a_row(journal: Journal) -> None:
    journal.append([event(1)])
    for statement in ("UPDATE events SET host = 'x'", "DELETE FROM events"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            journal._database.execute(statement)


@pytest.mark.parametrize("seq", range(1, 7))
@pytest.mark.parametrize("column", COLUMNS)
def test_any_cell_that_is_changed_is_found_and_its_row_named(written: Path, seq: int, column: str) -> None:
    value = "(SELECT max(digest) FROM bodies WHERE digest IS NOT events.body)" if column == "body" else "'forged'"
    altered(written, f"UPDATE events SET {column} = {value} WHERE seq = {seq}")
    assert f"row {seq} " in fault(written)


@pytest.mark.parametrize("seq", range(1, 7))
def test_a_cell_of_another_type_is_found(written: Path, seq: int) -> None:
    altered(written, f"UPDATE events SET data = CAST(data AS BLOB) WHERE seq = {seq}")
    assert f"row {seq} " in fault(written)


@pytest.mark.parametrize("seq", range(1, 6))
def test_a_dropped_row_is_found(written: Path, seq: int) -> None:
    altered(written, f"DELETE FROM events WHERE seq = {seq}")
    assert f"row {seq} is missing" in fault(written)


@pytest.mark.parametrize("seq", range(1, 6))
def test_rows_that_are_dropped_and_renumbered_are_found(written: Path, seq: int) -> None:
    altered(
        written,
        f"DELETE FROM events WHERE seq = {seq}",
        f"UPDATE events SET seq = -seq WHERE seq > {seq}",
        "UPDATE events SET seq = -seq - 1 WHERE seq < 0",
    )
    assert f"row {seq} does not match" in fault(written)


def test_rows_that_changed_places_are_found(written: Path) -> None:
    altered(
        written,
        "UPDATE events SET seq = -2 WHERE seq = 2",
        "UPDATE events SET seq = 2 WHERE seq = 5",
        "UPDATE events SET seq = 5 WHERE seq = -2",
    )
    assert "row 2 does not match" in fault(written)


def test_a_row_put_in_is_found(written: Path) -> None:
    altered(written, f"INSERT INTO events SELECT 7, {', '.join(COLUMNS)} FROM events WHERE seq = 6")
    assert "row 7 does not match" in fault(written)


def test_a_cut_tail_is_found_against_an_anchor_and_only_so(written: Path) -> None:
    with Journal.open(written, readonly=True) as opened:
        anchor = opened.head()
    altered(written, "DELETE FROM events WHERE seq > 3")
    assert "body" in fault(written)  # the body that went with the tail was left behind
    drop_unnamed_bodies(written)
    with Journal.open(written, readonly=True) as opened:
        opened.verify()
    assert "row 6 is missing or differs" in fault(written, anchor)


def drop_unnamed_bodies(home: Path) -> None:
    with sqlite3.connect(home / FILE) as database:
        database.execute("DELETE FROM bodies WHERE digest NOT IN (SELECT body FROM events WHERE body IS NOT NULL)")
    database.close()


def test_a_whole_chain_forged_anew_is_found_against_an_anchor(written: Path, tmp_path: Path) -> None:
    with Journal.open(written, readonly=True) as opened:
        anchor = opened.head()
    with Journal.create(tmp_path / "forged", META) as forged:
        forged.append([event(number) for number in range(8)])
        forged.verify()
        with pytest.raises(JournalError, match="row 6"):
            forged.verify(anchor)


@pytest.mark.parametrize(
    "change", ["json = '{}'", "hash = 'forged'", "json = CAST(json AS BLOB)", "json = replace(json, 'gpu1', 'gpu9')"]
)
def test_changed_meta_is_found(written: Path, change: str) -> None:
    altered(written, f"UPDATE meta SET {change}")
    assert "row 0" in fault(written)


def test_missing_meta_is_found(written: Path) -> None:
    altered(written, "DELETE FROM meta")
    assert "row 0" in fault(written)


@pytest.mark.parametrize("blob", [b"no zlib", zlib.compress(b'{"state":"failed"}'), zlib.compress(b"\xff"), "text"])
def test_a_changed_body_is_found(written: Path, blob: bytes | str) -> None:
    with sqlite3.connect(written / FILE) as database:
        database.execute("UPDATE bodies SET json = ?", (blob,))
        digest = database.execute("SELECT min(digest) FROM bodies").fetchone()[0]
    database.close()
    assert f"body {digest}" in fault(written)
    with Journal.open(written, readonly=True) as opened, pytest.raises(JournalError, match="altered"):
        opened.body(digest)


def test_a_missing_and_an_added_body_are_found(written: Path) -> None:
    altered(written, "INSERT INTO bodies VALUES ('0123', x'00')")
    assert "body 0123" in fault(written)
    drop_unnamed_bodies(written)
    with sqlite3.connect(written / FILE) as database:
        database.execute("PRAGMA foreign_keys = OFF")
        digest = database.execute("SELECT min(digest) FROM bodies").fetchone()[0]
        database.execute("DELETE FROM bodies WHERE digest = ?", (digest,))
    database.close()
    assert digest in fault(written)
    with Journal.open(written, readonly=True) as opened, pytest.raises(JournalError, match="missing"):
        opened.body(digest)


def test_an_event_that_cannot_be_read_is_one_clear_error(written: Path) -> None:
    altered(written, "UPDATE events SET kind = 'danced' WHERE seq = 3")
    with Journal.open(written) as opened, pytest.raises(JournalError, match="row 3"):
        list(opened.events())


def _content(home: Path) -> tuple[Any, ...]:
    with Journal.open(home, readonly=True) as opened:
        opened.verify()
        events = list(opened.events())
        return dict(opened.meta), events, opened.head(), [opened.body(found.body) for found in events if found.body]


def test_no_flipped_bit_of_the_file_goes_unseen(written: Path) -> None:
    """Every byte in turn: either it is found, or nothing that the journal says has changed (unused space)."""
    path = written / FILE
    sound, content = path.read_bytes(), _content(written)
    found = 0
    for position in range(0, len(sound), 61):
        broken = bytearray(sound)
        broken[position] ^= 0x10
        path.write_bytes(broken)
        try:
            assert _content(written) == content, f"byte {position}"
        except GpuchangeError:
            found += 1
    assert found > 10


def test_a_truncated_file_is_found(written: Path) -> None:
    path = written / FILE
    sound = path.read_bytes()
    for length in range(0, len(sound), 509):
        path.write_bytes(sound[:length])
        with pytest.raises(GpuchangeError):
            _content(written)
