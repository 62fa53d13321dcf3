"""Which driver a CUDA toolkit needs, in one sentence: the short answers that checks ask for."""

from __future__ import annotations

from gpuchange.compat.tables import floor_row, full_row
from gpuchange.compat.versions import compare, parts


def driver_floor(cuda: str) -> str | None:
    """The oldest Linux driver on which programs of this CUDA version start at all; None when no table knows it."""
    found = floor_row(cuda)
    return found[0] if found else None


def full_driver(cuda: str) -> str | None:
    """The oldest driver that came with a release of this toolkit: from there on every feature of it works."""
    row = full_row(cuda) or {}
    return str(row["driver"]) if "driver" in row else None


def too_old(driver: str | None, cuda: str | None) -> str:
    """Why `driver` cannot carry `cuda`, or ''. Unknown on either side is no objection."""
    floor = driver_floor(cuda) if cuda else None
    if driver and floor and parts(driver) and compare(driver, floor) < 0:
        return f"toolkit {cuda} needs driver {floor} or newer, not {driver}"
    return ""


def compat_package(cuda: str) -> str:
    """The package by which an older driver carries this toolkit: cuda-compat-12-8."""
    return f"cuda-compat-{'-'.join(str(part) for part in parts(cuda)[:2])}"


def cudnn_mismatch(cudnn_package_cuda: str | None, cuda: str | None) -> str:
    """Why a cuDNN that was built for one CUDA major does not fit a toolkit of another, or ''."""
    if not cudnn_package_cuda or not cuda or parts(cudnn_package_cuda)[:1] == parts(cuda)[:1]:
        return ""
    return f"cuDNN is built for CUDA {parts(cudnn_package_cuda)[0]}, the toolkit is {cuda}"
