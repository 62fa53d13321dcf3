"""Cases are keywords: `pytest -k <case id>` and `-k cases` select their tests, `--list-cases` lists them."""

from __future__ import annotations

import casebook
import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["reliability.fixtures"]

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy one too
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--list-cases", action="store_true", help="list the known cases and their tests, run nothing")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        ids = [str(case) for marker in item.iter_markers("case") for case in marker.args]
        if ids:
            item.extra_keyword_matches.update([*ids, "cases"])


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    if not config.getoption("--list-cases"):
        return None
    print("\n".join(casebook.listing()))
    return 0
