"""The pure checks of a host, over cases in tests/cases: parsing, readiness, versions, proof; and hostile input."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuchange.checks import cards, cuda, driver, identity, manifest, readiness, snapshot, wanted
from gpuchange.compat import floors, versions

CASES = Path(__file__).parent / "cases"
TWO_H100 = json.loads((CASES / "facts" / "two_h100.json").read_text())


def cases(folder: str) -> list[Any]:
    return [pytest.param(json.loads(p.read_text()), id=p.stem) for p in sorted((CASES / folder).glob("*.json"))]


def patched(patch: dict[str, Any], base: dict[str, Any] = TWO_H100) -> dict[str, Any]:
    """The facts of a host with two H100, with `{"dotted.path": value}` put in; None takes the key away.

    Keys may hold dots themselves: the longest key that exists is taken first.
    """
    facts = copy.deepcopy(base)
    for path, value in patch.items():
        _put(facts, path, value)
    return facts


def _put(node: dict[str, Any], path: str, value: Any) -> None:
    inner = [key for key in node if path.startswith(f"{key}.") and isinstance(node[key], dict)]
    if inner:
        key = max(inner, key=len)
        _put(node[key], path[len(key) + 1 :], value)
    elif value is None:
        del node[path]
    else:
        node[path] = value


@pytest.mark.parametrize("case", cases("cards"))
def test_cards(case: dict[str, Any]) -> None:
    found = cards.parse(case["said"])
    assert found.ok == case["ok"]
    assert [card.bus_id for card in found.cards] == case.get("buses", [])
    assert sum(len(card.mig) for card in found.cards) == case.get("mig", 0)
    assert list(found.dead) == case.get("dead", [])
    assert case.get("why", "") in found.why
    if "uuid" in case:
        assert found.cards[0].uuid == case["uuid"]


@pytest.mark.parametrize("case", cases("driver"))
def test_driver(case: dict[str, Any]) -> None:
    userspace = driver.library_version(case["packages"])
    found = driver.parse(case["facts"], None, userspace)
    said = driver.inconsistencies(found, case.get("history", ""))
    assert found.loaded == case["loaded"]
    assert len(said) >= len(case["says"])
    assert bool(said) == bool(case["says"]), said
    assert all(any(text in line for line in said) for text in case["says"]), said


@pytest.mark.parametrize("case", cases("dkms"))
def test_dkms(case: dict[str, Any]) -> None:
    assert driver.dkms_trouble(case["said"]) == case["says"]


@pytest.mark.parametrize("case", cases("cuda"))
def test_cuda(case: dict[str, Any]) -> None:
    found = cuda.parse_cuda(case["raw"])
    assert found.active == case["active"]
    assert found.sentence() == case["says"]


@pytest.mark.parametrize("case", cases("cudnn"))
def test_cudnn(case: dict[str, Any]) -> None:
    found = cuda.parse_cudnn(case["raw"], case["packages"])
    assert found.version == case["version"]
    assert case["says"] in found.sentence()


@pytest.mark.parametrize("case", cases("readiness"))
def test_readiness(case: dict[str, Any]) -> None:
    facts = patched(case["patch"])
    wish = {key: tuple(value) if isinstance(value, list) else value for key, value in case["wish"].items()}
    found = readiness.objections(facts, case["errors"], snapshot.parse(facts), readiness.Wish(**wish))
    assert sorted(row.kind for row in found) == case["kinds"], found
    assert case["says"] in "\n".join(row.says for row in found)


@pytest.mark.parametrize("case", cases("wanted"))
def test_wanted(case: dict[str, Any]) -> None:
    before, now = snapshot.parse(patched(case["before"])), snapshot.parse(patched(case["patch"]))
    found = wanted.compare(case["wanted"], before, now)
    bad = [row.says for row in found if not row.ok]
    assert len(bad) == len(case["bad"]), bad
    assert all(any(text in line for line in bad) for text in case["bad"]), bad
    assert any(row.ok for row in found)


@pytest.mark.parametrize("case", cases("snapshot"))
def test_proof(case: dict[str, Any]) -> None:
    lines = snapshot.compare(TWO_H100, patched(case["patch"]))
    unequal = [str(line) for line in lines if not line.equal]
    assert len(unequal) == len(case["unequal"]), unequal
    assert all(line.startswith(text) for line, text in zip(unequal, case["unequal"], strict=True)), unequal
    assert {"packages", "services", "modules on disk", "cards"} <= {line.what for line in lines}


@pytest.mark.parametrize("case", cases("manifest"))
def test_manifest_proof(case: dict[str, Any]) -> None:
    found = manifest.parse(case["raw"])
    assert found is not None
    ok, line = manifest.proof(found)
    assert ok == case["ok"]
    assert case["says"] in line


def test_a_manifest_with_troubles_names_them() -> None:
    found = manifest.Manifest(
        files=2, bytes=1, content="c", metadata="m", jsonl_sha256="j", busy=1, unreadable=1,
        names={"busy": ["/srv/log"], "unreadable": ["/srv/x (EIO)"]},
    )  # fmt: skip
    assert manifest.troubles(found) == ("1 unreadable: /srv/x (EIO)", "1 changed while being read: /srv/log")


# ------------------------------------------------------------------------------------------- identity


@pytest.mark.case("two-names-one-machine")
def test_two_names_one_machine() -> None:
    one = {"machine_id": "m1", "boot_id": "b1"}
    found = identity.same_machines({"gpu-a": one, "gpu-b": dict(one), "gpu-c": {"machine_id": "m2", "boot_id": "b2"}})
    assert found == {name: "gpu-a and gpu-b are the same machine (machine-id m1)" for name in ("gpu-a", "gpu-b")}


def test_cloned_machine_ids_are_told_from_one_machine() -> None:
    found = identity.same_machines({"a": {"machine_id": "m", "boot_id": "1"}, "b": {"machine_id": "m", "boot_id": "2"}})
    assert "give each its own" in found["a"] and "not the same machine" in found["b"]


def test_hosts_without_machine_id_are_not_one_machine() -> None:
    assert identity.same_machines({"a": {"machine_id": ""}, "b": {}}) == {}


def test_cards_lost_moved_and_swapped_are_told_apart() -> None:
    def card(slot: str, uuid: str, serial: str = "1") -> cards.Card:
        return cards.Card(bus_id=slot, uuid=uuid, serial=serial, name="H")

    before = [card("s1", "u1"), card("s2", "u2"), card("s3", "u3")]
    assert identity.compare_cards(before, before, ["s1", "s2", "s3"]) == ()
    lost = identity.compare_cards(before, before[:2], ["s1", "s2", "s3"])
    assert lost == ("2 of 3 GPUs", "missing u3 (s3), on the PCI bus but not initialised")
    assert "not on the PCI bus" in identity.compare_cards(before, before[:2], ["s1", "s2"])[1]
    moved = identity.compare_cards(before, [*before[:2], card("s4", "u3")], ["s4"])
    assert moved == ("3 of 3 GPUs", "u3 moved from s3 to s4", "card u3 at s4 was not there before")
    swapped = [*before[:2], card("s3", "u9", "2")]
    assert len(identity.compare_cards(before, swapped, [])) == 2
    assert identity.compare_cards(before, swapped, [], ("gpu_uuid", "serial")) == ()


# ------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("older", "newer"),
    [("580.65.06", "580.95.05"), ("12.9", "12.10"), ("550.54.15-0ubuntu1", "570.86.15"), ("9.8", "9.8.0.87")],
)
def test_versions_are_compared_number_by_number(older: str, newer: str) -> None:
    assert versions.compare(older, newer) == -1
    assert versions.compare(newer, older) == 1


def test_a_release_meets_its_shorter_wish_only() -> None:
    assert versions.matches("12.8", "12.8.1-1")
    assert not versions.matches("12.8.1", "12.8")
    assert not versions.matches("12.1", "12.10")
    assert not versions.matches("12.8", None)
    assert versions.parts("1:570.86.15-0ubuntu1") == (570, 86, 15)


def test_driver_floors_are_nvidias() -> None:
    assert floors.driver_floor("12.4.1") == "525.60.13"
    assert floors.driver_floor("10.1") == "418.39"
    assert floors.driver_floor("99.1") is None
    assert floors.too_old("525.60.13", "12.8") == ""
    assert "13.0 needs driver 580.65.06" in floors.too_old("570.172.08", "13.0")


version = st.lists(st.integers(0, 999), min_size=1, max_size=4).map(lambda numbers: ".".join(map(str, numbers)))


@settings(deadline=None)  # a busy machine is no finding
@given(version, version)
def test_comparing_is_antisymmetric_and_agrees_with_tuples(one: str, two: str) -> None:
    assert versions.compare(one, two) == -versions.compare(two, one)
    assert versions.compare(one, one) == 0


# ------------------------------------------------------------------------------------------- hostile input

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)  # a busy machine is no finding
@given(st.sampled_from(sorted(TWO_H100)), junk)
def test_strange_facts_are_read_as_nothing_not_as_a_crash(name: str, value: Any) -> None:
    facts = {**TWO_H100, name: value}
    picture = snapshot.parse(facts)
    snapshot.compare(TWO_H100, facts)
    snapshot.compare(facts, TWO_H100)
    readiness.objections(facts, {}, picture, readiness.Wish(paths=("/srv/models",)))
    wanted.compare({"driver": "570.86.15"}, picture, picture)


@settings(deadline=None)  # a busy machine is no finding
@given(st.dictionaries(st.sampled_from(["rc", "out", "err", "hung", "cut", "seconds"]), junk))
def test_strange_words_of_nvidia_smi_are_not_ok_or_hold_no_card(said: dict[str, Any]) -> None:
    found = cards.parse(said)
    assert not found.cards


@settings(deadline=None)  # a busy machine is no finding
@given(st.text(), st.integers(0, 400))
def test_damaged_xml_is_not_ok_or_complete(noise: str, at: int) -> None:
    good = TWO_H100["smi"]["out"]
    found = cards.parse({**TWO_H100["smi"], "out": good[:at] + noise + good[at:]})
    assert not found.ok or len(found.cards) == 2


@settings(deadline=None)  # a busy machine is no finding
@given(junk)
def test_strange_manifests_are_none_or_read(raw: Any) -> None:
    assert manifest.parse(raw) is None or isinstance(raw, dict)
