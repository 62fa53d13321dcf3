"""The compatibility resolver against combinations from the published tables: tests/cases/compat, one file each."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import fields, replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuchange.cli import main
from gpuchange.compat.model import Question
from gpuchange.compat.resolver import RULES, Open, answer, fits, marks, newest, published, ranges
from gpuchange.compat.tables import find_card, known_branches, rows, source_of, tables
from gpuchange.compat.versions import compare, parts, text_of

CASES = Path(__file__).parent / "cases" / "compat"
TODAY = date(2026, 11, 30)
PARTS = {field.name for field in fields(Question)} - {"cards", "today"}


def cases(kind: str) -> list[Any]:
    return [pytest.param(yaml.safe_load(path.read_text()), id=path.stem) for path in sorted((CASES / kind).glob("*"))]


def asked(case: dict[str, Any]) -> Question:
    given = {name: value for name, value in case.items() if name in PARTS}
    return Question(TODAY, tuple(find_card(str(card)) for card in case.get("gpu", ())), **given)


def arguments(case: dict[str, Any]) -> list[str]:
    """The same question for the command line."""
    found = [word for card in case.get("gpu", ()) for word in ("--gpu", str(card))]
    for name, value in case.items():
        if name in PARTS:
            flag = "--" + name.replace("_", "-")
            found += [flag] if value is True else [flag, str(value)]
    return ["compat", *found, "--date", TODAY.isoformat()]


# --------------------------------------------------------------------------- the published combinations


def test_there_are_forty_of_each() -> None:
    assert len(cases("good")) >= 40 and len(cases("bad")) >= 40


@pytest.mark.parametrize("case", cases("good"))
def test_known_good(case: dict[str, Any]) -> None:
    found = answer(asked(case))
    assert found.verdict == "fits", [row.sentence() for row in (*found.of("refused"), *found.of("unknown"))]


@pytest.mark.parametrize("case", cases("bad"))
def test_known_bad(case: dict[str, Any]) -> None:
    """Refused by exactly the rules that the case names, each with what to do and where that is published."""
    found = answer(asked(case))
    refused = found.of("refused")
    assert {row.rule for row in refused} == set(case["rules"]), [row.sentence() for row in refused]
    assert all(row.source and row.says for row in refused)
    assert found.verdict == "refused"


@pytest.mark.parametrize("case", cases("good") + cases("bad"))
def test_a_case_names_a_table_and_only_parts_that_there_are(case: dict[str, Any]) -> None:
    assert case["table"] in tables()
    assert set(case) <= PARTS | {"gpu", "table", "rules"}
    assert set(case.get("rules", ())) <= {rule.id for rule in RULES}


def test_every_rule_that_can_refuse_does_so_in_some_case() -> None:
    """A rule that no bad case needs could be taken out unnoticed."""
    used = {rule for case in cases("bad") for rule in case.values[0]["rules"]}
    never = {
        "card-known", "driver-known", "driver-end-of-life", "cuda-known", "cuda-driver-full", "cuda-codegen",
        "tensorflow-known", "secure-boot",
    }  # fmt: skip
    assert used == {rule.id for rule in RULES} - never


# ------------------------------------------------------------------------------------------- the tables


@pytest.mark.parametrize("name", sorted(tables()))
def test_every_row_has_a_source(name: str) -> None:
    assert rows(name)
    assert all(len(source_of(name, row)) > 20 for row in rows(name))
    assert {key for row in rows(name) for key in row if key == "source" and not row[key]} == set()


def test_every_rule_reads_a_table() -> None:
    assert {rule.table for rule in RULES} <= set(tables())
    assert len({rule.id for rule in RULES}) == len(RULES)


def test_every_card_has_an_architecture_and_no_pci_id_stands_twice() -> None:
    assert [row["card"] for row in rows("cards") if find_card(row["card"]).architecture is None] == []
    ids = [number for row in rows("cards") for number in row["pci"]]
    assert len(ids) == len(set(ids))
    assert [row["card"] for row in rows("cards") if find_card(row["card"]).name != row["card"]] == []


def test_later_toolkits_came_with_later_drivers() -> None:
    """A slip of the pen in the table would show."""
    listed = sorted(rows("toolkit_driver"), key=lambda row: parts(row["cuda"]))
    drivers = [parts(row["driver"]) for row in listed]
    assert drivers == sorted(drivers)


@pytest.mark.parametrize(
    ("text", "name", "cc"),
    [
        ("NVIDIA H100 80GB HBM3", "H100", "9.0"),
        ("NVIDIA A100-SXM4-80GB", "A100", "8.0"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", "8.9"),
        ("Quadro RTX 6000", "Quadro RTX 6000", "7.5"),
        ("NVIDIA RTX 4000 SFF Ada Generation", "RTX 4000 SFF Ada", "8.9"),
        ("RTX 4090", "GeForce RTX 4090", "8.9"),
        ("TITAN X (Pascal)", "TITAN X (Pascal)", "6.1"),
        ("L40", "L40", "8.9"),
        ("10DE:2BB1", "RTX PRO 6000 Blackwell", "12.0"),
        ("0x2330", "H100", "9.0"),
        ("12.0", "12.0", "12.0"),
        ("NVIDIA Z1000", "NVIDIA Z1000", ""),
        ("NVIDIA RTX 4000", "NVIDIA RTX 4000", ""),
    ],
)
def test_cards_are_found_by_name_id_or_capability(text: str, name: str, cc: str) -> None:
    assert (find_card(text).name, find_card(text).cc) == (name, cc)


# ------------------------------------------------------------------- unknown, end of life, versions as numbers


@pytest.mark.parametrize(
    ("question", "rule"),
    [
        ({"driver": "640.10"}, "driver-known"),
        ({"cuda": "12.7"}, "cuda-known"),
        ({"cuda": "12.10"}, "cuda-known"),
        ({"cuda": "14.0"}, "cuda-known"),
        ({"gpu": ["Zebra 9"]}, "card-known"),
        ({"gpu": ["7.2"]}, "card-known"),
        ({"cudnn": "9.14.0", "gpu": ["V100"]}, "cudnn-card"),
        ({"cudnn": "9.30.0", "cuda": "13.3"}, "cudnn-cuda"),
        ({"pytorch": "3.0"}, "pytorch-build"),
        ({"tensorflow": "3.0"}, "tensorflow-known"),
    ],
)
def test_what_the_tables_do_not_say_is_neither_accepted_nor_refused(question: dict[str, Any], rule: str) -> None:
    found = answer(asked(question))
    assert [row.rule for row in found.of("unknown")] == [rule]
    assert "not in the" in found.of("unknown")[0].says
    assert found.verdict == "unknown"


def test_the_end_of_a_branch_is_a_warning_with_its_date() -> None:
    def at(driver: str, day: date) -> list[str]:
        found = answer(Question(day, driver=driver))
        assert found.verdict == "fits"
        return [row.says for row in found.of("warning")]

    assert at("570.124.06", date(2026, 2, 28)) == []
    assert at("570.124.06", date(2026, 3, 1)) == ["driver branch R570 (PB) reached its end of life in 2026-02"]
    assert at("550.54.15", date(2026, 1, 1)) == ["driver branch R550 has reached its end of life"]
    assert at("620.70.06", date(2029, 10, 1)) == ["driver branch R620 (LTSB) reached its end of life in 2029-09"]


def test_a_driver_below_the_toolkits_own_is_a_warning() -> None:
    (row,) = answer(Question(TODAY, driver="580.65.06", cuda="13.2.0")).of("warning")
    assert row.rule == "cuda-driver-full" and "minor-version compatibility; all of it from 595.45.04 on" in row.says


@pytest.mark.case("smi-cuda-version-is-not-the-toolkit")
def test_a_toolkit_newer_than_the_driver_is_named_and_an_older_one_is_fine() -> None:
    refused = answer(Question(TODAY, driver="470.82.01", cuda="12.4")).of("refused")
    assert "toolkit 12.4 needs driver 525.60.13 or newer, not 470.82.01" in refused[0].says
    assert answer(Question(TODAY, driver="535.104.05", cuda="11.3")).verdict == "fits"


@pytest.mark.case("right-version-wrong-module-flavour")
def test_the_module_flavour_must_fit_each_card() -> None:
    blackwell = Question(TODAY, (find_card("10de:2bb1"),), driver="580.173.02", module="proprietary")
    (row,) = answer(blackwell).of("refused")
    assert row.says.startswith("driver 580.173.02 proprietary does not drive RTX PRO 6000 Blackwell")
    assert row.remedy == "use the open flavour"
    assert answer(replace(blackwell, module="open")).verdict == "fits"
    old = Question(TODAY, (find_card("V100"),), driver="580.173.02", module="open")
    assert [row.remedy for row in answer(old).of("refused")] == ["use the proprietary flavour"]


@pytest.mark.case("fabricmanager-differs-in-patch-level")
def test_the_fabric_manager_must_be_the_drivers_very_version() -> None:
    question = Question(TODAY, nvswitch=True, driver="530.41.03", fabric_manager="530.30.02")
    assert [row.rule for row in answer(question).of("refused")] == ["fabric-manager-equal"]
    assert answer(replace(question, nvswitch=False)).verdict == "fits"


# -------------------------------------------------------------------------------------------- properties

KNOWN = [text_of(key) for key in marks("driver")[1:]]
drivers = st.one_of(
    st.sampled_from(KNOWN),
    st.builds(lambda branch, minor, patch: f"{branch}.{minor}.{patch:02}", st.integers(380, 640), st.integers(0, 200),
              st.integers(0, 20)),
)  # fmt: skip
cudas = st.sampled_from(["", *sorted({row["cuda"] for row in rows("toolkit_driver")}, key=parts), "13.4", "12.10"])
cudnns = st.one_of(
    st.sampled_from(["", *published("cudnn")]),
    st.builds(lambda *numbers: ".".join(map(str, numbers)), st.integers(7, 9), st.integers(0, 25), st.integers(0, 7)),
)
torches = st.sampled_from(["", *(f"{row['torch']}" for row in rows("pytorch")), "2.9.0+cu128", "2.14.0+cu126"])
flows = st.sampled_from(["", *(row["tensorflow"] for row in rows("tensorflow"))])
card_lists = st.lists(st.sampled_from([find_card(row["card"]) for row in rows("cards")]), max_size=3).map(tuple)
questions = st.builds(
    Question, today=st.just(TODAY), cards=card_lists, machine=st.sampled_from(["x86_64", "aarch64"]),
    module=st.sampled_from(["", "open", "proprietary"]), cuda=cudas, cudnn=cudnns, pytorch=torches, tensorflow=flows,
    cuda_compat=st.booleans(), nvswitch=st.sampled_from([None, True, False]),
)  # fmt: skip
BY_TABLE = {"card-dropped-by-driver", "driver-known"}
"""The rules by which a newer driver may be worse: a card that a branch dropped, a branch that no table has."""


@settings(max_examples=150, deadline=None)
@given(questions, drivers, drivers)
def test_a_newer_driver_is_never_worse_except_where_a_table_says_so(question: Question, one: str, two: str) -> None:
    older, newer = (replace(question, driver=driver) for driver in sorted((one, two), key=parts))
    for outcome in ("refused", "unknown"):
        before, after = ({said_of(row.rule) for row in answer(q).of(outcome)} for q in (older, newer))
        assert after - before <= BY_TABLE


def said_of(rule: str) -> str:
    """Two rules ask whether a PyTorch build runs on the driver: any, and any that has code for the cards."""
    return "pytorch-driver" if rule == "pytorch-driver-and-card" else rule


@settings(max_examples=40, deadline=None)
@given(questions, st.lists(drivers, min_size=8, max_size=8))
def test_the_ranges_for_an_open_driver_are_what_the_rules_say(question: Question, versions: list[str]) -> None:
    question = replace(question, driver="")
    found = ranges(question, "driver")
    for version in versions:
        assert inside(version, found) == (against(replace(question, driver=version)) <= against(question)), version


@settings(max_examples=40, deadline=None)
@given(questions, drivers, st.lists(cudnns.filter(bool), min_size=8, max_size=8))
def test_the_ranges_for_an_open_cudnn_are_what_the_rules_say(
    question: Question, driver: str, versions: list[str]
) -> None:
    question = replace(question, driver=driver, cudnn="")
    found = ranges(question, "cudnn")
    for version in versions:
        assert inside(version, found) == (against(replace(question, cudnn=version)) <= against(question)), version


def against(question: Question) -> Counter[str]:
    """By all rules, not only by those that say that they look at the open part."""
    found = answer(question)
    return Counter(row.rule for row in (*found.of("refused"), *found.of("unknown")))


def inside(version: str, found: tuple[tuple[str, str], ...]) -> bool:
    return any(compare(version, first) >= 0 and (not end or compare(version, end) < 0) for first, end in found)


@settings(max_examples=40, deadline=None)
@given(questions, drivers)
def test_every_finding_has_words_and_a_source(question: Question, driver: str) -> None:
    for row in answer(replace(question, driver=driver)).findings:
        assert row.says and row.source and "None" not in row.says + row.remedy


def test_a_known_end_is_the_only_thing_that_refuses_a_newer_branch() -> None:
    """The property above is not empty: newer drivers are refused, and by that rule alone."""
    volta = Question(TODAY, (find_card("V100"),), cuda="12.4")
    worse = {branch for branch in known_branches() if branch > 525 and not fits(volta, "driver", f"{branch}.999")}
    assert min(worse) == 590


# --------------------------------------------------------------------------------------- what is left open


@pytest.mark.parametrize(
    ("question", "part", "chosen"),
    [
        ({"gpu": ["V100"], "cuda": "12.8"}, "driver", "580.95.05"),
        ({"gpu": ["K80"]}, "driver", "470.82.01"),
        ({"gpu": ["H100"], "cuda": "13.0"}, "driver", "610.43.02"),
        ({"gpu": ["V100"], "cuda": "12.8", "driver": "580.95.05"}, "cudnn", "9.10.2.21"),
        ({"gpu": ["H100"], "cuda": "13.0", "driver": "580.95.05"}, "cudnn", "9.17.0"),
        ({"gpu": ["B200"], "cuda": "12.6"}, "cudnn", "9.17.0"),
        ({"cuda": "13.0", "gpu": ["K80"]}, "cudnn", ""),
        ({"gpu": ["H100", "Zebra"]}, "driver", ""),
    ],
)
def test_the_newest_that_fits(question: dict[str, Any], part: Open, chosen: str) -> None:
    assert newest(asked(question), part, published(part)) == chosen


# ------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize("case", cases("bad"))
def test_the_verb_refuses_with_the_source(case: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(case)) == 1
    out = capsys.readouterr().out
    assert all(f"({rule})" in out for rule in case["rules"])
    assert out.count("REFUSED:") == out.count("source: ") - out.count("\nwarning: ") - out.count(
        "\nnot in the tables: "
    )


@pytest.mark.parametrize("case", cases("good"))
def test_the_verb_accepts(case: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(case)) == 0
    assert capsys.readouterr().out.endswith("\nfits\n")


def test_the_verb_says_what_is_not_in_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compat", "--gpu", "Zebra", "--driver", "580.95.05"]) == 5
    assert "not in the tables: card Zebra is not in the tables" in capsys.readouterr().out


def test_the_verb_completes_what_is_left_open(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compat", "--gpu", "V100", "--driver", "auto", "--cuda", "12.8", "--cudnn", "auto", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1] == {
        "type": "compat", "verdict": "fits", "chosen": {"driver": "580.95.05", "cudnn": "9.10.2.21"}, "exit_code": 0,
    }  # fmt: skip
    assert all(line["source"] for line in lines[:-1])
    assert main(["compat", "--gpu", "B200", "--cuda", "13.0", "--cudnn", "auto", "--driver", "auto"]) == 0
    assert main(["compat", "--gpu", "K80", "--cuda", "13.0", "--driver", "auto"]) == 1
    assert "no driver in the tables is known to fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [[], ["--cuda", "12"], ["--driver", "newest"], ["--cuda", "auto"], ["--date", "soon", "--cuda", "12.8"]]
)
def test_the_verb_refuses_what_it_cannot_read(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compat", *words]) == 64
    assert "next:" in capsys.readouterr().err
