"""What dpkg and apt know of a host: the GPU stack's packages, holds, marks, origins, pins, alternatives. Read-only."""

from __future__ import annotations

import functools
import glob
import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ansible.module_utils.gpuchange_host import read_text, run

STACK_NAME = re.compile(
    r"(lib)?nvidia-.*|xserver-xorg-video-nvidia.*|linux-(modules|objects|signatures|image)-nvidia.*|lib(x?)nvid?ctrl0.*"
    r"|libnvidia.*|firmware-nvidia.*|cuda(-.*)?|gds-tools.*|nsight-.*|nv-.*|nvlsm|libnvsdm.*|nvlink.*"
    r"|lib(cu(blas|dart|dnn|fft|file|pti|rand|solver|sparse|inj|tensor|dss)|cuda1|cuda-.*|npp|nccl|nvjpeg|nvjitlink|nvrtc).*"
    r"|libnv(blas|graph|fatbin|toolsext|vm|infer|onnx|parsers|ptx).*"
    r"|cudnn.*|tensorrt.*|datacenter-gpu-manager.*|dkms"
)
STACK_PREFIXES = ("nvidia", "libnvidia", "xserver-xorg-video-nvidia", "cuda", "libcudnn", "cudnn", "libnccl")
ALTERNATIVES = re.compile(r"(cuda|cudnn|libcudnn|nvidia|glx|nvcc|nccl).*")
ALTERNATIVES_FOLDER = "/var/lib/dpkg/alternatives"
QUERY = "${Package}\\t${Architecture}\\t${Version}\\t${db:Status-Want}\\t${db:Status-Status}\\t${Multi-Arch}\\n"
PIN_FILES = ("/etc/apt/preferences", "/etc/apt/preferences.d/*")
SOURCE_FILES = ("/etc/apt/sources.list", "/etc/apt/sources.list.d/*")
# apt-cache and apt-mark, run by root, would write their package cache to the disk: looking must leave no trace.
IN_MEMORY = ("-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache=")
LIMIT = 16 * 1024 * 1024


def packages_snapshot() -> dict[str, Any]:
    """The package state that a rollback must equal, as JSON. Takes well under two seconds, changes nothing.

    packages: {name[:arch]: version} of the GPU stack (installed, however badly); broken: the same for those whose state
    is not "installed"; others: one digest over all other packages and their number; holds: every hold of the host;
    auto: stack packages marked automatic; origins: {name: where the installed version comes from}; alternatives:
    {name: {mode, value}}; pins, sources: {file: sha256}; audit: what `dpkg --audit` says; unmet: dependencies that are
    not met, in apt's words.
    """
    rows = installed()
    stack = {key: row for key, row in rows.items() if is_stack(row["name"])}
    others = sorted("%s=%s" % (key, row["version"]) for key, row in rows.items() if key not in stack)
    with ThreadPoolExecutor(max_workers=4) as pool:  # each reads all package lists anew, so as not to write a cache
        holds, auto = pool.submit(marks, "showhold"), pool.submit(marks, "showauto")
        found_origins, found_unmet = pool.submit(origins, sorted(stack)), pool.submit(unmet)
    marked_auto = set(auto.result())
    return {
        "packages": {key: row["version"] for key, row in stack.items()},
        "broken": {key: row["status"] for key, row in rows.items() if row["status"] != "installed"},
        "others": {"count": len(others), "sha256": hashlib.sha256("\n".join(others).encode()).hexdigest()},
        "holds": holds.result(),
        "auto": sorted(key for key in stack if key in marked_auto),
        "origins": found_origins.result(),
        "alternatives": alternatives(),
        "pins": digests(PIN_FILES),
        "sources": digests(SOURCE_FILES),
        "audit": audit(),
        "unmet": found_unmet.result(),
    }


def is_stack(name: str) -> bool:
    """Whether a package name (without architecture) belongs to the GPU stack."""
    return STACK_NAME.fullmatch(name) is not None


def installed() -> dict[str, dict[str, str]]:
    """{name: {name, arch, version, want, status}} of all that is not plainly absent; foreign ones are name:arch."""
    _, out, _ = run(["dpkg-query", "-W", "-f=" + QUERY], timeout=30, limit=LIMIT)
    return parse_installed(out, native_architecture())


def parse_installed(text: str, native: str) -> dict[str, dict[str, str]]:
    rows = {}
    for line in text.splitlines():
        fields = line.split("\t")
        if len(fields) < 5 or fields[4] in ("not-installed", "config-files"):
            continue
        name, arch, version, want, status = fields[:5]
        key = name if arch in (native, "all") else "%s:%s" % (name, arch)
        rows[key] = {"name": name, "arch": arch, "version": version, "want": want, "status": status}
    return rows


@functools.lru_cache(maxsize=1)
def native_architecture() -> str:
    return run(["dpkg", "--print-architecture"])[1].strip() or "amd64"


def marks(what: str) -> list[str]:
    """`what`: showhold, showauto or showmanual. Names, foreign ones with their architecture."""
    return sorted(run(["apt-mark", *IN_MEMORY, what], timeout=30, limit=LIMIT)[1].split())


def audit() -> str:
    """What dpkg finds half-done; empty when all is well."""
    rc, out, err = run(["dpkg", "--audit"])
    return (out + (err if rc else "")).strip()


def unmet() -> list[str]:
    """Dependencies that are not met now: any apt call would refuse to work before they are."""
    rc, out, err = run(["apt-get", *IN_MEMORY, "-o", "Debug::NoLocking=1", "check"], timeout=30, limit=LIMIT)
    if rc == 0:
        return []
    said = re.findall(r"^ (\S+ : .*(?:\n {2,}\S.*)*)$", out + err, flags=re.M)
    return [re.sub(r"\s+", " ", line) for line in said[:20]] or [err.strip()[-300:]]


def origins(names: list[str]) -> dict[str, str]:
    """Where each installed version comes from: "URL suite/component", or "local" when no list offers it."""
    if not names:
        return {}
    _, out, _ = run(["apt-cache", *IN_MEMORY, "policy", *names], timeout=30, limit=LIMIT)
    return {name: entry["origin"] for name, entry in parse_policy(out).items()}


def parse_policy(text: str) -> dict[str, dict[str, Any]]:
    """`apt-cache policy` → {name: {installed, candidate, origin, versions, priorities}}.

    versions: {version: [(priority of the source, source)]}; priorities: {version: its own, pins included}.
    """
    found: dict[str, dict[str, Any]] = {}
    entry: dict[str, Any] = {}
    version = ""
    for line in text.splitlines():
        if line and not line.startswith(" ") and line.endswith(":"):
            entry = {"installed": "", "candidate": "", "origin": "", "versions": {}, "priorities": {}}
            found[line[:-1]] = entry
            continue
        stripped = line.strip()
        head, _, rest = stripped.partition(": ")
        if head in ("Installed", "Candidate") and line.startswith("  ") and not line.startswith("   "):
            entry[head.lower()] = "" if rest == "(none)" else rest
        elif re.match(r" (\*\*\*|   ) ?\S+ -?\d+$", line):
            version, priority = stripped.replace("*** ", "").split()
            entry["versions"][version] = []
            entry["priorities"][version] = int(priority)
        elif re.match(r" {8,}-?\d+ ", line) and version in entry.get("versions", {}):
            priority, _, source = stripped.partition(" ")
            entry["versions"][version].append((int(priority), source.strip()))
    for entry in found.values():
        entry["origin"] = _origin(entry["versions"].get(entry["installed"], [])) if entry["installed"] else ""
    return found


def _origin(sources: list[tuple[int, str]]) -> str:
    real = [source for _, source in sources if "/var/lib/dpkg/status" not in source]
    return re.sub(r" \S+ Packages$", "", real[0]) if real else "local"


def alternatives() -> dict[str, dict[str, str]]:
    """{name: {mode: auto|manual, value: path}} of the alternatives that the GPU stack uses."""
    found = {}
    for path in sorted(glob.glob(ALTERNATIVES_FOLDER + "/*")):
        name = os.path.basename(path)
        lines = read_text(path).splitlines()
        if ALTERNATIVES.fullmatch(name) and len(lines) > 1:
            found[name] = {"mode": lines[0], "value": _link("/etc/alternatives/" + name)}
    return found


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def digests(patterns: tuple[str, ...]) -> dict[str, str]:
    """{file: sha256} of the regular files that match."""
    paths = [path for pattern in patterns for path in glob.glob(pattern) if os.path.isfile(path)]
    found = {}
    for path in sorted(paths):
        with open(path, "rb") as file:
            found[path] = hashlib.sha256(file.read()).hexdigest()
    return found
