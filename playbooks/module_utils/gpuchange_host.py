"""What every gpuchange module on a host is built on: opening, the owner marker, atomic files, commands, the report.

Python 3.8. A module looks like this:

    module = open_module()
    with owned(module):                    # apply and undo only; a probe never takes the marker
        found = save_once(state_dir(module) + "/haproxy.json", look())
        act()
    finish(module, "done", found=found)
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import stat
import subprocess
import tempfile
import time
from typing import Any, Iterator, NoReturn

from ansible.module_utils.basic import AnsibleModule

ROOT = "/var/lib/gpuchange"
LOCK_WAIT_S = 40.0
OUTPUT_LIMIT = 64 * 1024
MARKER = ("change", "controller", "fence", "boot", "user", "reason", "ticket")
CHANGE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
CLEAN_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C.UTF-8",
    "LANG": "C.UTF-8",
    "HOME": "/root",
}


def open_module() -> AnsibleModule:
    """The module with its four parameters; refuses a change id that could not be a file or unit name."""
    module = AnsibleModule(
        argument_spec={
            "mode": {"type": "str", "choices": ["probe", "apply", "undo"], "required": True},
            "owner": {"type": "dict", "required": True},
            "args": {"type": "dict", "default": {}},
            "step": {"type": "dict", "default": {}},
        },
        supports_check_mode=False,
    )
    change = str(module.params["owner"].get("change", ""))
    if not CHANGE_ID.fullmatch(change):
        module.fail_json(msg="owner.change is not a change id: %r" % change)
    return module


def finish(module: AnsibleModule, state: str, **fields: Any) -> NoReturn:
    """End the module with its report. `state`: done | not_done | running | unknown."""
    report = dict(fields, state=state)
    report.setdefault("changed", False)
    module.exit_json(changed=bool(report["changed"]), report=report)
    raise SystemExit(0)


def mode_of(module: AnsibleModule) -> str:
    return str(module.params["mode"])


def args_of(module: AnsibleModule) -> dict[str, Any]:
    return dict(module.params["args"] or {})


def direction_of(module: AnsibleModule) -> str:
    """`do` or `undo`: what a probe is asked about. Without a step, the mode decides."""
    step = module.params.get("step") or {}
    return str(step.get("direction") or ("undo" if mode_of(module) == "undo" else "do"))


def phase_of(module: AnsibleModule) -> str:
    return str((module.params.get("step") or {}).get("phase") or "phase")


def change_of(module: AnsibleModule) -> str:
    return str(module.params["owner"]["change"])


# ------------------------------------------------------------------------------------------------- files


def state_dir(change: Any) -> str:
    """`/var/lib/gpuchange/<change>` (0700, made if missing); takes a change id or a module."""
    name = change if isinstance(change, str) else change_of(change)
    path = os.path.join(ROOT, name)
    os.makedirs(path, mode=0o700, exist_ok=True)
    return path


def state_path(module: AnsibleModule, name: str) -> str:
    """A file of this change; makes nothing, so probes may use it."""
    return os.path.join(ROOT, change_of(module), name)


def write_atomic(path: str, data: Any, mode: int = 0o600) -> None:
    """Write text, bytes or JSON so that a reader or a power cut sees the old file or the new one, never half of one."""
    temporary = _temporary_with(path, data, mode)
    try:
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    sync_directory(os.path.dirname(path))


def save_once(path: str, data: Any) -> Any:
    """Keep the state found first: write `data` as JSON unless the file exists. Returns what is kept."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    if not os.path.exists(path):
        temporary = _temporary_with(path, data, 0o600)
        try:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            os.unlink(temporary)
        sync_directory(os.path.dirname(path))
    return read_json(path)


def read_json(path: str, default: Any = None) -> Any:
    """The file's JSON; `default` when there is no such file. Raises ValueError, naming the file, when it is damaged."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return default
    except ValueError as error:
        raise ValueError("%s is damaged: %s" % (path, error))


def read_text(path: str, default: str = "", limit: int = OUTPUT_LIMIT) -> str:
    """The first `limit` bytes of a file as text; `default` when it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        return default


def sync_directory(path: str) -> None:
    descriptor = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary_with(path: str, data: Any, mode: int) -> str:
    """A synced file beside `path` that holds `data`."""
    body = data if isinstance(data, bytes) else _as_text(data).encode("utf-8")
    descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".new", dir=os.path.dirname(path))
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        os.unlink(temporary)
        raise
    return temporary


def _as_text(data: Any) -> str:
    return data if isinstance(data, str) else json.dumps(data, sort_keys=True, ensure_ascii=False)


# ------------------------------------------------------------------------------------------------- owner


def owner_path(thing: str = "") -> str:
    """The marker of the host, or of one `thing` on it (a balancer's server): changes of different things may pass."""
    return os.path.join(ROOT, "owner-%s.json" % thing if thing else "owner.json")


def read_owner(thing: str = "") -> dict[str, Any] | None:
    """The marker, or None. A damaged one counts as somebody's: {"change": "?", "damaged": why}."""
    try:
        marker = read_json(owner_path(thing))
    except ValueError as error:
        return {"change": "?", "damaged": str(error)}
    return marker if marker is None or isinstance(marker, dict) else {"change": "?", "damaged": "not an object"}


def refusal(marker: dict[str, Any] | None, owner: dict[str, Any]) -> str:
    """Why the marker shuts `owner` out: "" (it does not), "locked" (another change), "stale" (a newer controller)."""
    if not marker:
        return ""
    if marker.get("change") != owner.get("change"):
        return "locked"
    theirs, ours = int(marker.get("fence", 0)), int(owner.get("fence", 0))
    if ours > theirs or (ours == theirs and marker.get("controller") == owner.get("controller")):
        return ""
    return "stale"


def shut_out(owner: dict[str, Any], thing: str = "") -> tuple[str, dict[str, Any]]:
    """Why `owner` may not act here, and by whom: a kind of `refusal`, "released" (see below), or ("", {})."""
    marker = read_owner(thing)
    kind = refusal(marker, owner)
    if kind:
        return kind, marker or {}
    try:
        entry = read_released().get(str(owner.get("change")))
    except ValueError as error:
        return "locked", {"change": "?", "damaged": str(error)}
    if entry and (int(owner.get("fence", 0)) <= entry["fence"] or thing in entry["taken"]):
        return "released", dict(entry, change=owner.get("change"), taken=entry["taken"].get(thing, ""))
    return "", {}


# What unlock took away stays shut out: a controller that was only stopped may come back, and finds no marker of its own
# any more. So the host remembers {change: {fence, by, since, taken}}: that change's controllers up to `fence` are
# refused, and all of them, however new, on a thing that another change has `taken` since ("" is the host): what they
# know of it is no longer true.


def read_released() -> dict[str, dict[str, Any]]:
    """Raises ValueError when the file is damaged: then nobody can be let in."""
    found = read_json(_released_path(), {})
    try:
        return {str(change): dict(e, fence=int(e["fence"]), taken=dict(e["taken"])) for change, e in found.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("%s is damaged: %r" % (_released_path(), error))


def remember_released(change: str, fence: int, by: str) -> None:
    """Shut the change's controllers up to `fence` out of this host. Call inside `locked`."""
    entries = read_released()
    before = entries.get(change, {"fence": fence, "taken": {}})
    entries[change] = dict(before, fence=max(fence, before["fence"]), by=by, since=_now())
    write_atomic(_released_path(), entries)


def _remember_taken(change: str, thing: str) -> None:
    entries = read_released()
    others = [entry for name, entry in entries.items() if name != change and thing not in entry["taken"]]
    for entry in others:
        entry["taken"][thing] = change
    if others:
        write_atomic(_released_path(), entries)


def _released_path() -> str:
    return os.path.join(ROOT, "released.json")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@contextlib.contextmanager
def owned(module: AnsibleModule, wait_s: float = LOCK_WAIT_S, thing: str = "") -> Iterator[dict[str, Any]]:
    """Hold the host's lock and marker while acting. Fails the module, with `refused`, when they are somebody else's.

    `thing` asks for the marker of one thing on the host (see `owner_path`) instead of the host's own.
    """
    with locked(module, wait_s):
        owner = module.params["owner"]
        guard(module, thing)
        marker = read_owner(thing)
        wanted = {key: owner.get(key) for key in MARKER}
        if marker is None or any(marker.get(key) != value for key, value in wanted.items()):
            _remember_taken(str(owner.get("change")), thing)
            marker = dict(wanted, since=(marker or {}).get("since", _now()))
            write_atomic(owner_path(thing), marker)
        yield marker


def guard(module: AnsibleModule, thing: str = "") -> None:
    """Fail the module, with `refused`, when the host or thing is somebody else's; touches no marker."""
    kind, by = shut_out(module.params["owner"], thing)
    if kind:
        refuse(module, kind, by, thing)


@contextlib.contextmanager
def locked(module: AnsibleModule, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """The flock of this host: one acting module at a time. It dies with its process, so it is never stale."""
    os.makedirs(ROOT, mode=0o700, exist_ok=True)
    descriptor = os.open(os.path.join(ROOT, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + wait_s
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                refuse(module, "locked", read_owner() or {"why": "another gpuchange call is acting on this host"})
            time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)


def refuse(module: AnsibleModule, kind: str, by: dict[str, Any], thing: str = "") -> NoReturn:
    said = {
        "locked": "%s belongs to change %s" % (thing or "this host", by.get("change", "?")),
        "stale": "a newer controller has taken this change over on %s" % (thing or "this host"),
        "released": "%s was unlocked: taken away from this change's controllers up to fence %s%s"
        % (thing or "this host", by.get("fence"), " and taken by %s since" % by["taken"] if by.get("taken") else ""),
    }[kind]
    module.fail_json(msg="%s; nothing was done" % said, refused={"kind": kind, "by": by})
    raise SystemExit(1)


def release_owner(module: AnsibleModule, thing: str = "") -> bool:
    """Take our marker away; call inside `owned` or `locked`. True if it was there. Refused when it is not ours."""
    marker = read_owner(thing)
    if marker is None:
        return False
    kind = refusal(marker, module.params["owner"])
    if kind:
        refuse(module, kind, marker, thing)
    os.unlink(owner_path(thing))
    sync_directory(ROOT)
    return True


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# ----------------------------------------------------------------------------------------------- commands


def run(
    argv: list[str], timeout: float = 30.0, env: dict[str, str] | None = None, limit: int = OUTPUT_LIMIT, data: str = ""
) -> tuple[int, str, str]:
    """Run a command without a shell in a clean English UTF-8 environment; output bounded to `limit` bytes each.

    `data` goes to its standard input. rc 127: no such program; 124: ended after `timeout` seconds, children included.
    """
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE if data else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(CLEAN_ENV, **(env or {})),
            start_new_session=True,
        )
    except OSError as error:
        return 127, "", "%s: %s" % (argv[0], error.strerror)
    try:
        out, err = process.communicate(data.encode("utf-8") if data else None, timeout=timeout)
        return process.returncode, bounded(out, limit), bounded(err, limit)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return 124, bounded(out, limit), bounded(err, limit) + "\n%s: no end within %g s" % (argv[0], timeout)


def bounded(raw: bytes, limit: int = OUTPUT_LIMIT) -> str:
    """Text of at most `limit` bytes; the middle goes, since the first and the last lines say most."""
    if len(raw) <= limit:
        return raw.decode("utf-8", "replace")
    half = limit // 2
    cut = "\n[... %d bytes left out ...]\n" % (len(raw) - 2 * half)
    return raw[:half].decode("utf-8", "replace") + cut + raw[-half:].decode("utf-8", "replace")


def boot_id() -> str:
    return read_text("/proc/sys/kernel/random/boot_id").strip()


def is_executable(name: str) -> bool:
    """Whether a program of this name is on the clean PATH."""
    return any(_runs(os.path.join(folder, name)) for folder in CLEAN_ENV["PATH"].split(":"))


def _runs(path: str) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and bool(status.st_mode & 0o111)
