"""A Preview as text: per host what would change, how long it would be out, what cannot be taken back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from gpuchange.cli import words
from gpuchange.preview import HostPreview, Preview

_SIGN = {"+": "green", "~": "yellow", "!": "red", "=": None}


def preview_text(preview: Preview, next_command: str) -> str:
    lines = [words.heading(f"{words.clean(preview.name)}: {len(preview.hosts)} host(s)"), ""]
    for host in preview.hosts:
        lines += [*_host(host), ""]
    return "\n".join([*lines, *_footer(preview, next_command)])


def _host(host: HostPreview) -> Iterator[str]:
    yield words.heading(words.clean(host.host)) + (" as wanted already: nothing to do" if host.as_wanted else "")
    for version in host.versions:
        yield _version(version.component, version.before, version.after, version.changes)
    for problem in host.problems:
        yield _signed("!", problem)
    if host.as_wanted or host.problems:
        return
    for step in host.steps:
        for line in step.lines:
            yield f"    {step.phase}/{step.provider}: {words.clean(line)}"
    yield f"    out of service for about {words.duration(host.downtime_s)} (estimate)"
    yield from _no_return(host)


def _version(component: str, before: str, after: str, changes: bool) -> str:
    if not changes:
        return _signed("=", f"{component:18} {before or 'absent'}")
    return _signed("~" if before else "+", f"{component:18} {before or 'absent'} → {after}")


def _signed(sign: str, text: str) -> str:
    return click.style(f"  {sign} {words.clean(text)}" if sign == "!" else f"  {sign} {text}", fg=_SIGN[sign])


def _no_return(host: HostPreview) -> Iterator[str]:
    if not host.no_return:
        yield "    reversible: yes, every step can be taken back"
    for reason in host.no_return:
        yield _signed("!", f"point of no return: {reason}")


def _footer(preview: Preview, next_command: str) -> Iterator[str]:
    steps = dict.fromkeys(f"{step.phase}/{step.provider}" for host in preview.hosts for step in host.steps)
    count, total = len(preview.to_change), len(preview.hosts)
    yield f"steps:     {', '.join(steps)}"
    staying = max(0, total - preview.at_once)
    yield f"capacity:  at most {preview.at_once} out at once: {staying} of {total} stay in service"
    if preview.problems:
        yield words.heading("not ready: ") + f"{sum(bool(h.problems) for h in preview.hosts)} host(s) with problems"
    else:
        yield words.heading(f"{count} to change, {total - count} as wanted already")
    yield f"next:      {next_command}"


def preview_json(preview: Preview) -> dict[str, Any]:
    """The preview as one JSON object."""
    return {
        "type": "preview",
        "name": preview.name,
        "at_once": preview.at_once,
        "to_change": [host.host for host in preview.to_change],
        "hosts": [_host_json(host) for host in preview.hosts],
    }


def _host_json(host: HostPreview) -> dict[str, Any]:
    return {
        "host": host.host,
        "as_wanted": host.as_wanted,
        "downtime_s": host.downtime_s,
        "versions": {v.component: {"before": v.before, "after": v.after or v.before} for v in host.versions},
        "steps": [{"step": f"{s.phase}/{s.provider}", "lines": list(s.lines)} for s in host.steps],
        "problems": list(host.problems),
        "no_return": list(host.no_return),
    }
