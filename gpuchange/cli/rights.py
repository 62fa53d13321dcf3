"""doctor --sudoers: what root is needed for, where, and what a sudoers file can and cannot do about it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gpuchange.cli import words
from gpuchange.cli.settings import current

if TYPE_CHECKING:
    from gpuchange.providers.contract import Provider

SUDOERS = """# /etc/sudoers.d/gpuchange (mode 0440; check it with: visudo -cf FILE), on GPU hosts and balancers:
Defaults:gpuchange !requiretty
gpuchange ALL=(root) NOPASSWD: ALL"""
LIMITS = (
    "One line gives all: sudo cannot limit Ansible to fixed commands. Its modules run as `/bin/sh -c ...` with names",
    "and text that change with every call, so a list of commands would either match nothing or match every shell.",
    'What limits the account instead: a key of its own (from="CONTROLLER",restrict in authorized_keys), the line',
    "above without NOPASSWD (then give the password with -K), and no such line on hosts that no plan changes.",
    "Without root: validate, schema, status, list, show, report, audit, resolve, pause, abort; on the controller",
    "gpuchange itself and hooks `on: controller`, which run as whoever runs gpuchange.",
    "Preflight asks sudo with the account itself, before anything is moved.",
)


def show(plan_path: Path | None) -> None:
    """Prints the steps of the plan (or of every provider) that need root, then the sudoers file and its limits."""
    rows = [
        (f"{phase}/{row.name}", row.root_on if row.root_for else "-", row.root_for or "no root needed")
        for phase, row in _steps(plan_path)
    ]
    if current().json:
        for step, where, why in rows:
            words.say(words.as_json({"type": "right", "step": step, "on": where, "root_for": why}))
        return
    words.say(words.table(("STEP", "AS ROOT ON", "FOR"), rows))
    words.say(f"\n{SUDOERS}\n")
    for line in LIMITS:
        words.say(line)


def _steps(plan_path: Path | None) -> Iterator[tuple[str, Provider]]:
    """(phase, provider) in the order in which they are played."""
    from gpuchange import plan
    from gpuchange.phases import PHASES
    from gpuchange.providers import of_phase

    loaded = plan.load(plan_path) if plan_path else None
    for phase in PHASES:
        home = phase.do.phase
        rows = [chosen.provider for chosen in loaded.chosen(home)] if loaded else list(of_phase(home))
        yield from ((phase.name, row) for row in (reversed(rows) if phase.reverse else rows))
