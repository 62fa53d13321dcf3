"""What all ways of making a backup set have in common: look, hash the source, name the set only once it is proved.

Standard library only: part of the programs gpuchange_backup (rsync) and gpuchange_tar, which run as host units.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

try:
    from ansible.module_utils import gpuchange_backup_look as looking
    from ansible.module_utils import gpuchange_hashing as hashing
except ImportError:  # a program now: its copies lie beside it
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import gpuchange_backup_look as looking  # type: ignore[import-not-found,no-redef]
    import gpuchange_hashing as hashing  # type: ignore[import-not-found,no-redef]

Job = Dict[str, Any]
PASSES = 3  # files written while they were copied are copied again


def looked(job: Job, method: str) -> Tuple[Job, Optional[Dict[str, Any]]]:
    """The job with real paths, and the last set of this method. Raises Refused: not a source, not a place for sets."""
    to, paths = job["to"], _real(looking.checked_paths(job))
    looking.check_target(paths, to)
    to = os.path.realpath(to)
    last = looking.last_set(to, job["name"], method)
    looking.check_sources(paths, last)
    return dict(job, paths=paths, to=to), last


def _real(paths: List[str]) -> List[str]:
    """A source that is a link would be copied as a link, and its copy compared with the source itself."""
    return sorted({os.path.realpath(path) for path in paths})


def keeps_neither_holes_nor_links(to: str) -> bool:
    return looking.filesystem_of(to)["type"] in looking.PLAIN


def manifest(job: Job, roots: List[List[str]], out: str, **more: Any) -> Dict[str, Any]:
    return hashing.run_job(dict({"roots": roots, "out": out, "exclude": job.get("exclude", [])}, **more))


def source_manifest(job: Job) -> Tuple[str, str]:
    """Hash the source on its side: (its manifest, what the source was in the pass before this one)."""
    source, before = job["work"] + "-source", job["work"] + "-source.before.jsonl"
    with contextlib.suppress(FileNotFoundError):
        os.replace(source + ".jsonl", before)
    manifest(job, [[path, path] for path in job["paths"]], source, previous=[before, *list(job.get("previous", []))])
    return source + ".jsonl", before


def equal(result: Dict[str, Any]) -> bool:
    return bool(result["equal"] == result["expected"] and not result["extra"])


def damages(damaged: List[List[Any]]) -> str:
    """Copies that differ from a source which did not change, in words; ''."""
    return "; ".join(_damage(*each) for each in damaged[:3]) + ("; and more" if len(damaged) > 3 else "")


def _damage(name: str, source: Optional[str], copied: Optional[str]) -> str:
    if not copied:
        return "not in the copy, though its source did not change: %s" % name
    if not source:
        return "differs from its source, which did not change: %s" % name
    return "hash differs: source %.16s, copy %.16s (%s)" % (source, copied, name)


def first_lines(text: str) -> str:
    return "; ".join(text.splitlines()[:3])[:600]


def describe(job: Job, wanted: Dict[str, Any], found: Dict[str, Any], began: float, **more: Any) -> Dict[str, Any]:
    """What set.json says of a proved set."""
    result = found["compare"]
    described = {
        "name": job["name"],
        "paths": job["paths"],
        "files": wanted["files"],
        "bytes": wanted["bytes"],
        "per_path": wanted["per_path"],
        "filesystems": {path: looking.filesystem_of(path) for path in job["paths"]},
        "needed": wanted["need"],
        "content": found["content"],
        "manifest_sha256": found["jsonl_sha256"],
        "checked": result["checked"],
        "expected": result["expected"],
        "in_flux": result["expected"] - result["equal"] + result["extra"],
        "in_flux_names": [name for shown in result["names"].values() for name in shown][:10],
        "began": began,
        "ended": time.time(),
    }
    return dict(described, **more)


def publish(described: Dict[str, Any], partial: str, final: str) -> None:
    with open(partial + "/set.json", "w", encoding="utf-8") as file:
        json.dump(described, file, sort_keys=True, indent=1)
        file.flush()
        os.fsync(file.fileno())
    replaced = final + ".replaced.partial"
    if os.path.exists(final):  # made again: the newer one counts
        os.rename(final, replaced)
    os.rename(partial, final)
    shutil.rmtree(replaced, ignore_errors=True)
    parent = os.open(os.path.dirname(final), os.O_RDONLY)
    os.fsync(parent)
    os.close(parent)


def program(path: str, make_set: Callable[[Job], Dict[str, Any]]) -> int:
    """Make the set of the job in the file `path`; prints what became of it. Returns the exit code."""
    os.umask(0o077)
    os.nice(10)  # the host serves meanwhile
    with open(path, encoding="utf-8") as file:
        job = json.load(file)
    try:
        print(json.dumps(make_set(job)))
    except (looking.Refused, OSError, ValueError) as error:
        print(json.dumps({"failed": str(error)}))
        return 1
    return 0
