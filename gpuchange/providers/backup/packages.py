"""backup/packages: keep the exact packages to go forward and to come back on the host itself, proven offline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.facts import evidence
from gpuchange.providers.stacks import one_way
from gpuchange.reports import Report, Verdict, by_state


class PackagesBackup(Params):
    """The packages that the stack replaces, kept so that a rollback needs no network."""


class PackagesBackupReport(Report):
    """`kept` files of `bytes` together lie in `store` on the host; `not_obtainable` could not be had anywhere."""

    store: str = ""
    kept: int = 0
    bytes: int = 0
    not_obtainable: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def kept_args(preflight: str) -> Callable[[HostView, Mode], dict[str, Any]]:
    return lambda view, _mode: {"transaction": evidence(view, preflight).get("transaction")}


def judge_kept(view: HostView, report: PackagesBackupReport) -> Verdict:
    if report.state != "done":
        return by_state(report)
    irreversible = one_way(view, report.not_obtainable)
    if irreversible:
        return Verdict.reject(irreversible)
    return Verdict.accept(f"rollback store complete: {report.kept} packages, {report.bytes / 1024**2:.1f} MiB")


def kept_preview(preflight: str) -> Callable[[HostView, PackagesBackupReport], tuple[str, ...]]:
    def preview(view: HostView, _report: PackagesBackupReport) -> tuple[str, ...]:
        sizes = evidence(view, preflight).get("sizes") or {}
        size = (int(sizes.get("download", 0)) + int(sizes.get("keep", 0))) / 1024**2
        return (f"new and old packages kept on the host: {size:.1f} MiB",)

    return preview


PROVIDER = Provider(
    phase="backup",
    name="packages",
    does="Fetch new and old packages into a store on the host; prove both ways by offline simulation.",
    params=PackagesBackup,
    report=PackagesBackupReport,
    root_for="the store of old packages below /var/lib/gpuchange",
    args=kept_args("preflight/apt"),
    judge=judge_kept,
    preview=kept_preview("preflight/apt"),
    foresees=True,
    binaries=("apt-get", "dpkg-deb"),
    estimate_s=60.0,
)
