"""The verb doctor: is this machine fit to run changes, and what of its settings do we override?"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import click

import gpuchange
from gpuchange import content
from gpuchange.cli import rights, words
from gpuchange.cli.settings import common, current
from gpuchange.errors import GpuchangeError

_PACKAGES = (("ansible-core", (2, 16)), ("ansible-runner", (2, 4)), ("paramiko", (3, 4)), ("pydantic", (2, 7)))


@dataclass(frozen=True)
class Finding:
    """`ok` False is a fault that needs `remedy`; what is merely worth knowing is ok."""

    topic: str
    ok: bool
    says: str
    remedy: str = ""


@click.command()
@click.argument("plan_path", metavar="[PLAN]", required=False, type=click.Path(path_type=Path))
@click.option("--sudoers", is_flag=True, help="What each step (of PLAN, or any) needs root for; a sudoers file.")
@common
def doctor(plan_path: Path | None, sudoers: bool) -> int:
    """Check this machine. Exit 1 when something has to be mended before a change can run."""
    if sudoers or plan_path:
        rights.show(plan_path)
        return 0
    findings = [finding for check in CHECKS for finding in check()]
    for found in findings:
        if current().json:
            words.say(words.as_json({"type": "finding", **found.__dict__}))
        else:
            mark = click.style("ok   ", fg="green") if found.ok else click.style("FAULT", fg="red", bold=True)
            words.say(f"{mark} {found.topic:14} {words.clean(found.says)}")
            if not found.ok and found.remedy:
                words.say(f"      {'next:':14} {found.remedy}")
    return 0 if all(found.ok for found in findings) else 1


def _python() -> Iterator[Finding]:
    yield Finding("gpuchange", True, f"{gpuchange.__version__} on Python {sys.version.split()[0]} ({sys.executable})")
    fit = sqlite3.sqlite_version_info >= (3, 22)
    yield Finding("sqlite", fit, sqlite3.sqlite_version, "use a Python built with SQLite 3.22 or newer")


def _packages() -> Iterator[Finding]:
    for name, least in _PACKAGES:
        wanted = ".".join(map(str, least))
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding(name, False, "missing", f"pip install '{name}>={wanted}'")
            continue
        fit = tuple(int(part) for part in version.split(".")[:2]) >= least
        yield Finding(name, fit, version, f"pip install '{name}>={wanted}'")


def _tools() -> Iterator[Finding]:
    for tool, package in (
        ("ssh", "openssh-client"),
        ("ansible-playbook", "ansible-core"),
        ("ansible-inventory", "ansible-core"),
    ):
        beside = Path(sys.executable).with_name(tool)
        place = str(beside) if beside.exists() else shutil.which(tool)
        yield Finding(tool, bool(place), place or "not found", f"install {package}")


def _content() -> Iterator[Finding]:
    try:
        place = content.playbooks()
        yield Finding("playbooks", True, f"{place} (sha256 {content.digest(place)[:12]})")
    except GpuchangeError as error:
        yield Finding("playbooks", False, error.what, error.remedy)


def _state() -> Iterator[Finding]:
    root = current().root
    existing = next(path for path in (root, *root.parents) if path.exists())
    yield Finding("state", os.access(existing, os.W_OK), str(root), "choose a writable --state-dir (GPUCHANGE_STATE)")
    open_to_all = root.exists() and root.stat().st_mode & 0o022 != 0
    if open_to_all:
        yield Finding("state", False, f"others may write to {root}", f"chmod go-w {root}")


def _ansible_settings() -> Iterator[Finding]:
    """Which ansible.cfg counts here: we respect it, except where a change must not depend on it."""
    tool = Path(sys.executable).with_name("ansible-config")
    command = str(tool) if tool.exists() else shutil.which("ansible-config")
    if not command:
        return
    done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60)
    line = next((line.strip() for line in done.stdout.splitlines() if "config file" in line), "config file = None")
    yield Finding("ansible.cfg", True, f"{line}; overridden: host key checking on, ssh retries 0, strategy free")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (_python, _packages, _tools, _content, _state, _ansible_settings)
