"""docs/reliability.md, made of stored figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reliability.figures import Result

HEAD = """# What is promised, and how often it was tried

Made by `make reliability` from the figures in `docs/reliability/`; do not edit. A promise that broke, or was not tried,
makes the command end with 1. `make test` tries all of them in a short form.

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
    test = f"`{path}`"
    if not results:
        return f"| | not tried | | | {test} |\n"
    row, tried = results[0].row, sum(result.tried for result in results)
    lost = sum(len(result.broken) for result in results)
    source = f" ({row.source})" if row.source else ""
    return f"| {row.promise} | {tried:,} | {lost} | {row.peer}{source} | {test} |\n"


def _figures(result: Result) -> str:
    counts = ", ".join(f"{name.replace('_', ' ')} {number:,g}" for name, number in sorted(result.counts.items()))
    test = result.test.replace("|", "\\|")
    return (
        f"| {test} | {counts or f'tried {result.tried:,}'} | {result.commit} | {result.seed} | "
        f"{result.effort} | {result.seconds:,.0f} |\n"
    )
