"""The hash manifest's summary and the comparison of two manifests, judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class Comparison(BaseModel):
    """Counts of entries (files, directories, links, ...). `checked` were there on both sides and readable."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    expected: int
    checked: int
    equal: int
    mismatch: int
    missing: int
    extra: int
    metadata: int
    unreadable: int
    names: dict[str, list[str]] = {}


class Manifest(BaseModel):
    """`content` is the root digest over names and hashes, `metadata` over modes, owners, times and attributes."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    files: int
    dirs: int = 0
    links: int = 0
    others: int = 0
    bytes: int
    read_files: int = 0
    read_bytes: int = 0
    busy: int = 0
    unreadable: int = 0
    content: str
    metadata: str
    jsonl_sha256: str
    seconds: float = 0.0
    names: dict[str, list[str]] = {}
    compare: Comparison | None = None


KINDS = {
    "mismatch": "mismatch",
    "missing": "missing",
    "unreadable": "unreadable",
    "extra": "extra",
    "metadata": "with other mode, owner, time or attributes",
}
"""How a comparison's counts are told, the worst first."""


def parse(raw: Any) -> Manifest | None:
    """The summary that the host sent, or None when it sent none that can be read."""
    try:
        return Manifest.model_validate(raw) if isinstance(raw, Mapping) else None
    except ValidationError:
        return None


def troubles(manifest: Manifest) -> tuple[str, ...]:
    """What keeps a manifest from being a proof: files that cannot be read, or that change while they are read."""
    found = []
    if manifest.unreadable:
        found.append(f"{manifest.unreadable} unreadable: {_shown(manifest.names, 'unreadable')}")
    if manifest.busy:
        found.append(f"{manifest.busy} changed while being read: {_shown(manifest.names, 'busy')}")
    return tuple(found)


def sentence(manifest: Manifest) -> str:
    read = (
        f"{manifest.read_files} read, the others unmoved since" if manifest.read_files < manifest.files else "all read"
    )
    return f"manifest: {manifest.files} files, {manifest.bytes} bytes ({read}), root {manifest.content[:16]}"


def proof(manifest: Manifest) -> tuple[bool, str]:
    """(equal, the line that says so). Any difference is named; nothing compared is no proof."""
    result = manifest.compare
    if result is None:
        return False, "manifest: not compared"
    found = [kind for kind in KINDS if getattr(result, kind)]
    head = f"manifest: checked {result.checked} of {result.expected}"
    if found:
        counts = ", ".join(f"{getattr(result, kind)} {KINDS[kind]}" for kind in found)
        names = "; ".join(f"{kind}: {_shown(result.names, kind)}" for kind in found if result.names.get(kind))
        return False, f"{head}; {counts}" + (f" ({names})" if names else "")
    if not result.expected:
        return False, f"{head}; nothing was recorded"
    return result.equal == result.expected, f"{head} equal ({manifest.read_files} files read again)"


def _shown(names: Mapping[str, list[str]], kind: str) -> str:
    listed = names.get(kind, [])
    return ", ".join(listed[:3]) + (", …" if len(listed) > 3 else "")
