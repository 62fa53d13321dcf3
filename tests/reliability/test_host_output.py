"""What hosts say is hostile: no escape, link, markup or direction character of theirs gets out."""

from __future__ import annotations

import io
import json
import re
import sys
import unicodedata
from contextlib import redirect_stderr, redirect_stdout
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import made_changes

from gpuchange.cli import live, main, render, story, words
from gpuchange.history import History
from gpuchange.preview import HostPreview, Preview, StepPreview, Version
from gpuchange.states import Event, Kind
from reliability.figures import Figures, Row

ROW = Row(
    "What a host says reaches terminal, NDJSON and reports as plain text only",
    peer="Ansible prints a task's output as it came, escape sequences included",
    source="ansible-core 2.19, callback plugin default",
)

HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07", "\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\", "[red]x[/red]",
    "[link=http://evil.example]x[/link]", "\u202egnp.exe", "a\u2066b\u2069", "\x9b31mred", "line\r\x1b[1Aerased",
    "![x](http://evil.example/x.png)", "[x](javascript:alert(1))", "<script>alert(1)</script>", "a|b|c", "`x`",
    "</td><img src=x onerror=alert(1)>", "\x00\x07\x08", "\ufeffx\u200b\u00ad\u061c", "\U000e0041\U000e007f",
    "next: rm -rf /\n  next:  rm -rf /", "http://evil.example/track", "\ud800", "{{ 7*7 }}", "# heading",
    "\x1bP+q\x1b\\", "\x1b_x\x1b\\", "\u2028\u2029", "%n%s", "\\", "[/]", "*b* _i_ ~s~",
)  # fmt: skip
FORBIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def unseen(text: str) -> list[str]:
    """Characters that move a terminal or hide text; tab, line feed and our own colours are none."""
    bare = re.sub(r"\x1b\[[0-9;]{1,8}m", "", text)
    return [hex(ord(char)) for char in bare if unicodedata.category(char) in FORBIDDEN and char not in "\n\t"]


def test_every_control_and_format_character_of_unicode_is_taken_out(figures: Figures) -> None:
    for code in range(sys.maxunicode + 1):
        if unicodedata.category(chr(code)) in FORBIDDEN and chr(code) not in "\n\t":
            figures.tried += 1
            if words.clean(f"a{chr(code)}b", keep_lines=True) not in ("ab", "a"):
                figures.broken.append(hex(code))


# -- what is shown ----------------------------------------------------------------------------------------------------


def printed(*args: str) -> str:
    """What a command line writes to both streams."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        main(args)
    return out.getvalue()


def told(root: Path, text: str) -> Path:
    """A change in which a host says `text` wherever it can."""
    data = {"why": text, "findings": [text, f"x {text}"], "where": text}
    events = [made_changes.CREATED, made_changes.CONTROLLER]
    events += made_changes.done("gpu1", ("preflight", "host"))
    events += [
        Event(Kind.STARTED, "gpu1", "record", "host", "do", attempt="1"),
        Event(Kind.HELD, "gpu1", "record", "host", "do", attempt="1", data=data),
        Event(Kind.NOTE, "gpu2", data={"text": text, text.encode("utf-8", "replace").decode(): "key"}),
        made_changes.ended(5),
    ]
    return made_changes.make(root, "20260101-000000-x-0000", events)


VERBS = (["status"], ["show"], ["list"], ["report"], ["status", "--json"], ["show", "--json"], ["report", "--json"])


HARMLESS = ("lang", "charset", "http-equiv", "content")


class Elements(HTMLParser):
    """The tags of a page and their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        self.seen.update(
            f"{tag} {name}" for name, _ in attrs if name not in ("lang", "charset", "http-equiv", "content")
        )


PAGE = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "table", "tr", "th", "td"}
ALIVE = re.compile(r"(?<!\\)[\[\]`]|(?<!\\)!\[|<[A-Za-z/]|[a-z]://")


def markdown_alive(text: str) -> list[str]:
    """Links, images, code, tags and addresses that a Markdown reader would bring to life."""
    return ALIVE.findall(text)


def test_verbs_and_reports_show_a_hosts_words_as_plain_text(tmp_path: Path, figures: Figures) -> None:
    for number, text in enumerate(HOSTILE):
        home = told(tmp_path / str(number), text.encode("utf-8", "replace").decode())
        for verb in VERBS:
            said = printed(*verb, "--state-dir", str(home.parent))
            figures.tried += 1
            if found := unseen(said):
                figures.broken.append(f"{verb} {text!r}: {found}")
            for line in said.splitlines() if verb == ["show", "--json"] else ():
                if found := unseen(str(json.loads(line))):
                    figures.broken.append(f"decoded {verb} {text!r}: {found}")
        for kind in (".html", ".md"):
            path = tmp_path / f"r{kind}"
            printed("report", "--state-dir", str(home.parent), "-o", str(path))
            page = path.read_text()
            figures.tried += 1
            elements = Elements()
            elements.feed(page if kind == ".html" else "")
            if unseen(page) or elements.seen - PAGE or (kind == ".md" and markdown_alive(page)):
                figures.broken.append(f"{kind} {text!r}: {elements.seen - PAGE} {markdown_alive(page)}")


def as_line(seen: Preview) -> str:
    return words.as_json(render.preview_json(seen))


def test_preview_and_live_table_show_a_hosts_words_as_plain_text(figures: Figures) -> None:
    from rich.console import Console

    for text in HOSTILE:
        step = StepPreview("preflight", "host", (text,), f"no: {text}", 1.0)
        versions = (Version("driver", text, f"{text}1"), Version(text, text, ""))
        hosts = tuple(HostPreview(text, versions, (step,), problems, False, 1.0) for problems in ((), (text,)))
        shown = render.preview_text(Preview(text, hosts, 1), "x") + str(json.loads(as_line(Preview(text, hosts, 1))))
        screen, out = live.Screen(History()), io.StringIO()
        screen._rows[text] = (text, text, "2026-01-01T00:00:00+00:00")
        Console(file=out, width=300, force_terminal=True).print(screen._table())
        event = Event(Kind.HELD, text, "record", text, "do", data={"why": text})
        figures.tried += 3
        for what, said in (("preview", shown), ("table", out.getvalue()), ("sentence", story.sentence(event))):
            if found := unseen(said):
                figures.broken.append(f"{what} {text!r}: {found}")
        if "[red]" in text and "[red]" not in out.getvalue():
            figures.broken.append("markup was taken for colour")


def test_this_test_can_fail() -> None:
    assert not unseen("plain\t\n") and unseen("\x1b[2J") and unseen("\u202e")
    assert markdown_alive("[x](y)") and not markdown_alive(r"\[x\](y)")
