"""apt in a private corner: its own lists, cache and configuration, so that a look changes nothing on the host.

The configuration is the host's own (proxies, credentials, pins), without its hooks: they may write anywhere.
"""

from __future__ import annotations

import os
import re
import shutil
from typing import Any, Callable, Dict, Iterable, List, Tuple

from ansible.module_utils.gpuchange_apt_choice import Choice, Offer, Record, parse_show
from ansible.module_utils.gpuchange_host import run, write_atomic
from ansible.module_utils.gpuchange_packages import is_stack, native_architecture, parse_policy

HOOKS = re.compile(r"(APT::Update::(Pre|Post)-Invoke|DPkg::(Pre|Post)-Invoke|DPkg::Pre-Install-Pkgs|APT::Periodic).*")
OWN = re.compile(r"Dir::(Etc::(parts|main)|Cache|State::lists)\b.*", re.IGNORECASE)
LIMIT = 64 * 1024 * 1024
INSTALL = ["--no-install-recommends", "--allow-downgrades", "--allow-change-held-packages", "-y"]

Move = Dict[str, str]
"""One package's way: {name, from, to}; "" for absent."""


class PrivateApt:
    """apt with private lists and cache below `folder`. `offline`: no package source at all, only files that are named.

    `hooks` keeps the host's own hooks: a real transaction is the host's business. `status`: another dpkg status file.
    """

    def __init__(self, folder: str, offline: bool = False, hooks: bool = False, status: str = "") -> None:
        self.folder = folder
        name = ("offline" if offline else "apt") + ("-hooks" if hooks else "") + ("-status" if status else "")
        self.configuration = os.path.join(folder, name + ".conf")
        for name in ("lists/partial", "cache/archives/partial", "nothing"):
            os.makedirs(os.path.join(folder, name), mode=0o755, exist_ok=True)
        write_atomic(self.configuration, self._settings(offline, hooks, status))

    @property
    def env(self) -> Dict[str, str]:
        return {"APT_CONFIG": self.configuration}

    def _settings(self, offline: bool, hooks: bool, status: str) -> str:
        _, dump, _ = run(["apt-config", "dump"], limit=LIMIT)
        nothing = os.path.join(self.folder, "nothing")
        own = [
            ("Dir::Etc::parts", nothing),
            ("Dir::Etc::main", os.path.join(nothing, "apt.conf")),
            ("Dir::State::lists", os.path.join(self.folder, "empty" if offline else "lists")),
            ("Dir::Cache", os.path.join(self.folder, "cache")),
            ("APT::Sandbox::User", "root"),
        ]
        if offline:
            os.makedirs(os.path.join(self.folder, "empty", "partial"), exist_ok=True)
            own += [("Dir::Etc::sourcelist", os.path.join(nothing, "none")), ("Dir::Etc::sourceparts", nothing)]
        if not hooks:  # a look: even the solver's log stays here
            own.append(("Dir::Log::Planner", os.path.join(self.folder, "planner.log")))
        if status:
            own.append(("Dir::State::status", status))
        return private_settings(dump, own, hooks)

    def get(self, *argv: str, timeout: float = 40.0) -> Tuple[int, str, str]:
        return run(["apt-get", *argv], timeout=timeout, env=self.env, limit=LIMIT)

    def names(self) -> List[str]:
        _, out, _ = run(["apt-cache", "pkgnames"], timeout=40, env=self.env, limit=LIMIT)
        return sorted(name for name in out.split() if is_stack(name))

    def records(self, names: Iterable[str]) -> List[Record]:
        listed = sorted(names)
        if not listed:
            return []
        text = run(["apt-cache", "show", *listed], timeout=60, env=self.env, limit=LIMIT)[1]
        return parse_show(text, native_architecture())

    def policy(self, names: Iterable[str]) -> Dict[str, Dict[str, Any]]:
        listed = sorted(names)
        if not listed:
            return {}
        return parse_policy(run(["apt-cache", "policy", *listed], timeout=60, env=self.env, limit=LIMIT)[1])

    def offer(self, names: Iterable[str]) -> Offer:
        listed = sorted(names)
        candidates = {name: entry["candidate"] for name, entry in self.policy(listed).items()}
        return Offer(self.records(listed), candidates)

    def simulate(self, targets: List[str]) -> Tuple[List[Move], str]:
        """What `apt-get install TARGETS` would move, and why it cannot be done ("" when it can)."""
        rc, out, err = self.get("-s", *INSTALL, "install", *targets, timeout=60)
        return parse_simulation(out), "" if rc == 0 else first_error(out, err)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def private_settings(dump: str, own: List[Tuple[str, str]], hooks: bool = False) -> str:
    """An apt.conf: the host's settings (`apt-config dump`) without hooks (unless `hooks`), then ours."""
    kept = [line for line in dump.splitlines() if not OWN.match(line) and (hooks or not HOOKS.match(line))]
    return "\n".join(kept + ['%s "%s";' % pair for pair in own]) + "\n"


def parse_simulation(text: str) -> List[Move]:
    """`apt-get -s` → one move for each package that would change. Inst lines name old and new, Remv lines the old."""
    moves: Dict[str, Move] = {}
    for line in text.splitlines():
        inst = re.match(r"Inst (\S+) (?:\[([^\]]+)\] )?\((\S+)", line)
        gone = re.match(r"(?:Remv|Purg) (\S+)(?: \[([^\]]+)\])?", line)
        if inst:
            moves[inst.group(1)] = {"name": inst.group(1), "from": inst.group(2) or "", "to": inst.group(3)}
        elif gone:
            moves.setdefault(gone.group(1), {"name": gone.group(1), "from": gone.group(2) or "", "to": ""})
    return [move for _, move in sorted(moves.items()) if move["from"] != move["to"]]


def first_error(out: str, err: str) -> str:
    """apt's own reason: its E: lines, with the unmet dependencies that stand in its output."""
    unmet = re.findall(r"^ (\S+ : .*(?:\n {2,}\S.*)*)$", out, flags=re.M)
    said = [line[3:] for line in err.splitlines() if line.startswith("E: ")]
    lines = [re.sub(r"\s+", " ", text) for text in unmet[:6]] + said[:3]
    return "; ".join(lines) or err.strip()[-300:] or "apt-get gave no reason"


def explained(why: str, policy: Callable[[Iterable[str]], Dict[str, Dict[str, Any]]]) -> str:
    """apt's reason with what it does not say: "held broken packages" mostly is another source that wins."""
    needed = dict.fromkeys(re.findall(r"(?:Depends|PreDepends|Breaks|Conflicts): ([a-z0-9][a-z0-9.+-]*)", why))
    told = [_who_wins(name, entry) for name, entry in policy(needed).items()] if needed else []
    return "; ".join([why, *(line for line in told if line)])


def _who_wins(name: str, entry: Dict[str, Any]) -> str:
    """`nvidia-modprobe: candidate 440.26-1 (URL at priority 500) wins over 440.33.01-1 (URL at priority 400)`."""
    shown = {name: _where(sources, entry["priorities"][name]) for name, sources in entry["versions"].items()}
    candidate = entry["candidate"]
    others = ["%s (%s)" % (version, where) for version, where in shown.items() if version != candidate]
    if not candidate or candidate not in shown or not others:
        return ""
    return "%s: candidate %s (%s) wins over %s" % (name, candidate, shown[candidate], ", ".join(others[:4]))


def _where(sources: List[Tuple[int, str]], priority: int) -> str:
    """The version's best source, and the priority that pins and sources give it."""
    source = max(sources)[1] if sources else "no source"
    return "%s at priority %d" % (re.sub(r" \S+ Packages$", "", source), priority)


def targets_of(install: Dict[str, str], remove: Iterable[str]) -> List[str]:
    """apt-get's arguments: name=version to install, name- to remove."""
    return ["%s=%s" % pair for pair in sorted(install.items())] + [name + "-" for name in sorted(remove)]


def strangers(moves: List[Move], choice: Choice) -> List[str]:
    """What the transaction would remove or change beyond the chosen set; new dependencies are no strangers."""
    found = []
    for move in moves:
        name = move["name"]
        if not move["to"] and name not in choice.remove:
            found.append("%s %s would be removed" % (move["name"], move["from"]))
        elif move["to"] and move["from"] and name not in choice.install:
            found.append("%s %s would become %s" % (move["name"], move["from"], move["to"]))
    return found


def unreadable(err: str) -> List[str]:
    """Package sources that an update could not read; apt-get says so and still ends with 0."""
    lines = re.findall(r"^[EW]: ((?:Failed to fetch|The repository|GPG error|Some index files).*)$", err, flags=re.M)
    return [line for line in lines if not line.startswith("Some index files")]
