"""A client that forgives nothing: no retries, a new connection for each request, every shortfall counted.

It speaks HTTP over plain sockets, because libraries retry, pool and hide what goes wrong on the way.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

KEPT_REASONS = 10
PATIENCE = 15.0  # seconds until a request without its full reply counts as failed


class BadReply(Exception):
    """The reply is not a whole, good one."""


@dataclass
class Tally:
    """What came of the requests sent in `seconds`. `reasons` keeps the first few failures and their time."""

    ok: int = 0
    failed: int = 0
    streams_ok: int = 0
    streams_failed: int = 0
    seconds: float = 0.0
    by_host: Counter[str] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        total = self.ok + self.failed
        return {
            "ok": self.ok,
            "failed": self.failed,
            "streams_ok": self.streams_ok,
            "streams_failed": self.streams_failed,
            "seconds": round(self.seconds, 1),
            "per_second": round(total / self.seconds, 1) if self.seconds else 0.0,
            "by_host": dict(sorted(self.by_host.items())),
            "reasons": self.reasons,
        }


@dataclass(frozen=True)
class Target:
    host: str
    port: int

    @classmethod
    def parse(cls, url: str) -> Target:
        """Raises ValueError unless `url` is http with a host."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is no http URL")
        return cls(parts.hostname, parts.port or 80)


async def fetch(target: Target, path: str) -> bytes:
    """Body of one GET over a connection of its own. Raises BadReply, OSError or TimeoutError."""
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        request = f"GET {path} HTTP/1.1\r\nHost: {target.host}\r\nConnection: close\r\n\r\n"
        writer.write(request.encode())
        head = await reader.readuntil(b"\r\n\r\n")
        status, headers = _parse_head(head)
        if status != 200:
            raise BadReply(f"status {status}")
        if headers.get("transfer-encoding") == "chunked":
            return await _chunks(reader)
        return await reader.readexactly(int(headers.get("content-length", "0")))
    finally:
        writer.close()


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    return int(first.split()[1]), {name.strip().lower(): value.strip().lower() for name, _, value in pairs}


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        body += (await reader.readexactly(size + 2))[:size]
        if size == 0:
            return body


class Load:
    """`rate` small requests a second, and every `stream_every` s (0 = never) a stream of `stream_seconds`."""

    def __init__(self, url: str, *, rate: float = 60, stream_every: float = 2, stream_seconds: float = 5) -> None:
        self.target = Target.parse(url)
        self.rate, self.stream_every, self.stream_seconds = rate, stream_every, stream_seconds
        self.tally = Tally()
        self._started = 0.0

    def run(self, finished: Callable[[], bool]) -> Tally:
        """Send until `finished()` says so, then wait for what is still open. Blocks."""
        asyncio.run(self._run(finished))
        return self.tally

    async def _run(self, finished: Callable[[], bool]) -> None:
        self._started = time.monotonic()
        streams = self._repeat(self.stream_every, self._stream, finished) if self.stream_every else asyncio.sleep(0)
        await asyncio.gather(self._repeat(1 / self.rate, self._request, finished), streams)

    async def _repeat(self, interval: float, send: Callable[[], Any], finished: Callable[[], bool]) -> None:
        """Open loop: the next request is due by the clock, not by the last reply."""
        open_requests: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        while not finished():
            task = asyncio.create_task(send())
            open_requests.add(task)
            task.add_done_callback(open_requests.discard)
            due += interval
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        # the rate is that of sending; waiting for the last streams must not dilute it
        self.tally.seconds = max(self.tally.seconds, time.monotonic() - self._started)
        await asyncio.gather(*open_requests)

    async def _request(self) -> None:
        body = await self._attempt("/infer", PATIENCE)
        if body is None:
            self.tally.failed += 1
        else:
            self.tally.ok += 1
            self.tally.by_host[_host_of(body)] += 1

    async def _stream(self) -> None:
        path = f"/stream?seconds={self.stream_seconds:g}"
        body = await self._attempt(path, self.stream_seconds + PATIENCE)
        if body is not None and body.endswith(b"end\n"):
            self.tally.ok += 1
            self.tally.streams_ok += 1
        else:
            self.tally.failed += 1
            self.tally.streams_failed += 1

    async def _attempt(self, path: str, patience: float) -> bytes | None:
        try:
            async with asyncio.timeout(patience):
                return await fetch(self.target, path)
        except (
            OSError,
            ValueError,
            IndexError,
            BadReply,
            TimeoutError,
            asyncio.IncompleteReadError,
        ) as error:
            if len(self.tally.reasons) < KEPT_REASONS:
                after = time.monotonic() - self._started
                self.tally.reasons.append(f"after {after:.1f} s, {path}: {type(error).__name__} {error}".rstrip())
            return None


def _host_of(body: bytes) -> str:
    """The answering host's name in a reply of the lab's model server; other servers count as "?"."""
    _, _, rest = body.decode(errors="replace").partition('"host": "')
    return rest.partition('"')[0] or "?"
