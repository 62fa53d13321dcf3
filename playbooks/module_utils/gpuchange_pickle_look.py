"""What a pickle says, without doing what it says: its opcodes are followed on a stack of stand-ins.

Nothing is imported, called or built. Only dictionaries that become the state of an object are looked at, and of those
only the keys asked for: memory stays bounded however large the pickle is. Standard library only.
"""

from __future__ import annotations

import pickletools
from typing import IO, Any, Dict, FrozenSet, Iterator, List

MOST_ARGUMENT = 1024 * 1024
MOST_LINE = 8192
MOST_STACK = 200000
MOST_KEPT = 100000
FILES = (".distcp", ".safetensors")  # names of shards: one name serves many objects
UNKNOWN = object()
MARK = object()
TEXT = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")
NUMBER = ("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4")
PUT = ("PUT", "BINPUT", "LONG_BINPUT")
GET = ("GET", "BINGET", "LONG_BINGET")


class Bounded:
    """A file for pickletools: one argument of an opcode is never larger than a limit."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def read(self, count: int) -> bytes:
        if count > MOST_ARGUMENT:
            raise ValueError("holds a single value of %d bytes" % count)
        return self.file.read(count)

    def readline(self) -> bytes:
        line = self.file.readline(MOST_LINE)
        if len(line) == MOST_LINE:
            raise ValueError("holds a single line of more than %d bytes" % MOST_LINE)
        return line


class Fields(Dict[str, Any]):
    """Stand-in of a dictionary: what it holds under the keys asked for."""


class Follower:
    """The pickle machine's stack and memo, with stand-ins for all but short texts, whole numbers and `Fields`."""

    def __init__(self, wanted: FrozenSet[str]) -> None:
        self.wanted, self.memoized = wanted, 0
        self.stack: List[Any] = []
        self.memo: Dict[int, Any] = {}

    def states(self, file: IO[bytes]) -> Iterator[Dict[str, Any]]:
        """Every state given to an object that has all the keys asked for, at their first level."""
        ended = False
        for opcode, argument, _ in pickletools.genops(Bounded(file)):  # type: ignore[arg-type]
            if opcode.name == "BUILD":
                state = self.stack[-1] if self.stack else UNKNOWN
                if isinstance(state, Fields) and self.wanted <= set(state):
                    yield dict(state)
            self._follow(opcode, argument)
            ended = opcode.name == "STOP"
        if not ended:
            raise ValueError("ends in the middle")

    def _follow(self, opcode: Any, argument: Any) -> None:
        name = opcode.name
        if name in TEXT or name in NUMBER:
            small = argument.bit_length() < 128 if isinstance(argument, int) else len(argument) < 4096
            self._push(argument if small else UNKNOWN)
        elif name in ("EMPTY_DICT", "DICT"):
            items = self._to_mark() if name == "DICT" else []
            self._push(Fields())
            self._set(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._to_mark() if name == "SETITEMS" else [self._pop(), self._pop()][::-1]
            self._set(items)
        elif name in PUT or name == "MEMOIZE":
            self._put(self.memoized if name == "MEMOIZE" else argument)
        elif name in GET:
            self._push(self.memo.get(argument, UNKNOWN))
        else:
            self._other(opcode)

    def _other(self, opcode: Any) -> None:
        """Any other opcode takes and gives as many values as pickletools says, and what it gives is not known."""
        if opcode.name == "BUILD":  # leaves the object, whatever became of it
            self._pop()
            return
        if opcode.name == "POP" and self.stack and self.stack[-1] is MARK:
            self.stack.pop()
            return
        if opcode.name == "DUP":
            self._push(self.stack[-1] if self.stack else UNKNOWN)
            return
        before = list(opcode.stack_before)
        if pickletools.markobject in before:
            self._to_mark()
            before = before[: before.index(pickletools.markobject)]
        for _ in before:
            self._pop()
        for given in opcode.stack_after:
            self._push(MARK if given is pickletools.markobject else UNKNOWN)

    def _set(self, items: List[Any]) -> None:
        target = self.stack[-1] if self.stack else UNKNOWN
        if isinstance(target, Fields):
            pairs = zip(items[::2], items[1::2])
            target.update({key: value for key, value in pairs if isinstance(key, str) and key in self.wanted})

    def _put(self, index: Any) -> None:
        """Only what can still matter is remembered: names asked for and short texts, up to a limit."""
        self.memoized += 1
        value = self.stack[-1] if self.stack else UNKNOWN
        worth = isinstance(value, str) and (value in self.wanted or value.endswith(FILES))
        if worth and isinstance(index, int):
            if len(self.memo) >= MOST_KEPT:
                raise ValueError("names more than %d files" % MOST_KEPT)
            self.memo[index] = value
        elif isinstance(index, int):
            self.memo.pop(index, None)

    def _push(self, value: Any) -> None:
        if len(self.stack) >= MOST_STACK:
            raise ValueError("nested or wide beyond %d values" % MOST_STACK)
        self.stack.append(value)

    def _pop(self) -> Any:
        if not self.stack or self.stack[-1] is MARK:
            raise ValueError("takes more than it has given")
        return self.stack.pop()

    def _to_mark(self) -> List[Any]:
        taken: List[Any] = []
        while self.stack and self.stack[-1] is not MARK:
            taken.append(self.stack.pop())
        if not self.stack:
            raise ValueError("takes more than it has given")
        self.stack.pop()
        return taken[::-1]


def states(file: IO[bytes], wanted: FrozenSet[str]) -> Iterator[Dict[str, Any]]:
    """{key: text, number or a stand-in} of every object in the pickle that was given all of these keys.

    Raises ValueError, in words, on what is no pickle, ends early or asks for more memory than is given to it.
    """
    return Follower(wanted).states(file)
