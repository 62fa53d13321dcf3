"""Parsers on what real tools print, driver 470 to the newest. A new case is a new file in tests/cases/recorded.

A file is a JSON object {kind, source, expect}, a line `-----`, and the text as the tool prints it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostcode
import pytest
from ansible.module_utils import gpuchange_driver, gpuchange_facts_gpu, gpuchange_packages

from gpuchange.checks import cards, cuda, driver, smi_text

assert hostcode  # puts module_utils on the path
FOLDER = Path(__file__).parent / "cases" / "recorded"


def smi(text: str, **more: Any) -> dict[str, Any]:
    return {"rc": 0, "out": text, "err": "", "hung": False, "cut": False, "seconds": 0.4, **more}


def facts_of(found: cards.Smi, expect: dict[str, Any]) -> dict[str, Any]:
    """What of the answer is expected, card by card."""
    seen = {key: getattr(found, key) for key in expect if key not in ("cards", "dead", "why")}
    if "cards" in expect:
        pairs = zip(found.cards, expect["cards"], strict=True)
        seen["cards"] = [{key: _plain(getattr(card, key)) for key in wanted} for card, wanted in pairs]
    return {
        **seen,
        **({"dead": list(found.dead)} if "dead" in expect else {}),
        **({"why": expect["why"] if expect["why"] in found.why else found.why} if "why" in expect else {}),
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def cell(text: str) -> Any:
    sick = smi_text.sickness(text)
    return f"!{sick}" if sick else smi_text.number(text)


def rows(text: str, width: int) -> list[list[Any]]:
    found = smi_text.csv_rows(text, width)
    return [[row[0], *map(cell, row[1:])] for row in found if "temperature.gpu" not in row]


def tabled(text: str) -> dict[str, Any]:
    found = smi_text.table(text)
    return {"driver": found.driver, "cuda": found.cuda, "cards": [list(card) for card in found.cards]}


def loaded(text: str) -> dict[str, Any]:
    """Both ends read the same: the module that decides on the host, and the judge."""
    found = driver.parse({"loaded": {"proc_version": text}}, None, None)
    assert gpuchange_driver.parse_proc_version(text) == (found.loaded or "")
    assert gpuchange_driver.is_open(text) == bool(found.open_module)
    return {"loaded": found.loaded, "open": found.open_module}


def installed(text: str) -> dict[str, Any]:
    found = gpuchange_packages.parse_installed(text, "amd64")
    return {
        "names": sorted(found),
        "library": driver.library_version({name: row["version"] for name, row in found.items()}),
    }


def header(name: str) -> Callable[[str, Any], Any]:
    def read(text: str, _expect: Any) -> Any:
        path = FOLDER.parent / name  # never opened: the text stands for it
        defines = gpuchange_facts_gpu.defines(text, "CUDNN_")
        return cuda.parse_cudnn({"headers": {str(path): defines}}, {}).version

    return read


def toolkit(key: str) -> Callable[[str, Any], Any]:
    def read(text: str, _expect: Any) -> Any:
        return cuda.parse_cuda({"toolkits": {"/usr/local/cuda": {key: text}}}).toolkits["/usr/local/cuda"]

    return read


KINDS: dict[str, Callable[[str, Any], Any]] = {
    "xml": lambda text, expect: facts_of(cards.parse(smi(text)), expect),
    "failure": lambda text, expect: facts_of(cards.parse(smi(text, rc=255)), expect),
    "list": lambda text, _: [[c.name, c.uuid, [list(part) for part in c.mig]] for c in smi_text.listing(text)],
    "mig": lambda text, _: [list(row) for row in smi_text.gpu_instances(text)],
    "table": lambda text, _: tabled(text),
    "csv": lambda text, expect: {"width": expect["width"], "rows": rows(text, expect["width"])},
    "proc": lambda text, _: loaded(text),
    "modinfo": lambda text, _: {
        name: row["version"] for name, row in gpuchange_driver.parse_modinfo(text).items()
    },
    "dpkg": lambda text, _: installed(text),
    "version.json": toolkit("json"),
    "version.txt": toolkit("txt"),
    **{name: header(name) for name in ("cudnn.h", "cudnn_version.h", "cudnn_version_v8.h")},
}  # fmt: skip


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_a_recorded_output_is_read_as_it_is_meant(path: Path) -> None:
    head, _, text = path.read_text(encoding="utf-8").partition("\n-----\n")
    case = json.loads(head)
    assert len(case["source"]) > 10 and text
    assert KINDS[case["kind"]](text, case["expect"]) == case["expect"]


def test_every_kind_has_a_case() -> None:
    kinds = {json.loads(path.read_text().partition("\n-----\n")[0])["kind"] for path in FOLDER.glob("*.txt")}
    assert kinds == set(KINDS)


def recorded(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8").partition("\n-----\n")[2]


@pytest.mark.case("mig-lines-break-gpu-count")
def test_mig_devices_get_their_names_from_the_listing_and_their_places_from_mig_lgi() -> None:
    """The XML of a real driver names neither; seven instances are one card."""
    listing = "\n".join(
        ["GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-0000-4000-8000-000000000000)"]
        + [f"  MIG 1g.10gb     Device  {n}: (UUID: MIG-0000000{n}-0000-5000-8000-000000000000)" for n in range(7)]
    )
    places = "\n".join(f"|   0  MIG 1g.10gb      19        {n}          {n}:1     |" for n in range(7))
    found = cards.parse(smi(recorded("xml-550-mig-seven"), list=listing, instances=places))
    assert [card.geometry for card in found.cards] == ["7x1g.10gb", "none"]
    assert [device.place for device in found.cards[0].mig] == [f"{n}:1" for n in range(7)]
    assert found.cards[0].mig[6].uuid.startswith("MIG-00000006")


@pytest.mark.case("one-dead-card-hides-all-from-smi")
def test_the_others_are_asked_one_by_one_where_a_dead_card_silences_all() -> None:
    alone = recorded("xml-570-requires-reset").replace("GPU requires reset", "31 C").replace("97:00", "1B:00")
    dead = "Unable to determine the device handle for GPU 0000:0B:00.0: Unknown Error\n"
    each = {"0000:1b:00.0": smi(alone), "0000:0b:00.0": smi(dead, rc=255)}
    found = cards.parse(smi(dead, rc=255, each=each))
    assert not found.ok and found.dead == ("0000:0b:00.0",)
    assert [card.bus_id for card in found.cards] == ["0000:1b:00.0"]
    assert (found.driver, found.cuda) == ("570.148.08", "12.8"), "the driver is not at fault, and is known"
    assert found.why.startswith("GPU at 0000:0b:00.0 not responding; 1 other answers")


def test_a_complaint_is_told_in_its_words_not_in_the_markup_around_it() -> None:
    dead = '<?xml version="1.0" ?>\nUnable to determine the device handle for GPU0000:0B:00.0: Unknown Error\n'
    assert "ended with 255: Unable to determine" in cards.parse(smi(dead, rc=255)).why


def test_a_torn_xml_leaves_what_the_table_tells() -> None:
    found = cards.parse(smi(recorded("xml-470-throttle-reasons")[:300], table=recorded("table-610-new-head")))
    assert not found.ok and "cannot be read" in found.why
    assert (found.driver, found.cuda, found.dead) == ("610.57.04", "13.3", ("0000:97:00.0",))
    assert [card.name for card in found.cards] == ["NVIDIA GeForce GTX 1650", "NVIDIA H100 80GB HBM3"]
