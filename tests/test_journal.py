"""The journal: what was acknowledged is there, what was altered is found, one writes and any number read."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
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
from tests.journalling import META, altered, event

pytest_plugins = ["tests.journalling"]


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


@pytest.mark.thorough
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
    with pytest.raises(
        LockedError, match=rf"process {os.getpid()} of .* on {os.uname().nodename} \(boot {locking.boot()}\) since 20"
    ):
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
    with pytest.raises(LockedError, match=rf"process {process.pid} of .* since 20"):
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


def test_the_lock_that_a_killed_writer_was_just_handing_to_a_child_is_waited_for(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between fork and exec a child holds what its parent held, also when the parent was killed at that very moment."""
    Journal.create(home, META).close()
    waits, says = os.pipe()
    handle = os.open(home / "lock", os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    label = {"pid": ended.pid, "host": os.uname().nodename, "boot": locking.boot()}
    (home / "lock").write_text(json.dumps(label))
    child = os.fork()
    if child == 0:
        os.read(waits, 1)
        os._exit(0)
    os.close(handle)
    monkeypatch.setattr(locking, "LINGERS_S", 0.1)
    with pytest.raises(LockedError):
        Journal.open(home)
    monkeypatch.setattr(locking, "LINGERS_S", 30.0)
    threading.Timer(0.2, os.write, (says, b"x")).start()
    Journal.open(home).close()
    os.waitpid(child, 0)
    os.close(waits)
    os.close(says)


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


def test_the_lock_label_is_json_and_survives_a_signal(home: Path) -> None:
    Journal.create(home, META).close()
    process = writer(home)
    assert process.stdout and process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.wait()
    process.stdout.close()
    label = json.loads((home / "lock").read_text())
    assert set(label) == {"pid", "host", "user", "boot", "since"}
