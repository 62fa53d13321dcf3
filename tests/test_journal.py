"""The journal: what was acknowledged is there, what was altered is found, one writes and any number read."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuchange import journal as journals
from gpuchange import locking
from gpuchange.errors import GpuchangeError, JournalError, LockedError, VersionMismatch
from gpuchange.journal import FILE, Journal
from gpuchange.states import Event, Kind

META = {"change": "c1", "hosts": ["gpu1", "gpu2"]}
COLUMNS = ("at", "kind", "host", "phase", "provider", "direction", "attempt", "data", "body", "hash")


def event(number: int = 1, kind: Kind = Kind.STARTED, **more: Any) -> Event:
    return Event(kind, f"gpu{number}", "stack", "apt", "do", f"a{number}", **more)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """In memory where that is to be had: these tests commit by the thousand, and no power is cut in them."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else tmp_path) as directory:
        yield Path(directory) / "change"


@pytest.fixture
def journal(home: Path) -> Iterator[Journal]:
    with Journal.create(home, META) as made:
        yield made


@pytest.fixture
def written(home: Path) -> Path:
    """A journal of six events, two of them with a body, closed."""
    with Journal.create(home, META) as made:
        made.append([event(1, data={"x": 1}), event(2)])
        made.append([(event(1, Kind.ACCEPTED), {"state": "done", "lines": ["a", "b"]})])
        made.append([(event(2, Kind.ACCEPTED), {"state": "done"}), event(3), event(4)])
    return home


def altered(home: Path, *statements: str) -> None:
    """Edit the file behind the journal's back."""
    with sqlite3.connect(home / FILE) as database:
        database.execute("DROP TRIGGER events_stay")
        database.execute("DROP TRIGGER events_last")
        for statement in statements:
            database.execute(statement)
    database.close()


def fault(home: Path, anchor: tuple[int, str] | None = None) -> str:
    with Journal.open(home, readonly=True) as opened, pytest.raises(JournalError) as caught:
        opened.verify(anchor)
    return str(caught.value)


# -- what is written is read ------------------------------------------------------------------------------------------


def test_events_come_back_as_they_were_returned(journal: Journal) -> None:
    returned = journal.append([event(1, data={"why": "é\udcff", "n": [1, None]}), (event(2), {"state": "done"})])
    assert [found.seq for found in returned] == [1, 2]
    assert list(journal.events()) == returned
    assert list(journal.events(after=1)) == returned[1:]
    assert journal.body(returned[1].body) == {"state": "done"}
    assert returned[0].at.endswith("Z") and len(returned[0].at) == len("2026-01-01T00:00:00.000Z")


def test_meta_cannot_be_changed_by_its_reader(journal: Journal) -> None:
    assert journal.meta == META
    with pytest.raises(TypeError):
        journal.meta["change"] = "other"  # type: ignore[index]


def test_a_body_is_stored_once(journal: Journal) -> None:
    first, second = journal.append([(event(1), {"b": 1, "a": 2}), (event(2), {"a": 2, "b": 1})])
    assert first.body == second.body
    with sqlite3.connect(journal.path) as database:
        assert database.execute("SELECT count(*) FROM bodies").fetchone() == (1,)
    database.close()


def test_an_entry_without_a_body_may_say_so_and_may_name_one_that_is_there(journal: Journal) -> None:
    [with_body] = journal.append([(event(1), {"x": 1})])
    plain, named = journal.append([(event(2), None), event(3, body=with_body.body)])
    assert plain.body == "" and named.body == with_body.body
    with pytest.raises(JournalError):
        journal.append([event(4, body="0" * 64)])
    assert journal.head()[0] == 3


def test_many_events_are_read_page_by_page(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "_PAGE", 3)
    journal.append([event(number) for number in range(10)])
    assert [found.seq for found in journal.events()] == list(range(1, 11))
    journal.verify()


words = st.text(max_size=8)
plain_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(Kind), words, st.dictionaries(words, plain_json, max_size=3)), max_size=5))
def test_any_data_survives_reopening(home: Path, rows: list[tuple[Kind, str, dict[str, Any]]]) -> None:
    shutil.rmtree(home, ignore_errors=True)
    with Journal.create(home, {}) as made:
        returned = made.append([Event(kind, host, data=data) for kind, host, data in rows])
        head = made.head()
    with Journal.open(home) as again:
        assert list(again.events()) == returned and again.head() == head
        assert [found.data for found in returned] == [data for _, _, data in rows]
        again.verify(head)


# -- all or nothing ---------------------------------------------------------------------------------------------------


def test_one_call_is_one_transaction(journal: Journal) -> None:
    journal.append([event(1)])
    before = journal.head()
    with pytest.raises((TypeError, ValueError)):
        journal.append([event(2), event(3, data={"x": float("nan")})])
    with pytest.raises(JournalError):
        journal.append([event(2), event(3, body="no such body")])
    assert journal.head() == before and len(list(journal.events())) == 1
    assert journal.append([event(2)])[0].seq == 2
    journal.verify()


def test_a_full_disk_loses_nothing_and_the_journal_goes_on_when_there_is_room(journal: Journal) -> None:
    journal.append([event(1)])
    pages = journal._database.execute("PRAGMA page_count").fetchone()[0]
    journal._database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(JournalError, match="make room") as caught:
        journal.append([(event(2), {"noise": [os.urandom(64).hex() for _ in range(500)]})])
    assert "full" in caught.value.why and caught.value.exit_code == 5
    journal._database.execute("PRAGMA max_page_count = 1000000")
    assert journal.append([event(2)])[0].seq == 2
    journal.verify()


WRITER = """
import sys
from gpuchange.journal import Journal
from gpuchange.states import Event, Kind
journal = Journal.open(sys.argv[1])
while True:
    print(journal.append([Event(Kind.NOTE, data={"n": 1}), Event(Kind.NOTE)])[-1].seq, flush=True)
"""


def writer(home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", WRITER, str(home)], stdout=subprocess.PIPE, text=True)


def test_what_was_acknowledged_survives_a_kill_and_pairs_stay_pairs(home: Path) -> None:
    Journal.create(home, META).close()
    for lines in (1, 7, 30):
        process = writer(home)
        assert process.stdout
        acknowledged = [int(process.stdout.readline()) for _ in range(lines)][-1]
        process.kill()
        acknowledged = max([acknowledged, *map(int, process.stdout.read().split()[:-1])])
        process.wait()
        with Journal.open(home) as again:
            again.verify()
            assert again.head()[0] >= acknowledged and again.head()[0] % 2 == 0


# -- one writer, many readers -----------------------------------------------------------------------------------------


def test_a_second_writer_is_told_who_the_first_is(journal: Journal, home: Path) -> None:
    with pytest.raises(LockedError, match=f"process {os.getpid()} on {os.uname().nodename} since 20"):
        Journal.open(home)
    with pytest.raises(LockedError):
        Journal.create(home, META)
    journal.append([event(1)])


def test_readers_see_what_is_committed_while_the_writer_goes_on(journal: Journal, home: Path) -> None:
    with Journal.open(home, readonly=True) as reader:
        assert reader.head()[0] == 0
        journal.append([event(1), event(2)])
        assert [found.host for found in reader.events()] == ["gpu1", "gpu2"]
        reading = reader.events()
        next(reading)
        journal.append([event(3)])
        assert reader.head() == journal.head()
        with pytest.raises(JournalError, match="reading only"):
            reader.append([event(4)])


def test_the_lock_of_a_killed_writer_is_free(home: Path) -> None:
    Journal.create(home, META).close()
    assert locking.holder(home) == {}
    process = writer(home)
    assert process.stdout and process.stdout.readline()
    assert locking.holder(home)["pid"] == process.pid
    with pytest.raises(LockedError, match=str(process.pid)):
        Journal.open(home)
    process.kill()
    process.wait()
    process.stdout.close()
    assert locking.holder(home)["pid"] == process.pid
    Journal.open(home).close()


def test_a_forked_child_that_outlives_the_writer_does_not_hold_the_lock(home: Path) -> None:
    made = Journal.create(home, META)
    parent_waits, child_asks = os.pipe()
    child_waits, parent_says = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(child_asks, b"x")
        os.read(child_waits, 1)
        os._exit(0)
    os.read(parent_waits, 1)
    made.close()
    Journal.open(home).close()
    os.write(parent_says, b"x")
    os.waitpid(child, 0)
    for handle in (parent_waits, child_asks, child_waits, parent_says):
        os.close(handle)


def test_a_child_forked_while_the_lock_is_held_leaves_it_with_the_parent(journal: Journal, home: Path) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(LockedError):
        Journal.open(home)


def test_a_lock_without_a_label_is_still_a_lock(journal: Journal, home: Path) -> None:
    (home / "lock").write_text("[]")
    with pytest.raises(LockedError, match="another process"):
        Journal.open(home)


def test_a_full_disk_costs_the_lock_its_label_only(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    Journal.create(home, META).close()
    monkeypatch.setattr(os, "truncate", fail)
    with Journal.open(home), pytest.raises(LockedError, match="another process"):
        Journal.open(home)
    Journal.open(home).close()


def test_closing_twice_harms_nobody(home: Path) -> None:
    made = Journal.create(home, META)
    made.close()
    with Journal.open(home) as second:
        made.close()
        with pytest.raises(LockedError):
            Journal.open(home)
        second.append([event(1)])


# -- files ------------------------------------------------------------------------------------------------------------


def test_nobody_else_reads_it(home: Path) -> None:
    before = os.umask(0)
    try:
        with Journal.create(home, META) as made:
            made.append([event(1)])
            modes = {path.name: path.stat().st_mode & 0o777 for path in home.iterdir()}
    finally:
        os.umask(before)
    assert modes == {FILE: 0o600, f"{FILE}-wal": 0o600, f"{FILE}-shm": 0o600, "lock": 0o600}
    assert home.stat().st_mode & 0o777 == 0o700


def test_a_file_may_be_named_instead_of_the_directory(written: Path) -> None:
    with Journal.open(written / FILE) as opened:
        assert opened.head()[0] == 6


def test_a_directory_that_others_may_write_is_refused(home: Path) -> None:
    home.mkdir()
    home.chmod(0o777)
    with pytest.raises(JournalError, match="chmod 700"):
        Journal.create(home, META)


def test_creating_twice_is_refused_and_keeps_the_first(written: Path) -> None:
    with pytest.raises(JournalError, match="exists already"):
        Journal.create(written, {})
    with Journal.open(written) as opened:
        opened.verify()
        assert opened.meta == META


def test_a_creation_cut_short_leaves_nothing_in_the_way(home: Path) -> None:
    home.mkdir(mode=0o700)
    (home / f"{FILE}.new").write_bytes(b"half of one")
    with pytest.raises(JournalError, match="no such journal"):
        Journal.open(home)
    Journal.create(home, META).close()
    assert not (home / f"{FILE}.new").exists()


def test_a_creation_that_fails_frees_the_lock(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", fail)
        with pytest.raises(JournalError, match="No space left"):
            Journal.create(home, META)
    Journal.create(home, META).close()


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _text(path: Path) -> None:
    path.write_bytes(b"these are no pages of a database" * 200)


def _other_program(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE events (seq)")
    database.close()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


@pytest.mark.parametrize("harm", [_empty, _text, _other_program, _cut])
@pytest.mark.parametrize("readonly", [True, False])
def test_what_is_no_journal_is_one_clear_error_and_frees_the_lock(
    written: Path, harm: Callable[[Path], None], readonly: bool
) -> None:
    harm(written / FILE)
    for _ in range(2):
        with pytest.raises(GpuchangeError) as caught, Journal.open(written, readonly=readonly) as opened:
            opened.verify()
        assert str(written) in str(caught.value) and caught.value.remedy
        assert not isinstance(caught.value, LockedError)


def test_another_schema_names_the_way_out(written: Path) -> None:
    altered(written, "PRAGMA user_version = 99")
    with pytest.raises(VersionMismatch, match="schema 99") as caught:
        Journal.open(written)
    assert caught.value.exit_code == 8


def test_a_lock_that_cannot_be_opened_says_so(written: Path) -> None:
    (written / "lock").unlink()
    (written / "lock").mkdir()
    with pytest.raises(JournalError, match="lock cannot be opened"):
        Journal.open(written)


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


def test_the_lock_label_is_json_and_survives_a_signal(home: Path) -> None:
    Journal.create(home, META).close()
    process = writer(home)
    assert process.stdout and process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.wait()
    process.stdout.close()
    label = json.loads((home / "lock").read_text())
    assert set(label) == {"pid", "host", "since"}
