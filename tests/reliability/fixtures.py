"""pytest's part in the reliability tests: modules that hold a ROW (see figures.py) and count what they try.

They are tried in a short, seeded form by `make test` and in full by `make reliability`, which makes docs/reliability.md
from what is stored here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from reliability.figures import FULL, SHORT, Clock, Effort, Figures, Result, commit

SHOWN = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("reliability")
    group.addoption("--effort", choices=[SHORT, FULL], default=SHORT, help="how much the reliability tests try")
    group.addoption("--seed", type=int, help="seed of the reliability tests (default: 1 for short, random for full)")
    group.addoption("--figures", type=Path, metavar="DIR", help="store the figures of the reliability tests in DIR")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:  # chosen before the workers start, so that they agree
        config.option.seed = random.SystemRandom().randrange(1 << 31) if config.option.effort == FULL else 1


def pytest_report_header(config: pytest.Config) -> str:
    return f"reliability: effort {config.option.effort}, seed {config.option.seed}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if hasattr(getattr(item, "module", None), "ROW"):
            item.add_marker(pytest.mark.reliability)


@pytest.fixture
def effort(pytestconfig: pytest.Config) -> Effort:
    """How much to try, and the seed to draw with."""
    return Effort(pytestconfig.option.effort == FULL, pytestconfig.option.seed)


@pytest.fixture
def figures(request: pytest.FixtureRequest, effort: Effort) -> Iterator[Figures]:
    """Counted by the test; stored after it. Whatever was broken fails the test, and so does trying nothing."""
    kept, clock = Figures(), Clock()
    yield kept
    directory = request.config.option.figures
    module = request.module.__name__.rpartition(".")[2].removeprefix("test_")
    level = FULL if effort.full else SHORT
    result = Result(
        module, request.node.name, request.module.ROW, level, effort.seed, commit(), clock.seconds(),
        kept.tried, kept.broken, kept.counts,
    )  # fmt: skip
    if directory:
        result.store(directory)
    print(f"\n{module}: tried {kept.tried}, broken {len(kept.broken)}, {kept.counts}, seed {effort.seed}")
    if kept.broken:
        pytest.fail("\n".join(kept.broken[:SHOWN]))
    if not kept.tried:
        pytest.fail("nothing was tried")
