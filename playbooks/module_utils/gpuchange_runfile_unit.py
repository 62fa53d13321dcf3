"""Work of an NVIDIA .run change, run inside a host unit. Self-contained: copied into the change's state directory.

Usage: gpuchange_runfile_unit.py JOB.json, with {do: keep, store, wanted: [{file, sha256, version}]} or
{do: install, argv, folder, unload: bool}. keep copies installers into the store and reads them back; install runs one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

INSTALLER_LOG = "/var/log/nvidia-installer.log"
DAEMONS = ("nvidia-persistenced", "nvidia-fabricmanager", "nvidia-imex", "nvidia-powerd", "nvidia-dcgm", "dcgm")
MODULES = ("nvidia_drm", "nvidia_uvm", "nvidia_peermem", "nvidia_modeset", "nvidia")


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S "), text, sep="", flush=True)


def run(argv: list[str]) -> int:
    say("$ " + " ".join(argv))
    return subprocess.call(argv, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)


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


# ---------------------------------------------------------------------------------------------------- keep


def keep(job: dict[str, Any]) -> int:
    """Every wanted installer in the store, proven by its sha256 and its own check; then the list of them."""
    kept = {row["version"]: keep_one(job["store"], row) for row in job["wanted"]}
    write(os.path.join(job["store"], "manifest.json"), {version: row for version, row in kept.items() if row})
    return 0 if all(kept.values()) else 1


def keep_one(store: str, row: dict[str, Any]) -> dict[str, Any]:
    """The store's entry for one installer; {} when it cannot be kept, after saying why."""
    name = "NVIDIA-%s.run" % row["version"]
    target = os.path.join(store, name)
    if not (os.path.isfile(target) and sha256(target) == row["sha256"]):
        why = copy(row["file"], target, row["sha256"])
        if why:
            say("ERROR: " + why)
            return {}
    if run(["sh", target, "--check"]):
        say("ERROR: %s does not pass its own check" % row["file"])
        return {}
    return {"file": name, "sha256": row["sha256"], "size": os.path.getsize(target), "source": row["file"]}


def copy(source: str, target: str, digest: str) -> str:
    """Copy through a draft that is synced and read back; why that failed, or ""."""
    draft = target + ".new"
    try:
        shutil.copyfile(source, draft)
        with open(draft, "rb") as file:
            os.fsync(file.fileno())
        found = sha256(draft)
    except OSError as error:
        return "%s cannot be kept: %s" % (source, error)
    if found != digest:
        return "%s changed: its sha256 is %s, not %s" % (source, found, digest)
    os.chmod(draft, 0o400)
    os.rename(draft, target)
    return ""


# ------------------------------------------------------------------------------------------------- install


def install(job: dict[str, Any]) -> int:
    """One installer, or its removal; what holds the driver is stopped only where that has to leave the kernel first."""
    shutil.rmtree(job["folder"], ignore_errors=True)  # what an interrupted one has unpacked
    os.makedirs(job["folder"], mode=0o700)
    stopped = stop_daemons() if job["unload"] else []
    try:
        why = unload() if job["unload"] else ""
        if why:
            say("ERROR: " + why)
            return 1
        rc = run(job["argv"])
        if rc:
            print("\n".join(errors()), flush=True)
        return rc
    finally:
        for name in stopped:
            run(["systemctl", "start", "--no-block", name])
        shutil.rmtree(job["folder"], ignore_errors=True)


def stop_daemons() -> list[str]:
    active = [name for name in DAEMONS if subprocess.call(["systemctl", "is-active", "--quiet", name]) == 0]
    return [name for name in active if run(["systemctl", "stop", name]) == 0]


def loaded() -> list[str]:
    return [name for name in MODULES if os.path.isdir("/sys/module/" + name)]


def unload() -> str:
    """Take the driver out of the kernel; why that is not possible, or ""."""
    for name in loaded():
        run(["modprobe", "-r", name])
    left = ", ".join(loaded())
    return "the loaded driver is in use (%s): this installer cannot work beside it" % left if left else ""


def errors() -> list[str]:
    """The installer's own words: with --silent they are in its log only."""
    try:
        with open(INSTALLER_LOG, encoding="utf-8", errors="replace") as file:
            text = file.read()[-65536:]
    except OSError:
        return []
    return re.findall(r"^(?:-> )?(?:ERROR|FATAL).*$", text, flags=re.M)[-5:]


def main(path: str) -> int:
    with open(path, encoding="utf-8") as file:
        job = json.load(file)
    return {"keep": keep, "install": install}[job["do"]](job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
