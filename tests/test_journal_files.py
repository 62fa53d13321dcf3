"""What the journal does to its files, in which order it makes them durable, and what it says when it cannot."""

from __future__ import annotations

import os
import re
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuchange import journal as journals
from gpuchange.errors import GpuchangeError, JournalError, VersionMismatch
from gpuchange.journal import APPLICATION_ID, FILE, SCHEMA, Journal, canonical
from gpuchange.states import Event, Kind
from tests.journalling import META, altered, event, fault

pytest_plugins = ["tests.journalling"]


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is made durable and what is moved, in order; the real calls are made."""
    said: list[str] = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(handle: int) -> None:
        said.append(f"sync {os.readlink(f'/proc/self/fd/{handle}')}")
        fsync(handle)

    def recorded_rename(source: Any, target: Any) -> None:
        said.append(f"move {target}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    yield said


@contextmanager
def told(text: str, where: Path) -> Iterator[list[GpuchangeError]]:
    """One clear error: what, where, and what to do."""
    caught: list[GpuchangeError] = []
    with pytest.raises(GpuchangeError, match=text) as found:
        yield caught
    caught.append(found.value)
    assert str(where) in found.value.where and found.value.remedy


# -- durability -------------------------------------------------------------------------------------------------------


def test_a_new_journal_is_moved_into_place_and_its_directories_are_made_durable(home: Path, synced: list[str]) -> None:
    Journal.create(home, META).close()
    assert synced == [f"sync {home.parent}", f"move {home / FILE}", f"sync {home}"]


def test_a_directory_that_is_there_needs_no_syncing_of_its_parent(home: Path, synced: list[str]) -> None:
    home.mkdir(mode=0o700)
    Journal.create(home, META).close()
    assert f"sync {home.parent}" not in synced


def test_who_is_about_to_act_makes_the_changes_place_durable_first(written: Path, synced: list[str]) -> None:
    Journal.open(written, readonly=True).close()
    assert synced == []
    Journal.open(written).close()
    assert synced == [f"sync {written.parent}"]


def test_the_handle_of_a_synced_directory_is_closed_whatever_happens(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    home.mkdir()
    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError):
        journals._sync_directory(home)
    assert set(os.listdir("/proc/self/fd")) == before


def pragma(database: sqlite3.Connection, name: str) -> Any:
    return database.execute(f"PRAGMA {name}").fetchone()[0]


def test_a_writer_waits_for_the_disk_at_every_commit(written: Path) -> None:
    with Journal.open(written) as opened:
        database = opened._database
        full = 2
        assert (pragma(database, "journal_mode"), pragma(database, "synchronous")) == ("wal", full)
        assert pragma(database, "foreign_keys") == 1
        assert pragma(database, "busy_timeout") == 10_000  # ms
        assert pragma(database, "application_id") == APPLICATION_ID == int.from_bytes(b"gpuc")
        assert pragma(database, "user_version") == SCHEMA == 1


def test_a_reader_changes_nothing(written: Path) -> None:
    with Journal.open(written, readonly=True) as opened:
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            opened._database.execute("DELETE FROM bodies")
        assert pragma(opened._database, "foreign_keys") == 1
        with pytest.raises(JournalError, match="open for reading only") as caught:
            opened.append([event(1)])
        assert caught.value.where == str(written / FILE)


def test_each_entry_is_a_transaction_of_its_own_call(journal: Journal) -> None:
    assert journal._database.isolation_level is None
    statements: list[str] = []
    journal._database.set_trace_callback(statements.append)
    journal.append([event(1), event(2)])
    assert statements[0] == "BEGIN IMMEDIATE" and statements[-1] == "COMMIT"
    assert sum(statement.startswith("BEGIN") for statement in statements) == 1


def test_a_transaction_that_fails_is_taken_back_at_once(journal: Journal) -> None:
    with pytest.raises(JournalError):
        journal.append([event(1), event(2, body="0" * 64)])
    assert not journal._database.in_transaction
    assert list(journal.events()) == []


# -- files that are in the way ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stale", [f"{FILE}.new", f"{FILE}.new-wal", f"{FILE}.new-shm"])
def test_what_a_creation_cut_short_left_is_swept_away(home: Path, stale: str) -> None:
    home.mkdir(mode=0o700)
    (home / stale).write_bytes(b"left over" * 999)
    with Journal.create(home, META) as made:
        made.append([event(1)])
        made.verify()
    assert {path.name for path in home.iterdir()} <= {FILE, "lock"}


@pytest.mark.parametrize(("mode", "refused"), [(0o700, False), (0o755, False), (0o720, True), (0o702, True)])
def test_a_directory_that_group_or_others_may_write_is_refused(home: Path, mode: int, refused: bool) -> None:
    home.mkdir()
    home.chmod(mode)
    if not refused:
        Journal.create(home, META).close()
        return
    with told("others may write into this directory", home) as caught:
        Journal.create(home, META)
    assert caught[0].remedy == f"chmod 700 {home}"
    assert not list(home.iterdir())


def test_directories_are_made_private_all_the_way(home: Path) -> None:
    before = os.umask(0)
    try:
        Journal.create(home / "deep" / "er", META).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((home / "deep" / "er").stat().st_mode) == 0o700


def test_a_journal_in_the_way_is_not_touched(written: Path) -> None:
    before = (written / FILE).read_bytes()
    with told("exists already", written / FILE) as caught:
        Journal.create(written, {})
    assert "gpuchange list" in caught[0].remedy and (written / FILE).read_bytes() == before


def test_a_journal_that_is_not_there_is_said_so(home: Path) -> None:
    with told("there is no such journal", home / FILE) as caught:
        Journal.open(home)
    assert "gpuchange list" in caught[0].remedy and not home.exists()
    home.mkdir()
    (home / FILE).mkdir()
    with told("there is no such journal", home / FILE):
        Journal.open(home)


# -- what it says -----------------------------------------------------------------------------------------------------

STAY = "do not resume"


def test_a_journal_that_cannot_be_written_names_directory_and_way_out(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_source: Any, _target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with told("the journal cannot be created", home / FILE) as caught:
        Journal.create(home, META)
    assert caught[0].remedy == f"make room and check access to {home}" and "No space" in caught[0].why


def test_a_database_in_use_elsewhere_is_reported_as_such(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = sqlite3.connect(written / FILE)
    other.execute("BEGIN EXCLUSIVE")
    with Journal.open(written) as opened:
        opened._database.execute("PRAGMA busy_timeout = 1")
        with told("cannot be read or written; nothing was recorded", written / FILE) as caught:
            opened.append([event(1)])
        assert caught[0].remedy == f"make room and check access to {written}, then gpuchange resume"
        assert "locked" in caught[0].why
        other.rollback()
        other.close()
        assert opened.append([event(1)])[0].seq == 7


def test_a_file_that_is_no_database_is_damaged_and_must_not_be_resumed(written: Path) -> None:
    (written / FILE).write_bytes(b"these are no pages of a database" * 200)
    with told("the journal is damaged", written / FILE) as caught:
        Journal.open(written)
    assert STAY in caught[0].remedy and "not a database" in caught[0].why


def test_another_programs_database_is_not_ours(written: Path) -> None:
    altered(written, "PRAGMA application_id = 7")
    with told("this is not a journal of gpuchange", written / FILE) as caught:
        Journal.open(written)
    assert STAY in caught[0].remedy


@pytest.mark.parametrize("schema", [0, 2])
def test_another_schema_says_which_and_which_we_read(written: Path, schema: int) -> None:
    altered(written, f"PRAGMA user_version = {schema}")
    with told(f"this journal has schema {schema}; this gpuchange reads schema 1", written / FILE) as caught:
        Journal.open(written)
    assert isinstance(caught[0], VersionMismatch) and "the gpuchange version that began this change" in caught[0].remedy


def test_a_damaged_page_is_found_by_verify(written: Path) -> None:
    with Journal.open(written, readonly=True) as opened:
        pages = pragma(opened._database, "page_count")
    size = (written / FILE).stat().st_size // pages
    found = 0
    for page in range(1, pages):
        sound = (written / FILE).read_bytes()
        broken = bytearray(sound)
        broken[page * size : page * size + 8] = b"\xff" * 8
        (written / FILE).write_bytes(broken)
        try:
            with Journal.open(written, readonly=True) as opened:
                opened.verify()
        except JournalError as error:
            found += 1
            assert STAY in error.remedy and str(written) in error.where
            if "the journal file is damaged" in str(error):
                assert error.why
        (written / FILE).write_bytes(sound)
    assert found >= pages // 2


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (
            "UPDATE events SET host = 'x' WHERE seq = 4",
            "row 4 does not match its hash: it was altered, moved or put in",
        ),
        ("DELETE FROM events WHERE seq = 2", "row 2 is missing"),
        ("UPDATE meta SET json = '{}'", "row 0 (the change's own data) does not match its hash"),
        ("INSERT INTO bodies VALUES ('0123', x'00')", "body 0123 is missing, or no row names it"),
    ],
)
def test_tampering_is_called_by_its_name(written: Path, statement: str, said: str) -> None:
    altered(written, statement)
    with Journal.open(written, readonly=True) as opened, told(re.escape(said), written / FILE) as caught:
        opened.verify()
    assert f"the journal was tampered with: {said}" in str(caught[0]) and STAY in caught[0].remedy


def test_an_anchor_that_is_not_there_is_called_by_its_row(written: Path) -> None:
    with Journal.open(written, readonly=True) as opened:
        seq, hash_ = opened.head()
    assert "row 6 is missing or differs from the head that was kept elsewhere" in fault(written, (seq, "0" * 64))
    assert "row 9 is missing or differs" in fault(written, (9, hash_))
    assert "row 0 is missing or differs" in fault(written, (0, hash_))
    with Journal.open(written, readonly=True) as opened:
        found = list(opened._database.execute("SELECT seq, hash FROM events"))
        for anchor in found:
            opened.verify(anchor)


def test_bodies_that_are_missing_or_altered_say_which_and_stop_everything(written: Path) -> None:
    with Journal.open(written, readonly=True) as opened:
        digest = next(found.body for found in opened.events() if found.body)
        with told("a report body is missing", written / FILE) as caught:
            opened.body("0" * 64)
        assert caught[0].where.endswith(f"body {'0' * 64}") and STAY in caught[0].remedy
    altered(written, "UPDATE bodies SET json = x'00'")
    with Journal.open(written, readonly=True) as opened, told("a report body was altered", written / FILE) as caught:
        opened.body(digest)
    assert caught[0].where.endswith(f"body {digest}") and STAY in caught[0].remedy


@pytest.mark.parametrize(
    ("statement", "why"),
    [("kind = 'danced'", "KeyError('danced')"), ("data = 'no json'", "JSONDecodeError")],
)
def test_an_event_that_cannot_be_read_says_why(written: Path, statement: str, why: str) -> None:
    altered(written, f"UPDATE events SET {statement} WHERE seq = 3")
    with Journal.open(written) as opened, pytest.raises(JournalError, match="an event cannot be read") as caught:
        list(opened.events())
    assert caught.value.where == "row 3" and why in caught.value.why and STAY in caught.value.remedy


# -- what is hashed ---------------------------------------------------------------------------------------------------


def test_canonical_json_has_one_spelling() -> None:
    assert canonical({"b": [1, None, True], "a": "é"}) == '{"a":"\\u00e9","b":[1,null,true]}'
    with pytest.raises(ValueError):
        canonical(float("inf"))


def test_the_chain_is_the_one_that_journals_on_disk_have(home: Path) -> None:
    """A journal that one version wrote must be sound for the next: the hashes are pinned for a fixed row."""
    meta = canonical(META)
    genesis = journals._genesis(meta)
    row = journals._row(replace(event(1, data={"x": 1}), body=""), 1, "2026-01-01T00:00:00.000Z", None)
    assert genesis == "fba849a828aaf9fc4dcfa2dce1c57390ae40092370c8d98870468b04ed5583b9"
    assert journals._chain(genesis, row) == "7b3b8afc18bd8c8f88feef34d9cf9ce350c505503d2fc57649734ecd83705d64"
    with Journal.create(home, META) as made:
        assert made.head() == (0, genesis)


def test_an_event_of_all_parts_is_stored_column_by_column(journal: Journal) -> None:
    full = Event(Kind.ACCEPTED, "gpu1", "stack", "apt", "undo", "c/1.2", {"why": "w"})
    [returned] = journal.append([(full, {"state": "done"})])
    [stored] = journal._database.execute("SELECT * FROM events").fetchall()
    assert stored[:9] == (*(1, returned.at, "accepted", "gpu1", "stack", "apt", "undo", "c/1.2", '{"why":"w"}'),)
    assert stored[9] == returned.body and len(stored[10]) == 64
    assert replace(returned, seq=0, at="", body="") == full
    assert list(journal.events(after=1)) == [] and list(journal.events(after=0)) == [returned]


def test_pages_end_where_the_events_do(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "_PAGE", 3)
    for count in (1, 3, 4, 6):
        while journal.head()[0] < count:
            journal.append([event(1)])
        assert [found.seq for found in journal.events()] == list(range(1, count + 1))
        assert [found.seq for found in journal.events(after=2)] == list(range(3, count + 1))
