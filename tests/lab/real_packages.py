"""The distribution's own packages for a lab host, fetched once by this machine from the sources it uses."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from gpuchange.lab import Host, state

COMPONENTS = "main contrib non-free non-free-firmware"
FOLDER = "srv/distribution"
SOURCE = "deb [trusted=yes] file:/srv/distribution ./\n"


def provide(host: Host, plain: Path, *packages: str) -> None:
    """Put the packages, and all that a host of the tree `plain` lacks for them, into the host as its only source."""
    cache = state.root() / "cache" / "distribution"
    fetch(cache, plain, packages)
    target = host.root / FOLDER
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file in (cache / "archives").glob("*.deb"):
        shutil.copy2(file, target)
    listed = subprocess.run(["apt-ftparchive", "packages", "."], cwd=target, capture_output=True, check=True)
    (target / "Packages").write_bytes(listed.stdout)
    for path in (host.root / "etc/apt/sources.list.d").glob("*"):
        path.unlink()
    (host.root / "etc/apt/sources.list.d/distribution.list").write_text(SOURCE)


def fetch(cache: Path, plain: Path, packages: Sequence[str]) -> None:
    """Download into `cache`/archives; what is there already is not fetched again."""
    for name in ("lists/partial", "archives/partial"):
        (cache / name).mkdir(parents=True, exist_ok=True)
    (cache / "sources.list").write_text(sources())
    settings = {
        "Dir::Etc::sourcelist": cache / "sources.list",
        "Dir::Etc::sourceparts": "/nonexistent",
        "Dir::State::lists": cache / "lists",
        "Dir::State::status": plain / "var/lib/dpkg/status",
        "Dir::Cache": cache,
        "APT::Sandbox::User": "root",
        "APT::Install-Recommends": "false",
    }
    (cache / "apt.conf").write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
    environment = {**os.environ, "APT_CONFIG": str(cache / "apt.conf"), "LC_ALL": "C.UTF-8"}
    for verb in (["update"], ["-y", "--download-only", "install", *packages]):
        subprocess.run(["apt-get", "-q", *verb], env=environment, check=True, capture_output=True, timeout=1200)


def sources() -> str:
    """This machine's own sources with all components: the drivers are not in the one that it uses itself."""
    asked = ["apt-get", "indextargets", "--format", "deb $(REPO_URI) $(RELEASE)", "Created-By: Packages"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    remote = sorted({line for line in lines if not line.startswith("deb file:")})
    return "".join(f"{line} {COMPONENTS}\n" for line in remote)
