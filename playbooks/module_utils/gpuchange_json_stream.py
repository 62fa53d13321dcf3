"""Reads JSON of any size in bounded memory: its scalars one by one, each with its path. Standard library only."""

from __future__ import annotations

import json
import re
from typing import Any, Callable, Iterator, Tuple, Union

PIECE = 64 * 1024
MOST_TOKEN = 1024 * 1024
MOST_DEPTH = 32
TOKEN = re.compile(rb'"(?:[^"\\\x00-\x1f]|\\.)*"|[{}\[\],:]|-?[0-9][0-9.eE+-]*|true|false|null')
BLANKS = b" \t\r\n"

Where = Tuple[Union[str, int], ...]
Read = Callable[[int], bytes]


def scalars(read: Read) -> Iterator[Tuple[Where, Any]]:
    """(path of keys and indices, value) of every string, number, true, false and null, in their order.

    `read(n)` gives at most n bytes, none at the end. Raises ValueError, in words, on what is no single JSON value.
    """
    tokens = _tokens(read)
    yield from _value(_next(tokens), tokens, ())
    if next(tokens, None) is not None:
        raise ValueError("there is more after its end")


def _tokens(read: Read) -> Iterator[bytes]:
    buffer, ended = b"", False
    while True:
        buffer = buffer.lstrip(BLANKS)
        match = TOKEN.match(buffer)
        if match and (ended or match.end() < len(buffer)):  # at the very end of what was read it may go on
            yield match.group()
            buffer = buffer[match.end() :]
            continue
        if ended:
            if buffer:
                raise ValueError("ends in the middle" if buffer[:1] == b'"' else "not JSON at %r" % buffer[:20])
            return
        if len(buffer) > MOST_TOKEN:
            raise ValueError("not JSON, or a text of more than %d bytes" % MOST_TOKEN)
        more = read(PIECE)
        ended = not more
        buffer += more


def _next(tokens: Iterator[bytes]) -> bytes:
    token = next(tokens, None)
    if token is None:
        raise ValueError("ends in the middle")
    return token


def _value(token: bytes, tokens: Iterator[bytes], where: Where) -> Iterator[Tuple[Where, Any]]:
    if len(where) > MOST_DEPTH:
        raise ValueError("nested more than %d levels deep" % MOST_DEPTH)
    if token == b"{":
        yield from _object(tokens, where)
    elif token == b"[":
        yield from _array(tokens, where)
    elif token in b"}],:":
        raise ValueError("a value is missing before %r" % token)
    else:
        yield where, json.loads(token.decode("utf-8"))


def _object(tokens: Iterator[bytes], where: Where) -> Iterator[Tuple[Where, Any]]:
    token = _next(tokens)
    while token != b"}":
        if token[:1] != b'"':
            raise ValueError("a name is missing before %r" % token[:20])
        key = json.loads(token.decode("utf-8"))
        if _next(tokens) != b":":
            raise ValueError("no value follows the name %.40s" % key)
        yield from _value(_next(tokens), tokens, (*where, key))
        token = _after(tokens, b"}", "name")


def _array(tokens: Iterator[bytes], where: Where) -> Iterator[Tuple[Where, Any]]:
    token, index = _next(tokens), 0
    while token != b"]":
        yield from _value(token, tokens, (*where, index))
        index += 1
        token = _after(tokens, b"]", "value")


def _after(tokens: Iterator[bytes], end: bytes, item: str) -> bytes:
    """What follows an item: the first token of the next one, or the end of all."""
    token = _next(tokens)
    if token == end:
        return token
    if token != b",":
        raise ValueError("a comma is missing before %r" % token[:20])
    token = _next(tokens)
    if token == end:
        raise ValueError("a %s is missing before '%s'" % (item, end.decode()))
    return token
