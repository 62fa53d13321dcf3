"""backup/rsync: copy directories into a new set on a filesystem of the host, read it back and prove it equal."""

from __future__ import annotations

from gpuchange.providers.contract import Provider
from gpuchange.providers.copies import CopyParams, CopyReport, args_for, judge

PROVIDER = Provider(
    phase="backup",
    name="rsync",
    does="Copy directories with rsync into a new set, read it back and compare it with the source.",
    params=CopyParams,
    report=CopyReport,
    root_for="to read and write all files with their owners",
    args=args_for(CopyParams),
    judge=judge,
    binaries=("rsync",),
    estimate_s=30.0,
)
