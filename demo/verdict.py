"""What the demo shows: reads the two load summaries and the change's events, prints them side by side, judges.

    verdict.py CONTROL.json CHANGE.json EVENTS.jsonl EXIT_CODE

EVENTS.jsonl is the output of `gpuchange show --json`. Exit 0 only if all that the demo promises is true.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LEAVES = {("drain", "do"), ("release", "undo")}
RETURNS = {("release", "do"), ("drain", "undo")}


def most_out(events: Iterable[dict[str, Any]]) -> tuple[int, int]:
    """(hosts ever out of service, the most at one moment): out from the intent to drain until release is accepted."""
    out: set[str] = set()
    ever: set[str] = set()
    most = 0
    for event in events:
        way = (event.get("phase"), event.get("direction"))
        if event.get("kind") == "started" and way in LEAVES:
            out.add(event["host"])
        elif event.get("kind") == "accepted" and way in RETURNS and event["provider"] == "haproxy":
            out.discard(event["host"])
        ever |= out
        most = max(most, len(out))
    return len(ever), most


def main(control_file: str, change_file: str, events_file: str, code: str) -> int:
    control, change = (json.loads(Path(name).read_text()) for name in (control_file, change_file))
    hosts, most = most_out(json.loads(line) for line in Path(events_file).read_text().splitlines())
    rows = (
        ("", "reboot without drain", "gpuchange apply"),
        ("client at work for", f"{control['seconds']:.0f} s", f"{change['seconds']:.0f} s"),
        ("requests", control["ok"] + control["failed"], change["ok"] + change["failed"]),
        ("  a second", control["per_second"], change["per_second"]),
        ("  streams of 5 s", *(each["streams_ok"] + each["streams_failed"] for each in (control, change))),
        ("FAILED REQUESTS", control["failed"], change["failed"]),
        ("hosts changed", "1 (rebooted only)", hosts),
        ("most out at once", 1, f"{most} (by the journal)"),
        ("exit code", "", code),
    )
    for name, left, right in rows:
        print(f"{name:20} {left!s:>22} {right!s:>22}".rstrip())
    broken = [
        why
        for true, why in (
            (code == "0", f"the change ended with exit {code}"),
            (hosts > 0, "no host was changed"),
            (most == 1, f"{most} hosts were out at once"),
            (change["failed"] == 0, f"{change['failed']} requests failed during the change"),
            (change["per_second"] >= 50, "the client was too slow to prove anything"),
            (change["streams_ok"] > 0, "no stream ran during the change"),
            (control["failed"] > 0, "the control run saw no failure: the client proves nothing"),
        )
        if not true
    ]
    print()
    print("\n".join(f"NOT SHOWN: {why}" for why in broken) or "shown: a new stack on every host, no request failed")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
