"""One change on disk: its directory, its frozen copies, its journal, and what may be known of each host.

<root>/<id>/journal.db        events and reports (the only truth)
           /frozen/           plan.yaml, inventory/, playbooks/: what was reviewed is what runs
           /artifacts/        output of plays that failed, bounded
           /pause             present: start nothing new
           /orders/           notes for the controller that has the journal open (confirming.py)
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuchange import __version__, content, inventory, places
from gpuchange.confirming import Confirmations
from gpuchange.errors import InventoryError, StaleError, UsageError, VersionMismatch
from gpuchange.journal import Journal
from gpuchange.phases import PHASES
from gpuchange.plan import Plan, load
from gpuchange.planner import Limits, State, Step, Table
from gpuchange.providers.contract import HostView, Provider
from gpuchange.reports import REPORT_SCHEMA
from gpuchange.states import Event, Kind

JOURNAL = "journal.db"


@dataclass(frozen=True)
class Connection:
    """How Ansible reaches the hosts: the operator's flags, with Ansible's meaning. Secrets live here, never on disk."""

    inventory: tuple[str, ...] = ()
    limit: str | None = None
    user: str | None = None
    become: bool = False
    become_password: str | None = field(default=None, repr=False)
    private_key: str | None = None
    vault_ids: tuple[str, ...] = ()
    extra_vars: tuple[str, ...] = ()
    forks: int = 50
    verbosity: int = 0
    accept_new_host_keys: bool = False
    accept_irreversible: tuple[str, ...] = ()  # hosts that may be changed though they cannot be taken back

    def cmdline(self) -> str:
        """The ansible-playbook flags of every play (quoted for ansible-runner, which splits them as a shell does)."""
        import shlex

        parts: list[str] = []
        for flag, value in (("--user", self.user), ("--private-key", self.private_key)):
            parts += [flag, value] if value else []
        parts += ["--become"] if self.become else []
        for vault in self.vault_ids:
            parts += ["--vault-id", vault]
        for extra in self.extra_vars:
            parts += ["--extra-vars", extra]
        return shlex.join(parts)


def new_id(name: str) -> str:
    """A change id that sorts by time and says what it is: 20261130-174501-cuda-12-8-4f2a."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:24] or "change"
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{slug}-{secrets.token_hex(2)}"


def table_of(plan: Plan) -> Table:
    return Table.build(PHASES, lambda phase: [chosen.provider.name for chosen in plan.chosen(phase)])


def create(root: Path, plan_path: Path, connection: Connection) -> Path:
    """Freeze plan, inventory and playbooks into a new change directory and begin its journal. Touches no host.

    Raises PlanError, InventoryError; leaves nothing behind when it raises.
    """
    places.refuse_open_file(plan_path, "the plan")
    places.refuse_open_directory(root, "the state directory")
    plan = load(plan_path)
    sources = sources_of(plan, connection)
    for source in (path for path in sources if os.path.exists(path)):
        places.refuse_open_file(Path(source), "the inventory")
    found = inventory.resolve(sources, connection.limit, plan.hosts, vault_ids=connection.vault_ids)
    home = root / new_id(plan.name)
    with building(home) as draft:
        frozen = draft / "frozen"
        shutil.copyfile(plan_path, frozen / "plan.yaml")
        kept = inventory.freeze(sources, frozen / "inventory")
        meta = new_meta(home.name, plan, found, [_relative(path, frozen) for path in kept], frozen)
        meta["accept_irreversible"] = _accepted(connection.accept_irreversible, found)
        begin(draft, meta, plan)
    return home


@contextmanager
def building(home: Path) -> Iterator[Path]:
    """A directory with the playbooks frozen in it, to be filled; it becomes `home` at the end, or nothing stays."""
    home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = home.parent / f".{home.name}.partial"
    try:
        frozen = draft / "frozen"
        frozen.mkdir(mode=0o700, parents=True)
        shutil.copytree(content.playbooks(), frozen / "playbooks", ignore=shutil.ignore_patterns("__pycache__"))
        yield draft
        draft.rename(home)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def begin(draft: Path, meta: Mapping[str, Any], plan: Plan) -> None:
    """The journal's first event, under whatever `meta` says of the change for good."""
    _private(draft)
    with Journal.create(draft / JOURNAL, meta) as journal:
        journal.append([Event(Kind.CREATED, data={"plan": plan.name})])


def _accepted(named: tuple[str, ...], found: inventory.Inventory) -> list[str]:
    strangers = [host for host in named if host not in found.hosts]
    if strangers:
        raise UsageError(
            f"--accept-irreversible {strangers[0]}: not a host of this change",
            remedy=f"its hosts: {', '.join(found.hosts)}",
        )
    return list(named)


def sources_of(plan: Plan, connection: Connection) -> tuple[str, ...]:
    """What -i names, else the plan. Raises InventoryError when neither does."""
    if connection.inventory:
        return connection.inventory
    if plan.inventory:
        return tuple(plan.inventory_sources())
    raise InventoryError(
        "no inventory is named",
        where=plan.source,
        remedy="give one with -i, or write `inventory: FILE` into the plan",
    )


def _relative(path: str, frozen: Path) -> str:
    return os.path.relpath(path, frozen)


def delegates_of(plan: Plan, found: inventory.Inventory) -> tuple[str, ...]:
    """The other machines that the plan's providers act on, such as load balancers."""
    patterns = [p for phase in PHASES for c in plan.chosen(phase.name) for p in c.provider.delegates(c.params)]
    return inventory.select(found, patterns) if patterns else ()


def new_meta(change: str, plan: Plan, found: inventory.Inventory, kept: Sequence[str], frozen: Path) -> dict[str, Any]:
    """What is written down of a change for good when it begins. `kept`: the -i paths, relative to `frozen`."""
    delegates = delegates_of(plan, found)
    return {
        "change": change,
        "version": __version__,
        "report_schema": REPORT_SCHEMA,
        "table": [list(step.key) for step in table_of(plan).steps],
        "hosts": list(found.hosts),
        "delegates": list(delegates),
        "ssh": {name: _ssh_variables(found.known[name]) for name in dict.fromkeys([*found.hosts, *delegates])},
        "inventory": list(kept),
        "playbooks": content.digest(frozen / "playbooks"),
        "files": _own_files(frozen),
        "accept_irreversible": [],
    }


def _own_files(frozen: Path) -> dict[str, str]:
    """path → sha256 of the frozen plan and inventory."""
    return {path: digest for path, digest in content.files(frozen).items() if not path.startswith("playbooks/")}


SSH_VARIABLES = (
    *("ansible_connection", "ansible_host", "ansible_port", "ansible_user", "ansible_ssh_private_key_file"),
    *("ansible_ssh_common_args", "ansible_ssh_extra_args"),
)


def _ssh_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """What is needed to knock at a host; no password is among it."""
    return {name: variables[name] for name in SSH_VARIABLES if name in variables}


def _private(tree: Path) -> None:
    """0700 for directories, 0600 for files (0700 where they were executable)."""
    for path in [tree, *tree.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o700 if path.is_dir() or path.stat().st_mode & 0o100 else 0o600)


@dataclass
class Change:
    """An opened change: plan, table, limits, journal, folded state, and which report bodies each host has."""

    home: Path
    plan: Plan
    journal: Journal
    state: State
    meta: Mapping[str, Any]  # what the change began with; read once, it may name many hosts
    bodies: dict[str, dict[tuple[str, str], str]] = field(default_factory=dict)  # host → (which, step) → digest
    retries: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)  # host, phase, provider, direction
    hands: Confirmations = field(default_factory=Confirmations)

    @classmethod
    def open(cls, home: Path, *, readonly: bool = False) -> Change:
        """Fold the journal. Raises LockedError (another controller), VersionMismatch, JournalError, PlanError."""
        if not readonly:
            places.refuse_open_directory(home, "the state directory")
        journal = Journal.open(home / JOURNAL, readonly=readonly)
        try:
            plan = load(home / "frozen" / "plan.yaml")
            table, meta = table_of(plan), journal.meta
            _same_shape(meta, table)
            if not readonly:  # what acts must stand on a whole record; who only looks is told by audit verify
                journal.verify()
                _same_content(meta, home)
            change = cls(home, plan, journal, State(table, tuple(meta["hosts"])), meta)
            now = time.monotonic()  # waits begun by another controller are waited out anew
            for event in journal.events():
                change.fold(event, now)
        except BaseException:
            journal.close()
            raise
        return change

    @property
    def id(self) -> str:
        return self.home.name

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self.meta["hosts"])

    @property
    def reviewed(self) -> Mapping[str, Mapping[str, Any]]:
        """host → fingerprint that was reviewed; empty for a change that did not begin from a bundle."""
        found: Mapping[str, Mapping[str, Any]] = self.meta.get("reviewed", {}).get("hosts", {})
        return found

    @property
    def limits(self) -> Limits:
        rollout = self.plan.rollout
        return Limits(
            max_unavailable=rollout.max_unavailable_of(len(self.hosts)),
            canary=rollout.canary,
            stop_after_failures=rollout.stop_after_failures,
            on_failure=self.plan.rollback.on_failure,
        )

    def fold(self, event: Event, now: float = 0.0) -> None:
        self.state.apply(event, now)
        self.hands.fold(event)
        if event.kind is Kind.RETRY:
            self.retries[event.host, event.phase, event.provider, event.direction] += 1
        if not event.body:
            return
        step, kept = f"{event.phase}/{event.provider}", self.bodies.setdefault(event.host, {})
        kept.setdefault((event.direction, step), event.body)
        if event.kind == Kind.ACCEPTED and event.direction == "do":
            kept.setdefault(("first", step), event.body)
            kept["last", step] = event.body

    def provider(self, phase: str, name: str) -> tuple[Provider, Mapping[str, Any]]:
        """The provider that plays `phase` (release plays drain's) with its parameters."""
        chosen = next(c for c in self.plan.chosen(phase) if c.provider.name == name)
        return chosen.provider, chosen.params

    def view(self, host: str, step: Step, direction: str) -> HostView:
        """What a provider may know of `host` while the table's `step` is played in `direction`."""
        play = step.play(direction)
        _, params = self.provider(play.phase, step.provider)
        own = self.bodies.get(host, {}).get((direction, f"{step.phase.name}/{step.provider}"))
        return HostView(
            host=host,
            plan={**self.plan.data, "accept_irreversible": self.meta["accept_irreversible"]},
            params=params,
            first=self.reports(host, "first"),
            last=self.reports(host, "last"),
            own=self.journal.body(own) if own else None,
            waited=self.state.hosts[host].steps[step.key].waited,
            retries=self.retries[host, *step.key, direction],
            memo=self.hands.memos.get((host, *step.key, direction), {}),
            confirmed=(host, *step.key, direction) in self.hands.confirmed,
            direction="undo" if play.tasks == "undo" else "do",
        )

    def reports(self, host: str, which: str = "last") -> Mapping[str, Mapping[str, Any]]:
        """ "phase/provider" → accepted report body of this host (`first` or `last`)."""
        kept = self.bodies.get(host, {})
        return LazyBodies(self.journal, {step: digest for (kind, step), digest in kept.items() if kind == which})


class LazyBodies(Mapping[str, Mapping[str, Any]]):
    """ "phase/provider" → report body, read from the journal when asked for."""

    def __init__(self, journal: Journal, digests: Mapping[str, str]) -> None:
        self._journal, self._digests = journal, dict(digests)

    def __getitem__(self, step: str) -> Mapping[str, Any]:
        return self._journal.body(self._digests[step])

    def __iter__(self) -> Any:
        return iter(self._digests)

    def __len__(self) -> int:
        return len(self._digests)


def _same_content(meta: Mapping[str, Any], home: Path) -> None:
    frozen = home / "frozen"
    altered = [] if content.digest(frozen / "playbooks") == meta["playbooks"] else ["playbooks"]
    if "files" in meta:  # absent in changes begun by early versions
        was, now = meta["files"], _own_files(frozen)
        altered += sorted(path for path in was.keys() | now.keys() if was.get(path) != now.get(path))
    if altered:
        raise StaleError(
            f"what this change froze was altered since it began: {', '.join(altered)}",
            where=str(frozen),
            remedy="put it back as it was, or begin a new change",
        )


def _same_shape(meta: Mapping[str, Any], table: Table) -> None:
    mine = [list(step.key) for step in table.steps]
    if meta["report_schema"] != REPORT_SCHEMA or meta["table"] != mine:
        raise VersionMismatch(
            f"this change was begun by gpuchange {meta['version']}; {__version__} has other phases or reports",
            where=str(meta["change"]),
            remedy=f"go on with the version that began it: pip install gpuchange=={meta['version']}",
        )
