"""What a reviewed bundle needs of the command line: written by plan, approved by approve, carried out by apply."""

from __future__ import annotations

import os
import pwd
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpuchange.cli import again, asking, changes, live, render, running, words
from gpuchange.cli.settings import common, current
from gpuchange.errors import NotApproved, StaleError, UsageError

if TYPE_CHECKING:
    from gpuchange.approvals import Checked
    from gpuchange.bundle import Bundle
    from gpuchange.change import Change, Connection
    from gpuchange.looking import Looks
    from gpuchange.preview import Preview

Command = TypeVar("Command", bound=Callable[..., Any])
FILE = click.Path(path_type=Path, dir_okay=False)


@dataclass(frozen=True)
class Policy:
    """How many approvals are required, and whose count."""

    number: int = 0
    allowed: Path | None = None


NONE_REQUIRED = Policy()
_MAKING = (
    click.option("-o", "--out", type=FILE, metavar="FILE", help="Keep what was seen as a bundle, to be applied later."),
    click.option("--expires", default="24h", show_default=True, metavar="TIME", help="How long the bundle holds."),
    click.option("--author", metavar="NAME", help="Who makes the bundle (default: user@machine)."),
    click.option("--author-key", type=FILE, metavar="FILE", help="The author's SSH key: it cannot approve the bundle."),
)
_REQUIRING = (
    click.option(
        "--require-approvals",
        type=click.IntRange(0),
        default=0,
        metavar="N",
        help="Apply only a bundle with N approvals (also GPUCHANGE_REQUIRE_APPROVALS; the larger counts).",
    ),
    click.option(
        "--allowed-signers",
        type=FILE,
        metavar="FILE",
        envvar="GPUCHANGE_ALLOWED_SIGNERS",
        show_envvar=True,
        help="Whose approvals count, as ssh-keygen(1) says.",
    ),
)


def making_flags(command: Command) -> Command:
    for option in reversed(_MAKING):
        command = option(command)
    return command


def requiring_flags(command: Command) -> Command:
    for option in reversed(_REQUIRING):
        command = option(command)
    return command


def policy(flags: dict[str, Any]) -> Policy:
    """Takes its flags out of `flags`. The environment can only be raised, not lowered."""
    given = os.environ.get("GPUCHANGE_REQUIRE_APPROVALS", "") or "0"
    if not given.isdecimal():
        raise UsageError(f"GPUCHANGE_REQUIRE_APPROVALS is {given!r}, no number", remedy="set a whole number")
    return Policy(max(flags.pop("require_approvals"), int(given)), flags.pop("allowed_signers"))


# -- making -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """What `plan -o` was asked for."""

    out: Path
    lifetime_s: int
    author: str
    key: str

    def keep(self, plan: Path, change: Change, seen: Preview, looks: Looks, reach: Connection) -> None:
        """Write the bundle, unless something stands in the way of the change."""
        from gpuchange import bundle, reviewed

        if looks.code:
            words.warn(f"not written: {self.out}")
            return
        author = bundle.Author(name=self.author, key=self.key)
        made = reviewed.make(change, seen, looks, reviewed.Asked(plan, reach, author, self.lifetime_s))
        bundle.write(self.out, made)
        fields = {"path": str(self.out), "digest": made.digest, "expires": made.content.expires}
        if current().json:
            live.emit({"type": "bundle", **fields})
        else:
            words.say(f"\nwrote {self.out}, sha256 {made.digest}\nit holds until {made.content.expires}, for this once")
            words.say(f"next: {_signing(self.out)}, or {again.command('apply', self.out, bundled=True)}")


def order(flags: dict[str, Any]) -> Order | None:
    """Takes its flags out of `flags`; None when no bundle is asked for. Raises UsageError."""
    out, expires, author, key = (flags.pop(name) for name in ("out", "expires", "author", "author_key"))
    if out is None:
        return None
    from gpuchange import approvals, bundle, places

    places.refuse_open_file(out, "the bundle")
    if out.exists() and not bundle.is_bundle(out):
        raise UsageError("this file is no bundle: not written over", where=str(out), remedy="choose another name")
    name = approvals.check_name(author or _myself(), "--author")
    return Order(out, _lifetime(expires), name, approvals.key_of(key) if key else "")


def _myself() -> str:
    """user@machine; behind sudo the user who called it."""
    user = pwd.getpwuid(os.getuid()).pw_name
    return f"{os.environ.get('SUDO_USER', user) if os.getuid() == 0 else user}@{socket.gethostname()}"


def _lifetime(text: str) -> int:
    from pydantic import TypeAdapter, ValidationError

    from gpuchange.providers.types import Duration

    try:
        seconds = int(TypeAdapter(Duration).validate_python(text))
    except ValidationError as error:
        raise UsageError(f"--expires: {error.errors()[0]['msg']}", remedy="write 90m, 24h, 7d") from None
    if not seconds:
        raise UsageError("--expires: a bundle that holds no time at all", remedy="write 90m, 24h, 7d")
    return seconds


# -- applying ---------------------------------------------------------------------------------------------------------


def is_bundle(path: Path) -> bool:
    from gpuchange import bundle

    return bundle.is_bundle(path)


def refuse_plan(path: Path, asked: Policy) -> None:
    """A plain plan cannot carry approvals. Raises NotApproved when they are required."""
    if asked.number:
        raise NotApproved(
            f"{asked.number} approval(s) are required, and {path} is a plan, not a bundle",
            remedy=f"{again.command('plan', path)} -o FILE, then gpuchange approve FILE",
        )


def _commands(path: Path) -> tuple[str, str]:
    """Those that look at the bundle and that carry it out."""
    return again.command("plan", path, bundled=True), again.command("apply", path, bundled=True)


def _signing(path: Path) -> str:
    return f"{again.command('approve', path)} --key KEY --as NAME"


def look(path: Path, given: Connection, asked: Policy) -> tuple[Preview, int]:
    """Whether the bundle could be applied now: everything compared, the preview shown, no record left."""
    from gpuchange import reviewed
    from gpuchange.engine import Engine
    from gpuchange.looking import before_change, still_as_reviewed

    found, reach, _ = _opened(path, given, asked)
    with tempfile.TemporaryDirectory(prefix="gpuchange-look-") as scratch:
        engine = Engine(reviewed.scratch_change(Path(scratch), found, given.vault_ids), reach)
        try:
            looks = before_change(engine)
            still_as_reviewed(engine)
            seen = asking.show(engine.change.plan, looks, *_commands(path))
            return seen, looks.code
        finally:
            engine.close()


def apply(path: Path, given: Connection, asked: Policy) -> int:
    """Carry the bundle out, once, if nothing has moved. Raises StaleError, NotApproved, UsageError."""
    from gpuchange import reviewed

    found, reach, checked = _opened(path, given, asked)
    _tell(checked)
    root, counting = current().root, [{"as": one.name, "key": one.key} for one in checked if not one.why]
    home = reviewed.apply_once(root, found, given.vault_ids, counting)
    try:
        return asking.carry(home, reach, _commands(path)[0])
    except (click.Abort, UsageError, StaleError):
        if not changes.read(home).state.counts.touched:  # refused before anything was done: nothing to come back to
            reviewed.give_up(root, found, home)
        raise


def _opened(path: Path, given: Connection, asked: Policy) -> tuple[Bundle, Connection, list[Checked]]:
    """Approvals come first: an inventory is code, and only reading it may run that."""
    from gpuchange import approvals, bundle, drift, reviewed

    found = bundle.read(path)
    checked = approvals.require(found, asked.number, asked.allowed)
    reach = reviewed.connection(found, given)
    for notice in drift.refuse_if_stale(found, current().root, given.vault_ids):
        words.warn(f"inventory: {words.clean(notice)}")
    return found, reach, checked


def _tell(checked: list[Checked]) -> None:
    for one in checked:
        says = f"does not count: {one.why}" if one.why else f"approved ({one.key})"
        words.warn(f"{words.clean(one.name)}: {words.clean(says)}")


def bound(directory: Path, given: Connection) -> Connection:
    """The flags of a change that exists: what was reviewed stays as it was, also on resume and rollback."""
    kept = changes.read(directory).meta.get("reviewed")
    if not kept:
        return given
    from gpuchange import reviewed

    return reviewed.bound(kept["connection"], given)


# -- approving --------------------------------------------------------------------------------------------------------


@click.command()
@click.argument("path", metavar="FILE", type=FILE)
@click.option("--key", type=FILE, metavar="KEY", help="SSH key to sign with (its public half, if an agent has it).")
@click.option("--as", "name", metavar="NAME", help="Who approves, as the allowed signers file names you.")
@click.option("--show", is_flag=True, help="Only show what the bundle holds and who has approved it.")
@common
def approve(path: Path, key: Path | None, name: str | None, show: bool) -> None:
    """Show what the bundle FILE would do, and sign it. Not for its author. Touches no host."""
    from gpuchange import approvals, bundle

    found = bundle.read(path)
    _show(path, found)
    if show:
        return
    if key is None or name is None:
        raise UsageError("who approves, with which key?", remedy=_signing(path))
    _fresh(found)
    signed = approvals.sign(found, key, approvals.check_name(name, "--as"))
    running.confirm(f"approve this as {name}?")
    bundle.write(path, found.approved(signed))
    if current().json:
        live.emit({"type": "approved", "path": str(path), "digest": found.digest, "as": name})
    else:
        words.say(f"approved as {name}\nnext: {_commands(path)[1]} --require-approvals N --allowed-signers FILE")


def _fresh(found: Bundle) -> None:
    from datetime import UTC, datetime

    from gpuchange import drift
    from gpuchange.bundle import REVIEW_AGAIN

    if lines := drift.expired(found, datetime.now(UTC)):
        raise StaleError("the bundle is stale", why="\n  ".join(lines), remedy=REVIEW_AGAIN)


def _show(path: Path, found: Bundle) -> None:
    """What was reviewed: the preview as the dry run had it, and the plan itself."""
    from gpuchange.preview import Preview

    own = found.content
    seen = Preview(own.name, tuple(host.preview for host in own.hosts), own.at_once)
    by = [approval.name for approval in found.approvals]
    if current().json:
        told = {"author": own.author.name, "created": own.created, "expires": own.expires, "approved_by": by}
        live.emit({**render.preview_json(seen), "bundle": {"digest": found.digest, **told}, "plan": own.plan})
        return
    words.say(words.clean(own.plan, keep_lines=True))
    words.say(render.preview_text(seen, _commands(path)[1]))
    for what, value in (
        ("made by", f"{own.author.name} at {own.created} with gpuchange {own.version}"),
        ("holds until", own.expires),
        ("approved by", f"{', '.join(by) or 'nobody'} (not verified here)"),
        ("sha256", found.digest),
    ):
        words.say(f"{what + ':':12} {words.clean(value)}")
