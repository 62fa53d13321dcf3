"""YAML text to plain data that remembers where everything stood. The only place that knows YAML.

Scalars stay text: `no`, `0777`, `1:30:00` and `12.10` are converted by the plan's model, which knows what is meant.
An unquoted scalar is a `Plain`, so that a model can refuse what a YAML reader would take for a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from gpuchange.plan.problems import Mark, Path, Problem, ProblemsFound
from gpuchange.providers.types import Plain

MAX_BYTES = 256 * 1024
MAX_NODES = 20_000
MAX_DEPTH = 16
MAX_ALIASES = 100
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})


@dataclass
class Document:
    """One YAML document: `data` (dicts, lists, text), the mark of every value and key by path, and what is wrong."""

    data: Any = None
    values: dict[Path, Mark] = field(default_factory=dict)
    keys: dict[Path, Mark] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def parse(content: bytes) -> Document:
    """Read one YAML document. Raises ProblemsFound where reading cannot go on; milder faults are in `problems`."""
    text = _decoded(content)
    try:
        faults = list(_event_faults(text))
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ProblemsFound([_syntax(error, text)]) from None
    except (ValueError, OverflowError) as error:  # PyYAML's own slips on escapes and directives out of range
        raise ProblemsFound([Problem(Mark(1, 1), f"not YAML: {error}", "mend the escape or the directive")]) from None
    if root is None:
        raise ProblemsFound([Problem(Mark(1, 1), "the plan is empty", "write one with: gpuchange init")])
    document = Document(problems=faults)
    document.data = _Builder(document).build(root, (), ())
    return document


def _decoded(content: bytes) -> str:
    if len(content) > MAX_BYTES:
        problem = Problem(Mark(1, 1), f"the plan has {len(content)} bytes, more than {MAX_BYTES}", "split it")
        raise ProblemsFound([problem])
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        mark = Mark(before.count(b"\n") + 1, len(before) - before.rfind(b"\n"))
        raise ProblemsFound([Problem(mark, "the file is not UTF-8", "save it as UTF-8")]) from None


def _event_faults(text: str) -> Iterator[Problem]:
    """Walk the flat event stream first: limits hold before anything nested is built. Refused tags are yielded."""
    counts = {"documents": 0, "nodes": 0, "aliases": 0}
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        mark = _mark(event.start_mark)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        counts["documents"] += isinstance(event, yaml.DocumentStartEvent)
        counts["nodes"] += isinstance(event, yaml.NodeEvent)
        counts["aliases"] += isinstance(event, yaml.AliasEvent)
        _within_limits(counts, depth, mark)
        tag = getattr(event, "tag", None)
        if tag is not None:
            yield Problem(mark, f"the tag {tag} is refused; a plan is plain data", "remove the tag")


def _within_limits(counts: dict[str, int], depth: int, mark: Mark) -> None:
    exceeded = {
        "a second document begins here; a plan is one document": (
            counts["documents"] > 1,
            "remove the --- or write two files",
        ),
        f"nested deeper than {MAX_DEPTH} levels": (depth > MAX_DEPTH, "a plan needs fewer levels"),
        f"more than {MAX_NODES} values": (counts["nodes"] > MAX_NODES, "split the plan"),
        f"more than {MAX_ALIASES} aliases": (counts["aliases"] > MAX_ALIASES, "write the values out"),
    }
    for what, (hit, remedy) in exceeded.items():
        if hit:
            raise ProblemsFound([Problem(mark, what, remedy)])


class _Builder:
    """Turns composed nodes into data, noting marks; aliases are expanded and counted. A faulty scalar becomes None."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.built = 0

    def build(self, node: yaml.Node, path: Path, parents: tuple[int, ...]) -> Any:
        mark = _mark(node.start_mark)
        self.document.values[path] = mark
        self.built += 1
        if id(node) in parents:
            raise ProblemsFound([Problem(mark, "an alias points to what holds it", "write the values out")])
        if self.built > MAX_NODES:
            raise ProblemsFound([Problem(mark, f"aliases expand to more than {MAX_NODES} values", "write them out")])
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, mark, path)
        inside = (*parents, id(node))
        if isinstance(node, yaml.SequenceNode):
            return [self.build(child, (*path, index), inside) for index, child in enumerate(node.value)]
        return self._mapping(node, path, inside)

    def _mapping(self, node: yaml.Node, path: Path, parents: tuple[int, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, path)
            if key is not None:
                found[key] = self.build(value_node, (*path, key), parents)
        return found

    def _key(self, node: yaml.Node, path: Path) -> str | None:
        mark = _mark(node.start_mark)
        fault = _key_fault(node)
        if not fault and (*path, node.value) in self.document.keys:
            first = self.document.keys[*path, node.value]
            fault = (f"the key {node.value} stands twice (first in line {first.line})", "keep one of the two")
        if fault:
            self.document.problems.append(Problem(mark, *fault))
            return None
        self.document.keys[*path, node.value] = mark
        return str(node.value)

    def _scalar(self, node: yaml.ScalarNode, mark: Mark, path: Path) -> Any:
        text = str(node.value)
        if any(0xD800 <= ord(char) < 0xE000 for char in text):
            self.document.problems.append(Problem(mark, "half of a surrogate pair", "write the character itself", path))
            return None
        if node.style is not None:
            return text
        if text in _NULLS and path:
            what = f"{dotted(path)} has no value"
            self.document.problems.append(Problem(mark, what, "write a value, or remove the key", path))
            return None
        return Plain(text)


def _key_fault(node: yaml.Node) -> tuple[str, str] | None:
    if not isinstance(node, yaml.ScalarNode):
        return "a key must be text", "write the key as one word"
    if node.style is None and node.value == "<<":
        return "merge keys (<<) are refused", "write the keys out"
    if node.style is None and node.value in _NULLS:
        return "a key is empty", "write the key before the colon"
    if not node.value.isprintable():
        return "a key holds a character that cannot be printed", "write the key with plain letters"
    return None


def dotted(path: Path) -> str:
    """`("drain", 0, "timeout")` as an operator reads it: drain[0].timeout."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _mark(mark: Any) -> Mark:
    return Mark(mark.line + 1, mark.column + 1)


def _syntax(error: yaml.YAMLError, text: str) -> Problem:
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        mark = Mark(before.count("\n") + 1, len(before) - before.rfind("\n"))
        return Problem(mark, "a character that YAML does not allow", "remove it (control characters, odd blanks)")
    at = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    mark = _mark(at) if at else Mark(1, 1)
    problem = str(getattr(error, "problem", None) or "cannot be read")
    if "'\\t'" in problem:
        return Problem(mark, "a tab; YAML is indented with blanks", "replace the tab by blanks")
    if "undefined alias" in problem:
        return Problem(mark, f"{problem}; there is no such anchor", "write the value, or put quotes around a leading *")
    context = getattr(error, "context", None)
    return Problem(mark, f"not YAML: {problem}" + (f" ({context})" if context else ""), _syntax_remedy(problem))


def _syntax_remedy(problem: str) -> str:
    hints = {
        "mapping values are not allowed": "put quotes around text that holds a colon, or mend the indentation",
        "expected <block end>": "mend the indentation: keys of one level begin in the same column",
        "could not find expected ':'": "write `key: value`, with a blank after the colon",
        "cannot start any token": "put quotes around text that begins with a special character",
        "expected ',' or": "close the bracket, or put a comma between the entries",
    }
    return next((hint for start, hint in hints.items() if start in problem), "mend the line, or the one before it")
