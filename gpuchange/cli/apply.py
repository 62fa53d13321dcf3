"""Verbs that begin from a plan: plan, apply, verify."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuchange.cli import again, asking, bundles, words
from gpuchange.cli.flags import ansible_flags, connection
from gpuchange.cli.settings import common, current
from gpuchange.errors import UsageError

if TYPE_CHECKING:
    from gpuchange.change import Connection
    from gpuchange.preview import Preview

CHANGES_PRESENT = 2
PLAN = click.argument("plan_path", metavar="PLAN", type=click.Path(path_type=Path))


@click.command()
@PLAN
@click.option("--detailed-exitcode", is_flag=True, help="Exit 2 when there is something to change.")
@bundles.making_flags
@ansible_flags
@common
def plan(plan_path: Path, detailed_exitcode: bool, **flags: Any) -> int:
    """Show per host what `apply` would do. Reads the real hosts, changes nothing.

    With -o that is kept as a bundle, which `approve` signs and `apply` carries out only if nothing has moved.
    PLAN may be a bundle: then it is compared with what is there now.
    """
    order = bundles.order(flags)
    seen, code = looked(plan_path, connection(**flags), order)
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
@bundles.requiring_flags
@ansible_flags
@common
def apply(plan_path: Path, dry_run: bool, **flags: Any) -> int:
    """Carry PLAN out host by host: preview, question, then live progress.

    PLAN may be a bundle (plan -o): it is refused, with exit 8, when anything is not as it was reviewed.
    """
    asked, reach = bundles.policy(flags), connection(**flags)
    if dry_run:
        return looked(plan_path, reach, asked=asked)[1]
    if bundles.is_bundle(plan_path):
        return bundles.apply(plan_path, reach, asked)
    bundles.refuse_plan(plan_path, asked)
    from gpuchange import change

    home = change.create(current().root, plan_path, reach)
    try:
        return asking.carry(home, reach, again.command("plan", plan_path))
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


def looked(
    plan_path: Path,
    reach: Connection,
    order: bundles.Order | None = None,
    asked: bundles.Policy = bundles.NONE_REQUIRED,
) -> tuple[Preview, int]:
    """Looks at the hosts, prints the preview and returns it with the exit code of looking (0 = nothing in the way).

    Preflight and every probe, in a change that lives in a temporary directory; `order` keeps it as a bundle.
    """
    if not current().json:
        words.warn("looking at the hosts; nothing is changed")
    if bundles.is_bundle(plan_path):
        if order:
            raise UsageError("-o makes a bundle of a plan, not of a bundle", where=str(plan_path), remedy="name a plan")
        return bundles.look(plan_path, reach, asked)
    from gpuchange import change
    from gpuchange.engine import Engine
    from gpuchange.looking import look

    with tempfile.TemporaryDirectory(prefix="gpuchange-look-") as scratch:
        engine = Engine(change.create(Path(scratch), plan_path, reach), reach)
        try:
            looks = look(engine)
            shown = asking.show(
                engine.change.plan, looks, *(again.command(verb, plan_path) for verb in ("plan", "apply"))
            )
            if order:
                order.keep(plan_path, engine.change, shown, looks, reach)
            return shown, looks.code
        finally:
            engine.close()
