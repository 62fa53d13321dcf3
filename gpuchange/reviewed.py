"""From a dry run to a bundle, and from a bundle to the one change that it allows."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gpuchange import __version__, content, once
from gpuchange.bundle import (
    BASE64,
    REVIEW_AGAIN,
    Author,
    Bundle,
    Content,
    ExtraVars,
    HostReview,
    Inventory,
    Reach,
    Step,
    digest_of_file,
    lay_out,
)
from gpuchange.change import Change, Connection, begin, building, new_id, new_meta, sources_of
from gpuchange.checks import fingerprint
from gpuchange.drift import resolved
from gpuchange.errors import StaleError, UsageError
from gpuchange.frozen import is_inline
from gpuchange.looking import FIRST_PHASE, Looks
from gpuchange.phases import PHASES
from gpuchange.plan import Plan, load, loads
from gpuchange.preview import Preview, Version, compared, rows, wanted_versions
from gpuchange.reports import REPORT_SCHEMA

COMPONENT_KEYS = {"driver": "driver", "cuda": "CUDA", "cudnn": "cuDNN", "container_toolkit": "container toolkit"}


@dataclass(frozen=True)
class Asked:
    """What `plan -o` was asked: the plan file, how to reach the hosts, who asks, and for how long it shall hold."""

    plan: Path
    reach: Connection
    author: Author
    lifetime_s: int


def make(change: Change, seen: Preview, looks: Looks, asked: Asked) -> Bundle:
    """The bundle of a dry run: `change` is its scratch change, in which nothing secret stands in clear."""
    now = datetime.now(UTC)
    frozen, plan = change.home / "frozen", change.plan
    return Bundle.of(
        Content(
            version=__version__,
            report_schema=REPORT_SCHEMA,
            code=content.code(),
            created=_text(now),
            expires=_text(now + timedelta(seconds=asked.lifetime_s)),
            author=asked.author,
            name=plan.name,
            plan=(frozen / "plan.yaml").read_text(encoding="utf-8"),
            at_once=seen.at_once,
            steps=_steps(plan),
            hosts=tuple(
                HostReview(fingerprint=fingerprint.of_reports(looks.hosts[host.host], FIRST_PHASE), preview=host)
                for host in seen.hosts
            ),
            delegates=tuple(change.meta["delegates"]),
            inventory=Inventory(
                sources=tuple(_absolute(source) for source in sources_of(load(asked.plan), asked.reach)),
                kept=tuple(change.meta["inventory"]),
                files=_frozen_files(frozen),
            ),
            playbooks=content.files(frozen / "playbooks"),
            reach=_reach(asked.reach),
        )
    )


def _text(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def _absolute(source: str) -> str:
    return source if is_inline(source) else os.path.abspath(source)


def _steps(plan: Plan) -> tuple[Step, ...]:
    found = [(row.phase.name, row.provider.name, row.params) for row in rows(plan, PHASES)]
    return tuple(
        Step(phase=phase, provider=name, params=json.loads(json.dumps(params))) for phase, name, params in found
    )


def _frozen_files(frozen: Path) -> dict[str, str]:
    found = {}
    for path in sorted((frozen / "inventory").rglob("*")):
        if path.is_file():
            found[path.relative_to(frozen).as_posix()] = _one_file(path)
    return found


def _one_file(path: Path) -> str:
    raw = path.read_bytes()
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return BASE64 + base64.b64encode(raw).decode()
    return text if not text.startswith(BASE64) else BASE64 + base64.b64encode(raw).decode()


def _reach(connection: Connection) -> Reach:
    return Reach(
        limit=connection.limit,
        user=connection.user,
        become=connection.become,
        extra_vars=tuple(_extra(given) for given in connection.extra_vars),
        accept_irreversible=connection.accept_irreversible,
    )


def _extra(given: str) -> ExtraVars:
    if given.startswith("@"):
        path = os.path.abspath(os.path.expanduser(given[1:]))
        return ExtraVars(file=path, sha256=digest_of_file(path))
    return ExtraVars(text=given)


def connection(bundle: Bundle, given: Connection) -> Connection:
    """How the bundle's change reaches its hosts: what was reviewed from the bundle, keys and secrets from `given`.

    Raises UsageError when `given` names what the bundle says already.
    """
    reach = bundle.content.reach
    extra = tuple(f"@{one.file}" if one.file else one.text for one in reach.extra_vars)
    return bound({"user": reach.user, "become": reach.become, "extra_vars": extra}, given)


def bound(reviewed: Mapping[str, Any], given: Connection) -> Connection:
    """`given` with the flags of the review. Raises UsageError when it names others."""
    for flag, value in (
        ("-i", given.inventory),
        ("-l", given.limit),
        ("-e", given.extra_vars),
        ("--accept-irreversible", given.accept_irreversible),
        ("-u", given.user if given.user != reviewed["user"] else None),
        ("-b", given.become and not reviewed["become"]),
    ):
        if value:
            raise UsageError(
                f"{flag} was settled when the bundle was made", remedy=f"leave {flag} out, or plan and review anew"
            )
    extra = tuple(reviewed["extra_vars"])
    return replace(given, user=reviewed["user"], become=reviewed["become"], extra_vars=extra)


def apply_once(root: Path, bundle: Bundle, vault_ids: Sequence[str], approvals: Sequence[Mapping[str, str]]) -> Path:
    """The change of this bundle below `root`, not yet run; its record is durable before the change is there.

    Raises StaleError when a change began from it already, or playbooks moved at this very moment.
    """
    plan = loads(bundle.content.plan, "the bundle's plan")
    home = root / new_id(plan.name)
    with once.records(root) as records:
        record = records / bundle.digest
        once.refuse_if_applied(root, bundle.digest)
        once.keep(record, {"change": home.name, "begun": False})
        with building(home) as draft:
            begin(draft, _meta(bundle, plan, home.name, draft / "frozen", vault_ids, approvals), plan)
        once.keep(record, {"change": home.name, "begun": True})
    return home


def scratch_change(root: Path, bundle: Bundle, vault_ids: Sequence[str]) -> Path:
    """As `apply_once`, to look only: leaves no record."""
    plan = loads(bundle.content.plan, "the bundle's plan")
    home = root / new_id(plan.name)
    with building(home) as draft:
        begin(draft, _meta(bundle, plan, home.name, draft / "frozen", vault_ids, ()), plan)
    return home


def give_up(root: Path, bundle: Bundle, home: Path) -> None:
    """Forget a change that was refused before anything was done: the bundle may be applied again."""
    with once.records(root) as records:
        shutil.rmtree(home)
        (records / bundle.digest).unlink(missing_ok=True)


def _meta(
    bundle: Bundle,
    plan: Plan,
    change: str,
    frozen: Path,
    vault_ids: Sequence[str],
    approvals: Sequence[Mapping[str, str]],
) -> dict[str, Any]:
    (frozen / "plan.yaml").write_text(bundle.content.plan, encoding="utf-8")
    kept = lay_out(bundle, frozen)
    found = resolved(bundle, plan, kept, vault_ids)
    meta = new_meta(change, plan, found, bundle.content.inventory.kept, frozen)
    reach = connection(bundle, Connection())
    _refuse_if_unlike(bundle, meta, plan, frozen)
    return {
        **meta,
        "accept_irreversible": list(bundle.content.reach.accept_irreversible),
        "reviewed": {
            "bundle": bundle.digest,
            "author": bundle.content.author.model_dump(),
            "approvals": [dict(one) for one in approvals],
            "hosts": {one.preview.host: one.fingerprint for one in bundle.content.hosts},
            "connection": {"user": reach.user, "become": reach.become, "extra_vars": list(reach.extra_vars)},
        },
    }


def _versions(plan: Plan, host: HostReview) -> tuple[Version, ...]:
    """Before → after as the plan and the host's own fingerprint have it."""
    found = {name: str(host.fingerprint.get(key, "")) for name, key in COMPONENT_KEYS.items()}
    return compared(wanted_versions(plan.data), found)


def _refuse_if_unlike(bundle: Bundle, meta: Mapping[str, Any], plan: Plan, frozen: Path) -> None:
    """What it says of itself must follow from its own plan and inventory, and from the playbooks just frozen."""
    own = bundle.content
    pairs = (
        ("its hosts", list(bundle.hosts), meta["hosts"]),
        ("its delegates", list(own.delegates), meta["delegates"]),
        ("its steps", own.steps, _steps(plan)),
        ("its name", own.name, plan.name),
        ("the playbooks", own.playbooks, content.files(frozen / "playbooks")),
        ("at most out at once", own.at_once, plan.rollout.max_unavailable_of(len(meta["hosts"]))),
        ("its versions", [one.preview.versions for one in own.hosts], [_versions(plan, one) for one in own.hosts]),
        ("the report schema", own.report_schema, REPORT_SCHEMA),
    )
    wrong = [what for what, said, found in pairs if said != found]
    if wrong:
        why = f"{', '.join(wrong)}: what it shows is not what its plan and inventory give here"
        raise StaleError("the bundle contradicts itself", why=why, remedy=REVIEW_AGAIN)
