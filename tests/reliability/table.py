"""docs/reliability.md, made of stored figures."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path

from reliability.figures import FULL, Result, Row

ROOT = Path(__file__).parents[2]

HEAD = """# What is promised, and how often it was tried

Made by `make reliability` from the figures in `docs/reliability/`; do not edit. A promise that broke, or was not tried,
makes the command end with 1. `make test` tries them in a short form.

| promise | tried | broken | peers | test |
|---|---|---|---|---|
"""

FIGURES = """
## Figures

| test | figures | commit | seed | effort | seconds |
|---|---|---|---|---|---|
"""


SURVIVORS = """
## Surviving mutants

Faults put into the journal, the states, the planner and the engine that no test can notice, because they change nothing
that anybody could see. They do not count in the score.

| module, place | fault | in | why it changes nothing |
|---|---|---|---|
"""


def document(found: dict[str, list[Result]], survivors: Sequence[Mapping[str, str]] = ()) -> str:
    """Markdown of all modules' results; `found`: test module's path → its tests' results; `survivors`: see
    survivors.yaml."""
    rows = "".join(_row(path, results) for path, results in found.items())
    figures = "".join(_figures(result) for results in found.values() for result in results)
    mutants = SURVIVORS + "".join(map(_survivor, survivors)) if survivors else ""
    return HEAD + rows + FIGURES + figures + mutants


def _survivor(entry: Mapping[str, str]) -> str:
    place, _, rest = entry["mutant"].partition(": ")
    fault, _, line = rest.rpartition(" in ")
    cells = (place, f"`{fault}`", f"`{line}`", entry["why"])
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def broken(found: dict[str, list[Result]]) -> list[str]:
    """The test modules that broke a promise or were not tried."""
    return [path for path, results in found.items() if not results or any(result.broken for result in results)]


def _row(path: str, results: list[Result]) -> str:
    row, tried = row_of(path), f"{sum(result.tried for result in results):,}"
    if any(result.effort != FULL for result in results):
        tried += " (in part in the short form)"
    lost = sum(len(result.broken) for result in results) if results else ""
    source = f" ({row.source})" if row.source else ""
    return f"| {row.promise} | {tried if results else 'not tried'} | {lost} | {row.peer}{source} | `{path}` |\n"


def row_of(path: str) -> Row:
    """The ROW that a test module holds, without importing what the module needs."""
    tree = ast.parse((ROOT / path).read_text())
    call = next(
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ROW"
    )
    assert isinstance(call, ast.Call)
    given = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
    return Row(*map(ast.literal_eval, call.args), **given)


def _figures(result: Result) -> str:
    counts = ", ".join(f"{name.replace('_', ' ')} {number:,g}" for name, number in sorted(result.counts.items()))
    test = result.test.replace("|", "\\|")
    return (
        f"| {test} | {counts or f'tried {result.tried:,}'} | {result.commit} | {result.seed} | "
        f"{result.effort} | {result.seconds:,.0f} |\n"
    )
