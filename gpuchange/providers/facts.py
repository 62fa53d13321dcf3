"""What the looking providers share: the report of gpuchange_facts, its arguments, what the plan says about a host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from gpuchange.checks import card_settings
from gpuchange.checks.snapshot import Snapshot, mapping, parse
from gpuchange.providers.contract import HostView
from gpuchange.providers.types import OPEN
from gpuchange.reports import Report

SEAL, RECORD = "seal/host", "record/host"


class FactsReport(Report):
    """`facts` and `errors` by collector, the `manifest` summary, the result of the GPU test `function`."""

    machine_id: str = ""
    facts: dict[str, Any] = Field(default_factory=dict)
    errors: dict[str, str] = Field(default_factory=dict)
    manifest: dict[str, Any] | None = None
    function: dict[str, Any] | None = None
    backup: dict[str, Any] | None = None
    restored: tuple[Any, ...] = ()
    progress: dict[str, Any] = Field(default_factory=dict)

    @property
    def picture(self) -> Snapshot:
        return parse(self.facts)


def section(view: HostView, key: str) -> dict[str, Any]:
    """A part of the plan as a mapping; empty when the plan does not have it."""
    return mapping(view.plan.get(key))


def base_args(view: HostView) -> dict[str, Any]:
    """Arguments of the facts themselves: the paths and services that the plan names."""
    return {"paths": list(section(view, "record").get("paths") or ()), "services": services(view)}


def services(view: HostView) -> list[str]:
    """The units that the plan names: those whose state is recorded, and the known users of the cards."""
    named = [*(section(view, "record").get("services") or ()), *(section(view, "gpu_users").get("services") or ())]
    return list(dict.fromkeys(named))


def manifest_args(view: HostView, name: str, compare: str = "", digest: str = "") -> dict[str, Any] | None:
    """Arguments of the hash manifest `name`; None when the plan names no path.

    Earlier manifests of this change spare reading files that have not moved, unless the plan asks for `rehash: all`.
    """
    record = section(view, "record")
    if not record.get("paths"):
        return None
    earlier = list(dict.fromkeys([name, "seal", "record"])) if record.get("rehash", "moved") == "moved" else []
    looks = name != "prove" and record.get("inspect", "tell") != "skip"  # a proof compares every byte with the seal
    return {
        "name": name,
        "paths": list(record["paths"]),
        "exclude": list(record.get("exclude") or ()),
        "previous": earlier,
        "compare": compare,
        "compare_sha256": digest,
        "threads": record.get("threads") or 0,
        "sums": list(record.get("sums") or ()) if name != "prove" else [],
        "inspect": looks,
    }


def card_goal(view: HostView) -> list[dict[str, Any]]:
    """The cards' settings as sealed, where the plan wants them set again; [] where it does not."""
    if section(view, "verify").get("card_settings") != "restore":
        return []
    return card_settings.goal(parse(sealed(view).get("facts") or {}).cards)


def evidence(view: HostView, key: str) -> Mapping[str, Any]:
    """The latest accepted report body of another step, or {}."""
    return view.last.get(key) or {}


def sealed(view: HostView) -> Mapping[str, Any]:
    """What the host must equal or is compared with: the seal, or the record of a change that has not sealed."""
    return evidence(view, SEAL) or evidence(view, RECORD)


def asked(view: HostView) -> dict[str, str]:
    """The versions that the plan asks for, as it writes them: driver, cuda, cudnn, ... or auto."""
    stack = section(view, "stack")
    return {key: str(value) for key, value in stack.items() if key in COMPONENTS and value}


def wanted(view: HostView) -> dict[str, str]:
    """The versions that this host shall have. What the plan leaves open is what preflight chose; absent before that."""
    chosen = mapping(evidence(view, f"preflight/{section(view, 'stack').get('provider')}").get("chosen"))
    found = {key: str(chosen.get(key, "")) if value == OPEN else value for key, value in asked(view).items()}
    return {key: version for key, version in found.items() if version}


COMPONENTS = ("driver", "cuda", "cudnn", "nccl", "fabric_manager", "container_toolkit")
