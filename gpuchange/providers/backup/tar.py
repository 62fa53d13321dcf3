"""backup/tar: one archive of directories in a new set on a filesystem of the host, read back and proved equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from gpuchange.providers.contract import Provider
from gpuchange.providers.copies import CopyParams, CopyReport, args_for, judge
from gpuchange.providers.types import AbsPath


class TarParams(CopyParams):
    """One archive made while the host serves."""

    compression: Literal["none", "gzip", "zstd"] = Field("none", description="Weights hardly get smaller.")
    may_change: tuple[AbsPath, ...] = Field(
        (), description="Paths at or below which files may change meanwhile: told. What changes elsewhere is refused."
    )


def packer(params: Mapping[str, Any]) -> tuple[str, ...]:
    """The program that compresses, if one is asked for."""
    name = str(params.get("compression", "none"))
    return () if name == "none" else (name,)


PROVIDER = Provider(
    phase="backup",
    name="tar",
    does="Archive directories with GNU tar into a new set, read it back and compare it with the source.",
    params=TarParams,
    report=CopyReport,
    root_for="to read and write all files with their owners",
    args=args_for(TarParams),
    judge=judge,
    binaries=("tar",),
    also=packer,
    estimate_s=60.0,
)
