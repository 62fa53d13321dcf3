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


def files(tree: Path) -> dict[str, str]:
    """relative path → sha256 (hex) of every file below `tree`, byte-code left out."""
    found = sorted(p for p in tree.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {p.relative_to(tree).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}


def code() -> str:
    """sha256 (hex) over gpuchange's own Python, the lab left out: a version number alone does not tell an edit."""
    package = Path(__file__).resolve().parent
    total = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        if inside.parts[0] not in ("lab", "playbooks"):
            total.update(f"{inside.as_posix()}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()
