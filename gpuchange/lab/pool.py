"""The btrfs pool all labs share: one sparse file, loop-mounted; subvolumes made, copied and removed."""

from __future__ import annotations

import os
from pathlib import Path

from gpuchange.errors import LabError
from gpuchange.lab import state
from gpuchange.lab.tools import sh

SIZE = "40G"


def pool_file() -> Path:
    return state.root() / "pool.btrfs"


def mounted() -> bool:
    return os.path.ismount(state.pool())


def mount() -> None:
    """Make the pool file if need be and mount it. Call under the `labs` lock."""
    if mounted():
        return
    state.pool().mkdir(parents=True, exist_ok=True)
    if not pool_file().exists():
        draft = pool_file().with_suffix(".new")
        sh(["truncate", "-s", SIZE, draft])
        sh(["mkfs.btrfs", "-q", draft])
        draft.rename(pool_file())
    sh(["mount", "-o", "loop,noatime,discard=async", pool_file(), state.pool()])
    for part in ("images", "labs"):
        (state.pool() / part).mkdir(exist_ok=True)


def unmount() -> None:
    if mounted():
        sh(["umount", "--detach-loop", state.pool()])
    if state.pool().exists():
        state.pool().rmdir()


def create(path: Path) -> None:
    sh(["btrfs", "subvolume", "create", path])


def snapshot(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    sh(["btrfs", "subvolume", "snapshot", source, target])


def delete(path: Path) -> None:
    """Delete a subvolume and those nested in it, deepest first (a guest may have made some)."""
    if not path.exists():
        return
    _release(path)
    for subvolume in [*reversed(nested(path)), path]:
        sh(["btrfs", "subvolume", "delete", subvolume])


def nested(path: Path) -> list[Path]:
    """Subvolumes below `path`, outer ones first."""
    top = str(path.relative_to(state.pool()))
    lines = sh(["btrfs", "subvolume", "list", state.pool()]).splitlines()
    names = (line.split(" path ", 1)[1] for line in lines if " path " in line)
    return [state.pool() / name for name in sorted(names) if name.startswith(top + "/")]


def delete_tree(directory: Path) -> None:
    """Delete a directory of the pool with all subvolumes in it."""
    if not directory.exists():
        return
    _release(directory)
    for inner in reversed(nested(directory)):
        sh(["btrfs", "subvolume", "delete", inner])
    sh(["rm", "-rf", "--one-file-system", directory])


def _release(directory: Path) -> None:
    """Unmount what an interrupted build left mounted below."""
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for point in reversed(points):
        if point.startswith(f"{directory}/"):
            sh(["umount", "--lazy", point])


def free_bytes() -> int:
    """Space the pool's file may still take on the machine's own disk, in bytes."""
    found = os.statvfs(state.root())
    return found.f_bavail * found.f_frsize


def require_space(wanted: int) -> None:
    if free_bytes() < wanted:
        raise LabError(
            f"too little space under {state.root()}: {free_bytes() >> 20} MiB free, {wanted >> 20} needed",
            remedy="free some space, or point GPUCHANGE_LAB_DIR at a larger disk",
        )
