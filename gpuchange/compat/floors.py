"""Which driver a CUDA toolkit needs: NVIDIA's published tables (tables.json, with sources) and the rules on them."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from gpuchange.compat.versions import compare, parts


@cache
def tables() -> dict[str, Any]:
    """All tables: {name: {source, rows}}."""
    return dict(json.loads(files("gpuchange.compat").joinpath("tables.json").read_text("utf-8")))


def driver_floor(cuda: str) -> str | None:
    """The oldest Linux driver on which programs of this CUDA version start at all; None when no table knows it."""
    key = parts(cuda)
    for row in tables()["cuda_driver_floor"]["rows"]:
        wanted = tuple(int(part) for part in row["cuda"].split(".") if part.isdigit())
        if key and key[: len(wanted)] == wanted:
            return str(row["min_driver"])
    return None


def full_driver(cuda: str) -> str | None:
    """The oldest driver that came with a release of this toolkit: from there on every feature of it works."""
    key = parts(cuda)
    rows = [row for row in tables()["toolkit_driver"]["rows"] if key and parts(row["cuda"])[: len(key)] == key]
    return str(min(rows, key=lambda row: parts(row["driver"]))["driver"]) if rows else None


def too_old(driver: str | None, cuda: str | None) -> str:
    """Why `driver` cannot carry `cuda`, or ''. Unknown on either side is no objection."""
    floor = driver_floor(cuda) if cuda else None
    if driver and floor and parts(driver) and compare(driver, floor) < 0:
        return f"toolkit {cuda} needs driver {floor} or newer, not {driver}"
    return ""


def cudnn_mismatch(cudnn_package_cuda: str | None, cuda: str | None) -> str:
    """Why a cuDNN that was built for one CUDA major does not fit a toolkit of another, or ''."""
    if not cudnn_package_cuda or not cuda or parts(cudnn_package_cuda)[:1] == parts(cuda)[:1]:
        return ""
    return f"cuDNN is built for CUDA {parts(cudnn_package_cuda)[0]}, the toolkit is {cuda}"
