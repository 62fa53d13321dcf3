"""The bundle file: what was reviewed, in one file of canonical JSON, found again byte for byte or refused.

{"approvals": [...], "content": {...}, "digest": sha256 of the canonical content, "format": ..., "format_version": 1}
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from gpuchange import __version__, places
from gpuchange.errors import StaleError, UsageError
from gpuchange.journal import canonical
from gpuchange.preview import HostPreview

FORMAT, FORMAT_VERSION = "gpuchange-bundle", 1
BASE64 = "base64:"
MAX_BYTES = 256 << 20
_HEAD = re.compile(rb'\{"approvals":\[')
REVIEW_AGAIN = "look again and have that reviewed: gpuchange plan -o FILE PLAN"


def _inside(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError("leaves its directory")
    return path


RelPath = Annotated[str, AfterValidator(_inside)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Author(_Part):
    """Who made the bundle; `key` is the fingerprint of their signing key ("" when none was named)."""

    name: str
    key: str = ""


class ExtraVars(_Part):
    """One -e: its text, or the file that it names (absolute) with the sha256 of its content."""

    text: str = ""
    file: str = ""
    sha256: str = ""


class Reach(_Part):
    """The flags of `plan` that say what is changed and as whom; `apply` takes them from here."""

    limit: str | None = None
    user: str | None = None
    become: bool = False
    extra_vars: tuple[ExtraVars, ...] = ()
    accept_irreversible: tuple[str, ...] = ()


class Inventory(_Part):
    """The frozen inventory: `files` by path (text, or base64 after "base64:"), `kept`: the -i paths among them.

    `sources`: what -i named when the plan was made, absolute.
    """

    sources: tuple[str, ...]
    kept: tuple[RelPath, ...]
    files: dict[RelPath, str]


class Step(_Part):
    """One step of every host, with the provider's parameters as the plan resolved them."""

    phase: str
    provider: str
    params: dict[str, Any]


class HostReview(_Part):
    """One host: what it was (see checks/fingerprint.py) and what was said would happen to it."""

    fingerprint: dict[str, str | dict[str, str]]
    preview: HostPreview


class Content(_Part):
    """What is reviewed, approved and compared. Times are UTC, ISO 8601: they are for people and for expiry only."""

    version: str
    report_schema: int
    code: str
    created: str
    expires: str
    author: Author
    name: str
    plan: str
    at_once: int
    steps: tuple[Step, ...]
    hosts: tuple[HostReview, ...]
    delegates: tuple[str, ...]
    inventory: Inventory
    playbooks: dict[str, str]
    reach: Reach


class Approval(_Part):
    """A signature (armored, as ssh-keygen -Y sign writes it) over the bundle's digest, and whose it claims to be."""

    name: str
    signature: str


@dataclass(frozen=True)
class Bundle:
    content: Content
    digest: str
    approvals: tuple[Approval, ...] = ()

    @classmethod
    def of(cls, content: Content) -> Bundle:
        return cls(content, digest_of(content.model_dump(mode="json")))

    def approved(self, approval: Approval) -> Bundle:
        return replace(self, approvals=(*self.approvals, approval))

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(host.preview.host for host in self.content.hosts)


def digest_of(content: Any) -> str:
    return hashlib.sha256(canonical(content).encode()).hexdigest()


def text_of(bundle: Bundle) -> str:
    fields = {
        "approvals": [approval.model_dump(mode="json") for approval in bundle.approvals],
        "content": bundle.content.model_dump(mode="json"),
        "digest": bundle.digest,
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
    }
    return canonical(fields) + "\n"


def is_bundle(path: Path) -> bool:
    """Whether the file is a bundle, told by its content: also one that was damaged, so that it is refused as such."""
    try:
        if not path.is_file():  # what is in a pipe is gone once it is read
            return False
        with open(path, "rb") as file:
            return _HEAD.match(file.read(16)) is not None
    except OSError:
        return False


def write(path: Path, bundle: Bundle) -> None:
    """Write atomically, 0600. Raises UsageError when that fails or another kind of file stands there."""
    if path.exists() and not is_bundle(path):
        raise UsageError("this file is no bundle: not written over", where=str(path), remedy="choose another name")
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text_of(bundle))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise UsageError(f"cannot write: {error.strerror}", where=str(path), remedy="choose another place") from None


def read(path: Path) -> Bundle:
    """The bundle in `path`. Raises StaleError (damaged, other version), UsageError (unreadable, open to all)."""
    places.refuse_open_file(path, "the bundle")
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read: {error.strerror}", where=str(path), remedy="name a bundle file") from None
    return parse(raw, str(path))


def parse(raw: bytes, where: str = "") -> Bundle:
    """The bundle whose bytes are `raw`; `where` is what errors name. Raises StaleError."""
    fields = _fields(raw, where)
    content = fields["content"]
    if digest_of(content) != fields["digest"]:
        raise _damaged(where, "its content does not match its digest: it was edited after it was made")
    made_by = content.get("version") if isinstance(content, dict) else None
    if fields["format_version"] != FORMAT_VERSION or made_by != __version__:
        raise StaleError(
            f"gpuchange version differs: the bundle was made by {made_by}, this is {__version__}",
            where=where,
            remedy=f"pip install gpuchange=={made_by}, or {REVIEW_AGAIN}",
        )
    try:
        approvals = tuple(Approval.model_validate(one) for one in fields["approvals"])
        return Bundle(Content.model_validate(content), fields["digest"], approvals)
    except (ValidationError, TypeError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        raise _damaged(where, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


_KEYS = {"approvals", "content", "digest", "format", "format_version"}


def _fields(raw: bytes, where: str) -> dict[str, Any]:
    """The outer fields of a file in canonical form: one spelling only, so that no byte of it can differ unseen."""
    if len(raw) > MAX_BYTES:
        raise _damaged(where, f"it is larger than {MAX_BYTES >> 20} MiB")
    try:
        fields = json.loads(raw)
        whole = isinstance(fields, dict) and (canonical(fields) + "\n").encode() == raw
    except (ValueError, RecursionError) as error:
        raise _damaged(where, f"it is no JSON: {error}") from None
    if not whole or fields.keys() != _KEYS or fields["format"] != FORMAT:
        raise _damaged(where, "it is not written as gpuchange writes it")
    return dict(fields)


def _damaged(where: str, why: str) -> StaleError:
    return StaleError("the bundle is damaged or was edited", where=where, why=why, remedy=REVIEW_AGAIN)


def lay_out(bundle: Bundle, frozen: Path) -> list[str]:
    """Write the bundle's inventory below `frozen` (files 0600); returns its -i paths."""
    for name, text in bundle.content.inventory.files.items():
        path = frozen / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        raw = base64.b64decode(text.removeprefix(BASE64)) if text.startswith(BASE64) else text.encode()
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(raw)
    return [str(frozen / name) for name in bundle.content.inventory.kept]


def digest_of_file(path: str) -> str:
    """sha256 (hex) of a file that -e names. Raises UsageError."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"-e @FILE: cannot read: {error.strerror}", where=path, remedy="mend the name") from None
