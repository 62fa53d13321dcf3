"""`rollback` from every phase boundary gives a host equal to what was sealed; what cannot be proved is held."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from boundaries import STEPS, Boundary, put_back, take
from changes import owner_marker
from crashing import left_behind
from field import SIDE_BY_SIDE, Field
from reliability.figures import Effort, Figures, Row

from gpuchange.lab import Host
from gpuchange.states import Event, Kind

ROW = Row(
    "From every phase boundary a rollback gives a host equal to what was sealed, shown line by line; "
    "what cannot be proved is held, out of service, exit 6",
    peer="Kubernetes driver operators: no way back to the old driver",
    source="NVIDIA/gpu-operator docs: upgrade forward only",
)

PROVED = ("packages", "holds", "origins", "services", "manifest", "modules loaded", "GPU function", "cards")


@dataclass
class Returned:
    """What came of the boundaries of one host."""

    tried: int = 0
    proofs: int = 0
    seconds: float = 0.0
    broken: list[str] = field(default_factory=list)


def return_from(lab_field: Field, steps: Sequence[str]) -> Returned:
    """Take the boundaries of one host, then roll back from each."""
    with lab_field.host() as host:
        host.run(["apt-mark", "hold", "libcudnn9-cuda-12", "curl"])
        host.run(["apt-mark", "auto", "nvidia-utils-550"])
        told, before = Returned(), lab_field.looks(host)
        for boundary in take(lab_field, host, steps):
            _return(lab_field, boundary, before, told)
    return told


def _return(lab_field: Field, boundary: Boundary, before: dict[str, list[str]], told: Returned) -> None:
    controller, host = put_back(lab_field, boundary), boundary.host
    began = time.monotonic()
    said = controller.run("rollback", boundary.change, "--yes")
    told.seconds += time.monotonic() - began
    told.tried += 1
    wrong = [] if said.code == 0 else [f"exit {said.code}"]
    after = lab_field.looks(host)
    wrong += [f"{name}: {before[name]} became {after[name]}" for name in before if before[name] != after[name]]
    events = controller.events()
    touched = any(event.kind is Kind.STARTED and event.phase == "drain" for event in events)
    wrong += left_behind(controller, host)
    if touched:
        wrong += _unproved(events, sealed=any(e.kind is Kind.ACCEPTED and e.phase == "seal" for e in events))
        told.proofs += 1
    told.broken += [f"{host.name}, before {boundary.step}: {what}\n{said.text[-3000:]}" for what in wrong]


def _unproved(events: list[Event], sealed: bool) -> list[str]:
    """Subjects of the proof of which nothing is said; without a seal there is nothing to prove against yet."""
    proofs = [e for e in events if (e.kind, e.phase, e.direction) == (Kind.ACCEPTED, "seal", "undo")]
    if not sealed:
        return []
    lines = [str(line) for proof in proofs for line in proof.data.get("findings", ())]
    return [f"the proof says nothing of {subject}" for subject in PROVED if not any(subject in line for line in lines)]


def dealt(steps: Sequence[str], hosts: int) -> list[list[str]]:
    """The steps spread over hosts."""
    return [deal for number in range(hosts) if (deal := list(steps[number::hosts]))]


@pytest.mark.timeout(3600)
def test_rollback_from_a_boundary_is_proved(field: Field, effort: Effort, figures: Figures) -> None:
    few = sorted(random.Random(effort.seed).sample(STEPS, len(STEPS) // 3), key=STEPS.index)
    deals = dealt(STEPS if effort.full else few, SIDE_BY_SIDE)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        for told in pool.map(lambda steps: return_from(field, steps), deals):
            figures.tried += told.tried
            figures.broken += told.broken
            figures.count(boundaries=told.tried, proofs_line_by_line=told.proofs, seconds_of_rollback=told.seconds)


# -- what cannot be proved --------------------------------------------------------------------------------------------


def alter_a_file(host: Host) -> None:
    host.run(["sh", "-c", "echo not what was recorded >> $(find /srv/models -type f | sort | head -1)"])


def lose_a_card(host: Host) -> None:
    host.break_("card-lost-at-reboot")


def hold_a_package(host: Host) -> None:
    host.run(["apt-mark", "hold", "openssh-server"])


SPOILED = {"a file was altered": alter_a_file, "a hold appeared": hold_a_package, "a card is lost": lose_a_card}
"""The last one takes long: cards that do not show yet are waited for."""


@pytest.mark.timeout(3600)
def test_what_cannot_be_proved_is_held_out_of_service(field: Field, effort: Effort, figures: Figures) -> None:
    ways = list(SPOILED) if effort.full else [list(SPOILED)[effort.seed % 2]]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        for way, wrong in pool.map(lambda way: (way, spoiled(field, way)), ways):
            figures.tried += 1
            figures.broken += [f"{way}: {what}" for what in wrong]
            figures.count(spoiled_rollbacks_held=not wrong)


def spoiled(lab_field: Field, way: str) -> list[str]:
    """Roll back from after the stack with something else amiss; what is wrong with how that ended."""
    with lab_field.host() as host:
        (boundary,) = take(lab_field, host, ["verify/host"])
        controller = put_back(lab_field, boundary)
        SPOILED[way](host)
        said = controller.run("rollback", boundary.change, "--yes")
        checks = {
            f"exit {said.code}, not 6": said.code == 6,
            "it serves": lab_field.lab.serving()[host.name] not in ("UP",),
            "its marker is gone": owner_marker(host),
            "nobody is asked": f"gpuchange resolve {boundary.change} {host.name}" in said.text,
            "a proof was accepted": not any(
                (e.kind, e.phase, e.direction) == (Kind.ACCEPTED, "seal", "undo") for e in controller.events()
            ),
        }
        return [f"{what}\n{said.text[-3000:]}" for what, true in checks.items() if not true]
