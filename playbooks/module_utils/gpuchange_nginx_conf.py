"""nginx's configuration files: where the servers of an upstream stand, and how one is marked down there.

Grammar: https://nginx.org/en/docs/beginners_guide.html#conf_structure and ngx_conf_file.c; `server ... down`:
https://nginx.org/en/docs/http/ngx_http_upstream_module.html#server. Python 3.8, standard library only.
"""

from __future__ import annotations

import glob
import os
import re
from typing import Any, Dict, Iterator, List, Optional, Tuple

TOKEN = re.compile(
    rb"""(?P<space>(?:\s|\#[^\n]*)+) | (?P<quoted>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*') | (?P<mark>[{};])
       | (?P<word>(?:\\.|\$\{[^}]*\}|[^\s{};"'\\])(?:\\.|\$\{[^}]*\}|[^\s{};\\])*)""",
    re.X | re.S,
)
DEPTH = 20  # of includes: nginx itself has no limit, but ends on a loop
DEFAULT_PORT = 80


class NginxError(Exception):
    """nginx or its configuration cannot be used; the text says what, where, and what would help."""


class Directive:
    """`name args;` or `name args {`: `end` is the offset of that last character in `file`."""

    def __init__(self, file: str, words: List[bytes], end: int, context: Tuple[str, ...]) -> None:
        self.file, self.end, self.context = file, end, context
        self.name, self.args = words[0].decode("utf-8", "replace"), [w.decode("utf-8", "replace") for w in words[1:]]


def read(path: str) -> List[Directive]:
    """All directives of the configuration that begins with `path`, in order, what it includes in its place.

    Raises NginxError when a file cannot be read or is no such configuration.
    """
    return list(_walk(path, os.path.dirname(path), (), 0))


def _walk(path: str, prefix: str, context: Tuple[str, ...], depth: int) -> Iterator[Directive]:
    if depth > DEPTH:
        raise NginxError("%s is included %d levels deep" % (path, depth))
    for directive in parse(path, _content(path), context):
        yield directive
        if directive.name == "include" and directive.args:
            pattern = os.path.join(prefix, directive.args[0])
            for name in sorted(glob.glob(pattern)):
                yield from _walk(name, prefix, directive.context, depth + 1)


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise NginxError("%s cannot be read: %s" % (path, error.strerror or error))


def parse(file: str, text: bytes, context: Tuple[str, ...] = ()) -> Iterator[Directive]:
    """The directives of one file. `context`: the blocks around it by their first words, `upstream gpu` for one."""
    words: List[bytes] = []
    outer = len(context)
    for kind, token, here in _tokens(file, text):
        if kind != "mark":
            words.append(token)
            continue
        if words:
            directive = Directive(file, words, here, context)
            yield directive
            if token == b"{":
                context = (*context, " ".join([directive.name, *directive.args[:1]]))
            words = []
        if token == b"}":
            if len(context) <= outer:
                raise NginxError("%s:%d: unexpected }" % (file, _line(text, here)))
            context = context[:-1]


def _tokens(file: str, text: bytes) -> Iterator[Tuple[str, bytes, int]]:
    """(word or mark, its bytes, its offset); what stands in a block of Lua is passed over."""
    at, last = 0, b""
    while at < len(text):
        match = TOKEN.match(text, at)
        if not match:
            raise NginxError("%s:%d cannot be read as nginx's configuration" % (file, _line(text, at)))
        kind, token, here, at = match.lastgroup, match.group(), at, match.end()
        if kind == "mark" and token == b"{" and last.endswith(b"_by_lua_block"):
            at = _end_of_block(text, at) - 1
        if kind != "space":
            last = token[1:-1] if kind == "quoted" else token
            yield "mark" if kind == "mark" else "word", last, here


def _line(text: bytes, at: int) -> int:
    return text.count(b"\n", 0, at) + 1


def _end_of_block(text: bytes, at: int) -> int:
    """Behind the brace that closes a block of another language; braces in its strings are taken for braces."""
    open_braces = 1
    while open_braces and at < len(text):
        open_braces += {123: 1, 125: -1}.get(text[at], 0)
        at += 1
    return at


def value(directives: List[Directive], name: str, default: str = "") -> str:
    """The argument of a directive of the outermost level."""
    found = (d.args[0] for d in directives if d.name == name and not d.context and d.args)
    return next(found, default)


def servers(directives: List[Directive]) -> List[Dict[str, Any]]:
    """Every server of every upstream: upstream, name (as written), address, port, admin, backup, weight, file, end."""
    rows = []
    for directive in directives:
        kind, _, upstream = (directive.context or ("",))[-1].partition(" ")
        if directive.name == "server" and kind == "upstream" and directive.args:
            address, port = split(directive.args[0])
            more = directive.args[1:]
            weight = next((word[7:] for word in more if word.startswith("weight=")), "1")
            rows.append(
                {
                    "upstream": upstream,
                    "name": directive.args[0],
                    "address": address,
                    "port": port,
                    "admin": "down" if "down" in more else "ready",
                    "backup": "backup" in more,
                    "weight": int(weight) if weight.isdigit() else 1,
                    "file": os.path.realpath(directive.file),
                    "end": directive.end,
                }
            )
    return rows


def split(name: str) -> Tuple[str, int]:
    """`10.0.0.11:8000`, `[2001:db8::1]:8000`, `gpu1` as (address, port); a unix socket has port 0."""
    if name.startswith("unix:"):
        return name, 0
    match = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(?::(\d+))?", name)
    if not match:
        return name, DEFAULT_PORT
    return match.group(1).strip("[]").lower(), int(match.group(2) or DEFAULT_PORT)


def same_server(row: Dict[str, Any], wanted: str) -> bool:
    """Whether `wanted` names this server: as it is written, or its address, with a port or without."""
    address, port = split(wanted)
    exact = ":" in wanted.rpartition("]")[2] if wanted.startswith("[") else wanted.count(":") == 1
    if wanted.count(":") > 1 and not wanted.startswith("["):  # a bare IPv6 address
        address, exact = wanted.lower(), False
    return row["name"] == wanted or (row["address"] == address and (not exact or row["port"] == port))


def with_down(text: bytes, ends: List[int]) -> bytes:
    """The file with ` down` at the end of the directives that end there."""
    for end in sorted(ends, reverse=True):
        text = text[:end] + b" down" + text[end:]
    return text


def without_down(text: bytes, ends: List[int]) -> Optional[bytes]:
    """The file with what `with_down` wrote taken out again; None when it does not stand there."""
    for end in sorted(ends, reverse=True):
        if text[end - 5 : end] != b" down":
            return None
        text = text[: end - 5] + text[end:]
    return text
