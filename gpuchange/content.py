"""Where the Ansible content is: inside the installed package, or beside it in a checkout."""

from __future__ import annotations

import hashlib
from pathlib import Path

from gpuchange.errors import GpuchangeError

PLAYBOOK = "phase.yml"


def playbooks() -> Path:
    """The directory that holds phase.yml, roles/, library/ and module_utils/."""
    package = Path(__file__).resolve().parent
    for place in (package / "playbooks", package.parent / "playbooks"):
        if (place / PLAYBOOK).is_file():
            return place
    raise GpuchangeError(
        "the Ansible content of gpuchange is missing",
        where=str(package),
        remedy="reinstall gpuchange: pip install --force-reinstall gpuchange",
    )


def digest(tree: Path) -> str:
    """sha256 (hex) over the relative paths and contents of all files below `tree`, byte-code left out."""
    total = hashlib.sha256()
    for path in sorted(p for p in tree.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        total.update(str(path.relative_to(tree)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()
