"""NVIDIA's .run files for a lab: real self-extracting archives around the files that the lab's packages install."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from gpuchange.errors import LabError
from gpuchange.lab import stack, state
from gpuchange.lab.tools import sh

FILES = Path(__file__).parent / "files" / "runfile"
PARTS = ("nvidia-utils", "libnvidia-compute", "nvidia-dkms", "nvidia-kernel-common")


def name_of(version: str) -> str:
    """As NVIDIA calls it: NVIDIA-Linux-x86_64-570.172.08.run."""
    return f"NVIDIA-Linux-{os.uname().machine}-{version}.run"


def runfile(version: str) -> Path:
    """The installer of a driver version of the lab's repository, built once for each state of its sources.

    Raises LabError when the repository does not have that version.
    """
    repository = stack.repository()
    target = state.root() / "cache" / f"run-{stack.source_digest(FILES)}-{repository.name}" / name_of(version)
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built = build(version, repository, Path(scratch))
            built.rename(target)
    return target


def build(version: str, repository: Path, scratch: Path) -> Path:
    """Unpack the version's packages, put the installer beside their files, and the script that unpacks in front."""
    folder = scratch / "driver"
    packages = [found for part in PARTS for found in (repository / "pool").glob(f"{part}-*_{version}-*.deb")]
    if len(packages) != len(PARTS):
        raise LabError(f"the lab's repository has no driver {version}")
    folder.mkdir()
    for package in packages:
        sh(["dpkg-deb", "-x", package, folder / "files"])
    shutil.rmtree(folder / "files/usr/share/doc", ignore_errors=True)
    installer = folder / "nvidia-installer"
    installer.write_text((FILES / "nvidia-installer").read_text().replace("@VERSION@", version))
    installer.chmod(0o755)
    uninstaller = folder / "files/usr/bin/nvidia-uninstall"
    uninstaller.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(installer, folder / "files/usr/bin/nvidia-installer")
    uninstaller.write_text('#!/bin/sh\nexec nvidia-installer --uninstall "$@"\n')
    uninstaller.chmod(0o755)
    return archive(folder, version, scratch)


def archive(folder: Path, version: str, scratch: Path) -> Path:
    """Head and tar.gz in one file; its checksums cover everything behind its third line."""
    payload = scratch / "payload.tar.gz"
    with tarfile.open(payload, "w:gz") as packed:
        for path in sorted(folder.iterdir()):
            packed.add(path, arcname=path.name, filter=_as_root)
    kib = sum(path.lstat().st_size for path in folder.rglob("*")) // 1024 + 1
    text = (FILES / "head.sh").read_text()
    values = {"VERSION": version, "ARCH": os.uname().machine, "KIB": str(kib), "SKIP": str(text.count("\n") + 1)}
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    first, rest = text.split("\n", 3)[:3], text.split("\n", 3)[3].encode() + payload.read_bytes()
    summed = scratch / "summed"
    summed.write_bytes(rest)
    head = "\n".join(first) + "\n"
    head = head.replace("@CRC@", sh(["cksum", summed]).split()[0])
    head = head.replace("@MD5@", hashlib.md5(rest, usedforsecurity=False).hexdigest())
    made = scratch / name_of(version)
    made.write_bytes(head.encode() + rest)
    made.chmod(0o755)
    return made


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry
