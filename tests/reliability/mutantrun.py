"""Runs the tests of the core modules against mutants of these: which tests, in which order, what came out.

What was found out is kept in `.mutants/` of the checkout, so that a run can be stopped and taken up again.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import coverage

from reliability.mutation import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / ".mutants"
NAMES = ("journal", "states", "planner", "engine")
VERDICTS = "verdicts.jsonl"
MUTATION = "tests/reliability/mutation.py"
CPU = 2.0  # seconds that a test may compute, beyond three times what it takes, before its mutant loops for ever


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. `end`: failed, error, timeout (killed); passed, uncovered by any test (survived)."""

    id: str
    end: str
    by: str = ""
    seconds: float = 0.0
    of: str = ""  # what it was found out with

    @property
    def killed(self) -> bool:
        return self.end in ("failed", "error", "timeout")


def module_path(name: str) -> str:
    return f"gpuchange/{name}.py"


def own_tests(module: str) -> list[str]:
    """The files with a module's own tests, by name; the engine hands confirmations on."""
    own = Path(module).stem
    names = (own, "confirming") if own == "engine" else (own,)
    found = {path for name in names for path in (ROOT / "tests").glob(f"test_{name}*.py")}
    return [str(path.relative_to(ROOT)) for path in sorted(found)]


def test_files() -> list[str]:
    return [file for name in NAMES for file in own_tests(module_path(name))]


def all_mutants() -> list[Mutant]:
    return [mutant for name in NAMES for mutant in mutants(module_path(name), (ROOT / module_path(name)).read_text())]


class Host:
    """The process of mutanthost.py."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("mutanthost.py"))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, mutant: Mutant | None, tests: Sequence[str] | None = None, **more: Any) -> dict[str, Any]:
        """Run `tests` (None: all of them) against `mutant` (None: the modules as they are). See mutanthost.py."""
        module, at = (mutant.module, mutant.at) if mutant else ("", None)
        asked = {"module": module, "at": at, "tests": tests, "files": test_files()}
        stdin, stdout = _pipes(self._process)
        stdin.write(json.dumps({**asked, "cpu": {}, "coverage": "", **more}) + "\n")
        stdin.flush()
        return dict(json.loads(stdout.readline()))

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        stdin, stdout = _pipes(self._process)
        stdin.close()
        stdout.close()
        self._process.wait()


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin and process.stdout
    return process.stdin, process.stdout


@dataclass(frozen=True)
class Map:
    """Which tests run a line of one module, and how long (seconds) each takes. The test "" is loading the module."""

    durations: dict[str, float]
    lines: dict[str, list[str]]

    @classmethod
    def draw(cls, host: Host, file: str, module: str) -> Map:
        """Run a file's tests once, watched. Raises RuntimeError when one fails without any mutant."""
        with tempfile.TemporaryDirectory() as scratch:
            data = Path(scratch) / "coverage"
            answer = host.ask(None, files=[file], coverage=str(data))
            if answer["end"] != "passed":
                raise RuntimeError(f"{file}: a test fails without any mutant: {answer['by'] or answer['end']}")
            return cls(answer["durations"], _contexts(data, module))

    def add(self, other: Mapping[str, Any]) -> None:
        """Merge another map, as kept in JSON."""
        self.durations.update(other["durations"])
        for line, tests in other["lines"].items():
            self.lines.setdefault(line, []).extend(tests)

    def tests(self, mutant: Mutant, hint: str = "") -> list[str]:
        """The tests that run the mutant's lines, the quick ones first; what runs when the module is loaded: all."""
        first, last = mutant.lines
        named = {test for line in range(first, last + 1) for test in self.lines.get(str(line), ())}
        chosen = set(self.durations) if "" in named else named & set(self.durations)
        return sorted(chosen, key=lambda test: (test != hint, self.durations[test], test))


def _contexts(data: Path, module: str) -> dict[str, list[str]]:
    read = coverage.CoverageData(str(data))
    read.read()
    by_line = read.contexts_by_lineno(str(ROOT / module))
    return {str(line): sorted({context.rpartition("|")[0] for context in of}) for line, of in by_line.items()}


class Campaign:
    """A run over mutants. `judge` them in any order and any number of sittings; verdicts are kept as they come.

    A kept verdict holds as long as the module is the same and the test that killed the mutant is (of one that survived:
    all its tests are).
    """

    def __init__(self, host: Host, kept: Path = KEPT) -> None:
        self._host, self._kept = host, kept
        self._maps: dict[str, Map] = {}
        kept.mkdir(exist_ok=True)
        self.verdicts = {verdict.id: verdict for verdict in _read(kept / VERDICTS)}

    def map(self, module: str) -> Map:
        """Which of a module's own tests run what; drawn anew for the files that have changed."""
        if module not in self._maps:
            merged = self._maps[module] = Map({}, {})
            for file in own_tests(module):
                kept = self._kept / f"{_digest([file, module])}.map"
                if not kept.exists():
                    kept.write_text(json.dumps(asdict(Map.draw(self._host, file, module))))
                merged.add(json.loads(kept.read_text()))
        return self._maps[module]

    def judge(self, mutant: Mutant) -> Verdict:
        known = self.verdicts.get(mutant.id)
        if known is None or known.of != stamp(mutant, known.by):
            known = self.verdicts[mutant.id] = self._try(mutant, known.by if known else "")
            with (self._kept / VERDICTS).open("a") as file:
                file.write(json.dumps(asdict(known)) + "\n")
        return known

    def _try(self, mutant: Mutant, hint: str) -> Verdict:
        known = self.map(mutant.module)
        tests = known.tests(mutant, hint)
        if not tests:
            return Verdict(mutant.id, "uncovered", of=stamp(mutant, ""))
        began = time.monotonic()
        answer = self._host.ask(mutant, tests, cpu={test: CPU + 3 * known.durations[test] for test in tests})
        seconds = round(time.monotonic() - began, 2)
        return Verdict(mutant.id, answer["end"], answer["by"], seconds, stamp(mutant, answer["by"]))


def stamp(mutant: Mutant, by: str) -> str:
    tests = [by.partition("::")[0]] if by else own_tests(mutant.module)
    return _digest([mutant.module, *tests])


@lru_cache
def content_sum(path: str) -> str:
    file = ROOT / path
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else ""


def _digest(paths: Sequence[str]) -> str:
    """Of these files, and of all that tests among them share with others."""
    shared = sorted({helper for path in paths if path.startswith("tests/") for helper in helpers(path)})
    return hashlib.sha256("".join(map(content_sum, [*paths, *shared, MUTATION])).encode()).hexdigest()[:16]


@lru_cache
def helpers(path: str) -> frozenset[str]:
    """The files of tests/ that a test file draws on, be it by way of others: every one that is named in it."""
    known = {f.stem: str(f.relative_to(ROOT)) for f in (ROOT / "tests").glob("*.py") if not f.stem.startswith("test_")}
    found, open_ends = {known["conftest"]}, [path, known["conftest"]]
    while open_ends:
        words = set(re.findall(r"\w+", (ROOT / open_ends.pop()).read_text()))
        named = {known[stem] for stem in known.keys() & words} - found
        found |= named
        open_ends += named
    return frozenset(found)


def _read(path: Path) -> list[Verdict]:
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [Verdict(**json.loads(line)) for line in lines if line.endswith("\n")]


def score(killed: int, survived: int) -> float:
    """Percent killed, one decimal; rounded down, so that it is never better than it is."""
    return math.floor(1000 * killed / max(killed + survived, 1)) / 10


def sample(found: Sequence[Mutant], seed: int) -> list[Mutant]:
    """All mutants in an order drawn by `seed`: a prefix is a fair sample."""
    order = list(found)
    random.Random(seed).shuffle(order)
    return order


def within(mutants_: Iterable[Mutant], seconds: float | None) -> Iterator[Mutant]:
    """Those that come before the time is over."""
    end = None if seconds is None else time.monotonic() + seconds
    for mutant in mutants_:
        if end is not None and time.monotonic() > end:
            return
        yield mutant
