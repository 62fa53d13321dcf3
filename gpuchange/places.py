"""Files that decide what a change does must not be open to everybody: state, plan and inventory."""

from __future__ import annotations

import stat
from pathlib import Path

from gpuchange.errors import UsageError

_WORLD = stat.S_IWOTH


def refuse_open_file(path: Path, what: str) -> None:
    """Raises UsageError when everybody may write to the file `path` or to its directory.

    A sticky directory such as /tmp counts too, as it does for Ansible's own settings.
    """
    real = path.resolve()
    for place in (real, real.parent):
        if place.exists() and place.stat().st_mode & _WORLD:
            mode = stat.S_IMODE(place.stat().st_mode)
            raise UsageError(
                f"{what} lies where everybody may write",
                where=str(path),
                why=f"{place} has mode {mode:04o}: another user could change what is done",
                remedy=f"chmod o-w {place}" if place == real else f"move it into a directory of your own, not {place}",
            )


def refuse_open_directory(path: Path, what: str) -> None:
    """Raises UsageError when everybody may write into `path` or could put another in its place."""
    real = path.resolve()
    for place in (real, *real.parents):
        if not place.exists():
            continue
        mode = place.stat().st_mode
        if mode & _WORLD and (place == real or not mode & stat.S_ISVTX):
            raise UsageError(
                f"{what} lies where everybody may write",
                where=str(path),
                why=f"{place} has mode {stat.S_IMODE(mode):04o}",
                remedy=f"chmod o-w {place}, or choose another place with --state-dir",
            )
