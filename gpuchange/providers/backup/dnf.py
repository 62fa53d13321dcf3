"""backup/dnf: keep the exact RPMs to go forward and to come back on the host itself, proven without a repository."""

from __future__ import annotations

from gpuchange.providers.backup.packages import PackagesBackupReport, judge_kept, kept_args, kept_preview
from gpuchange.providers.contract import Params, Provider


class DnfBackup(Params):
    """The RPMs that the stack replaces, kept so that a rollback needs no network."""


PROVIDER = Provider(
    phase="backup",
    name="dnf",
    does="Fetch new and old RPMs into a store on the host; prove them by an offline simulation.",
    params=DnfBackup,
    report=PackagesBackupReport,
    root_for="the store of old packages below /var/lib/gpuchange",
    args=kept_args("preflight/dnf"),
    judge=judge_kept,
    preview=kept_preview("preflight/dnf"),
    foresees=True,
    binaries=("dnf", "rpm"),
    estimate_s=60.0,
)
