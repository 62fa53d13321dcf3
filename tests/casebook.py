"""The known cases and the tests that claim them with `@pytest.mark.case("<id>")`, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

TESTS = Path(__file__).resolve().parent


def known() -> dict[str, dict[str, str]]:
    """{id: {theme, shows}} of tests/cases/known.yaml."""
    return dict(yaml.safe_load((TESTS / "cases" / "known.yaml").read_text(encoding="utf-8")))


@cache
def claims() -> dict[str, list[str]]:
    """{case id: tests that claim it as "file::test"}, lab tests included: nothing is imported or collected."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for name, case in _claims_in(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(case, []).append(f"{path.relative_to(TESTS.parent)}::{name}")
    return found


def _claims_in(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            calls = [call for decorator in node.decorator_list for call in ast.walk(decorator)]
            yield from ((node.name, case) for call in calls for case in _cases_of(call))


def _cases_of(node: ast.AST) -> list[str]:
    """The ids in one `pytest.mark.case("id", ...)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "case":
        return [str(word.value) for word in node.args if isinstance(word, ast.Constant)]
    return []


def listing() -> list[str]:
    """Every case with its theme and its tests, as lines."""
    claimed = claims()
    lines = []
    for case, about in sorted(known().items()):
        lines += [f"{case} ({about['theme']})", *(f"    {test}" for test in claimed.get(case, ["no test"]))]
    return lines
