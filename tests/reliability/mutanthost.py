"""A process that runs tests against mutants: one line of JSON in, one out; a fork of itself for each.

What costs time is done once, before the forks. A fault inside a function is put into a fork of a pytest that has
collected all tests already; any other into a fork that has loaded the packages of others only, and imports gpuchange
with the fault in it. Nothing is written into the checkout.

    in:  {module, at: [node, fault] | null, tests: [node id, ...] | null (all of `files`), files: [path, ...],
          cpu: {node id: seconds that a test may compute}, coverage: where to store it | ""}
    out: {end: passed | failed | error | timeout, by: node id, durations: {node id: seconds}}
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from reliability.mutantload import Finder, functions, swap  # noqa: E402

PRELOADED = ("ansible_runner", "click", "hypothesis", "paramiko", "pydantic", "rich", "tenacity", "yaml")
ANSWER = "answer.json"
MEMORY = 4 << 30  # bytes; a mutant that eats more has failed
COLLECT = 120.0  # seconds
HANGS = 60.0  # seconds
QUIET = ("-q", "-x", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not thorough")
QUIET += ("-W", "ignore", "--hypothesis-seed=0", "--tb=no")
PR_SET_PDEATHSIG = 1
Asked = dict[str, Any]


class Watch:
    """pytest's plugin in a fork: runs the tests asked for in the order asked, each in its time, and notes the end."""

    def __init__(self, tests: Sequence[str] | None, cpu: Mapping[str, float]) -> None:
        self.tests, self.cpu = tests, cpu
        self.failed = ""
        self.durations: dict[str, float] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.tests is not None:
            items[:] = ordered(items, self.tests)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Nobody handles these signals: the system ends us. A loop without end shows on any machine, however busy."""
        signal.setitimer(signal.ITIMER_PROF, self.cpu.get(nodeid, HANGS))
        signal.setitimer(signal.ITIMER_REAL, HANGS)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.durations[report.nodeid] = self.durations.get(report.nodeid, 0.0) + report.duration
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def told(self, end: str) -> Asked:
        return {"end": end, "by": self.failed, "durations": self.durations}


def ordered(items: Sequence[pytest.Item], tests: Sequence[str]) -> list[pytest.Item]:
    known = {item.nodeid: item for item in items}
    return [known[test] for test in tests if test in known]


def in_a_fork(act: Callable[[Path], Asked]) -> Asked:
    """What `act` returns in a fork of this process; whatever that left running ends with it."""
    scratch = Path(tempfile.mkdtemp(prefix="mutant-"))
    child = os.fork()
    if not child:
        _child(act, scratch)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    by_clock = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGPROF)
    told: Asked = {"end": "timeout" if by_clock else "error", "by": "", "durations": {}}
    if (scratch / ANSWER).exists():
        told = json.loads((scratch / ANSWER).read_text())
    shutil.rmtree(scratch, ignore_errors=True)
    return told


def _child(act: Callable[[Path], Asked], scratch: Path) -> None:
    """Never returns."""
    os.setsid()
    end_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(scratch / "hypothesis")
    signal.setitimer(signal.ITIMER_REAL, COLLECT)
    me = os.getpid()
    try:
        told = act(scratch)
        if os.getpid() == me:  # and not a child that a test forked and that came back here
            (scratch / f"{ANSWER}.new").write_text(json.dumps(told))
            (scratch / f"{ANSWER}.new").rename(scratch / ANSWER)
    finally:
        os._exit(0)


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# -- from the start ---------------------------------------------------------------------------------------------------


def afresh(asked: Asked, scratch: Path) -> Asked:
    """Import, collect and run everything, with the fault in place as its module is imported."""
    if asked["at"]:
        sys.meta_path.insert(0, Finder(ROOT, asked["module"], tuple(asked["at"])))
    watch = Watch(asked["tests"], asked["cpu"])
    named = asked["tests"] if asked["tests"] is not None else asked["files"]
    files = dict.fromkeys(test.partition("::")[0] for test in named)
    cover = ("-p", "no:pytest_cov")
    if asked["coverage"]:
        os.environ["COVERAGE_FILE"] = asked["coverage"]
        cover = ("--cov=gpuchange", "--cov-context=test", "--cov-report=")
    code = int(pytest.main([*QUIET, *cover, f"--basetemp={scratch / 'tests'}", *files], plugins=[watch]))
    return watch.told({0: "passed", 1: "failed"}.get(code, "error"))


# -- from a pytest that has collected ---------------------------------------------------------------------------------


class Warm:
    """A fork that has collected all tests and forks for each mutant. `try_` says None to a fault it cannot take."""

    def __init__(self, files: Sequence[str]) -> None:
        ours, theirs = os.pipe(), os.pipe()
        if not os.fork():
            end_with_parent()
            os.close(ours[0])
            os.close(theirs[1])
            _serve(os.fdopen(theirs[0]), os.fdopen(ours[1], "w"), files)
            os._exit(0)
        os.close(ours[1])
        os.close(theirs[0])
        self._says, self._asks = os.fdopen(ours[0]), os.fdopen(theirs[1], "w")

    def try_(self, asked: Asked) -> Asked | None:
        self._asks.write(json.dumps(asked) + "\n")
        self._asks.flush()
        told = json.loads(self._says.readline())
        return None if told["end"] == "elsewhere" else dict(told)


def _serve(asks: IO[str], says: IO[str], files: Sequence[str]) -> None:
    class Loop:
        def pytest_runtestloop(self, session: pytest.Session) -> bool:
            gc.collect()
            gc.freeze()  # what is here stays shared with the forks
            for line in asks:
                functions(ROOT / json.loads(line)["module"])
                told = in_a_fork(lambda scratch, line=line: _swapped(session, json.loads(line), scratch))
                print(json.dumps(told), file=says, flush=True)
            return True

    pytest.main([*QUIET, "-p", "no:pytest_cov", *files], plugins=[Loop()])


def _swapped(session: pytest.Session, asked: Asked, scratch: Path) -> Asked:
    watch = Watch(None, asked["cpu"])
    if not swap(ROOT, asked["module"], tuple(asked["at"])):
        return watch.told("elsewhere")
    session.config.pluginmanager.register(watch)
    session.config._tmp_path_factory._given_basetemp = scratch / "tests"  # type: ignore[attr-defined]
    items = ordered(session.items, asked["tests"])
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if watch.failed:
            return watch.told("failed")
    return watch.told("passed")


def main() -> None:
    os.chdir(ROOT)
    said = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    for name in PRELOADED:
        importlib.import_module(name)
    warm: Warm | None = None
    with tempfile.TemporaryDirectory(prefix="mutants-") as shared:
        os.environ["GPUCHANGE_TEST_TEMPLATES"] = shared  # made by the run without a mutant that comes first
        for line in sys.stdin:
            asked = json.loads(line)
            told = None
            if asked["at"]:
                warm = warm or Warm(asked["files"])
                told = warm.try_(asked)
            told = told or in_a_fork(lambda scratch, asked=asked: afresh(asked, scratch))
            print(json.dumps(told), file=said, flush=True)


if __name__ == "__main__":
    main()
