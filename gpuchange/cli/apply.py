"""Verbs that begin from a plan: plan, apply, verify."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuchange.cli import asking, words
from gpuchange.cli.flags import ansible_flags, connection
from gpuchange.cli.settings import common, current
from gpuchange.errors import UsageError

if TYPE_CHECKING:
    from gpuchange.change import Connection
    from gpuchange.looking import Looks
    from gpuchange.preview import Preview

CHANGES_PRESENT = 2
PLAN = click.argument("plan_path", metavar="PLAN", type=click.Path(path_type=Path))


@click.command()
@PLAN
@click.option("--detailed-exitcode", is_flag=True, help="Exit 2 when there is something to change.")
@ansible_flags
@common
def plan(plan_path: Path, detailed_exitcode: bool, **flags: Any) -> int:
    """Show per host what `apply` would do. Reads the real hosts, changes nothing."""
    seen, code = looked(plan_path, connection(**flags))
    return code or (CHANGES_PRESENT if detailed_exitcode and seen.to_change else 0)


@click.command()
@PLAN
@click.option(
    "--accept-irreversible",
    metavar="HOST",
    multiple=True,
    help="Change this host though it cannot be taken back (an old package is nowhere to be had).",
)
@click.option("--dry-run", "-C", is_flag=True, help="Only show what would be done (the verb plan).")
@ansible_flags
@common
def apply(plan_path: Path, dry_run: bool, **flags: Any) -> int:
    """Carry PLAN out host by host: preview, question, then live progress."""
    reach = connection(**flags)
    if dry_run:
        return looked(plan_path, reach)[1]
    from gpuchange import change

    home = change.create(current().root, plan_path, reach)
    try:
        return asking.carry(home, reach, f"gpuchange plan {plan_path}")
    except (click.Abort, UsageError):
        shutil.rmtree(home)  # refused before anything was changed: there is nothing to come back to
        raise


@click.command()
@PLAN
@ansible_flags
@common
def verify(plan_path: Path, **flags: Any) -> int:
    """Compare the hosts with PLAN, as preflight finds them; change nothing. Exit 1 where they differ."""
    seen, code = looked(plan_path, connection(**flags))
    different = [host.host for host in seen.hosts if not host.as_wanted]
    if different and not code:
        words.warn(f"not as the plan wants: {words.clean(', '.join(different))}")
    return code or (1 if different else 0)


def looked(plan_path: Path, reach: Connection) -> tuple[Preview, int]:
    """Looks at the hosts, prints the preview and returns it with the exit code of looking (0 = nothing in the way)."""
    from gpuchange import plan as plans

    looks = _dry_run(plan_path, reach)
    shown = asking.show(plans.load(plan_path), looks, f"gpuchange plan {plan_path}", f"gpuchange apply {plan_path}")
    return shown, looks.code


def _dry_run(plan_path: Path, reach: Connection) -> Looks:
    """Preflight and every probe, in a change that lives in a temporary directory."""
    if not current().json:
        words.warn("looking at the hosts; nothing is changed")
    from gpuchange import change
    from gpuchange.engine import Engine
    from gpuchange.looking import look

    with tempfile.TemporaryDirectory(prefix="gpuchange-look-") as scratch:
        engine = Engine(change.create(Path(scratch), plan_path, reach), reach)
        try:
            return look(engine)
        finally:
            engine.close()
