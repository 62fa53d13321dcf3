"""Stands in front of ansible-playbook: announces the play that is about to start, waits for a go, then becomes it.

Copied as `<home>/bin/ansible-playbook`. It writes `<home>/gates/<attempt>.json` {"step", "tasks", "attempt", "pid",
"child", "beside"} and waits until `<attempt>.go` is there. `child`: the play's process that called it; `beside`:
processes of the same change's earlier controllers that are alive.
"""

import json
import os
import sys
import time

HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
GATES = os.path.join(HOME, "gates")
PATIENCE_S = 1200.0


def asked():
    """The extra variables that ansible-runner hands over, as plain text; {} for a call that is no play of a change."""
    for word in sys.argv[1:]:
        if word.startswith("@") and word.endswith("/extravars"):
            with open(word[1:], encoding="utf-8") as file:
                return plain(json.load(file))
    return {}


def plain(value):
    if isinstance(value, dict):
        return value["__ansible_unsafe"] if "__ansible_unsafe" in value else {k: plain(v) for k, v in value.items()}
    return value


def beside(attempt):
    """Attempts of other controllers of the same change among the processes of this machine."""
    change, _, number = attempt.partition("/")
    mine, found = f"{change}/{number.partition('.')[0]}.", []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                variables = file.read().decode("utf-8", "replace").split("\0")
        except OSError:
            continue
        theirs = next((v[18:] for v in variables if v.startswith("GPUCHANGE_ATTEMPT=" + change + "/")), mine)
        if not theirs.startswith(mine):
            found.append(f"{name} {theirs}")
    return found


def announce(fact):
    path, deadline = os.path.join(GATES, fact["attempt"].replace("/", "-")), time.monotonic() + PATIENCE_S
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(fact, file)
    os.rename(path + ".new", path + ".json")
    while not os.path.exists(path + ".go"):
        if time.monotonic() > deadline:
            sys.exit(f"nobody let this play go within {PATIENCE_S:g} s")
        time.sleep(0.02)


def main():
    variables = asked()
    if variables:
        step, attempt = variables.get("gpuchange_step") or {}, os.environ.get("GPUCHANGE_ATTEMPT", "")
        announce(
            {
                "step": f"{step['phase']}/{step['provider']}" if step else variables["gpuchange_role"],
                "tasks": variables["gpuchange_tasks"],
                "attempt": attempt,
                "pid": os.getpid(),
                "child": os.getppid(),
                "beside": beside(attempt),
            }
        )
    real = os.path.join(HOME, "real", "ansible-playbook")
    os.execv(real, [real, *sys.argv[1:]])


main()
