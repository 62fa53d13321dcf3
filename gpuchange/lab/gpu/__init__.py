"""The lab's simulated NVIDIA stack: packages, cards, what a guest's kernel would show, and faults.

A lab host gets three things from here: the tree of `install_guest`, the packages of `packages.START` out of
the repository that `packages.build_repo` makes, and `CARDS_FILE` from `cards.default_cards`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

guest_units: tuple[str, ...] = ("gpuchange-lab-gpu.service",)
"""systemd units to enable in a guest."""

guest_packages: tuple[str, ...] = ("kmod", "pciutils", "python3-minimal")
"""Debian packages that the guest's image must have, because its stand-ins use them."""

CARDS_FILE = "etc/gpuchange-lab/cards.json"
"""Where a guest keeps its cards, relative to its root."""

GUEST_TREE = Path(__file__).parent / "guest"


def install_guest(root: Path) -> None:
    """Copies the guest's files into an image; scripts become executable, whatever their mode was."""
    for source in sorted(GUEST_TREE.rglob("*")):
        target = root / source.relative_to(GUEST_TREE)
        if source.is_dir():
            target.mkdir(exist_ok=True)
            continue
        target.unlink(missing_ok=True)
        shutil.copyfile(source, target)
        target.chmod(0o755 if source.read_bytes().startswith(b"#!") else 0o644)
