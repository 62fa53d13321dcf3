"""backup/runfile: keep the .run installers to go forward and to come back on the host itself, each proven."""

from __future__ import annotations

from typing import Any

from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.facts import evidence
from gpuchange.providers.stacks import one_way
from gpuchange.reports import Report, Verdict, by_state

PREFLIGHT = "preflight/runfile"


class RunfileBackup(Params):
    """The installers of the new driver and of the one that is replaced, kept so that a rollback needs nothing else."""


class RunfileBackupReport(Report):
    """`kept` installers of `bytes` together lie in `store` on the host."""

    store: str = ""
    kept: int = 0
    bytes: int = 0
    not_obtainable: tuple[str, ...] = ()


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    found = evidence(view, PREFLIGHT)
    return {"transaction": found.get("transaction"), "not_obtainable": list(found.get("not_obtainable") or ())}


def judge(view: HostView, report: RunfileBackupReport) -> Verdict:
    if report.state != "done":
        return by_state(report)
    irreversible = one_way(view, report.not_obtainable)
    if irreversible:
        return Verdict.reject(irreversible)
    return Verdict.accept(f"installers kept: {report.kept}, {report.bytes / 1024**2:.1f} MiB")


def preview(view: HostView, _report: RunfileBackupReport) -> tuple[str, ...]:
    sizes = evidence(view, PREFLIGHT).get("sizes") or {}
    size = (int(sizes.get("download", 0)) + int(sizes.get("keep", 0))) / 1024**2
    return (f"new and old installer kept on the host: {size:.1f} MiB",)


PROVIDER = Provider(
    phase="backup",
    name="runfile",
    does="Copy new and old installer into a store on the host; prove each by sha256 and its own check.",
    params=RunfileBackup,
    report=RunfileBackupReport,
    root_for="the store of installers below /var/lib/gpuchange",
    args=args,
    judge=judge,
    preview=preview,
    foresees=True,
    estimate_s=20.0,
)
