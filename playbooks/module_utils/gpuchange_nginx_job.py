"""Taking one server out of nginx and putting it back: what nginx is asked and told. Python 3.8, standard library only.

nginx's open-source form has no order for it: the server is marked `down` in the configuration, and nginx is reloaded.
Two files on the balancer remember it; both are written before nginx's own:
  <change>/nginx-<host>.json  notes of one change: {servers: {upstream: row as found}, loaded, clocks, released}
  nginx-files.json            of all changes: {file: {sha256: [before and after our writing], marks: [upstream/server]}}
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import re
import shutil
import signal
import time
from typing import Any, Dict, List, Set

from ansible.module_utils import gpuchange_connections as connections
from ansible.module_utils import gpuchange_host as host
from ansible.module_utils import gpuchange_nginx_conf as conf
from ansible.module_utils.gpuchange_nginx_conf import NginxError

RELOAD_S = 20.0
MEMBERS_SHOWN = 64
YOUNG_S = 1.0  # a file as young as the workers may be what they have read


class Nginx:
    """One running nginx, its configuration read as it stands."""

    def __init__(self, config: str) -> None:
        self.config = config
        self.directives = conf.read(config)
        self.rows = conf.servers(self.directives)

    def check(self, when: str) -> None:
        """Raises NginxError, with nginx's own words, when it would not load what stands in its files."""
        code, _, said = host.run(["nginx", "-t", "-q", "-c", self.config])
        if code == 127:
            raise NginxError("there is no nginx on this balancer: %s" % said.strip())
        if code:
            raise NginxError("nginx -t fails %s: %s" % (when, said.strip().splitlines()[0] if said else "rc %d" % code))

    def master(self) -> int:
        """Raises NginxError when nginx is not running."""
        path = conf.value(self.directives, "pid") or _built_in("--pid-path") or "/run/nginx.pid"
        text = host.read_text(path).strip()
        if not text.isdigit() or connections.identity(int(text))[0] != "nginx":
            raise NginxError("nginx is not running: %s names no process of it" % path)
        return int(text)

    def workers(self) -> Dict[int, bool]:
        """{pid: whether it is on its way out, left behind by a reload}."""
        titles = {pid: host.read_text("/proc/%d/cmdline" % pid) for pid in connections.children(self.master())}
        return {pid: "shutting down" in title for pid, title in titles.items() if "worker process" in title}

    def reload(self) -> None:
        """Raises NginxError when no new workers come: then nginx goes on with what it had."""
        before = set(self.workers())
        os.kill(self.master(), signal.SIGHUP)
        deadline = time.monotonic() + RELOAD_S
        while not self._taken_over(before):
            if time.monotonic() > deadline:
                raise NginxError("nginx did not take the reload within %d s; its error log says why" % RELOAD_S)
            time.sleep(0.1)

    def _taken_over(self, before: Set[int]) -> bool:
        now = self.workers()
        serving = {pid for pid, leaving in now.items() if not leaving}
        return bool(serving) and not serving & before

    def not_loaded(self) -> List[str]:
        """Files of the configuration that are younger than the workers: a reload brings in what was edited there."""
        began = min((_began(pid) for pid, leaving in self.workers().items() if not leaving), default=time.time())
        files = {os.path.realpath(directive.file) for directive in self.directives} | {self.config}
        return sorted(file for file in files if os.path.exists(file) and os.stat(file).st_mtime > began + YOUNG_S)


def _built_in(option: str) -> str:
    _, _, said = host.run(["nginx", "-V"])
    found = re.search(r"%s=(\S+)" % option, said)
    return found.group(1) if found else ""


def _began(pid: int) -> float:
    """When a process began, in seconds since the epoch."""
    ticks = int(host.read_text("/proc/%d/stat" % pid, "0) " + "0 " * 30).rpartition(")")[2].split()[19])
    booted = re.search(r"(?m)^btime (\d+)", host.read_text("/proc/stat"))
    return (int(booted.group(1)) if booted else 0) + ticks / os.sysconf("SC_CLK_TCK")


# -------------------------------------------------------------------------------------------------- looking


class Look:
    """What nginx's files say at one moment of our server, and what its workers carry for it."""

    def __init__(self, nginx: Nginx, upstreams: List[str], names: List[str]) -> None:
        self.nginx = nginx
        self.mine = pick(nginx.rows, upstreams, names)
        ends = [end for row in self.mine for end in addresses(row)]
        self.workers = nginx.workers()
        self.carried = {pid: len(connections.held_by(pid, ends)) for pid in self.workers}

    @property
    def sessions(self) -> int:
        return sum(self.carried.values())

    @property
    def idle(self) -> bool:
        return not self.sessions

    def left(self) -> str:
        """Who still carries sessions."""
        word = {True: "old worker %d (before a reload)", False: "worker %d"}
        parts = ["%d in %s" % (n, word[self.workers[pid]] % pid) for pid, n in sorted(self.carried.items()) if n]
        return ", ".join(parts) or "0"

    def others(self, row: Dict[str, Any]) -> List[str]:
        """Other servers of the same upstream that may be asked and can be reached."""
        beside = [r for r in self.nginx.rows if r["upstream"] == row["upstream"] and r["end"] != row["end"]]
        return [r["name"] for r in beside if r["admin"] == "ready" and not unreachable(r)]

    def short_of(self, least: int) -> str:
        """Why our server may not leave now; "" when it may, or does not serve anyway."""
        for row in self.mine:
            others = self.others(row)
            if row["admin"] == "ready" and len(others) < least:
                count = "1 other server serves" if len(others) == 1 else "%d other servers serve" % len(others)
                return "upstream %s: %s (%s), at least %d must" % (
                    row["upstream"], count, ", ".join(others) or "none", least,
                )  # fmt: skip
        return ""

    def cut_by_reload(self) -> int:
        """Connections to servers of upstreams, ours left out: a reload leaves them in workers that are to end."""
        mine = {end for row in self.mine for end in addresses(row)}
        ends = [end for row in self.nginx.rows for end in addresses(row) if end not in mine]
        return sum(len(connections.held_by(pid, ends)) for pid in self.workers)

    def report(self) -> Dict[str, Any]:
        upstreams = {row["upstream"] for row in self.mine}
        members = [as_member(row) for row in self.nginx.rows if row["upstream"] in upstreams]
        return {
            "servers": [dict(as_server(row), sessions=self.sessions) for row in self.mine],
            "members": members[:MEMBERS_SHOWN],
            "others_serving": {row["upstream"]: len(self.others(row)) for row in self.mine},
            "sessions": self.sessions,
            "old_workers": {str(pid): self.carried[pid] for pid, leaving in self.workers.items() if leaving},
        }


def pick(rows: List[Dict[str, Any]], upstreams: List[str], names: List[str]) -> List[Dict[str, Any]]:
    """The rows of our server in `upstreams` (in every one that has it, if none is named); else says what there is."""
    known = sorted({row["upstream"] for row in rows})
    for upstream in upstreams:
        if upstream not in known:
            raise NginxError("nginx has no upstream %s; it has %s" % (upstream, ", ".join(known) or "none"))
    asked = [row for row in rows if not upstreams or row["upstream"] in upstreams]
    mine = [row for row in asked if any(conf.same_server(row, name) for name in names)]
    missing = [name for name in upstreams if all(row["upstream"] != name for row in mine)]
    if missing or not mine:
        there = ", ".join(row["name"] for row in asked if not missing or row["upstream"] in missing) or "none"
        raise NginxError(
            "no server %s in upstream %s; there are %s (another name: drain[].servers)"
            % (" or ".join(names), ", ".join(missing or known) or "of any name", there)
        )
    return mine


def as_member(row: Dict[str, Any]) -> Dict[str, Any]:
    return {"backend": row["upstream"], "server": row["name"], "admin": row["admin"], "weight": row["weight"]}


def as_server(row: Dict[str, Any]) -> Dict[str, Any]:
    """In the words that all balancers share."""
    trouble = unreachable(row)
    more = {"address": row["address"], "port": row["port"], "admin_bits": int(row["admin"] != "ready")}
    status = "unreachable" if trouble else "reachable"
    return dict(as_member(row), **more, up=not trouble, status=status, check=trouble)


def addresses(row: Dict[str, Any]) -> List[connections.End]:
    return connections.resolved(row["address"], row["port"]) if row["port"] else []


def unreachable(row: Dict[str, Any], path: str = "") -> str:
    """Why the server cannot take requests: "" if it accepts a connection, and answers `path` with 2xx or 3xx."""
    if not row["port"]:
        return ""
    refused = connections.reaches(row["address"], row["port"])
    if refused or not path:
        return refused or ""
    door = http.client.HTTPConnection(row["address"], row["port"], timeout=5)
    try:
        door.request("GET", path)
        status = door.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return "%s%s: %s" % (row["name"], path, error)
    finally:
        door.close()
    return "" if 200 <= status < 400 else "%s%s answers %d" % (row["name"], path, status)


# -------------------------------------------------------------------------------------------------- marking


def files_path() -> str:
    return os.path.join(host.ROOT, "nginx-files.json")


def edited_by_others(files: Set[str]) -> str:
    """Which file somebody else wrote while servers are marked down in it; "" if none. Call inside the lock."""
    known = host.read_json(files_path(), {})
    return ", ".join(sorted(f for f in files if f in known and _sha256(_bytes(f)) not in known[f]["sha256"]))


def mark(nginx: Nginx, rows: List[Dict[str, Any]], down: bool) -> None:
    """Mark these rows down in their files, or take our marks away, and test it; on failure all is put back.

    Raises NginxError. Call inside the lock; nginx must be reloaded afterwards.
    """
    before = {file: _bytes(file) for file in sorted({row["file"] for row in rows})}
    after = {file: _marked(file, before[file], rows, down) for file in before}
    host.write_atomic(files_path(), _known_with(before, after, rows, down))
    try:
        for file in after:
            _replace(file, after[file])
        nginx.check("with the server marked %s" % ("down" if down else "up"))
    except (NginxError, OSError):
        for file in before:
            _replace(file, before[file])
        raise


def _marked(file: str, text: bytes, rows: List[Dict[str, Any]], down: bool) -> bytes:
    ends = [row["end"] for row in rows if row["file"] == file]
    marked = conf.with_down(text, ends) if down else conf.without_down(text, ends)
    if marked is None:
        raise NginxError("%s: `down` of this change is not where it was put: somebody else wrote this file" % file)
    return marked


def _known_with(
    before: Dict[str, bytes], after: Dict[str, bytes], rows: List[Dict[str, Any]], down: bool
) -> Dict[str, Any]:
    """nginx-files.json after this writing. Whoever is killed in it leaves one content or the other."""
    known: Dict[str, Any] = host.read_json(files_path(), {})
    for file in after:
        names = {"%s/%s" % (row["upstream"], row["name"]) for row in rows if row["file"] == file}
        marks = set(known.pop(file, {"marks": []})["marks"])
        marks = marks | names if down else marks - names
        if marks:
            known[file] = {"sha256": [_sha256(before[file]), _sha256(after[file])], "marks": sorted(marks)}
    return known


def _replace(path: str, content: bytes) -> None:
    """The file with other content, never half of it; owner, mode, times and extended attributes stay as they were."""
    found = os.stat(path)
    temporary = os.path.join(os.path.dirname(path), ".%s.gpuchange" % os.path.basename(path))
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.chown(temporary, found.st_uid, found.st_gid)
            shutil.copystat(path, temporary)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    host.sync_directory(os.path.dirname(path))


def _bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
