"""A Preview as text: per host what would change, how long it would be out, what cannot be taken back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import click

from gpuchange.cli import words
from gpuchange.preview import HostPreview, Preview
from gpuchange.providers.contract import WARNING

_SIGN = {"+": "green", "~": "yellow", "!": "red", "=": None}


def preview_text(preview: Preview, next_command: str) -> str:
    lines = [words.heading(f"{words.clean(preview.name)}: {len(preview.hosts)} host(s)"), ""]
    for alike in _groups(preview.hosts):
        lines += [*_host(alike), ""]
    return "\n".join([*lines, *_footer(preview, next_command)])


def _groups(hosts: Sequence[HostPreview]) -> Iterator[list[HostPreview]]:
    """Hosts to which the same would happen, together: a fleet of a hundred is read in one screen."""
    groups: dict[tuple[object, ...], list[HostPreview]] = {}
    for host in hosts:
        said = tuple(_without_names(host.host, line) for line in (*host.problems, *_said(host)))
        key = (host.versions, host.as_wanted, host.no_return, said)
        groups.setdefault(key, []).append(host)
    yield from groups.values()


def _without_names(host: str, line: str) -> str:
    return re.sub(r"\bpid \d+|\d+ sessions? open", "", line.replace(host, ""))


def _said(host: HostPreview) -> list[str]:
    """What the steps say, each line once (at the last step that says it), without what the head shows already."""
    known = {f"{version.component.replace('_', ' ')}: {version.before}" for version in host.versions}
    lines = {line: step for step in host.steps for line in step.lines if line not in known}
    return [f"{step.phase}/{step.provider}: {line}" for line, step in lines.items()]


def _host(alike: Sequence[HostPreview]) -> Iterator[str]:
    host = alike[0]
    names = words.clean(", ".join(one.host for one in alike))
    yield words.heading(names) + (": as wanted already, nothing to do" if host.as_wanted else "")
    for version in host.versions:
        yield _version(version.component, version.before, version.after, version.changes)
    if host.problems and not host.versions:
        yield "    versions: not known, nothing of it could be read"
    for problem in host.problems:
        yield _signed("!", words.clean(problem))
    if host.as_wanted or host.problems:
        return
    for line in _said(host):
        text = f"    {words.clean(line)}"
        yield click.style(text, fg="yellow") if line.partition(": ")[2].startswith(WARNING) else text
    how = "as in earlier changes" if host.learned else "estimate"
    yield f"    out of service for about {words.duration(host.downtime_s)} each ({how})"
    yield from _no_return(host)


def _version(component: str, before: str, after: str, changes: bool) -> str:
    component, before, after = (words.clean(text) for text in (component, before, after))
    if not changes:
        return _signed("=", f"{component:18} {before or 'absent'}")
    return _signed("~" if before else "+", f"{component:18} {before or 'absent'} → {after}")


def _signed(sign: str, text: str) -> str:
    return click.style(f"  {sign} {text}", fg=_SIGN[sign])


def _no_return(host: HostPreview) -> Iterator[str]:
    if not host.no_return:
        yield "    reversible: yes, every step can be taken back"
    for reason in host.no_return:
        yield _signed("!", f"point of no return: {words.clean(reason)}")


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
