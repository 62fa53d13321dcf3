"""Verbs that begin from a plan: plan, apply, verify."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuchange.cli import live, render, running, words
from gpuchange.cli.flags import ansible_flags, connection
from gpuchange.cli.settings import common, current

if TYPE_CHECKING:
    from gpuchange.change import Connection
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
    return dry_run(plan_path, connection(**flags), detailed_exitcode)


@click.command()
@PLAN
@click.option("--dry-run", "-C", is_flag=True, help="Only show what would be done (the verb plan).")
@ansible_flags
@common
def apply(plan_path: Path, dry_run: bool, **flags: Any) -> int:
    """Carry PLAN out host by host: preview, question, then live progress."""
    reach = connection(**flags)
    if dry_run:
        return globals()["dry_run"](plan_path, reach, False)  # type: ignore[no-any-return]
    seen, code = look(plan_path, reach, f"gpuchange apply {plan_path}")
    if code:
        return code
    if not seen.to_change:
        words.warn("every host is as the plan wants it: nothing to do")
        return 0
    from gpuchange import change

    running.confirm(f"change {len(seen.to_change)} host(s)?")
    return running.run(change.create(current().root, plan_path, reach), reach)
