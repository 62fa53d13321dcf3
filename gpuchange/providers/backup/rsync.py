"""backup/rsync: copy directories into a new set on a filesystem of the host, read it back and prove it equal."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from gpuchange.checks.snapshot import mapping
from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.types import AbsPath, Percent
from gpuchange.reports import Report, Verdict, by_state

MIB = 1024.0**2


class RsyncParams(Params):
    """Copies made while the host serves."""

    paths: Annotated[tuple[AbsPath, ...], Field(min_length=1)] = Field(description="Directories to copy.")
    to: AbsPath = Field(description="Directory on the host that holds the sets; best a filesystem of its own.")
    exclude: tuple[AbsPath, ...] = Field((), description="Paths below them that are left out.")
    allow_shrink: Percent = Field(
        50.0, description="How many files or bytes fewer than in the last set are believed to be meant."
    )


class RsyncReport(Report):
    """`set` describes the proved set: path, files, bytes, content (root digest), checked, expected, in_flux, ..."""

    set: dict[str, Any] = Field(default_factory=dict)


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    return {key: view.params.get(key) for key in ("paths", "to", "exclude", "allow_shrink")}


def judge(_view: HostView, report: RsyncReport) -> Verdict:
    if report.state != "done":
        return by_state(report)
    made = mapping(report.set)
    if not made.get("checked"):
        return Verdict.reject("the backup holds nothing: no file was read back and compared")
    return Verdict.accept(findings=(_sentence(made), *_flux(made)))


def _sentence(made: dict[str, Any]) -> str:
    size = float(made.get("bytes") or 0) / MIB
    return f"backup {made.get('path')}: {made['checked']} of {made.get('expected')} read back and equal, {size:.0f} MiB"


def _flux(made: dict[str, Any]) -> tuple[str, ...]:
    if not made.get("in_flux"):
        return ()
    names = made.get("in_flux_names")
    shown = ", ".join(str(name) for name in names[:3]) if isinstance(names, list) else ""
    return (f"{made['in_flux']} changed while they were copied: {shown}",)


PROVIDER = Provider(
    phase="backup",
    name="rsync",
    does="Copy directories with rsync into a new set, read it back and compare it with the source.",
    params=RsyncParams,
    report=RsyncReport,
    root_for="to read and write all files with their owners",
    args=args,
    judge=judge,
    binaries=("rsync",),
    estimate_s=30.0,
)
