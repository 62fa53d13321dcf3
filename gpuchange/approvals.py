"""Approvals of a bundle: OpenSSH signatures over its digest (ssh-keygen -Y), one a key, never the author's own."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuchange import places
from gpuchange.bundle import Approval, Author, Bundle
from gpuchange.errors import BeforeChangeError, NotApproved, UsageError

NAMESPACE = "gpuchange-plan"
TIMEOUT_S = 120.0  # a key on a token waits for a touch
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.%+@:/-]{0,127}")
_KEY = re.compile(r"\bSHA256:[A-Za-z0-9+/]{43}\b")
OTHERS_MAY_WRITE = 0o022


@dataclass(frozen=True)
class Checked:
    """One approval looked at: it counts when `why` is "". `key`: the signing key's fingerprint, "" if unproven."""

    name: str
    key: str = ""
    why: str = ""


def message(bundle: Bundle) -> str:
    """What is signed: the digest, on a line."""
    return f"{bundle.digest}\n"


def same_person(one: str, other: str) -> bool:
    """Whether two identities are one person's: equal, or equal before the @. Case does not count."""
    first, second = one.casefold(), other.casefold()
    return first == second or first.partition("@")[0] == second.partition("@")[0]


def check_name(name: str, flag: str) -> str:
    """`name`, if it can stand in an allowed_signers file. Raises UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{flag} {name!r} is not an identity", remedy="use letters, digits and . _ % + @ : / -")
    return name


def key_of(path: Path) -> str:
    """The fingerprint of a private or public key file. Raises UsageError."""
    done = _keygen(["-l", "-f", str(path)])
    found = _KEY.search(done.stdout)
    if done.returncode or not found:
        raise UsageError(
            "this is no SSH key", where=str(path), why=_said(done), remedy="ssh-keygen -t ed25519 makes one"
        )
    return found[0]


def sign(bundle: Bundle, key: Path, name: str) -> Approval:
    """Sign the bundle's digest with `key` as `name`. Raises NotApproved for its author and for a second time."""
    mine = key_of(key)
    author = bundle.content.author
    if same_person(name, author.name) or mine == author.key:
        raise NotApproved(
            f"{author.name} made this bundle and cannot approve it", remedy="let somebody else approve it"
        )
    if any(same_person(name, approval.name) for approval in bundle.approvals):
        raise NotApproved(f"{name} has approved this bundle already", remedy="let somebody else approve it")
    done = _keygen(["-Y", "sign", "-n", NAMESPACE, "-f", str(key)], message(bundle))
    if done.returncode or "BEGIN SSH SIGNATURE" not in done.stdout:
        raise UsageError(
            "ssh-keygen did not sign", where=str(key), why=_said(done), remedy="check the key and its agent"
        )
    return Approval(name=name, signature=done.stdout)


def require(bundle: Bundle, number: int, allowed: Path | None) -> list[Checked]:
    """At least `number` approvals must count. Returns all, looked at. Raises NotApproved, UsageError."""
    if number <= 0:
        return []
    if allowed is None:
        raise UsageError(
            "approvals are required, and nobody says whose count",
            remedy="--allowed-signers FILE (or GPUCHANGE_ALLOWED_SIGNERS); ssh-keygen(1) has its form",
        )
    checked = check(bundle, allowed)
    counting = [one for one in checked if not one.why]
    if len(counting) < number:
        raise NotApproved(
            f"{number} approval(s) are required, {len(counting)} of {len(checked)} count",
            why="\n  ".join(f"{one.name}: {one.why or 'counts'}" for one in checked) or "nobody has approved it",
            remedy="gpuchange approve FILE --key KEY --as NAME",
        )
    return checked


def check(bundle: Bundle, allowed: Path) -> list[Checked]:
    """Look at each approval in turn; a key or a person counts once."""
    _trusted(allowed)
    found: list[Checked] = []
    for approval in bundle.approvals:
        one = _verified(bundle, approval, allowed)
        found.append(one if one.why else Checked(one.name, one.key, _double(one, found)))
    return found


def _double(one: Checked, before: Sequence[Checked]) -> str:
    for other in before:
        if other.key == one.key:
            return f"its key has approved already, as {other.name}"
        if not other.why and same_person(other.name, one.name):
            return f"{other.name} has approved already"
    return ""


def _verified(bundle: Bundle, approval: Approval, allowed: Path) -> Checked:
    name, author = approval.name, bundle.content.author
    if not _NAME.fullmatch(name):
        return Checked(repr(name), why="no identity")
    with tempfile.TemporaryDirectory(prefix="gpuchange-approval-") as scratch:
        signature = Path(scratch, "signature")
        signature.write_text(approval.signature, encoding="utf-8")
        common = ["-f", str(allowed), "-s", str(signature)]
        done = _keygen(["-Y", "verify", "-I", name, "-n", NAMESPACE, *common], message(bundle))
        key = _KEY.search(done.stdout)
        if done.returncode or not key:
            return Checked(
                name, why=f"not a signature of this bundle by a key that may sign for {name} ({_said(done)})"
            )
        others = _keygen(["-Y", "find-principals", *common]).stdout
    return Checked(name, key[0], _own(author, name, key[0], others.replace(",", "\n").split()))


def _own(author: Author, name: str, key: str, names: Sequence[str]) -> str:
    if key == author.key or any(same_person(author.name, one) for one in (name, *names)):
        return f"its key or name is that of the author, {author.name}"
    return ""


def _trusted(allowed: Path) -> None:
    """The file that says whose word counts must be there and nobody else's to write."""
    places.refuse_open_file(allowed, "the file of allowed signers")
    try:
        mode = allowed.stat().st_mode
        allowed.read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot read: {error.strerror}", where=str(allowed), remedy="mend --allowed-signers"
        ) from None
    if mode & OTHERS_MAY_WRITE:
        raise UsageError(
            "others may write to the allowed signers, and so approve",
            where=str(allowed),
            remedy=f"chmod go-w {allowed}",
        )


def _keygen(arguments: Sequence[str], given: str = "") -> subprocess.CompletedProcess[str]:
    tool = shutil.which("ssh-keygen")
    if tool is None:
        raise BeforeChangeError(
            "ssh-keygen is not on this machine; approvals are signed and verified with it",
            remedy="install OpenSSH's client, 8.2 or newer (Debian: apt-get install openssh-client)",
        )
    try:
        return subprocess.run(
            [tool, *arguments], input=given, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise BeforeChangeError(
            f"ssh-keygen gave no answer within {TIMEOUT_S:.0f} s", remedy="run it by hand"
        ) from None


def _said(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit {done.returncode}"
