"""The table of verbs and the group that loads each one only when it is called."""

from __future__ import annotations

import importlib
from typing import Any

import click

import gpuchange
from gpuchange.cli.settings import common
from gpuchange.errors import WORST_FIRST

VERBS: dict[str, tuple[str, str]] = {
    "init": ("gpuchange.cli.plans:init", "Write a commented plan to start from."),
    "validate": ("gpuchange.cli.plans:validate", "Check a plan file; needs no host."),
    "plan": ("gpuchange.cli.apply:plan", "Show what apply would do, reading the real hosts (apply --dry-run)."),
    "apply": ("gpuchange.cli.apply:apply", "Carry a plan out, host by host."),
    "approve": ("gpuchange.cli.bundles:approve", "Show a reviewed bundle and sign it."),
    "verify": ("gpuchange.cli.apply:verify", "Compare hosts with a plan; change nothing."),
    "resume": ("gpuchange.cli.going:resume", "Go on with a change that was cut short."),
    "rollback": ("gpuchange.cli.going:rollback", "Take a change back, with proof."),
    "resolve": ("gpuchange.cli.going:resolve", "Answer for a host that waits for a human."),
    "confirm": ("gpuchange.cli.going:confirm", "Say that what a host waited for was done by hand."),
    "pause": ("gpuchange.cli.going:pause", "Let what runs finish, start nothing more."),
    "abort": ("gpuchange.cli.going:abort", "End a change: hosts not yet begun are left as they are."),
    "unlock": ("gpuchange.cli.unlocking:unlock", "Show which change owns hosts, or take its markers away."),
    "status": ("gpuchange.cli.seeing:status", "Where each host of a change stands."),
    "list": ("gpuchange.cli.seeing:list_changes", "The changes kept here, newest first."),
    "show": ("gpuchange.cli.seeing:show", "A change's events, one line each."),
    "report": ("gpuchange.cli.report:report", "Write a change up: Markdown, HTML or JSON."),
    "audit": ("gpuchange.cli.audit:audit", "Check that a journal was not altered; print its head."),
    "doctor": ("gpuchange.cli.doctor:doctor", "Check this machine: versions, tools, settings."),
    "schema": ("gpuchange.cli.plans:schema", "Print the JSON Schema of plan files."),
    "compat": ("gpuchange.cli.compat:compat", "Which driver, CUDA, cuDNN, cards and frameworks go together."),
    "providers": ("gpuchange.cli.plans:providers", "List phases and the providers of each."),
    "lab": ("gpuchange.cli.lab:lab", "A fleet of simulated GPU hosts on this machine."),
}
"""Verb → (module:attribute, one line of help). The help stands here so that --help loads no verb."""

EXIT_CODES: tuple[tuple[int, str], ...] = (
    (0, "everything is as wanted; or an ordered rollback is proved"),
    (1, "failed before any change was made"),
    (2, "only with plan --detailed-exitcode: there is something to change"),
    (3, "failed, and rolled back with proof"),
    (4, "hosts cannot be reached"),
    (5, "a human has to decide, or it was paused: gpuchange status shows which"),
    (6, "a rollback failed or could not be proved"),
    (7, "locked: somebody else owns the change or a host; unlock found a lock"),
    (8, "refused: what was reviewed or recorded is no longer what is there, or not approved"),
    (64, "the command line, the plan or the inventory is wrong"),
    (129, "stopped because the terminal has gone (SIGHUP)"),
    (130, "stopped by Ctrl-C"),
    (143, "stopped by SIGTERM"),
)


class Verbs(click.Group):
    """A group whose commands are named in VERBS and imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, _, attribute = VERBS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS:
            ctx.fail(f"no such verb: {args[0]}{_nearest(args[0])}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, text) for verb, (_, text) in VERBS.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), text) for code, text in EXIT_CODES])
            formatter.write_text(f"When several hold, the first of {', '.join(map(str, WORST_FIRST))} counts.")


def _nearest(word: str) -> str:
    import difflib

    near = difflib.get_close_matches(word, VERBS, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _version(context: click.Context, _parameter: click.Parameter, value: Any) -> None:
    if value:
        click.echo(f"gpuchange {gpuchange.__version__}")
        context.exit()


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
@common
def group() -> None:
    """Change GPU servers host by host: rehearsed, resumable after any crash, rolled back with proof."""
