"""The machine's own tools: are they there, and running them with errors an operator understands."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpuchange.errors import LabError

# program -> Debian package that brings it
NEEDED: Mapping[str, str] = {
    "debootstrap": "debootstrap",
    "systemd-nspawn": "systemd-container",
    "mkfs.btrfs": "btrfs-progs",
    "apt-ftparchive": "apt-utils",
    "dpkg-deb": "dpkg",
    "gcc": "gcc",
    "ip": "iproute2",
    "ssh-keygen": "openssh-client",
    "rsync": "rsync",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
LIBC_HEADERS = Path("/usr/include/stdio.h"), "libc6-dev"


def missing_packages() -> list[str]:
    """Debian packages whose tools this machine lacks, sorted."""
    missing = {package for tool, package in NEEDED.items() if shutil.which(tool, path=_path()) is None}
    header, package = LIBC_HEADERS
    if not header.exists():
        missing.add(package)
    return sorted(missing)


def require_machine(*, install_tools: bool = False) -> None:
    """Root, Debian-like, and every tool present; with `install_tools` the missing ones are installed.

    Raises LabError with the remedy.
    """
    if os.geteuid() != 0:
        raise LabError(
            "the lab needs root: it mounts, bridges and boots hosts",
            remedy="run it again as root, for example: sudo gpuchange lab up",
        )
    if shutil.which("apt-get") is None or not Path("/etc/debian_version").exists():
        raise LabError(
            "the lab needs a Debian-like machine",
            why="its hosts are built with debootstrap from this machine's own apt sources",
            remedy="run the lab in a Debian or Ubuntu virtual machine",
        )
    missing = missing_packages()
    if missing and install_tools:
        _install(missing)
        missing = missing_packages()
    if missing:
        raise LabError(
            f"the lab needs tools that this machine lacks: {', '.join(missing)}",
            remedy=f"gpuchange lab up --install-tools, or: apt-get install {' '.join(missing)}",
        )


def _install(packages: Sequence[str]) -> None:
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    sh(["apt-get", "-q", "update"], env=env, timeout=300)
    sh(["apt-get", "-q", "-y", "install", "--no-install-recommends", *packages], env=env, timeout=900)


def _path() -> str:
    """PATH with the sbin directories, which a plain `su` or cron leaves out."""
    return os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"


def sh(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
    stdin: str | None = None,
    check: bool = True,
) -> str:
    """Run a command and return its standard output. Raises LabError with the last lines of its output."""
    words = [str(word) for word in command]
    try:
        # a session of its own: when we are interrupted, whatever it started is ended with it
        process = subprocess.Popen(
            words,
            env={**os.environ, "PATH": _path(), "LC_ALL": "C.UTF-8", **(env or {})},
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace", cwd="/", start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise LabError(f"`{words[0]}` is not installed", remedy="gpuchange lab up --install-tools") from error
    try:
        output, trouble = process.communicate(stdin, timeout=timeout)
    except BaseException as error:
        _end_session(process)
        if isinstance(error, subprocess.TimeoutExpired):
            raise LabError(f"`{' '.join(words)}` did not end within {timeout:g} s") from error
        raise
    if check and process.returncode != 0:
        tail = (trouble.strip() or output.strip()).splitlines()[-8:]
        raise LabError(f"`{' '.join(words)}` failed with exit code {process.returncode}", why="\n  ".join(tail))
    return output


def _end_session(process: subprocess.Popen[str]) -> None:
    """End a command with all its children: politely, so that it can unmount what it mounted, then by force."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=10)
