"""Checksum files that others made (md5sum, sha256sum, BSD tags): sorted into a manifest's order, held against it.

Sorted on disk, in pieces: a file of millions of lines costs no more memory than one of a thousand.
Standard library only.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import re
import sys
from typing import IO, Any, Dict, Iterator, List, Optional, Tuple

try:
    from ansible.module_utils import gpuchange_manifest_stream as stream
except ImportError:  # a program now: its copy lies beside it
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import gpuchange_manifest_stream as stream  # type: ignore[import-not-found,no-redef]

ALGORITHMS = {32: "md5", 40: "sha1", 56: "sha224", 64: "sha256", 96: "sha384", 128: "sha512"}
PLAIN = re.compile(rb"(\\?)([0-9A-Fa-f]{32,128}) [ *](.+)", re.DOTALL)
TAGGED = re.compile(rb"(\\?)(MD5|SHA1|SHA224|SHA256|SHA384|SHA512) \((.+)\) = ([0-9A-Fa-f]{32,128})", re.DOTALL)
ESCAPES = {b"\\\\": b"\\", b"\\n": b"\n", b"\\r": b"\r"}
MOST_LINE = 8192
PIECE = 20000  # lines sorted in memory at once
Row = Dict[str, Any]


def parse_line(line: bytes) -> Optional[Tuple[str, str, bytes]]:
    """(algorithm, digest, name) of one line as md5sum and its kin write it, plain or with --tag; None if it is none."""
    text = line.rstrip(b"\r\n")
    plain, tagged = PLAIN.fullmatch(text), TAGGED.fullmatch(text)
    if plain:
        escaped, digest, name = plain[1], plain[2].decode().lower(), plain[3]
        algorithm = ALGORITHMS.get(len(digest))
    elif tagged:
        escaped, digest, name = tagged[1], tagged[4].decode().lower(), tagged[3]
        algorithm = tagged[2].decode().lower()
        algorithm = algorithm if ALGORITHMS.get(len(digest)) == algorithm else None
    else:
        return None
    if escaped:
        name = re.sub(rb"\\[\\nr]", lambda match: ESCAPES[match.group()], name)
    return (algorithm, digest, name) if algorithm and b"\0" not in name else None


class Listing:
    """What one checksum file says, line by line; counts what is no line of it or names nothing that was recorded."""

    def __init__(self, file: str, below: str, roots: List[Tuple[bytes, bytes]], exclude: List[bytes]) -> None:
        self.file, self.roots, self.exclude = file, roots, tuple(path.rstrip(b"/") + b"/" for path in exclude)
        self.below = stream.to_bytes(below or os.path.dirname(file))
        self.counts = {"listed": 0, "strange": 0, "outside": 0}
        self.first: Dict[str, str] = {}
        self.why = ""

    def rows(self) -> Iterator[Row]:
        try:
            with open(self.file, "rb") as lines:
                yield from self._rows(lines)
        except OSError as error:
            self.why = error.strerror or str(error)

    def _rows(self, lines: IO[bytes]) -> Iterator[Row]:
        for number, line in enumerate(iter(lambda: lines.readline(MOST_LINE), b""), 1):
            if line.startswith(b"#") or not line.strip():
                continue
            parsed = parse_line(line)
            if parsed is None:
                self._count("strange", "line %d" % number)
                continue
            algorithm, digest, name = parsed
            self._count("listed", "")
            shown = self._shown(name)
            if shown is None:
                self._count("outside", stream.to_text(name))
                continue
            yield {
                "path": stream.to_text(shown),
                "name": stream.to_text(name),
                "file": self.file,
                "algorithm": algorithm,
                "digest": digest,
            }

    def _count(self, what: str, first: str) -> None:
        self.counts[what] += 1
        self.first.setdefault(what, first)

    def _shown(self, name: bytes) -> Optional[bytes]:
        """The name that the manifest has for it, links on the way followed; None when it lies outside of the roots."""
        real = os.path.realpath(os.path.join(self.below, name))
        for root, shown in self.roots:
            if (real + b"/").startswith(root.rstrip(b"/") + b"/"):
                found = shown + real[len(root.rstrip(b"/")) :]
                return None if (found + b"/").startswith(self.exclude) else found
        return None


def prepare(job: Dict[str, Any], out: str) -> List[Listing]:
    """Sort all that the job's checksum files list into `out`, in a manifest's order."""
    roots = [(os.path.realpath(stream.to_bytes(root)), stream.to_bytes(shown)) for root, shown in job["roots"]]
    exclude = [stream.to_bytes(path) for path in job.get("exclude", [])]
    listings = [Listing(each["file"], each.get("below") or "", roots, exclude) for each in job["sums"]]
    pieces: List[str] = []
    rows: List[Row] = []
    for row in (row for listing in listings for row in listing.rows()):
        rows.append(row)
        if len(rows) >= PIECE:
            pieces.append(_write_piece(rows, "%s.piece.%d" % (out, len(pieces))))
            rows = []
    pieces.append(_write_piece(rows, "%s.piece.%d" % (out, len(pieces))))
    _merge(pieces, out)
    return listings


def _key(row: Row) -> Tuple[stream.Key, str]:
    return stream.key_of(stream.to_bytes(row["path"])), row["file"]


def _write_piece(rows: List[Row], path: str) -> str:
    with open(path, "w", encoding="ascii") as file:
        file.writelines(json.dumps(row) + "\n" for row in sorted(rows, key=_key))
    return path


def _merge(pieces: List[str], out: str) -> None:
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(path, encoding="ascii")) for path in pieces]
        merged = heapq.merge(*(map(json.loads, file) for file in files), key=_key)
        with open(out, "w", encoding="ascii") as file:
            file.writelines(json.dumps(row) + "\n" for row in merged)
    for path in pieces:
        os.unlink(path)


def problems(listings: List[Listing], listed: str, manifest: str) -> Iterator[Tuple[str, str]]:
    """(checksum file, what is wrong). Counts equal names into each listing's counts."""
    by_file = {listing.file: listing for listing in listings}
    for listing in listings:
        listing.counts["equal"] = 0
        yield from ((listing.file, said) for said in _of_the_file(listing))
    rows, found = stream.Reader(listed), stream.Reader(manifest)
    while rows.key is not None:
        row, entry = rows.entry, found.at(rows.key)
        said = _problem(row, entry)
        if said:
            yield row["file"], "%s %s" % (row["name"], said)
        else:
            by_file[row["file"]].counts["equal"] += 1
        rows.step()
    rows.close()
    found.close()


def _of_the_file(listing: Listing) -> Iterator[str]:
    counts = listing.counts
    if listing.why:
        yield "cannot be read: %s" % listing.why
    elif not counts["listed"]:
        yield "lists nothing"
    if counts["strange"]:
        yield "has %d lines that are no checksums, the first is %s" % (counts["strange"], listing.first["strange"])
    if counts["outside"]:
        yield "lists %d names outside of record.paths, or excluded: not checked, the first is %s" % (
            counts["outside"],
            listing.first["outside"],
        )


def _problem(row: Row, entry: Optional[stream.Entry]) -> str:
    if entry is None:
        return "is listed and is not there"
    if entry.get("error") or entry.get("busy"):
        return "could not be read (%s)" % (entry.get("error") or "it changed meanwhile")
    if entry.get("kind") != "file":
        return "is listed and is a %s" % entry.get("kind")
    if entry.get(row["algorithm"]) != row["digest"]:
        return "is not as listed: %s %.16s, not %.16s" % (row["algorithm"], entry.get(row["algorithm"]), row["digest"])
    return ""
