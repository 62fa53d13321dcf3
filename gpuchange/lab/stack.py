"""What hosts get of the GPU simulation: the package repository, their cards and their device nodes."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from gpuchange.lab import gpu, state
from gpuchange.lab.gpu import CARDS_FILE, cards, packages


def source_digest(*roots: Path) -> str:
    """One hash over the contents and names of all files below `roots`."""
    digest = hashlib.sha256()
    for base in roots:
        for path in sorted(base.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(base)}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


GPU_SOURCE = Path(gpu.__file__).parent


def repository() -> Path:
    """The stand-in apt repository, built once for each state of its sources. Call under the `images` lock."""
    kernel = os.uname().release  # its packages are for the running kernel
    target = state.root() / "cache" / f"repo-{source_digest(GPU_SOURCE)}-{kernel}"
    if not target.exists():
        packages.build_repo(target)
    return target


def write_cards(tree: Path, host: str, count: int) -> None:
    path = tree / CARDS_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(cards.default_cards(host, count), indent=1) + "\n")


def device_nodes(tree: Path) -> list[str]:
    """Device nodes the host has at its next power-on: one for each card not lost, and the driver's two."""
    path = tree / CARDS_FILE
    if not path.exists():
        return []
    present = [card["minor"] for card in json.loads(path.read_text())["cards"] if not card.get("lost")]
    return [*(f"/dev/nvidia{minor}" for minor in present), "/dev/nvidiactl", "/dev/nvidia-uvm"]
