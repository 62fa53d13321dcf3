"""Versions as NVIDIA writes them, compared number by number: 580.95.05 is newer than 580.65.06, 12.10 than 12.9."""

from __future__ import annotations

import re
from functools import lru_cache

Key = tuple[int, ...]

_NUMBERS = re.compile(r"\d{1,9}(?:\.\d{1,9}){0,7}")


@lru_cache(maxsize=8192)
def parts(version: str) -> Key:
    """The numeric components of the upstream part: `1:570.86.15-0ubuntu1` → (570, 86, 15). Empty when there is none.

    A Debian epoch and revision are no part of the upstream version and are left out.
    """
    upstream = version.partition(":")[2] if re.match(r"\d+:", version) else version
    found = _NUMBERS.match(upstream.strip())
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def compare(one: str, two: str) -> int:
    """-1, 0 or 1. Missing components count as zero: 12.8 equals 12.8.0."""
    left, right = parts(one), parts(two)
    width = max(len(left), len(right))
    padded = [key + (0,) * (width - len(key)) for key in (left, right)]
    return (padded[0] > padded[1]) - (padded[0] < padded[1])


def matches(wanted: str, found: str | None) -> bool:
    """Whether `found` is `wanted`, or a release of it: wanted 12.8 is met by 12.8.1, wanted 12.8.1 not by 12.8."""
    asked = parts(wanted)
    return bool(asked) and found is not None and parts(found)[: len(asked)] == asked


def release(version: str) -> str:
    """The first two components: 12.8.1 → 12.8."""
    return ".".join(str(part) for part in parts(version)[:2])


def text_of(key: Key) -> str:
    return ".".join(str(part) for part in key)


def successor(key: Key) -> Key:
    """The first key after everything that begins with `key`: (9, 10, 2) → (9, 10, 3)."""
    return (*key[:-1], key[-1] + 1)
