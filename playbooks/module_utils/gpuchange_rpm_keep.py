"""Copies exact RPMs into a change's package store, run inside a host unit. Self-contained but for dnf's own script.

Usage: gpuchange_rpm_keep.py JOB.json, with {store, wanted: [[name, version]], cached: {"name=version": path}, python,
script, fetch: job of dnf's script}. Every file is read back (rpm -K), hashed; manifest.json lists all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from typing import Any


def sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1024 * 1024), b""):
            digest.update(block)
    return digest.hexdigest()


def write(path: str, data: dict[str, Any]) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=".", dir=os.path.dirname(path))
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(data, file, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)


def whole(path: str) -> bool:
    """Whether rpm finds the package complete; signatures are asked of dnf, which knows what must be signed."""
    return subprocess.call(["rpm", "-K", "--nosignature", path], stdout=subprocess.DEVNULL) == 0


def known(store: str) -> dict[str, Any]:
    """Files of an earlier, interrupted collection that still are what the manifest says."""
    try:
        with open(os.path.join(store, "manifest.json"), encoding="utf-8") as file:
            files = json.load(file)["files"]
    except (OSError, ValueError, KeyError):
        return {}
    paths = {key: os.path.join(store, entry["file"]) for key, entry in files.items()}
    return {
        key: files[key] for key, path in paths.items() if os.path.exists(path) and sha256(path) == files[key]["sha256"]
    }


def adopt(store: str, path: str, source: str) -> dict[str, Any]:
    """The manifest's entry of a package copied into the store; {} when it is not whole."""
    target = os.path.join(store, os.path.basename(path))
    draft = target + ".new"
    shutil.copyfile(path, draft)
    with open(draft, "rb") as file:
        os.fsync(file.fileno())
    if not whole(draft):
        os.unlink(draft)
        return {}
    os.rename(draft, target)
    size = os.path.getsize(target)
    return {"file": os.path.basename(target), "sha256": sha256(target), "size": size, "source": source}


def fetched(job: dict[str, Any], missing: list[list[str]]) -> dict[str, Any]:
    path = os.path.join(job["store"], "fetch.job")
    write(path, {**job["fetch"], "wanted": missing})
    subprocess.call([job["python"], "-I", job["script"], path], stdin=subprocess.DEVNULL)
    with open(job["fetch"]["answer"], encoding="utf-8") as file:
        return dict(json.load(file))


def main(path: str) -> int:
    with open(path, encoding="utf-8") as file:
        job = json.load(file)
    store, wanted = job["store"], {"%s=%s" % tuple(pair): pair for pair in job["wanted"]}
    files = {key: entry for key, entry in known(store).items() if key in wanted}
    files.update(
        {
            key: adopt(store, path, "dnf cache")
            for key, path in job["cached"].items()
            if key in wanted and key not in files
        }
    )
    missing = [pair for key, pair in wanted.items() if not files.get(key)]
    said = fetched(job, missing) if missing else {"files": {}, "unsigned": []}
    files.update({key: adopt(store, path, "repository") for key, path in said.get("files", {}).items()})
    files = {key: entry for key, entry in files.items() if entry}
    lost = sorted(key for key in wanted if key not in files)
    write(os.path.join(store, "manifest.json"), {"files": files, "missing": lost, "unsigned": said.get("unsigned", [])})
    if said.get("error"):
        print("dnf: " + said["error"])
    for key in lost:
        print("not obtainable: " + key)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
