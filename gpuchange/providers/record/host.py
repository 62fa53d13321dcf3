"""record/host: facts and hash manifest while the host serves, so that the seal only re-reads what moved since."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gpuchange.checks import card_settings, consistency
from gpuchange.checks import manifest as manifests
from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.facts import FactsReport, base_args, manifest_args
from gpuchange.providers.types import AbsPath, Count, Short, UnitName
from gpuchange.reports import Verdict, by_state


class SumsParams(Params):
    """A checksum file that others made, as md5sum and sha256sum write it. A path alone is its `file`."""

    file: AbsPath = Field(description="The checksum file.")
    below: AbsPath | None = Field(None, description="What its names are relative to; default: where it lies.")


class RecordParams(Params):
    """What is recorded and compared beyond the GPU stack."""

    paths: tuple[AbsPath, ...] = Field((), description="Directories whose files are hashed and proved unchanged.")
    exclude: tuple[AbsPath, ...] = Field((), description="Paths below them that are left out.")
    services: tuple[UnitName, ...] = Field((), description="Units whose state a rollback must restore.")
    rehash: Literal["moved", "all"] = Field(
        "moved", description="moved: read again what changed in size, times or inode. all: read everything every time."
    )
    sums: tuple[Annotated[SumsParams, Short("file")], ...] = Field(
        (), description="Checksum files (md5 to sha512) that the files below paths are held against as well."
    )
    inspect: Literal["tell", "require", "skip"] = Field(
        "tell",
        description="Checkpoints, locks and half-written files below paths. tell: what is wrong before the change is "
        "told, what the change made wrong fails. require: what is wrong before stops the change. skip: not looked at.",
    )
    threads: Annotated[Count, Field(le=64)] = Field(0, description="Files hashed at once; 0: one per core, 16 at most.")


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    return {**base_args(view), "manifest": manifest_args(view, "record")}


def judge(view: HostView, report: FactsReport) -> Verdict:
    if report.state != "done":
        return by_state(report)
    missing = tuple(f"{name} could not be recorded: {why}" for name, why in sorted(report.errors.items()))
    if missing:
        return Verdict.reject("; ".join(missing), missing)
    manifest, known = manifests.parse(report.manifest), _known(report)
    if manifest is None:
        return Verdict.accept(findings=known)
    troubles = manifests.troubles(manifest)
    data = consistency.parse(report.manifest)
    findings = (manifests.sentence(manifest), *troubles, *consistency.told(data), *known)
    if manifest.unreadable:
        return Verdict.reject(troubles[0], findings)
    stopping = consistency.stopping(data, str(view.params.get("inspect")))
    if stopping:
        return Verdict.reject(stopping, findings)
    return Verdict.accept(findings=findings)  # files that are written while the host serves are the seal's to judge


def _known(report: FactsReport) -> tuple[str, ...]:
    """What a rollback leads back to, where there is more than one of it or a choice behind it."""
    picture = report.picture
    unwell = () if picture.smi.ok or not picture.pci else (picture.smi.why,)
    return (*unwell, picture.cuda.sentence(), picture.cudnn.sentence(), *card_settings.sentences(picture.cards))


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
