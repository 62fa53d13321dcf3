"""What holds for every verb: where changes are kept, and how to talk. Usable before and after the verb."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from gpuchange.cli import words

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass
class Settings:
    """`root` holds one directory a change; `given`: as the command line names it; `spoke`: a JSON line is out."""

    root: Path
    json: bool = False
    yes: bool = False
    spoke: bool = False
    given: str = ""


def default_root() -> Path:
    """/var/lib/gpuchange/changes for root, $XDG_STATE_HOME/gpuchange for everybody else."""
    if os.geteuid() == 0:
        return Path("/var/lib/gpuchange/changes")
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if os.path.isabs(state) else Path.home() / ".local/state") / "gpuchange"


def current() -> Settings:
    """The settings of the running command line."""
    settings = click.get_current_context().find_object(Settings)
    assert settings is not None, "every verb carries @common"
    return settings


def _keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    settings = context.ensure_object(Settings) if context.obj else Settings(default_root())
    context.obj = context.find_root().obj = settings
    if parameter.name == "no_color":
        words.use_colour(context.find_root(), wanted=not value and context.find_root().color is not False)
        context.color = context.find_root().color
    elif value and parameter.name == "root":
        _keep_root(context, settings, str(value))
    elif value:
        setattr(settings, str(parameter.name), value)


def _keep_root(context: click.Context, settings: Settings, value: str) -> None:
    """What the command line names, before or after the verb, counts more than the environment."""
    named = context.get_parameter_source("root") is ParameterSource.COMMANDLINE
    if named or not settings.given:
        settings.root, settings.given = Path(value).absolute(), value if named else ""


_OPTIONS = (
    click.option(
        "--state-dir",
        "root",
        metavar="DIR",
        envvar="GPUCHANGE_STATE",
        show_envvar=True,
        type=click.Path(file_okay=False),
        help="Where changes are kept (root: /var/lib/gpuchange/changes, else $XDG_STATE_HOME/gpuchange).",
        expose_value=False,
        callback=_keep,
        is_eager=True,
    ),
    click.option("--json", is_flag=True, help="Machine output on stdout.", expose_value=False, callback=_keep),
    click.option("--yes", is_flag=True, help="Ask nothing.", expose_value=False, callback=_keep),
    click.option(
        "--no-color", is_flag=True, help="No colour (also NO_COLOR).", expose_value=False, callback=_keep, is_eager=True
    ),
)


def common(command: Command) -> Command:
    """Gives a verb the options that hold for every verb."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
