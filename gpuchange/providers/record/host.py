"""record/host: facts and hash manifest while the host serves, so that the seal only re-reads what moved since."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gpuchange.checks import manifest as manifests
from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.facts import FactsReport, base_args, manifest_args
from gpuchange.providers.types import AbsPath, Count, UnitName
from gpuchange.reports import Verdict, by_state


class RecordParams(Params):
    """What is recorded and compared beyond the GPU stack."""

    paths: tuple[AbsPath, ...] = Field((), description="Directories whose files are hashed and proved unchanged.")
    exclude: tuple[AbsPath, ...] = Field((), description="Paths below them that are left out.")
    services: tuple[UnitName, ...] = Field((), description="Units whose state a rollback must restore.")
    rehash: Literal["moved", "all"] = Field(
        "moved", description="moved: read again what changed in size, times or inode. all: read everything every time."
    )
    threads: Annotated[Count, Field(le=64)] = Field(0, description="Files hashed at once; 0: one per core.")


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    return {**base_args(view), "manifest": manifest_args(view, "record")}


def judge(_view: HostView, report: FactsReport) -> Verdict:
    if report.state != "done":
        return by_state(report)
    missing = tuple(f"{name} could not be recorded: {why}" for name, why in sorted(report.errors.items()))
    if missing:
        return Verdict.reject("; ".join(missing), missing)
    manifest = manifests.parse(report.manifest)
    if manifest is None:
        return Verdict.accept()
    troubles = manifests.troubles(manifest)
    findings = (manifests.sentence(manifest), *troubles)
    if manifest.unreadable:
        return Verdict.reject(troubles[0], findings)
    return Verdict.accept(findings=findings)  # files that are written while the host serves are the seal's to judge


PROVIDER = Provider(
    phase="record",
    name="host",
    does="Record versions, packages, modules, cards, services and the hash manifest.",
    params=RecordParams,
    report=FactsReport,
    root_for="to read every file below record.paths, and to run as a unit",
    args=args,
    judge=judge,
    estimate_s=5.0,
)
