"""NVIDIA's self-extracting installer (.run) on a host: what a file holds, what one has installed. Read-only.

A file is read, not executed, until its sha256 is known to be the plan's: an option that an old installer does not know
would start an installation.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from typing import Any, Dict, List, Optional, Tuple

from ansible.module_utils.gpuchange_host import ROOT, read_json, read_text, run

INSTALLED_LOG = "/var/lib/nvidia/log"
LIBRARIES = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib")
STORE = "runfiles"
MANIFEST = "manifest.json"
HEAD_LIMIT = 512 * 1024
LOG_LIMIT = 4 * 1024 * 1024
CHECK_TIMEOUT_S = 30
NUMBER = re.compile(r"\d{3}\.\d+(?:\.\d+)?")
ENTRY = re.compile(r"^(\d+): (/.*)$", flags=re.M)
INSTALLED_KINDS = ("0", "1")  # nvidia-installer's: a link, a file; others are what it had to move away

# ------------------------------------------------------------------------------------------------- a file


def head(path: str) -> Dict[str, Any]:
    """What the shell script in front of the archive says: {version, label, arch, kib, options}. Nothing is executed."""
    try:
        with open(path, "rb") as file:
            raw = file.read(HEAD_LIMIT)
    except OSError:
        raw = b""
    return parse_head(raw)


def parse_head(raw: bytes) -> Dict[str, Any]:
    """`options`: the long options that its help names; `kib`: unpacked size. Empty values where it says nothing."""
    skip = re.search(rb"^skip=(\d+)$", raw[:4096], flags=re.M)
    lines = raw.split(b"\n")
    text = b"\n".join(lines[: int(skip.group(1)) - 1] if skip else []).decode("utf-8", "replace")
    label = _said(r'^label="?([^"\n]*)"?$', text)
    version = NUMBER.search(_said(r'^version_string="?([^"\n]*)"?$', text) or label)
    return {
        "version": version.group(0) if version and "NVIDIA" in label else "",
        "label": label,
        "arch": _said(r'^TARGET_ARCH="?([^"\n]*)"?$', text),
        "kib": int(_said(r"Uncompressed size : (\d+) KB", text) or 0),
        "options": sorted(set(re.findall(r"--[a-z][a-z0-9-]+", text))),
    }


def _said(pattern: str, text: str) -> str:
    found = re.search(pattern, text, flags=re.M)
    return found.group(1).strip() if found else ""


def sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1024 * 1024), b""):
            digest.update(block)
    return digest.hexdigest()


def file_problem(path: str, digest: str, version: str) -> str:
    """Why this file is not the installer of `version` that the plan means, in one sentence; "" when it is."""
    if not os.path.isfile(path):
        return "%s does not exist on this host: put the installer there (it is not fetched)" % path
    try:
        found = sha256(path)
    except OSError as error:
        return "%s cannot be read: %s" % (path, error.strerror)
    if found != digest:
        return "%s is not the plan's file: its sha256 is %s, not %s" % (path, found, digest)
    said = head(path)
    if not said["version"]:
        return "%s is no NVIDIA driver installer (it says %s)" % (path, said["label"] or "nothing about itself")
    if said["version"] != version:
        return "%s installs driver %s, not %s" % (path, said["version"], version)
    if said["arch"] and said["arch"] != os.uname().machine:
        return "%s is for %s, this host is %s" % (path, said["arch"], os.uname().machine)
    rc, out, err = run(["sh", path, "--check"], timeout=CHECK_TIMEOUT_S)
    return "%s is damaged: %s" % (path, (out + err).strip()[-200:]) if rc else ""


# ------------------------------------------------------------------------------------- what is installed


def installed_run(path: str = INSTALLED_LOG) -> Dict[str, Any]:
    """{version, paths} of the driver that a .run file has installed; {"version": "", "paths": []} when none has."""
    return parse_installed_log(read_text(path, limit=LOG_LIMIT))


def parse_installed_log(text: str) -> Dict[str, Any]:
    """nvidia-installer's own list: `1.0-57017208 (570.172.08)`, what it is, then an entry for each file and link."""
    first = text.partition("\n")[0]
    numbers = NUMBER.findall(first.partition("(")[2] or first)
    paths = [path for kind, path in ENTRY.findall(text) if kind in INSTALLED_KINDS]
    return {"version": numbers[0] if numbers else "", "paths": paths}


def summary() -> Dict[str, Any]:
    """{version, files} of a driver that a .run file has installed, as far as its files are still there; {} without."""
    now = installed_run()
    there = len(now["paths"]) - len(missing(now["paths"]))
    return {"version": now["version"], "files": there} if now["version"] else {}


def missing(paths: List[str]) -> List[str]:
    return [path for path in paths if not os.path.lexists(path)]


def content_digest(paths: List[str]) -> str:
    """One digest over what lies there. Kernel modules are left out: a rebuilt one may differ in its bytes alone."""
    whole = hashlib.sha256()
    for path in sorted(paths):
        if re.search(r"\.ko(\.\w+)?$", path):
            continue
        whole.update(("%s\0%s\n" % (path, _content(path))).encode("utf-8", "surrogateescape"))
    return whole.hexdigest()


def _content(path: str) -> str:
    if os.path.islink(path):
        return "-> " + os.readlink(path)
    try:
        return sha256(path)
    except OSError:
        return "absent"


def library_versions() -> Dict[str, str]:
    """{libcuda, libnvidia-ml: version in the name of the file behind the link that programs open}."""
    found = {}
    for stem, soname in (("libcuda", "libcuda.so.1"), ("libnvidia-ml", "libnvidia-ml.so.1")):
        links = [path for place in LIBRARIES for path in glob.glob("%s/%s" % (place, soname))]
        real = os.path.realpath(links[0]) if links else ""
        found[stem] = real.rpartition(".so.")[2]
    return found


def run_problem() -> str:
    """Why packages cannot bring a driver to this host: a .run file has installed one."""
    version = installed_run()["version"]
    if not version:
        return ""
    said = "driver %s was installed by NVIDIA's .run file, which packages would half overwrite"
    return (said + "; remove it first (nvidia-uninstall), or use stack: {provider: runfile}") % version


# ---------------------------------------------------------------------------------- what earlier changes kept


def kept(version: str) -> Optional[Tuple[str, str]]:
    """(file, sha256) of an installer of this version that an earlier change keeps on the host, or None."""
    for path in sorted(glob.glob(os.path.join(ROOT, "*", STORE, MANIFEST))):
        try:
            entry = (read_json(path, {}) or {}).get(version)
        except ValueError:
            continue
        file = os.path.join(os.path.dirname(path), entry["file"]) if entry else ""
        if file and os.path.isfile(file) and sha256(file) == entry["sha256"]:
            return file, str(entry["sha256"])
    return None
