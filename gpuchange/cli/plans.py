"""Verbs about plan files: init, validate, schema, providers. None of them touches a host."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gpuchange.cli import again, words
from gpuchange.cli.settings import common, current
from gpuchange.errors import UsageError


@click.command()
@click.argument("path", type=click.Path(path_type=Path), default="plan.yaml")
@click.option("--force", is_flag=True, help="Write over an existing file.")
@common
def init(path: Path, force: bool) -> None:
    """Write a commented plan to PATH (default plan.yaml) and its JSON Schema beside it, for editors."""
    from gpuchange import plan

    if path.exists() and not force:
        raise UsageError("the file exists already", where=str(path), remedy=again.command("init", "--force", path))
    schema = path.with_name("gpuchange.schema.json")
    for target, text in ((path, plan.template()), (schema, json.dumps(plan.json_schema(), indent=2) + "\n")):
        _write(target, text)
    words.say(f"wrote {path} and {schema.name}\nnext: edit it, then  {again.command('validate', path)}")


def _write(target: Path, text: str) -> None:
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write: {error.strerror}", where=str(target), remedy="choose another place") from None


@click.command()
@click.argument("paths", type=click.Path(path_type=Path), nargs=-1, required=True)
@common
def validate(paths: tuple[Path, ...]) -> None:
    """Check plan files: keys, types, versions, paths. Needs no host and no inventory."""
    from gpuchange import plan

    for path in paths:
        loaded = plan.load(path)
        if current().json:
            words.say(words.as_json({"type": "valid", "path": str(path), "name": loaded.name}))
        else:
            words.say(f"{path}: ok ({words.clean(loaded.name)})")


@click.command()
@common
def schema() -> None:
    """Print the JSON Schema (draft-07) of plan files."""
    from gpuchange import plan

    words.say(json.dumps(plan.json_schema(), indent=2))


@click.command()
@common
def providers() -> None:
    """List the phases in order and the providers of each."""
    from gpuchange.phases import PHASES
    from gpuchange.providers import of_phase

    rows = [(phase, provider) for phase in PHASES for provider in of_phase(phase.name)]
    if current().json:
        for phase, provider in rows:
            fields = {"phase": phase.name, "provider": provider.name, "does": provider.does}
            words.say(words.as_json({"type": "provider", **fields, "reversible": provider.reversible}))
        return
    lines = [(phase.name, provider.name, provider.does, provider.reversible) for phase, provider in rows]
    words.say(words.table(("PHASE", "PROVIDER", "DOES", "REVERSIBLE"), lines))
