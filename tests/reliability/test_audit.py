"""Every single alteration of a real change's journal is found; what only an anchored head can tell is told by it."""

from __future__ import annotations

import random
import shutil
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bundling import Desk

from gpuchange.errors import GpuchangeError, JournalError
from gpuchange.journal import FILE, Head, Journal, _chain
from reliability.figures import Effort, Figures, Row

pytest_plugins = ["bundling"]
ROW = Row(
    "Whatever is altered, dropped, put in or moved in a change's journal is found; a cut end by a head kept elsewhere",
    peer="Terraform, Ansible: the record of a run is a file that anybody may edit",
    source="hashicorp/terraform internal/states/statemgr/filesystem.go: plain JSON, no digest over earlier states",
)
COLUMNS = ("at", "kind", "host", "phase", "provider", "direction", "attempt", "data", "hash")
Statement = tuple[str, Sequence[Any]]


@dataclass
class Bench:
    """A whole journal, the head that was kept elsewhere, and copies of it to be altered."""

    whole: Path
    work: Path
    head: Head
    rows: list[tuple[Any, ...]]
    bodies: dict[str, bytes]

    def altered(self, *statements: Statement) -> Path:
        """A copy after these statements, with the triggers out of the way as a forger would have it."""
        shutil.copyfile(self.whole, self.work / FILE)
        for rest in ("-wal", "-shm"):
            (self.work / f"{FILE}{rest}").unlink(missing_ok=True)
        database = sqlite3.connect(self.work / FILE)
        database.execute("PRAGMA journal_mode = DELETE")
        database.execute("PRAGMA synchronous = OFF")
        database.execute("DROP TRIGGER events_stay")
        database.execute("DROP TRIGGER events_last")
        for text, values in statements:
            database.execute(text, values)
        database.commit()
        database.close()
        return self.work

    def found(self, *statements: Statement, anchor: Head | str | None = None) -> bool:
        return not sound(self.altered(*statements), anchor)


def sound(directory: Path, anchor: Head | str | None = None) -> bool:
    try:
        with Journal.open(directory, readonly=True) as journal:
            journal.verify(anchor)
            return True
    except JournalError:
        return False


@pytest.fixture
def bench(desk: Desk, tmp_path: Path) -> Bench:
    """The journal of a change that failed on one host, was rolled back there, and was rolled back as a whole."""
    desk.fleet.faults["h2", "verify_host", "apply"] = ["failed"]
    assert desk.run("apply", str(desk.home / "plan.yaml"), "--yes") == 3
    assert desk.run("rollback", "--yes") in (0, 3)
    (directory,) = desk.kept()
    with Journal.open(directory) as journal:  # as its writer leaves it: all in one file
        head = journal.head()
    (work := tmp_path / "work").mkdir(mode=0o700)
    database = sqlite3.connect(directory / FILE)
    rows = database.execute("SELECT * FROM events ORDER BY seq").fetchall()
    bodies = dict(database.execute("SELECT digest, json FROM bodies"))
    database.close()
    made = Bench(directory / FILE, work, head, rows, bodies)
    assert len(rows) > 40 and len(bodies) >= 3
    assert not made.found() and sound(made.altered(), head) and sound(work, head[1])
    return made


def flipped(text: str, draw: random.Random) -> str:
    """`text` with one character another, or one more where there is none."""
    if not text:
        return "x"
    at = draw.randrange(len(text))
    return text[:at] + chr((ord(text[at]) ^ 1) or 64) + text[at + 1 :]


def of_a_row(row: tuple[Any, ...], last: int, draw: random.Random) -> Iterator[tuple[str, list[Statement]]]:
    """Every single alteration of one row."""
    seq = row[0]
    names = ("seq", "at", "kind", "host", "phase", "provider", "direction", "attempt", "data", "body", "hash")
    for name in COLUMNS:
        value = flipped(row[names.index(name)], draw)
        yield f"{name} flipped", [(f"UPDATE events SET {name} = ? WHERE seq = ?", (value, seq))]
    yield "body unnamed", [("UPDATE events SET body = ? WHERE seq = ?", ("0" * 64 if not row[9] else None, seq))]
    yield "data as bytes", [("UPDATE events SET data = CAST(data AS BLOB) WHERE seq = ?", (seq,))]
    renumber: list[Statement] = [
        ("UPDATE events SET seq = -seq WHERE seq > ?", (seq,)),
        ("UPDATE events SET seq = -seq - 1 WHERE seq < 0", ()),
    ]
    if seq < last:  # the last one is a cut end: see below
        yield "dropped", [("DELETE FROM events WHERE seq = ?", (seq,))]
        yield "dropped, renumbered", [("DELETE FROM events WHERE seq = ?", (seq,)), *renumber]
        swap = [(-seq, seq), (seq, seq + 1), (seq + 1, -seq)]
        yield "swapped", [("UPDATE events SET seq = ? WHERE seq = ?", pair) for pair in swap]
    copy = "INSERT INTO events SELECT ?, at, kind, host, phase, provider, direction, attempt, data, body, hash"
    yield "put in again", [(f"{copy} FROM events WHERE seq = ?", (last + 1, seq))]


def test_every_single_alteration_of_a_row_is_found(bench: Bench, effort: Effort, figures: Figures) -> None:
    draw = random.Random(effort.seed)
    rows = bench.rows if effort.full else draw.sample(bench.rows, 12)
    for row in rows:
        for what, statements in of_a_row(row, len(bench.rows), draw):
            figures.tried += 1
            if not bench.found(*statements):
                figures.broken.append(f"row {row[0]}: {what} was not found")
    figures.count(rows=len(rows))


def test_every_alteration_of_a_report_or_of_the_changes_own_data_is_found(
    bench: Bench, effort: Effort, figures: Figures
) -> None:
    draw = random.Random(effort.seed)
    tries: list[tuple[str, Statement]] = [
        ("a report put in", ("INSERT INTO bodies VALUES (?, ?)", ("0" * 64, zlib.compress(b"{}")))),
        ("own data dropped", ("DELETE FROM meta", ())),
        ("own hash", ("UPDATE meta SET hash = ?", ("0" * 64,))),
    ]
    for digest, packed in bench.bodies.items():
        text = zlib.decompress(packed)
        for _ in range(effort.of(200, 15)):
            at = draw.randrange(len(text))
            other = zlib.compress(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
            tries.append((f"report flipped at {at}", ("UPDATE bodies SET json = ? WHERE digest = ?", (other, digest))))
        tries.append(("report dropped", ("DELETE FROM bodies WHERE digest = ?", (digest,))))
        tries.append(("report renamed", ("UPDATE bodies SET digest = ? WHERE digest = ?", ("1" * 64, digest))))
    with Journal.open(bench.whole, readonly=True) as journal:
        meta = journal._meta_text
    for _ in range(effort.of(500, 40)):
        tries.append(("own data flipped", ("UPDATE meta SET json = ?", (flipped(meta, draw),))))
    for what, statement in tries:
        figures.tried += 1
        if not bench.found(statement):
            figures.broken.append(f"{what}: not found")


UNNAMED = "DELETE FROM bodies WHERE digest NOT IN (SELECT body FROM events WHERE body IS NOT NULL)"


def test_a_cut_end_is_found_by_a_kept_head_and_only_by_it(bench: Bench, effort: Effort, figures: Figures) -> None:
    """What the command says of itself: without a head kept elsewhere a cut end cannot be found. Both are tried."""
    lasts = range(len(bench.rows))
    for last in lasts if effort.full else random.Random(effort.seed).sample(lasts, 12):
        cut: list[Statement] = [("DELETE FROM events WHERE seq > ?", (last,)), (UNNAMED, ())]
        figures.tried += 1
        if not bench.found(*cut, anchor=bench.head) or not bench.found(*cut, anchor=bench.head[1]):
            figures.broken.append(f"cut after row {last}: not found with a head")
        figures.count(unseen_without_a_head=0 if bench.found(*cut) else 1)
    assert figures.counts["unseen_without_a_head"] == figures.tried


def forged(bench: Bench, seq: int) -> list[Statement]:
    """Row `seq` altered by one who knows how the chain is made: every hash from there on fits again."""
    statements: list[Statement] = [("UPDATE events SET host = 'h9' WHERE seq = ?", (seq,))]
    with Journal.open(bench.whole, readonly=True) as journal:
        last = journal._genesis
    for row in bench.rows:
        changed: Any = (*row[:3], "h9", *row[4:10]) if row[0] == seq else row[:10]
        last = _chain(last, changed)
        statements.append(("UPDATE events SET hash = ? WHERE seq = ?", (last, row[0])))
    return statements


def test_a_chain_made_anew_is_found_by_a_kept_head(bench: Bench, effort: Effort, figures: Figures) -> None:
    draw = random.Random(effort.seed)
    for row in bench.rows if effort.full else draw.sample(bench.rows, 8):
        statements = forged(bench, row[0])
        figures.tried += 1
        if bench.found(*statements):
            figures.broken.append(f"row {row[0]}: this forger is clumsy, the test shows nothing")
        if not bench.found(*statements, anchor=bench.head):
            figures.broken.append(f"row {row[0]} forged with all that follow: not found with a head")


def content(directory: Path) -> tuple[Any, ...]:
    with Journal.open(directory, readonly=True) as journal:
        events = list(journal.events())
        return dict(journal.meta), events, [journal.body(event.body) for event in events if event.body]


def broken_files(raw: bytes, draw: random.Random, number: int) -> Iterator[tuple[str, bytes]]:
    for _ in range(number):
        at, mask = draw.randrange(len(raw)), draw.randrange(1, 256)
        yield f"byte {at} ^ {mask}", raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :]
    for _ in range(number // 10):
        yield "truncated", raw[: draw.randrange(len(raw))]
        at = draw.randrange(len(raw) - 64)
        yield f"64 bytes of noise at {at}", raw[:at] + draw.randbytes(64) + raw[at + 64 :]
        yield "noise", draw.randbytes(draw.randrange(2, 5000))


def test_a_malformed_file_is_told_in_words(
    desk: Desk, bench: Bench, effort: Effort, figures: Figures, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the verb itself: exit 8, or nothing that the journal says has changed. Never an unexpected error."""
    raw, was = bench.whole.read_bytes(), content(bench.whole.parent)
    found = 0
    for what, broken in broken_files(raw, random.Random(effort.seed), effort.of(2000, 100)):
        bench.whole.write_bytes(broken)
        code = desk.run("audit", "verify")
        said = capsys.readouterr()
        figures.tried += 1
        if "Traceback" in said.err or "unexpected" in said.err or code not in (0, 8):
            figures.broken.append(f"{what}: exit {code}: {said.err[:200]}")
        if code == 0 and unlike(bench.whole.parent, was):
            figures.broken.append(f"{what}: not found")
        found += code == 8
    figures.count(found=found, in_unused_space=figures.tried - found)
    bench.whole.write_bytes(raw)


def unlike(directory: Path, was: tuple[Any, ...]) -> bool:
    try:
        return content(directory) != was
    except GpuchangeError:
        return False


def test_this_test_can_fail(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a chain that leaves a column out, alterations of that column are not found."""
    careless: Callable[[str, Any], str] = lambda previous, row: _chain(previous, (*row[:3], "", *row[4:]))  # noqa: E731
    monkeypatch.setattr("gpuchange.journal._chain", careless)
    with Journal.open(bench.whole, readonly=True) as journal:
        last = journal._genesis
    hashes: list[Statement] = []
    for row in bench.rows:
        last = careless(last, row[:10])
        hashes.append(("UPDATE events SET hash = ? WHERE seq = ?", (last, row[0])))
    assert not bench.found(*hashes)
    assert not bench.found(*hashes, ("UPDATE events SET host = 'h9' WHERE seq = 9", ()))
