"""One package transaction on a host, run inside a host unit. Self-contained: copied into the change's state directory.

Usage: gpuchange_apt_unit.py JOB.json, with {targets, env, touched, holds, renamed, auto, new_auto, purge, fix_broken}.
Whatever happens to the transaction, holds and automatic marks are put right before this ends. Automatic upgrades are
kept away since the drain. An empty list of targets only repairs: dpkg --configure -a.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any, Iterator

APT = [
    "apt-get",
    "-y",
    "--no-install-recommends",
    "--allow-downgrades",
    "--allow-change-held-packages",
    "-oDpkg::Options::=--force-confdef",
    "-oDpkg::Options::=--force-confold",
    "-oDPkg::Lock::Timeout=300",
    "-oDpkg::Use-Pty=0",
]
HOLD_RESTORED = "hold on %s changed by this step: restored"

silent = False
"""Set by a caller whose standard output is not for words (an Ansible module)."""


def say(text: str) -> None:
    if not silent:
        print(time.strftime("%H:%M:%S "), text, sep="", flush=True)


def run(argv: list[str], env: dict[str, str] | None = None) -> int:
    say("$ " + " ".join(argv))
    out = subprocess.DEVNULL if silent else None
    return subprocess.call(
        argv, env=dict(os.environ, **(env or {})), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
    )


def output(argv: list[str]) -> str:
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    return done.stdout.decode("utf-8", "replace")


def installed() -> set[str]:
    """Names (foreign ones with their architecture as well) that dpkg holds more of than their configuration."""
    out = output(["dpkg-query", "-W", "-f=${Package} ${Architecture} ${db:Status-Status}\\n"])
    rows = [line.split() for line in out.splitlines()]
    present = [row for row in rows if len(row) == 3 and row[2] not in ("not-installed", "config-files")]
    return {row[0] for row in present} | {"%s:%s" % (row[0], row[1]) for row in present}


def wanted_holds(holds: list[str], renamed: dict[str, str], present: set[str]) -> set[str]:
    """The holds as they were; a held package that was replaced passes its hold on to its successor."""
    replaced = {old: new for old, new in renamed.items() if old not in present and new in present}
    return {replaced.get(name, name) for name in holds}


def restore_holds(job: dict[str, Any]) -> bool:
    """Make the holds of the packages we touched what they must be; others' are never touched. False if that failed."""
    present = installed()
    wanted = wanted_holds(job["holds"], job["renamed"], present)
    now = set(output(["apt-mark", "showhold"]).split())
    ours = set(job["touched"])
    missing, extra = sorted(wanted - now), sorted((now - wanted) & ours)
    if missing:
        lost = [name for name in missing if name in job["holds"]]
        say(HOLD_RESTORED % ", ".join(lost) if lost else "holds pass on to %s" % ", ".join(missing))
        run(["apt-mark", "hold", *missing])
    if extra:
        run(["apt-mark", "unhold", *extra])
    if not missing and not extra:
        return True
    return wanted - set(output(["apt-mark", "showhold"]).split()) <= wanted - present


def restore_marks(job: dict[str, Any]) -> None:
    """Automatic marks: a successor has its predecessor's, what came along as a dependency is automatic."""
    present = installed()
    ours = [name for name in job["touched"] if name in present]
    was_auto = set(job["auto"]) | {job["renamed"][name] for name in job["auto"] if name in job["renamed"]}
    auto = [name for name in ours if name in was_auto or name in job["new_auto"]]
    manual = [name for name in ours if name not in auto]
    now = set(output(["apt-mark", "showauto"]).split())
    if set(auto) - now:
        run(["apt-mark", "auto", *sorted(set(auto) - now)])
    if set(manual) & now:
        run(["apt-mark", "manual", *sorted(set(manual) & now)])


def purge_leftovers(names: list[str]) -> None:
    """Take away the configuration files of packages that the change had brought: modprobe options would still act."""
    left = output(["dpkg-query", "-W", "-f=${Package} ${db:Status-Status}\\n"]).splitlines()
    gone = [name for name in names if name + " config-files" in left]
    if gone:
        run(["dpkg", "--purge", *gone])


def read(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        return dict(json.load(file))


def write(path: str, data: dict[str, Any]) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=".", dir=os.path.dirname(path))
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)


def transact(job: dict[str, Any]) -> int:
    """Mend what an interrupted dpkg left, then the one transaction, then leftovers."""
    if output(["dpkg", "--audit"]).strip():
        say("dpkg was left half-done: repairing with configure -a")
        run(["dpkg", "--configure", "-a", "--force-confdef", "--force-confold"], job["env"])
    if not job["targets"]:
        return 1 if output(["dpkg", "--audit"]).strip() else 0
    rc = run([*APT, "install", *job["targets"]], job["env"])
    if rc and job.get("fix_broken"):
        say("apt-get ended with %d: once more with --fix-broken and the same packages" % rc)
        rc = run([*APT, "--fix-broken", "install", *job["targets"]], job["env"])
    if rc == 0:
        purge_leftovers(job["purge"])
    return rc


@contextlib.contextmanager
def put_right(job: dict[str, Any]) -> Iterator[None]:
    """Whatever happens inside: holds and marks are put right."""
    try:
        yield
    finally:
        for mend in (restore_holds, restore_marks):
            try:
                mend(job)
            except (OSError, ValueError, KeyError) as error:
                say("could not be put right: %s: %s" % (type(error).__name__, error))


def main(path: str) -> int:
    job = read(path)
    with put_right(job):
        return transact(job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
