"""Collects exact .deb files into a change's package store, run inside a host unit. Self-contained.

Usage: gpuchange_debs_unit.py JOB.json, with {store, wanted: [[name, version]], native: architecture, env: private apt}.
Sources in order: the store itself, apt's cache, the package lists (fetched privately), dpkg-repack. Every file is read
back, checked and hashed; manifest.json lists {"name=version": {file, sha256, size, source}} and what was missing.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from typing import Any

ARCHIVES = "/var/cache/apt/archives"


def run(argv: list[str], env: dict[str, str], folder: str) -> int:
    print("$ " + " ".join(argv)[:2000], flush=True)
    return subprocess.call(argv, env=dict(os.environ, **env), cwd=folder, stdin=subprocess.DEVNULL)


def fields(path: str, native: str) -> tuple[str, str]:
    """(name, version) of a .deb, a foreign one as name:arch; ("", "") when it cannot be read to its end."""
    checked = subprocess.run(
        ["dpkg-deb", "-f", path, "Package", "Version", "Architecture"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    readable = subprocess.call(["dpkg-deb", "-c", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0
    said = dict(line.split(": ", 1) for line in checked.stdout.decode().splitlines() if ": " in line)
    arch = said.get("Architecture", native)
    suffix = "" if arch in (native, "all") else ":" + arch
    return (said.get("Package", "") + suffix, said.get("Version", "")) if readable else ("", "")


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


class Collector:
    def __init__(self, job: dict[str, Any]) -> None:
        self.store, self.env, self.native = job["store"], job["env"], job["native"]
        self.wanted = [(name, version) for name, version in job["wanted"]]
        self.manifest_path = os.path.join(self.store, "manifest.json")
        self.files: dict[str, dict[str, Any]] = {}

    def missing(self) -> list[tuple[str, str]]:
        return [pair for pair in self.wanted if "%s=%s" % pair not in self.files]

    def keep_known(self) -> None:
        """Files of an earlier, interrupted collection count if they are still what the manifest says."""
        try:
            with open(self.manifest_path, encoding="utf-8") as file:
                known = json.load(file)["files"]
        except (OSError, ValueError, KeyError):
            return
        for key, entry in known.items():
            path = os.path.join(self.store, entry["file"])
            if os.path.exists(path) and sha256(path) == entry["sha256"]:
                self.files[key] = entry

    def take(self, folder: str, source: str, move: bool) -> None:
        """Adopt every wanted .deb that lies in `folder`."""
        wanted = set(self.missing())
        stems = {name.partition(":")[0] for name, _ in wanted}
        for path in sorted(glob.glob(os.path.join(folder, "*.deb"))):
            if os.path.basename(path).split("_")[0] not in stems:
                continue
            found = fields(path, self.native)
            if found in wanted:
                self.adopt("%s=%s" % found, path, source, move)

    def adopt(self, key: str, path: str, source: str, move: bool) -> None:
        target = os.path.join(self.store, os.path.basename(path))
        draft = target + ".new"
        (shutil.move if move else shutil.copyfile)(path, draft)
        with open(draft, "rb") as file:
            os.fsync(file.fileno())
        os.chmod(draft, 0o644)
        os.rename(draft, target)
        size = os.path.getsize(target)
        self.files[key] = {"file": os.path.basename(target), "sha256": sha256(target), "size": size, "source": source}
        self.save()

    def save(self) -> None:
        missing = ["%s=%s" % pair for pair in self.missing()]
        write(self.manifest_path, {"files": self.files, "missing": missing})

    def download(self, folder: str) -> None:
        """All at once, then one by one what did not come: one unknown version fails the whole call."""
        if not self.missing():
            return
        run(["apt-get", "update", "-q"], self.env, folder)
        run(["apt-get", "download", "-q", *["%s=%s" % pair for pair in self.missing()]], self.env, folder)
        self.take(folder, "package source", move=True)
        for pair in self.missing():
            run(["apt-get", "download", "-q", "%s=%s" % pair], self.env, folder)
        self.take(folder, "package source", move=True)

    def repack(self, folder: str) -> None:
        if self.missing() and shutil.which("dpkg-repack"):
            run(["dpkg-repack", *[name for name, _ in self.missing()]], {}, folder)
            self.take(folder, "dpkg-repack", move=True)


def main(path: str) -> int:
    with open(path, encoding="utf-8") as file:
        job = json.load(file)
    collector = Collector(job)
    incoming = os.path.join(collector.store, "incoming")
    os.makedirs(incoming, mode=0o755, exist_ok=True)
    collector.keep_known()
    collector.take(collector.store, "store", move=False)
    collector.take(ARCHIVES, "apt cache", move=False)
    collector.download(incoming)
    collector.repack(incoming)
    shutil.rmtree(incoming, ignore_errors=True)
    collector.save()
    for missing in collector.missing():
        print("not obtainable: %s %s" % missing)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
