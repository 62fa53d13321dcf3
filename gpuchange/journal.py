"""The journal: append-only, hash-chained events of one change in SQLite. The only truth about a change.

One controller writes (it holds `lock` beside the journal); any number of readers look on meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from gpuchange.errors import JournalError, VersionMismatch
from gpuchange.locking import ControllerLock
from gpuchange.states import Event, Kind

SCHEMA = 1
FILE = "journal.db"
APPLICATION_ID = 0x67_70_75_63  # "gpuc", so that another program's SQLite file is not taken for ours

_TABLES = """
CREATE TABLE meta (one INTEGER PRIMARY KEY CHECK (one = 1), json TEXT NOT NULL, hash TEXT NOT NULL);
CREATE TABLE bodies (digest TEXT NOT NULL PRIMARY KEY, json BLOB NOT NULL);
CREATE TABLE events (
  seq INTEGER PRIMARY KEY, at TEXT NOT NULL, kind TEXT NOT NULL, host TEXT NOT NULL, phase TEXT NOT NULL,
  provider TEXT NOT NULL, direction TEXT NOT NULL, attempt TEXT NOT NULL, data TEXT NOT NULL,
  body TEXT REFERENCES bodies (digest), hash TEXT NOT NULL
);
CREATE TRIGGER events_stay BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;
CREATE TRIGGER events_last BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;
"""
_COLUMNS = "seq, at, kind, host, phase, provider, direction, attempt, data, body"
_PAGE = 4096
_KINDS: dict[str, Kind] = {kind.value: kind for kind in Kind}

Row = tuple[int, str, str, str, str, str, str, str, str, str | None]
Head = tuple[int, str]


def canonical(value: Any) -> str:
    """JSON in one spelling only: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _genesis(meta_text: str) -> str:
    """The hash that the first event follows: it binds the meta data into the chain."""
    return _digest(f"gpuchange journal {SCHEMA}\n{meta_text}")


def _chain(previous: str, row: Row) -> str:
    return _digest(previous + _flat(list(row)))


_flat = json.JSONEncoder(separators=(",", ":")).encode  # the row is a flat list: it has one spelling already


class Journal:
    """One change's journal: `journal.db` in the change's directory (or the file named). Then `close`, or `with`.

    Raises JournalError when the file is missing, damaged, full or contradicts itself; LockedError when another
    controller writes; VersionMismatch when another gpuchange version wrote it.
    """

    def __init__(self, path: Path, database: sqlite3.Connection, lock: ControllerLock | None) -> None:
        self.path = path
        self._database, self._lock = database, lock
        with _explained(path):
            _check_schema(path, database)
            text, genesis = database.execute("SELECT json, hash FROM meta").fetchone() or ("null", "")
            last = database.execute("SELECT seq, hash FROM events ORDER BY seq DESC LIMIT 1").fetchone()
        self._meta_text: str = text
        self._genesis: str = genesis
        self._head: Head = last or (0, genesis)

    @classmethod
    def create(cls, path: Path | str, meta: Mapping[str, Any]) -> Self:
        """A new journal in `path` (made 0700 if missing), holding `meta` for good. All of it or nothing."""
        path = _file(path)
        _private_directory(path.parent)
        lock = ControllerLock.take(path.parent)
        try:
            if path.exists():
                raise JournalError("this change exists already", where=str(path), remedy="gpuchange list shows it")
            with _explained(path):
                _build(path, canonical(meta))
            return cls(path, _connect(path, readonly=False), lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(cls, path: Path | str, readonly: bool = False) -> Self:
        """An existing journal; `readonly` takes no lock and never waits for the writer."""
        path = _file(path)
        if not path.is_file():
            raise JournalError("there is no such journal", where=str(path), remedy="gpuchange list shows the changes")
        lock = None if readonly else ControllerLock.take(path.parent)
        try:
            with _explained(path):
                if lock:  # a change that was moved into place must not vanish with the power once hosts are touched
                    _sync_directory(path.parent.parent)
                return cls(path, _connect(path, readonly=readonly), lock)
        except BaseException:
            if lock:
                lock.release()
            raise

    @property
    def meta(self) -> Mapping[str, Any]:
        value: dict[str, Any] = json.loads(self._meta_text)
        return MappingProxyType(value)

    def head(self) -> Head:
        """(seq, hash) of the last event, as this process knows it; (0, hash of the meta data) when there is none."""
        if self._lock:
            return self._head
        with _explained(self.path):
            last = self._database.execute("SELECT seq, hash FROM events ORDER BY seq DESC LIMIT 1").fetchone()
        return last or (0, self._genesis)

    def append(self, entries: Sequence[Event | tuple[Event, Mapping[str, Any] | None]]) -> list[Event]:
        """Append all entries (events, or events with their report body) in one transaction; durable on return.

        Returns them with seq, at and body filled in, read back as a later reader will see them.
        """
        if not self._lock:
            raise JournalError("this journal is open for reading only", where=str(self.path))
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        rows: list[tuple[Any, ...]] = []
        bodies: dict[str, bytes] = {}
        seq, last = self._head
        for entry in entries:
            event, body = entry if isinstance(entry, tuple) else (entry, None)
            digest = _keep(bodies, body) if body is not None else event.body or None
            seq += 1
            row = _row(event, seq, at, digest)
            last = _chain(last, row)
            rows.append((*row, last))
        with _explained(self.path), _transaction(self._database):
            self._database.executemany("INSERT OR IGNORE INTO bodies VALUES (?, ?)", bodies.items())
            self._database.executemany(f"INSERT INTO events VALUES ({', '.join('?' * 11)})", rows)
        self._head = (seq, last)
        return [_event(row[:-1]) for row in rows]

    def events(self, after: int = 0) -> Iterator[Event]:
        """The events with seq > `after`, in order. Read page by page: a slow reader never holds the writer up."""
        for row in self._rows(after):
            yield _event(row[:-1])

    def body(self, digest: str) -> dict[str, Any]:
        """The report body that an event names."""
        with _explained(self.path):
            found = self._database.execute("SELECT json FROM bodies WHERE digest = ?", (digest,)).fetchone()
        if not found:
            raise JournalError("a report body is missing", where=f"{self.path}, body {digest}", remedy=_RESTORE)
        text = _unpacked(found[0])
        if text is None or _digest(text) != digest:
            raise JournalError("a report body was altered", where=f"{self.path}, body {digest}", remedy=_RESTORE)
        body: dict[str, Any] = json.loads(text)
        return body

    def verify(self, anchor: Head | str | None = None) -> None:
        """Check meta, every event, every body. Raises JournalError that names the first bad row.

        Events cut off at the end cannot be told from events never written, unless `anchor` (an earlier `head()` kept
        elsewhere, or its hash alone) is given.
        """
        with _explained(self.path):
            verdict = self._database.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if verdict != "ok":
            raise JournalError("the journal file is damaged", where=str(self.path), why=verdict, remedy=_RESTORE)
        if not isinstance(self._meta_text, str) or _genesis(self._meta_text) != self._genesis:
            raise self._bad("row 0 (the change's own data)", "does not match its hash")
        held, used = self._walk(anchor)
        if not held:
            row = f"row {anchor[0]}" if isinstance(anchor, tuple) else "the row of the head"
            raise self._bad(row, "is missing or differs from the head that was kept elsewhere")
        self._verify_bodies(used)

    def _walk(self, anchor: Head | str | None) -> tuple[bool, set[str]]:
        """Follow the chain; return whether it holds the anchor, and the body digests that were named."""
        seq, last = 0, self._genesis
        held = anchor in (None, last, (seq, last))
        used: set[str] = set()
        for row in self._rows(0):
            seq += 1
            if row[0] != seq:
                raise self._bad(f"row {seq}", "is missing")
            if not _well_typed(row) or (last := _chain(last, row[:-1])) != row[-1]:
                raise self._bad(f"row {seq}", "does not match its hash: it was altered, moved or put in")
            if row[9]:
                used.add(row[9])
            held = held or anchor in (last, (seq, last))
        return held, used

    def _verify_bodies(self, used: set[str]) -> None:
        with _explained(self.path):
            kept = {digest for (digest,) in self._database.execute("SELECT digest FROM bodies")}
        if kept != used:
            raise self._bad(f"body {min(map(str, kept ^ used))}", "is missing, or no row names it")
        for digest in sorted(used):
            self.body(digest)

    def _bad(self, row: str, how: str) -> JournalError:
        return JournalError(f"the journal was tampered with: {row} {how}", where=str(self.path), remedy=_RESTORE)

    def _rows(self, after: int) -> Iterator[Any]:
        query = f"SELECT {_COLUMNS}, hash FROM events WHERE seq > ? ORDER BY seq LIMIT {_PAGE}"
        while True:
            with _explained(self.path):
                page = self._database.execute(query, (after,)).fetchall()
            yield from page
            if len(page) < _PAGE:
                return
            after = page[-1][0]

    def close(self) -> None:
        self._database.close()
        if self._lock:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()


_RESTORE = "do not resume; compare with your copy or anchor of this journal, and look at the hosts themselves"


def _file(path: Path | str) -> Path:
    """A name with a suffix is the file itself, anything else the change's directory."""
    path = Path(path)
    return path if path.suffix == ".db" else path / FILE


def _row(event: Event, seq: int, at: str, digest: str | None) -> Row:
    data = canonical(event.data) if event.data else "{}"
    return (
        seq,
        at,
        event.kind.value,
        event.host,
        event.phase,
        event.provider,
        event.direction,
        event.attempt,
        data,
        digest,
    )


def _event(row: Any) -> Event:
    seq, at, kind, host, phase, provider, direction, attempt, text, body = row
    try:
        data = {} if text == "{}" else json.loads(text)
        return Event(_KINDS[kind], host, phase, provider, direction, attempt, data, body or "", seq, at)
    except (ValueError, KeyError) as error:
        raise JournalError("an event cannot be read", where=f"row {seq}", why=repr(error), remedy=_RESTORE) from None


def _well_typed(row: Any) -> bool:
    """SQLite lets any type into any column: bytes where text belongs would read alike and hash differently."""
    return all(isinstance(value, str) for i, value in enumerate(row[1:], 1) if i != 9) and (
        row[9] is None or isinstance(row[9], str)
    )


def _keep(bodies: dict[str, bytes], body: Mapping[str, Any]) -> str:
    text = canonical(body)
    digest = _digest(text)
    bodies[digest] = zlib.compress(text.encode())
    return digest


def _unpacked(blob: Any) -> str | None:
    try:
        return zlib.decompress(blob).decode()
    except (zlib.error, TypeError, UnicodeDecodeError):
        return None


def _private_directory(directory: Path) -> None:
    if not directory.exists():
        directory.mkdir(mode=0o700, parents=True)
        _sync_directory(directory.parent)
    elif directory.stat().st_mode & 0o022:
        raise JournalError(
            "others may write into this directory; a journal in it could be replaced",
            where=str(directory),
            remedy=f"chmod 700 {directory}",
        )


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _build(path: Path, meta_text: str) -> None:
    """Write the empty journal beside its place, then move it there: a crash leaves none, never half of one."""
    draft = path.with_name(path.name + ".new")
    for stale in (draft, draft.with_name(draft.name + "-wal"), draft.with_name(draft.name + "-shm")):
        stale.unlink(missing_ok=True)
    os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    database = _connect(draft, readonly=False)
    try:
        database.executescript(
            f"BEGIN; {_TABLES} PRAGMA user_version = {SCHEMA}; PRAGMA application_id = {APPLICATION_ID};"
        )
        database.execute("INSERT INTO meta VALUES (1, ?, ?)", (meta_text, _genesis(meta_text)))
        database.execute("COMMIT")
    finally:
        database.close()
    os.rename(draft, path)
    _sync_directory(path.parent)


def _connect(path: Path, *, readonly: bool) -> sqlite3.Connection:
    database = sqlite3.connect(f"{path.absolute().as_uri()}?mode={'ro' if readonly else 'rw'}", uri=True, timeout=10)
    database.isolation_level = None
    try:
        if not readonly:
            database.execute("PRAGMA journal_mode = WAL").fetchone()
            database.execute("PRAGMA synchronous = FULL")
        database.execute("PRAGMA foreign_keys = ON")
    except BaseException:
        database.close()
        raise
    return database


def _check_schema(path: Path, database: sqlite3.Connection) -> None:
    application = database.execute("PRAGMA application_id").fetchone()[0]
    schema = database.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID:
        raise JournalError("this is not a journal of gpuchange", where=str(path), remedy=_RESTORE)
    if schema != SCHEMA:
        raise VersionMismatch(
            f"this journal has schema {schema}; this gpuchange reads schema {SCHEMA}",
            where=str(path),
            remedy="use the gpuchange version that began this change (gpuchange list names it)",
        )


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:  # SQLite has rolled back by itself when the disk is full
            database.execute("ROLLBACK")
        raise


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn SQLite's and the system's words into an operator's."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise JournalError(
            "the journal cannot be read or written; nothing was recorded by this step",
            where=str(path),
            why=str(error),
            remedy=f"make room and check access to {path.parent}, then gpuchange resume",
        ) from error
    except sqlite3.Error as error:
        raise JournalError("the journal is damaged", where=str(path), why=str(error), remedy=_RESTORE) from error
    except OSError as error:
        raise JournalError(
            "the journal cannot be created",
            where=str(path),
            why=str(error),
            remedy=f"make room and check access to {path.parent}",
        ) from error
