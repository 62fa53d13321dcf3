"""Who approved a bundle: signatures that count, and all those that do not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from bundling import Desk, edited

from gpuchange import approvals, bundle
from gpuchange.journal import Journal

pytest_plugins = ["bundling"]
pytestmark = pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="needs ssh-keygen")
Captured = pytest.CaptureFixture[str]


def approve(desk: Desk, path: Path, who: str, key: str = "") -> int:
    return desk.run("approve", str(path), "--as", who, "--key", str(desk.key(key or who)), "--yes")


def apply(desk: Desk, path: Path, number: int, signers: Path) -> int:
    required = ("--require-approvals", str(number), "--allowed-signers", str(signers))
    return desk.run("apply", str(path), "--yes", *required)


def test_two_approvals_are_counted_and_journalled(desk: Desk, capsys: Captured) -> None:
    path = desk.plan()
    signers = desk.signers(bob="bob", carol="carol")
    assert approve(desk, path, "bob") == 0
    assert "reason: because" in (out := capsys.readouterr().out)  # what is signed is shown: plan and preview
    assert "2 to change" in out and "approved as bob" in out
    assert apply(desk, path, 2, signers) == 8
    err = capsys.readouterr().err
    assert "2 approval(s) are required, 1 of 1 count" in err and "bob: counts" in err
    assert not desk.fleet.changed and desk.kept() == []
    assert approve(desk, path, "carol") == 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert apply(desk, path, 2, signers) == 0
    with Journal.open(desk.kept()[0], readonly=True) as journal:
        by = journal.meta["reviewed"]["approvals"]
    assert [(one["as"], one["key"]) for one in by] == [
        (who, approvals.key_of(desk.key(who))) for who in ("bob", "carol")
    ]


def test_nobody_approves_their_own(desk: Desk, capsys: Captured) -> None:
    path = desk.plan("b", "--author-key", str(desk.key("alice")))
    for who, key in (("alice", "alice"), ("Alice@example.org", "bob"), ("bob", "alice")):
        assert approve(desk, path, who, key) == 8
        assert "alice made this bundle" in capsys.readouterr().err
    assert bundle.read(path).approvals == ()


def sneaked(path: Path, who: str, key: Path, digest: str = "") -> Path:
    """The bundle with an approval put in by hand, past the verb's own refusals."""
    signed = approvals._keygen(
        ["-Y", "sign", "-n", approvals.NAMESPACE, "-f", str(key)], f"{digest or bundle.read(path).digest}\n"
    ).stdout
    return edited(path, lambda f: f["approvals"].append({"name": who, "signature": signed}), coherent=False)


@pytest.mark.parametrize(("known_key", "listed"), [(True, "bob"), (False, "alice@example.org"), (False, "zoe,alice")])
def test_a_self_made_approval_that_was_put_in_does_not_count(
    desk: Desk, capsys: Captured, known_key: bool, listed: str
) -> None:
    """The author's key, known from the bundle or from the signers' file, does not count under any name."""
    path = desk.plan("b", *(("--author-key", str(desk.key("mine"))) if known_key else ()))
    signers = desk.home / "allowed_signers"
    public = Path(f"{desk.key('mine')}.pub").read_text()
    signers.write_text(f"{listed} {public}bob {public}")
    forged = sneaked(path, "bob", desk.key("mine"))
    assert apply(desk, forged, 1, signers) == 8
    assert "its key or name is that of the author, alice" in capsys.readouterr().err


def test_one_key_or_one_person_counts_once(desk: Desk, capsys: Captured) -> None:
    path = desk.plan()
    assert approve(desk, path, "bob") == 0
    assert approve(desk, path, "bob") == 8
    assert "bob has approved this bundle already" in capsys.readouterr().err
    twice = sneaked(path, "dan", desk.key("bob"))
    assert apply(desk, twice, 2, desk.signers(bob="bob", dan="bob")) == 8
    assert "dan: its key has approved already, as bob" in capsys.readouterr().err
    other = sneaked(path, "bob@laptop", desk.key("bob2"))
    signers = desk.signers(**{"bob": "bob", "bob@laptop": "bob2"})
    assert apply(desk, other, 2, signers) == 8
    assert "bob@laptop: bob has approved already" in capsys.readouterr().err


def test_forged_and_stale_ones_do_not_count(desk: Desk, capsys: Captured) -> None:
    path, signers = desk.plan(), desk.signers(bob="bob")
    assert apply(desk, path, 1, signers) == 8
    assert "nobody has approved it" in capsys.readouterr().err
    for forged in (
        sneaked(path, "bob", desk.key("mallory")),
        sneaked(path, "bob", desk.key("bob"), digest="0" * 64),
        edited(path, lambda f: f["approvals"].append({"name": "bob", "signature": "no signature"}), coherent=False),
        edited(path, lambda f: f["approvals"].append({"name": "-Of", "signature": "x"}), coherent=False),
        edited(path, lambda f: f["approvals"].append({"name": "a\x1b[2J", "signature": "x"}), coherent=False),
    ):
        assert apply(desk, forged, 1, signers) == 8
        assert "0 of 1 count" in (err := capsys.readouterr().err)
        assert "\x1b" not in err
    assert approve(desk, path, "bob") == 0
    stale = edited(path, lambda f: f["content"].update(expires="2999-01-01T00:00:00Z"))
    assert apply(desk, stale, 1, signers) == 8
    assert "bob: not a signature of this bundle" in capsys.readouterr().err
    assert apply(desk, path, 1, signers) == 0


def test_a_signature_for_something_else_does_not_count(desk: Desk) -> None:
    path = desk.plan()
    made = bundle.read(path)
    command = ["-Y", "sign", "-n", "git", "-f", str(desk.key("bob"))]
    signed = approvals._keygen(command, approvals.message(made)).stdout
    other = made.approved(bundle.Approval(name="bob", signature=signed))
    (one,) = approvals.check(other, desk.signers(bob="bob"))
    assert one.why


def test_the_environment_may_be_raised_not_lowered(
    desk: Desk, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = desk.plan()
    monkeypatch.setenv("GPUCHANGE_REQUIRE_APPROVALS", "1")
    monkeypatch.setenv("GPUCHANGE_ALLOWED_SIGNERS", str(desk.signers(bob="bob")))
    assert desk.run("apply", str(path), "--yes", "--require-approvals", "0") == 8
    assert desk.run("apply", str(desk.home / "plan.yaml"), "--yes") == 8
    assert "is a plan, not a bundle" in capsys.readouterr().err
    assert approve(desk, path, "bob") == 0
    assert desk.run("apply", str(path), "--yes", "--require-approvals", "2") == 8
    assert desk.run("apply", str(path), "--yes") == 0
    monkeypatch.setenv("GPUCHANGE_REQUIRE_APPROVALS", "many")
    assert desk.run("apply", str(path), "--yes") == 64


def test_the_list_of_signers_is_nobody_elses(desk: Desk, capsys: Captured) -> None:
    path, signers = desk.plan(), desk.signers(bob="bob")
    assert approve(desk, path, "bob") == 0
    signers.chmod(0o664)
    assert apply(desk, path, 1, signers) == 64
    assert "others may write" in capsys.readouterr().err
    assert apply(desk, path, 1, desk.home / "none") == 64
    assert desk.run("apply", str(path), "--yes", "--require-approvals", "1") == 64
    assert "--allowed-signers" in capsys.readouterr().err


def test_without_ssh_keygen_it_says_what_to_install(
    desk: Desk, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = desk.plan()
    desk.key("bob")
    monkeypatch.setattr(approvals.shutil, "which", lambda _tool: None)
    assert approve(desk, path, "bob") == 1
    assert "apt-get install openssh-client" in capsys.readouterr().err


def test_approve_asks_who_and_with_what(desk: Desk, capsys: Captured) -> None:
    path = desk.plan()
    assert desk.run("approve", str(path)) == 64
    assert desk.run("approve", str(path), "--show") == 0
    assert desk.run("approve", str(path), "--as", "b b", "--key", str(desk.key("bob"))) == 64
    assert desk.run("approve", str(path), "--as", "bob", "--key", str(desk.home / "plan.yaml")) == 64
    assert "this is no SSH key" in capsys.readouterr().err
    assert desk.run("approve", str(path), "--as", "bob", "--key", str(desk.key("bob"))) == 64  # no terminal, no --yes
    assert bundle.read(path).approvals == ()


def test_approve_for_programs(desk: Desk, capsys: Captured) -> None:
    path = desk.plan()
    capsys.readouterr()
    assert desk.run("approve", str(path), "--as", "bob", "--key", str(desk.key("bob")), "--yes", "--json") == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["type"] for row in said] == ["version", "preview", "approved"]
    assert said[1]["bundle"]["author"] == "alice"


def test_an_expired_bundle_is_not_approved(desk: Desk) -> None:
    path = edited(desk.plan(), lambda f: f["content"].update(expires="2020-01-01T00:00:00Z"))
    assert approve(desk, path, "bob") == 8


def test_an_ordinary_ssh_keygen_verifies_it_too(desk: Desk) -> None:
    """As the manual says: the digest on a line, in our namespace."""
    path, signers = desk.plan(), desk.signers(bob="bob")
    assert approve(desk, path, "bob") == 0
    fields = json.loads(path.read_text())
    (desk.home / "sig").write_text(fields["approvals"][0]["signature"])
    command = f"echo {fields['digest']} | ssh-keygen -Y verify -I bob -n gpuchange-plan -f {signers} -s {desk.home}/sig"
    assert os.system(f"{command} > /dev/null") == 0
