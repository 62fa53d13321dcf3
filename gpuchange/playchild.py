"""The child process of one play: the only door to ansible_runner.

Reads one request (JSON) from standard input, plays it, and writes one JSON line per fact to its original standard
output: {"evidence": …} the moment a host's report arrives, and {"end": …} at last. Whatever else is printed goes to
standard error. The parent builds the environment; this process adds nothing to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

WORST = ("unknown", "not_done", "running", "done")
MESSAGE_LIMIT = 4000
REDACTED = b"********"
CRASHES = {4, 6, 7, 8, 9, 11}  # ILL, ABRT, BUS, FPE, KILL (out of memory), SEGV


def unsafe(value: Any) -> Any:
    """`value` with every string marked so that Ansible never templates it (also where a plan holds Jinja)."""
    if isinstance(value, str):
        return {"__ansible_unsafe": value}
    if isinstance(value, Mapping):
        return {key: unsafe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [unsafe(item) for item in value]
    return value


def _items(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The results of a loop. A module may return anything under this name as well."""
    found = result.get("results")
    return [item if isinstance(item, dict) else {} for item in found] if isinstance(found, list) else []


def merged(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """The report in a task result; a loop's reports become one: its state is the worst, `parts` holds each."""
    if isinstance(result.get("report"), dict):
        return dict(result["report"])
    items = _items(result)
    parts = [item["report"] for item in items if isinstance(item.get("report"), dict)]
    if not parts or len(parts) != len(items):
        return None
    worst = min(parts, key=lambda part: WORST.index(part["state"]) if str(part.get("state")) in WORST else 0)
    return {
        "state": worst.get("state"),
        "why": worst.get("why", ""),
        "changed": any(p.get("changed") for p in parts),
        "parts": parts,
    }


def _culprit(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a loop, the item that went wrong; else the result itself."""
    wrong = [item for item in _items(result) if item.get("failed") or item.get("unreachable")]
    return wrong[0] if wrong else result


TRACEBACK = "Traceback (most recent call last)"
REMEDIES = {
    "Missing sudo password": "sudo asks for a password: give it with -K, or allow sudo without one (see: gpuchange "
    "doctor --sudoers)",
    "Incorrect sudo password": "sudo refused the password: give the right one with -K",
    "a password is required": "sudo asks for a password: give it with -K",
    "waiting for privilege escalation prompt": "sudo asks in words of its own, or hangs: try `sudo true` there",
    "is not in the sudoers file": "the account may not use sudo: see gpuchange doctor --sudoers, or log in with -u",
    "is not allowed to execute": "the account's sudo rights are too few: see gpuchange doctor --sudoers",
    "may not run sudo": "the account may not use sudo: see gpuchange doctor --sudoers, or log in with -u",
}
"""Words of sudo and Ansible → what to do next."""


def _without_traceback(text: str) -> str:
    """What a program said; of a Python traceback, as of a module cut off by a reboot, the last line alone."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip() if TRACEBACK in text else "\n".join(lines)


def _message(result: Mapping[str, Any]) -> str:
    source = _culprit(result)
    said = str(source.get("msg") or "")
    parts = (source.get("module_stderr"), source.get("stderr"), source.get("module_stdout") if "MODULE" in said else "")
    extra = next((text for part in parts if (text := _without_traceback(str(part or "")))), "")
    text = "\n".join(part for part in (said, extra) if part)[:MESSAGE_LIMIT] or "the task failed without a message"
    hint = next((remedy for words, remedy in REMEDIES.items() if words in text), "")
    return f"{text} ({hint})" if hint else text


def _garbled(result: Mapping[str, Any]) -> bool:
    """The module ran, but what came back is no result (killed, or noise around it): it may have done its work."""
    source = _culprit(result)
    return "module_stdout" in source and "deserialization failed" in str(source.get("msg", ""))


def _where(data: Mapping[str, Any], host: str) -> str:
    """The machine that spoke: the delegate of the (failing) item, else the host."""
    source = _culprit(data.get("res") or {})
    vars_ = source.get("_ansible_delegated_vars")
    delegated = vars_ if isinstance(vars_, dict) else {}
    name = delegated.get("ansible_delegated_host") or (source.get("item") if source.get("unreachable") else None)
    return name if isinstance(name, str) else host


def evidence(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """What one runner event says about its host, or None. Pure."""
    data = event.get("event_data") or {}
    host, result, kind = data.get("host"), data.get("res") or {}, event.get("event")
    if not host:
        return None
    if kind == "runner_on_ok" and data.get("task") == "report":
        report = merged(result)
        if report is not None:
            return {"kind": "reported", "host": host, "where": _where(data, host), "report": report}
    if kind == "runner_on_failed" and _garbled(result):
        return {"kind": "silent", "host": host, "why": f"module output not parsable: {_message(result)}"}
    if kind == "runner_on_failed" and not data.get("ignore_errors"):
        return {
            "kind": "failed",
            "host": host,
            "where": _where(data, host),
            "why": _message(result),
            "refused": _culprit(result).get("refused"),
        }
    if kind == "runner_on_unreachable":
        return {"kind": "unreachable", "host": host, "where": _where(data, host), "why": _message(result)}
    return None


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _crashed(pid: int) -> bool:
    """Whether `pid` is dead by one of CRASHES, not yet waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return False
    return fields[0] == "Z" and int(fields[49]) & 0x7F in CRASHES


def worker_crashed() -> bool:
    """Whether a worker of our ansible-playbook was killed: under the strategy `free` Ansible waits for it for ever."""
    return any(_crashed(worker) for playbook in _children(os.getpid()) for worker in _children(playbook))


def hand_over(secret: str, place: Path) -> None:
    """Make Ansible read the become password from a pipe at `place`: it lies in no file, no argument, no environment."""
    os.mkfifo(place, 0o600)
    os.environ["ANSIBLE_BECOME_PASSWORD_FILE"] = str(place)

    def write() -> None:
        with contextlib.suppress(OSError), open(place, "w", encoding="utf-8") as pipe:  # waits for the reader
            pipe.write(secret + "\n")

    threading.Thread(target=write, daemon=True).start()


@contextlib.contextmanager
def redacted_output(secret: str) -> Iterator[None]:
    """What is printed meanwhile (the log of the play) goes through a pipe that takes `secret` out of every line."""
    if not secret:
        yield
        return
    log, (reader, writer) = os.dup(2), os.pipe()

    def copy() -> None:
        with open(reader, "rb") as lines:
            for line in lines:
                os.write(log, line.replace(secret.encode(), REDACTED))

    copying = threading.Thread(target=copy, daemon=True)
    copying.start()
    for standard in (1, 2):
        os.dup2(writer, standard)
    os.close(writer)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for standard in (1, 2):
            os.dup2(log, standard)
        copying.join(5.0)


def play(request: Mapping[str, Any], say: Any) -> None:
    """Run one playbook and `say` its evidence as it comes."""
    import ansible_runner

    stats: dict[str, Any] = {}

    def on_event(event: dict[str, Any]) -> bool:
        fact = evidence(event)
        if fact is not None:
            say({"evidence": fact})
        if event.get("event") == "playbook_on_stats":
            stats.update(event.get("event_data") or {})
        return False  # events live in the stream, not in thousands of files

    private = Path(request["private_dir"])
    if request.get("become_password") is not None:
        hand_over(str(request["become_password"]), private / "become")
    limit = private / "limit"
    limit.write_text("\n".join(request["hosts"]) + "\n")
    runner = ansible_runner.run(
        private_data_dir=str(private),
        ident=request["ident"],
        playbook=request["playbook"],
        inventory=request["inventory"],
        limit=f"@{limit}",
        extravars=request["extravars"],
        cmdline=request["cmdline"] or None,
        forks=request["forks"],
        quiet=False,
        settings={"suppress_output_file": True},  # the same text goes to our own log, bounded and redacted
        verbosity=request["verbosity"] or None,
        event_handler=on_event,
        cancel_callback=worker_crashed,
    )
    wanted = ("ok", "failures", "dark")
    say({"end": {"rc": runner.rc, "status": runner.status, "stats": {key: stats.get(key) for key in wanted if stats}}})


def main() -> None:
    os.umask(0o077)
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)

    def say(fact: dict[str, Any]) -> None:
        try:
            out.write(json.dumps(fact, ensure_ascii=True) + "\n")
        except BrokenPipeError:  # the engine is gone; its successor will probe
            os._exit(75)

    request = json.load(sys.stdin)
    with redacted_output(str(request.get("become_password") or "")):
        play(request, say)


if __name__ == "__main__":
    main()
