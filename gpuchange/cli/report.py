"""The verb report: a change written up for people who were not there, or for programs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import click

from gpuchange.cli import changes, measured, plot, running, story, words
from gpuchange.cli.settings import common, current
from gpuchange.errors import UsageError


@dataclass(frozen=True)
class Section:
    """A heading with a table (`head` and `rows` of text) below it."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@click.command()
@click.argument("change", required=False)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="A .md, .html or .json file; else to stdout.")
@common
def report(change: str | None, output: Path | None) -> None:
    """Write CHANGE (default: the latest) up: hosts, versions, times, proof of rollback, every event."""
    found = changes.read(changes.find(current().root, change))
    suffix = output.suffix if output else (".json" if current().json else ".md")
    if suffix not in WRITERS:
        raise UsageError(
            f"a report cannot be written as {suffix or 'that'}", remedy="end the name in .md, .html or .json"
        )
    text = WRITERS[suffix](found)
    if output is None:
        words.say(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write: {error.strerror}", where=str(output), remedy="choose another place") from None
    words.say(f"wrote {output}")


def sections(found: changes.Change) -> tuple[Section, ...]:
    count, head = changes.verify(found.directory)
    facts = (
        ("change", found.id),
        ("plan", found.name),
        ("began", words.clock(found.began, day=True)),
        ("stands", found.outcome),
        ("journal", f"{count} events, chain whole, head {head}"),
    )
    hosts = tuple(tuple(map(str, row)) for row in running.summary_rows(found))
    events = tuple((str(e.seq), words.clock(e.at, day=True), story.sentence(e)) for e in found.events)
    return (
        Section("Change", ("what", "value"), facts),
        Section("Hosts", running.SUMMARY_HEAD, hosts),
        *(part for part in (_findings(found, *kind) for kind in FINDINGS) if part.rows),
        *(part for part in (Section(SPEED, measured.HEAD, measured.rows(measured.speeds(found))),) if part.rows),
        Section("Events", ("no.", "time", "event"), events),
    )


FINDINGS = (("Proof of rollback", "undo"), ("What was found", "do"))
"""(title, direction): going back, a finding is a line of the comparison that proves the rollback."""


SPEED = "Speed before and after"


def _findings(found: changes.Change, title: str, direction: str) -> Section:
    return Section(title, ("host", "step", "line"), tuple(changes.findings(found, direction)))


def _markdown(found: changes.Change) -> str:
    parts = [f"# gpuchange: {_cell(found.name)}"]
    for section in sections(found):
        rows = [section.head, tuple("---" for _ in section.head), *section.rows]
        parts += [f"## {section.title}", "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in rows)]
    return "\n\n".join(parts) + "\n"


_MARKDOWN = re.compile(r"[\\`*_\[\]!|~#]")


def _cell(text: str) -> str:
    """Text as Markdown that shows it as it is: no link, image or tag of a host's making comes alive."""
    return _MARKDOWN.sub(r"\\\g<0>", escape(words.clean(text), quote=False)).replace("://", "&#58;//")


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; margin-bottom: 2rem; }}
th, td {{ text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #ccc; vertical-align: top; }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def _html(found: changes.Change) -> str:
    parts = {section.title: _html_section(section) for section in sections(found)}
    if SPEED in parts:
        parts[SPEED] += _plots(found)
    body = "\n".join(parts.values())
    return _PAGE.format(title=escape(f"gpuchange: {words.clean(found.name)}"), body=body)


def _plots(found: changes.Change) -> str:
    drawn = {host: plot.chart(findings, words.clean) for host, findings in measured.speeds(found).items()}
    return "".join(f"\n<h3>{escape(words.clean(host))}</h3>\n{svg}" for host, svg in drawn.items() if svg)


def _html_section(section: Section) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in section.head)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{escape(words.clean(cell))}</td>" for cell in row) + "</tr>" for row in section.rows
    )
    return f"<h2>{escape(section.title)}</h2>\n<table><tr>{head}</tr>\n{rows}</table>"


def _json(found: changes.Change) -> str:
    fields: dict[str, Any] = {**changes.as_json(found), "type": "report"}
    fields["events"] = [changes.event_fields(event) for event in found.events]
    return words.as_json(fields, indent=2) + "\n"


WRITERS: dict[str, Callable[[changes.Change], str]] = {".md": _markdown, ".html": _html, ".json": _json}
