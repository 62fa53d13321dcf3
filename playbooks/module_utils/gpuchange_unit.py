"""Long work on a host as a named unit that outlives the connection, the controller and Ansible's temporary files.

One unit per (change, phase, direction, step): `gpuchange-<change>-<phase>-<do|undo>-<step>`, without an attempt number,
so a second start attaches instead of starting twice. Once-only is kept by the runner itself (it links `<name>.begun`
before it acts), not by systemd: so it also holds where there is no systemd, and across a power cut.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import subprocess
import sys
import time
from types import ModuleType
from typing import Any

from ansible.module_utils import gpuchange_runner
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpuchange_host import (
    CLEAN_ENV,
    ROOT,
    boot_id,
    change_of,
    direction_of,
    is_executable,
    phase_of,
    read_json,
    read_text,
    run,
    state_dir,
    write_atomic,
)

STEP_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,40}")
UNIT_FILE = re.compile(r"([a-z0-9_]+)-(do|undo)-([a-z0-9_]+)(?:-g([0-9]+))?\.spec")
LIVE = ("active", "activating", "deactivating", "reloading")


class UnitName:
    """The names of one unit: the systemd unit and its files `<phase>-<do|undo>-<step>[-g<generation>].*`."""

    def __init__(
        self, change: str, phase: str, direction: str, step: str, generation: int = 0, folder: str = ""
    ) -> None:
        if not STEP_NAME.fullmatch(step):
            raise ValueError("not a step name: %r" % step)
        self.stem = "%s-%s-%s" % (phase, direction, step) + ("-g%d" % generation if generation else "")
        self.unit = "gpuchange-%s-%s.service" % (change, self.stem)
        self.folder = folder or os.path.join(ROOT, change)

    def file(self, suffix: str) -> str:
        return os.path.join(self.folder, "%s.%s" % (self.stem, suffix))

    @property
    def result(self) -> str:
        return self.file("json")

    @property
    def begun(self) -> str:
        return self.file("begun")


def unit_name(module: AnsibleModule, step: str, generation: int = 0, folder: str = "") -> UnitName:
    return UnitName(change_of(module), phase_of(module), direction_of(module), step, generation, folder)


def named(change: str, step: str = "") -> list[UnitName]:
    """The change's units on this host, whatever became of them, whose step begins so."""
    folder = os.path.join(ROOT, change)
    files = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    stems = [UNIT_FILE.fullmatch(name) for name in files]
    return [UnitName(change, m[1], m[2], m[3], int(m[4] or 0)) for m in stems if m and m[3].startswith(step)]


def working(change: str) -> list[str]:
    """The change's units that run on this host now."""
    return [name.unit for name in named(change) if unit_state(name)["state"] == "running"]


def host_unit(
    module: AnsibleModule,
    step: str,
    argv: list[str],
    wait_s: float = 40.0,
    deadline_s: float = 3600.0,
    env: dict[str, str] | None = None,
    generation: int = 0,
    folder: str = "",
) -> dict[str, Any]:
    """Start the unit, or attach to it, or read its result; wait at most `wait_s` seconds for the result.

    Call it inside `owned(module)`. `argv` must outlive this call: programs of the host, or `install_script(...)`.
    `generation` is raised by an operator's retry only, so that an old failure does not answer for the new try.
    `folder` keeps its files elsewhere (below /run for looks that must leave no trace); default: the change's.
    Returns {"state": running | finished | lost, "unit"} and, finished, rc, out, boot_id, started_boot, timed_out.
    """
    name = unit_name(module, step, generation, folder)
    found = unit_state(name)
    if found["state"] == "absent":
        os.makedirs(name.folder, mode=0o700, exist_ok=True)
        _start(module, name, argv, deadline_s, env or {})
    found = wait_for_unit(name, wait_s)
    return dict(found, state="lost") if found["state"] == "absent" else found


def wait_for_unit(name: UnitName, wait_s: float) -> dict[str, Any]:
    """Look until the unit has ended, at most `wait_s` seconds. A unit that just disappeared is looked at twice."""
    deadline = time.monotonic() + wait_s
    while True:
        found = unit_state(name)
        if found["state"] != "running" or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def unit_state(name: UnitName) -> dict[str, Any]:
    """What is known about a unit, changing nothing: {"state": absent | running | finished | lost, ...}.

    lost: it began, but neither runs nor left a result (reboot, power cut, kill): look at the real state of the host.
    """
    found = _result(name) or _begun(name) or _starting(name)
    if found["state"] in ("lost", "absent"):
        found = _result(name) or found  # it may have ended between the two looks
    return dict(found, unit=name.unit)


def forget_unit(name: UnitName) -> None:
    """Let the step be started anew. Only for work that may be repeated, and never while it runs."""
    if unit_state(name)["state"] != "running":
        for path in (name.begun, name.result):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def install_script(module: AnsibleModule, script: ModuleType, folder: str = "") -> str:
    """Copy a self-contained module_utils file into the change's state directory (or `folder`); returns its path."""
    path = os.path.join(folder or state_dir(module), script.__name__.rpartition(".")[2] + ".py")
    source = inspect.getsource(script)
    if read_text(path, limit=len(source) * 4 + 1) != source:
        write_atomic(path, source, 0o700)
    return path


def _result(name: UnitName) -> dict[str, Any] | None:
    try:
        result = read_json(name.result)
    except ValueError:
        return None
    return dict(result, state="finished") if isinstance(result, dict) else None


def _begun(name: UnitName) -> dict[str, Any] | None:
    try:
        begun = read_json(name.begun)
    except ValueError:
        begun = {}
    if begun is None:
        return None
    return dict(begun, started_boot=begun.get("boot_id", ""), state="running" if _lives(begun) else "lost")


def _lives(begun: dict[str, Any]) -> bool:
    if begun.get("boot_id") != boot_id():
        return False
    fields = read_text("/proc/%s/stat" % begun.get("pid")).rpartition(")")[2].split()
    return len(fields) > 19 and fields[0] != "Z" and fields[19] == begun.get("start_time")


def _starting(name: UnitName) -> dict[str, Any]:
    """Before the runner has said that it began, only systemd knows of it; nobody, if it was never ordered."""
    if os.path.exists(name.file("spec")) and _has_systemd():
        _, out, _ = run(["systemctl", "show", "--property=ActiveState", name.unit])
        if out.strip().rpartition("=")[2] in LIVE:
            return {"state": "running"}
    return _begun(name) or {"state": "absent"}


def _has_systemd() -> bool:
    """Whether system units can be had: hooks on a controller may run as an ordinary user."""
    return os.geteuid() == 0 and os.path.isdir("/run/systemd/system") and is_executable("systemd-run")


def _start(module: AnsibleModule, name: UnitName, argv: list[str], deadline_s: float, env: dict[str, str]) -> None:
    runner, spec = install_script(module, gpuchange_runner, name.folder), name.file("spec")
    files = {"begun": name.begun, "result": name.result, "log": name.file("log")}
    write_atomic(spec, dict(files, argv=argv, env=dict(CLEAN_ENV, **env), deadline_s=deadline_s))
    command = [sys.executable, "-I", runner, spec]
    why = _start_in_systemd(name, command) if _has_systemd() else _start_detached(name, command)
    if why:
        module.fail_json(msg="cannot start %s: %s" % (name.unit, why))


def _start_in_systemd(name: UnitName, command: list[str]) -> str:
    """Why it could not be started, or "". That the unit is there already is no failure: we attach."""
    properties = ["Type=exec", "KillMode=mixed", "TimeoutStopSec=120", "OOMPolicy=continue", "StandardInput=null"]
    argv = ["systemd-run", "--quiet", "--collect", "--unit=" + name.unit]
    argv += ["--property=" + item for item in properties]
    rc, _, err = run([*argv, "--", *command])
    if rc == 0 or unit_state(name)["state"] != "absent":
        return ""
    return err.strip() or "systemd-run ended with %d" % rc


def _start_detached(name: UnitName, command: list[str]) -> str:
    """Start the runner away from this call's process group, and see that it has begun."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=CLEAN_ENV,
            start_new_session=True,
        )
    except OSError as error:
        return "%s: %s" % (command[0], error.strerror)
    deadline = time.monotonic() + 10.0
    while not os.path.exists(name.begun):
        if time.monotonic() > deadline:
            return "the runner did not begin within 10 s"
        if process.poll() not in (None, 0):
            return "the runner ended with %s" % process.returncode
        time.sleep(0.02)
    return ""
