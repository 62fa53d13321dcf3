"""Do a host's containers see its GPUs? The host's own nvidia-smi may be fine while theirs is not. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpuchange.checks.snapshot import Snapshot, mapping, rows


def blind(facts: Mapping[str, Any]) -> dict[str, str]:
    """{"runtime name": what its nvidia-smi says} of the running containers that see no GPU."""
    running = rows(mapping(facts.get("containers")).get("running"))
    return {f"{row.get('runtime')} {row.get('name')}": _words(row.get("says")) for row in running if row.get("rc") != 0}


def losses(before: Mapping[str, Any], now: Mapping[str, Any], picture: Snapshot) -> Iterator[str]:
    """What is to be said against a host that answers while its containers do not; those that never did do not count."""
    if not picture.smi.ok:
        return
    already = blind(before)
    for name, says in blind(now).items():
        if name not in already:
            yield f"host OK, container {name.partition(' ')[2]} sees no GPU: {says}"
    fresh = mapping(mapping(now.get("containers")).get("fresh"))
    if fresh and fresh.get("rc") != 0:
        yield f"host OK, container sees no GPU: a fresh one says: {_words(fresh.get('says'))}"


def _words(says: Any) -> str:
    return " ".join(str(says or "nothing").split())[:200]
