"""Small faults put into the core modules, one at a time: do their tests notice?

In full all mutants are tried, and each that survives must be explained in survivors.yaml; the short form tries a sample
for about a minute and a half.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from reliability import mutantrun
from reliability.figures import Effort, Figures, Row
from reliability.mutantrun import NAMES, Campaign, Host, Verdict, all_mutants, sample, score
from reliability.mutation import Mutant, mutants, mutated

ROW = Row(
    "A fault in the journal, the states, the planner or the engine does not go unnoticed: of all mutants that are not "
    "equal in effect, at least 90 of 100 are killed by the tests",
)
SURVIVORS = Path(__file__).with_name("survivors.yaml")
PROMISED, ALARMING = 90.0, 80.0  # percent: of all, of a sample
SAMPLE = 30  # mutants in the short form: a number, not a time, so that a slow machine judges no fewer


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Host() as made:
        yield made


def explained() -> dict[str, str]:
    """Survivors whose fault changes nothing that anybody could see: id → why."""
    return {entry["mutant"]: entry["why"] for entry in yaml.safe_load(SURVIVORS.read_text()) or []}


def test_the_tests_kill_the_mutants(host: Host, effort: Effort, figures: Figures, tmp_path: Path) -> None:
    campaign = Campaign(host) if effort.full else Campaign(host, tmp_path)
    equal, killed, survived = explained(), 0, list[Mutant]()
    order = sample(all_mutants(), effort.seed)
    for mutant in order if effort.full else order[:SAMPLE]:
        figures.tried += 1
        if campaign.judge(mutant).killed:
            killed += 1
        elif mutant.id not in equal:
            survived.append(mutant)
    equivalent = figures.tried - killed - len(survived)
    figures.count(killed=killed, survived=len(survived), equivalent=equivalent, percent=score(killed, len(survived)))
    if score(killed, len(survived)) < (PROMISED if effort.full else ALARMING):
        figures.broken.append(f"{killed} killed, {len(survived)} not: " + "; ".join(mutant.id for mutant in survived))


def test_every_explanation_is_of_a_mutant_that_there_is() -> None:
    known = {mutant.id for mutant in all_mutants()}
    assert [mutant for mutant in explained() if mutant not in known] == []
    assert all(explained().values())


def test_a_fault_survives_tests_that_do_not_look(host: Host) -> None:
    """The same fault, with a test that looks at what it breaks, and with one that does not."""
    fault = next(m for m in all_mutants() if m.place == "_network_suspect" and m.becomes == "return None")
    looks = "tests/test_planner_people.py::test_many_hosts_gone_at_once_stop_all_new_forward_work"
    looks_away = "tests/test_planner.py::test_last_phase_ends_the_way_there"
    assert host.ask(fault, [looks_away])["end"] == "passed"
    assert host.ask(None, [looks])["end"] == "passed"
    answer = host.ask(fault, [looks_away, looks])
    assert (answer["end"], answer["by"]) == ("failed", looks)


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_where_a_module_is_loaded_is_put_in_too(host: Host, name: str) -> None:
    faults = [m for m in all_mutants() if m.module == f"gpuchange/{name}.py" and m.place in FIRST_OF[name]]
    assert faults
    [mine] = [m for m in faults if (m.was, m.becomes) == FIRST_OF[name][m.place]]
    assert host.ask(mine, [KILLER[name]])["end"] in ("failed", "error")


FIRST_OF = {
    "journal": {"": ("'journal.db'", "''")},
    "states": {"Status": ("'done'", "''")},
    "planner": {"Limits": ("'host'", "''")},
    "engine": {"": ("'owner_marker'", "''")},
}
KILLER = {
    "journal": "tests/test_journal.py::test_nobody_else_reads_it",
    "states": "tests/test_states.py::test_the_words_in_journals_on_disk_stay_what_they_are",
    "planner": "tests/test_planner.py::test_limits_are_careful_unless_told_otherwise",
    "engine": "tests/test_engine_control.py::test_markers_of_hosts_that_are_done_are_given_back_once",
}


# -- the faults themselves --------------------------------------------------------------------------------------------


def faults_of(source: str) -> set[str]:
    return {f"{mutant.was} → {mutant.becomes}" for mutant in mutants("m.py", source)}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", {"a < b → a <= b", "a < b → a >= b"}),
        ("a is None", {"a is None → a is not None"}),
        ("a and b", {"a and b → a or b", "a and b → a", "a and b → b"}),
        ("not a", {"not a → a"}),
        ("a + 2", {"a + 2 → a - 2", "2 → 3"}),
        ("a | b", {"a | b → a", "a | b → b"}),
        ("a = True", {"True → False"}),
        ("a.b = c", {"a.b = c → nothing"}),
        ("a += b", {"a += b → a -= b", "a += b → nothing"}),
        ("f(x)", {"f(x) → nothing"}),
        ("f'{a} b'", {"f'{a} b' → ''"}),
        ("if a:\n    pass", {"if a → if not a"}),
        ("[a for a in b if a]", {"[a for a in b if a] → [a for a in b if not a]"}),
        ("any(a)", {"any(a) → all(a)", "any(a) → nothing"}),
        ("raise a", {"raise a → nothing"}),
        ("while a < b:\n    break", {"a < b → a <= b", "a < b → a >= b", "break → continue"}),
        ("def f():\n    'text'\n    return a", {"return a → return None"}),
        ("def f() -> 'X':\n    return", {"return → nothing"}),
        ("a: 'X' = b", set()),
        ("import a", set()),
        ("Row = tuple[int, 'x']", set()),
    ],
)
def test_faults_of_each_kind_are_made(source: str, expected: set[str]) -> None:
    assert faults_of(source) == expected


@pytest.mark.parametrize("mutant", sample(all_mutants(), 1)[:60], ids=lambda mutant: mutant.id[:60])
def test_a_mutant_is_the_module_with_one_place_changed(mutant: Mutant) -> None:
    source = Path(__file__).parents[2].joinpath(mutant.module).read_text()
    sound = ast.unparse(ast.parse(source)).splitlines()
    faulty = ast.unparse(mutated(source, mutant.at)).splitlines()
    assert sound != faulty
    same = sum(a == b for a, b in zip(sound, faulty, strict=False))
    tail = sum(a == b for a, b in zip(reversed(sound), reversed(faulty), strict=False))
    assert same + tail >= min(len(sound), len(faulty)) - 45  # one statement, at most a whole function's body


def test_ids_are_unique() -> None:
    found = [mutant.id for mutant in all_mutants()]
    assert len(set(found)) == len(found)


def test_verdicts_are_kept_while_module_and_killer_are_the_same(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = next(m for m in all_mutants() if m.place == "_network_suspect")
    tried: list[str] = []

    def try_(_self: Campaign, mutant: Mutant, hint: str) -> Verdict:
        tried.append(hint)
        return Verdict(mutant.id, "failed", KILLER["planner"], 1.0, mutantrun.stamp(mutant, KILLER["planner"]))

    monkeypatch.setattr(Campaign, "_try", try_)
    assert Campaign(host, tmp_path).judge(fault) == Campaign(host, tmp_path).judge(fault)
    assert tried == [""]
    monkeypatch.setattr(mutantrun, "content_sum", lambda path: f"another {path}")
    Campaign(host, tmp_path).judge(fault)
    assert tried == ["", KILLER["planner"]]  # the test that killed it before is tried first
