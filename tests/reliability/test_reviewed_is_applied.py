"""What was reviewed is what is applied: whatever moves, and every forgery, is refused before a host is changed."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bundling import HOSTS, Desk, edited, facts

from gpuchange import approvals, bundle, content
from gpuchange.checks import fingerprint
from gpuchange.errors import StaleError
from reliability.figures import Effort, Figures, Row

pytest_plugins = ["bundling"]
pytestmark = pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="needs ssh-keygen")
ROW = Row(
    "What was reviewed is what is applied: what moved since is refused before a host is changed; forged approvals too",
    peer="Terraform: a saved plan is refused when its state's serial moved; the machines themselves are not compared",
    source="hashicorp/terraform internal/backend/local/backend_local.go",
)
Quiet = pytest.CaptureFixture[str]
CHANGING = {"baseline_gpu", "verify_host", "watch_host"}
"""Roles that run only on a host that is about to be changed, or was."""


def test_no_byte_of_a_bundle_can_differ(desk: Desk, effort: Effort, figures: Figures) -> None:
    raw, draw = desk.plan().read_bytes(), random.Random(effort.seed)
    places = range(len(raw)) if effort.full else sorted(draw.sample(range(len(raw)), 1500))
    for at in places:
        broken = raw[:at] + bytes([raw[at] ^ (1 << draw.randrange(8))]) + raw[at + 1 :]
        figures.tried += 1
        try:
            bundle.parse(broken)
        except StaleError:
            continue
        figures.broken.append(f"byte {at} altered: read all the same")
    figures.count(bytes=len(raw))


def leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in `data` that holds no others."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inner:
        yield from leaves(value, (*path, key))
    if not inner:
        yield path


def other(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool) or value is None:
        return not value if value is not None else "other"
    if isinstance(value, int | float):
        return value + 1
    return f"{value}~" if isinstance(value, str) else [*value, "x"] if isinstance(value, list) else {"x": "x"}


def with_other(path: tuple[Any, ...]) -> Callable[[dict[str, Any]], None]:
    def change(fields: dict[str, Any]) -> None:
        node = fields["content"]
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = other(node[path[-1]])

    return change


def test_no_field_of_an_approved_bundle_can_differ(desk: Desk, effort: Effort, figures: Figures, capsys: Quiet) -> None:
    """By one who makes the digest fit again."""
    path, signers = desk.plan(), desk.signers(bob="bob")
    assert desk.run("approve", str(path), "--as", "bob", "--key", str(desk.key("bob")), "--yes") == 0
    fields = list(leaves(json.loads(path.read_text())["content"]))
    for field in fields if effort.full else random.Random(effort.seed).sample(fields, 25):
        forged = edited(path, with_other(field))
        code = desk.run("apply", str(forged), "--yes", "--require-approvals", "1", "--allowed-signers", str(signers))
        figures.tried += 1
        if code != 8 or desk.fleet.changed:
            figures.broken.append(f"{'.'.join(map(str, field))} altered: exit {code}")
    figures.count(fields=len(fields))


MOVES: dict[str, Callable[[dict[str, Any]], None]] = {
    "machine-id": lambda facts: facts.update(machine_id="f" * 32),
    "boot-id": lambda facts: facts.update(boot_id="later"),
    "kernel": lambda facts: facts.update(kernel="6.9.9"),
    "driver": lambda facts: facts["loaded"].update(proc_version="NVRM version: x  Kernel Module  535.1.2  Tue"),
    "CUDA": lambda facts: facts["cuda"].update(link=[]),
    "cuDNN": lambda facts: facts["packages"]["packages"].update({"libcudnn9-cuda-12": "9.7.0.1-1"}),
    "package dkms": lambda facts: facts["packages"]["packages"].update({"dkms": "9"}),
    "container toolkit": lambda facts: facts["packages"]["packages"].pop("nvidia-container-toolkit"),
    "card": lambda facts: facts["smi"].update(out=facts["smi"]["out"].replace("GPU-h", "GPU-x", 1)),
}
MOMENTS = {  # (role, tasks) of the play as which begins the host has moved; "": before anything
    "before": ("", ""),
    "before record": ("record_host", "apply"),
    "before drain": ("preflight_host", "probe"),
    "before seal": ("seal_host", "apply"),
}


def test_every_move_of_a_host_at_every_moment_is_refused(
    desk: Desk, effort: Effort, figures: Figures, capsys: Quiet
) -> None:
    for what, move in MOVES.items():
        move(mine := facts("h1"))
        lines = fingerprint.moved(fingerprint.of({"facts": facts("h1")}), fingerprint.of({"facts": mine}))
        assert any(line.startswith(what) for line in lines)
    cases = [(host, what, moment) for host in HOSTS for what in MOVES for moment in MOMENTS]
    for host, what, moment in cases if effort.full else random.Random(effort.seed).sample(cases, 10):
        desk.fresh()
        path = desk.plan()
        if moment == "before":
            MOVES[what](desk.fleet.facts[host])
        else:
            desk.fleet.before = mover(desk, host, what, MOMENTS[moment])
        code = desk.run("apply", str(path), "--yes")
        said = capsys.readouterr()
        figures.tried += 1
        changed = {role for name, role, _ in desk.fleet.ledger if name == host} & CHANGING
        named = what in said.out + said.err or "another machine answers" in said.out
        if code == 0 or changed or not named or (moment == "before" and (code != 8 or desk.fleet.changed)):
            figures.broken.append(f"{host}, {what} {moment}: exit {code}, done: {sorted(changed)}, named: {named}")


def mover(desk: Desk, host: str, what: str, moment: tuple[str, str]) -> Callable[[Any], None]:
    moved: list[str] = []

    def before(request: Any) -> None:
        if not moved and (request.role, request.tasks) == moment and host in request.hosts:
            moved.append(what)
            MOVES[what](desk.fleet.facts[host])

    return before


def test_every_file_of_the_playbooks_that_moved_is_named(
    desk: Desk, effort: Effort, figures: Figures, capsys: Quiet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, tree = desk.plan(), tmp_path / "playbooks"
    shutil.copytree(content.playbooks(), tree, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(content, "playbooks", lambda: tree)
    names = sorted(content.files(tree))
    for name in names if effort.full else random.Random(effort.seed).sample(names, 12):
        whole = (tree / name).read_bytes()
        for how, alter in (("changed", lambda p: p.write_bytes(whole + b"\n")), ("is gone", Path.unlink)):  # noqa: B023
            alter(tree / name)
            code = desk.run("apply", str(path), "--yes")
            figures.tried += 1
            if code != 8 or f"playbooks/{name} {how}" not in capsys.readouterr().err:
                figures.broken.append(f"{name} {how}: exit {code}")
            (tree / name).write_bytes(whole)
    assert desk.fleet.changed == []
    assert desk.run("apply", str(path), "--yes") == 0


def signature(key: Path, text: str, namespace: str = approvals.NAMESPACE) -> str:
    return approvals._keygen(["-Y", "sign", "-n", namespace, "-f", str(key)], text).stdout


def test_no_forged_approval_counts(desk: Desk, effort: Effort, figures: Figures) -> None:
    """Other keys, other texts, other namespaces, other names, damaged signatures, the author's own, one key twice."""
    made, draw = bundle.read(desk.plan("b", "--author-key", str(desk.key("alice")))), random.Random(effort.seed)
    signers = desk.signers(bob="bob", dan="bob", erin="alice")
    good = signature(desk.key("bob"), approvals.message(made))
    assert not approvals.check(made.approved(bundle.Approval(name="bob", signature=good)), signers)[0].why
    for number in range(effort.of(400, 6)):
        stranger = desk.key(f"stranger{number % 8}")
        at = draw.randrange(40, len(good) - 40)
        letter = draw.choice([c for c in "ABCabc0189+/" if c != good[at]])
        for what, name, text in (
            ("another key", "bob", signature(stranger, approvals.message(made))),
            ("another text", "bob", signature(desk.key("bob"), f"{draw.randbytes(32).hex()}\n")),
            ("another namespace", "bob", signature(desk.key("bob"), approvals.message(made), "file")),
            ("another name", f"mallory{number}", good),
            ("the author's key", "erin", signature(desk.key("alice"), approvals.message(made))),
            ("a damaged one", "bob", good if good[at] == "\n" else good[:at] + letter + good[at + 1 :]),
        ):
            if text == good and name == "bob":
                continue
            figures.tried += 1
            (one,) = approvals.check(made.approved(bundle.Approval(name=name, signature=text)), signers)
            if not one.why:
                figures.broken.append(f"{what}, as {name}, counts")
    twice = copy.copy(made)
    for name in ("bob", "dan", "bob"):
        twice = twice.approved(bundle.Approval(name=name, signature=good))
    figures.tried += 1
    if sum(not one.why for one in approvals.check(twice, signers)) != 1:
        figures.broken.append("one key under two names counts more than once")


def test_this_test_can_fail(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the comparison, a host that moved is changed."""
    path = desk.plan()
    monkeypatch.setattr("gpuchange.checks.fingerprint.moved", lambda _was, _now: ())
    MOVES["boot-id"](desk.fleet.facts["h2"])
    assert desk.run("apply", str(path), "--yes") == 0
    assert CHANGING & {role for name, role, _ in desk.fleet.ledger if name == "h2"}
