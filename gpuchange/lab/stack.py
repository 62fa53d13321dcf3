"""What the lab takes from the GPU simulation: its package repository, guest files, cards and in-guest faults."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuchange.lab import state
from gpuchange.lab.tools import sh

try:  # PLACEHOLDER until gpuchange.lab.gpu lands
    from gpuchange.lab import gpu
    from gpuchange.lab.gpu import cards, faults, packages

    HAVE_GPU = True
except ImportError:
    HAVE_GPU = False

CARDS_FILE = Path("etc/gpuchange-lab/cards.json")


def source_digest(*roots: Path) -> str:
    """One hash over the contents and names of all files below `roots`."""
    digest = hashlib.sha256()
    for base in roots:
        for path in sorted(base.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(base)}\0{path.stat().st_mode & 0o111}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def gpu_source() -> Path:
    return Path(__file__).parent / "gpu"


def repository() -> Path:
    """The stand-in apt repository, built once for each state of its sources. Call under the `images` lock."""
    target = state.root() / "cache" / f"repo-{source_digest(gpu_source())}"
    if target.exists():
        return target
    draft = target.with_suffix(".new")
    sh(["rm", "-rf", draft])
    draft.mkdir(parents=True)
    if HAVE_GPU:
        packages.build_repo(draft)
    else:
        (draft / "Packages").write_text("")
        sh(["sh", "-c", f"cd {draft} && apt-ftparchive release . > Release"])
    draft.rename(target)
    return target


def start_packages() -> tuple[str, ...]:
    return packages.START if HAVE_GPU else ()


def guest_units() -> tuple[str, ...]:
    return gpu.guest_units if HAVE_GPU else ()


def gpu_faults() -> Mapping[str, Any]:
    return faults.FAULTS if HAVE_GPU else {}


def write_cards(tree: Path, host: str, count: int) -> None:
    content = (
        cards.default_cards(host, count) if HAVE_GPU else {"cards": [{"minor": n} for n in range(count)]}
    )
    path = tree / CARDS_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def device_nodes(tree: Path) -> list[str]:
    """Device nodes the host has at its next power-on: one for each card not lost, and the driver's own two."""
    path = tree / CARDS_FILE
    if not path.exists():
        return []
    present = [card["minor"] for card in json.loads(path.read_text())["cards"] if not card.get("lost")]
    return [*(f"/dev/nvidia{minor}" for minor in present), "/dev/nvidiactl", "/dev/nvidia-uvm"]
