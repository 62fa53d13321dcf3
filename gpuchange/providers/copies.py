"""What the backups that copy directories have in common: parameters, report, judgement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

from gpuchange.checks.snapshot import mapping
from gpuchange.providers.contract import HostView, Mode, Params
from gpuchange.providers.types import AbsPath, Percent
from gpuchange.reports import Report, Verdict, by_state

MIB = 1024.0**2


class CopyParams(Params):
    """Copies made while the host serves."""

    paths: Annotated[tuple[AbsPath, ...], Field(min_length=1)] = Field(description="Directories to copy.")
    to: AbsPath = Field(description="Directory on the host that holds the sets; best a filesystem of its own.")
    exclude: tuple[AbsPath, ...] = Field((), description="Paths below them that are left out.")
    allow_shrink: Percent = Field(
        50.0, description="How many files or bytes fewer than in the last set are believed to be meant."
    )


class CopyReport(Report):
    """`set` describes the proved set: path, files, bytes, content (root digest), checked, expected, in_flux, ..."""

    set: dict[str, Any] = Field(default_factory=dict)


def args_for(params: type[CopyParams]) -> Callable[[HostView, Mode], dict[str, Any]]:
    """Every parameter goes to the host as it is."""
    return lambda view, _mode: {key: view.params.get(key) for key in params.model_fields}


def judge(_view: HostView, report: CopyReport) -> Verdict:
    if report.state != "done":
        return by_state(report)
    made = mapping(report.set)
    if not made.get("checked"):
        return Verdict.reject("the backup holds nothing: no file was read back and compared")
    return Verdict.accept(findings=(_sentence(made), *_flux(made), *_archive(made)))


def _sentence(made: dict[str, Any]) -> str:
    size = float(made.get("bytes") or 0) / MIB
    return f"backup {made.get('path')}: {made['checked']} of {made.get('expected')} read back and equal, {size:.0f} MiB"


def _flux(made: dict[str, Any]) -> tuple[str, ...]:
    if not made.get("in_flux"):
        return ()
    names = made.get("in_flux_names")
    shown = ", ".join(str(name) for name in names[:3]) if isinstance(names, list) else ""
    return (f"{made['in_flux']} changed while they were copied: {shown}",)


def _archive(made: dict[str, Any]) -> tuple[str, ...]:
    """What only a set with an archive says of itself."""
    if not made.get("archive"):
        return ()
    size = float(mapping(made.get("archive_is")).get("size") or 0) / MIB
    said = [f"{made['archive']}: {size:.0f} MiB, sha256 {made.get('archive_sha256')}"]
    said += [f"restored for a test and equal: {made.get('restored')} files"]
    said += [f"made anew, the one before was damaged: {made['replaces']}"] if made.get("replaces") else []
    said += [f"{made['sockets']} sockets left out"] if made.get("sockets") else []
    return tuple(said)
