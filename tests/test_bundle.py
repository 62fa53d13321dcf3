"""Reviewed = applied: a bundle says what was looked at, and is carried out once, if nothing has moved."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from bundling import Desk, edited

from gpuchange import bundle, change, content, once, reviewed
from gpuchange.checks import fingerprint
from gpuchange.errors import StaleError, UsageError
from gpuchange.journal import Journal

pytest_plugins = ["bundling"]
Captured = pytest.CaptureFixture[str]


class TestMaking:
    def test_a_bundle_holds_what_was_reviewed_and_is_private(self, desk: Desk, capsys: Captured) -> None:
        path = desk.plan()
        assert path.stat().st_mode & 0o777 == 0o600
        made = bundle.read(path)
        assert made.hosts == ("h1", "h2")
        assert made.content.plan == (desk.home / "plan.yaml").read_text()
        assert made.content.author.name == "alice"
        assert made.content.hosts[0].fingerprint["boot-id"] == "boot-of-h1"
        assert made.content.hosts[0].fingerprint["packages"] == {"libcudnn9": "9.8.0-1"}
        assert len(made.content.hosts[0].fingerprint["cards"]) == 2
        assert made.content.playbooks == content.files(content.playbooks())
        assert [step.phase for step in made.content.steps][:3] == ["preflight", "record", "drain"]
        assert bundle.canonical(json.loads(path.read_text())) + "\n" == path.read_text()
        assert "gpuchange apply" in capsys.readouterr().out
        assert not desk.state.exists()
        assert not desk.fleet.changed

    def test_json_names_it(self, desk: Desk, capsys: Captured) -> None:
        desk.plan("b", "--json")
        said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [row["type"] for row in said] == ["version", "preview", "bundle"]
        assert said[-1]["digest"] == bundle.read(desk.home / "b").digest

    def test_nothing_is_written_when_something_stands_in_the_way(self, desk: Desk, capsys: Captured) -> None:
        desk.fleet.faults["h2", "preflight_host", "apply"] = ["failed"]
        assert desk.run("plan", str(desk.home / "plan.yaml"), "-o", str(desk.home / "b")) == 1
        assert not (desk.home / "b").exists()
        assert "not written" in capsys.readouterr().err

    def test_another_kind_of_file_is_not_written_over(self, desk: Desk, capsys: Captured) -> None:
        assert desk.run("plan", str(desk.home / "plan.yaml"), "-o", str(desk.home / "inventory.yaml")) == 64
        assert "no bundle" in capsys.readouterr().err
        desk.plan()
        desk.plan()  # a bundle is

    @pytest.mark.parametrize(("given", "says"), [("5", "has no unit"), ("0s", "no time"), ("soon", "90m, 24h")])
    def test_a_lifetime_has_a_unit(self, desk: Desk, capsys: Captured, given: str, says: str) -> None:
        assert desk.run("plan", str(desk.home / "plan.yaml"), "-o", str(desk.home / "b"), "--expires", given) == 64
        err = capsys.readouterr().err
        assert "--expires" in err and says in err

    @pytest.mark.parametrize(
        "line", ["ansible_password: hunter2", "ansible_become_password: 'hunter2'", "ansible_ssh_pass: hunter2 # x"]
    )
    def test_a_password_in_plain_is_refused(self, desk: Desk, capsys: Captured, line: str) -> None:
        (desk.home / "group_vars").mkdir()
        (desk.home / "group_vars" / "all.yaml").write_text(f"# ansible_password: not this one\n{line}\n")
        assert desk.run("plan", str(desk.home / "plan.yaml"), "-o", str(desk.home / "b")) == 64
        assert "secrets in clear" in (err := capsys.readouterr().err)
        assert "hunter2" not in err
        assert not (desk.home / "b").exists()

    def test_extra_vars_are_kept_unless_they_are_secret(self, desk: Desk, capsys: Captured) -> None:
        plan, out = str(desk.home / "plan.yaml"), str(desk.home / "b")
        assert desk.run("plan", plan, "-o", out, "-e", "ansible_password=hunter2") == 64
        assert "-e gives a secret in clear" in capsys.readouterr().err
        secret = desk.home / "secret.yaml"
        secret.write_text("ansible_password: hunter2\n")
        assert desk.run("plan", plan, "-o", out, "-e", f"@{secret}", "-e", "ansible_port=22", "--author", "a") == 0
        assert "hunter2" not in Path(out).read_text()
        secret.write_text("ansible_password: other\n")
        assert desk.run("apply", out, "--yes") == 8
        assert f"-e @{secret} changed" in capsys.readouterr().err
        secret.unlink()
        assert desk.run("apply", out, "--yes") == 8
        assert f"-e @{secret} is gone" in capsys.readouterr().err


class TestApplying:
    def test_it_is_applied_once(self, desk: Desk, capsys: Captured) -> None:
        path = desk.plan().rename(desk.home / "anything.yaml")  # told by its content, not by its name
        assert desk.run("apply", str(path), "--yes") == 0
        (directory,) = desk.kept()
        capsys.readouterr()
        assert desk.run("apply", str(path), "--yes") == 8
        assert f"already applied as change {directory.name}" in capsys.readouterr().err
        with Journal.open(directory, readonly=True) as journal:
            assert journal.meta["reviewed"]["bundle"] == bundle.read(path).digest
        assert [row for row in desk.fleet.changed if row[1:] == ("verify_host", "apply")] == [
            ("h1", "verify_host", "apply"),
            ("h2", "verify_host", "apply"),
        ]

    def test_plan_of_a_bundle_only_compares(self, desk: Desk, capsys: Captured) -> None:
        path = desk.plan()
        assert desk.run("plan", str(path), "--detailed-exitcode") == 2
        assert desk.run("apply", str(path), "--dry-run") == 0
        assert not desk.fleet.changed
        desk.fleet.facts["h2"]["boot_id"] = "another"
        assert desk.run("plan", str(path)) == 8
        assert "host h2: boot-id was boot-of-h2, is another" in capsys.readouterr().err
        assert desk.run("plan", str(path), "-o", str(desk.home / "c")) == 64

    def test_without_a_yes_nothing_is_consumed(self, desk: Desk, capsys: Captured) -> None:
        path = desk.plan()
        assert desk.run("apply", str(path)) == 64
        assert desk.kept() == []
        assert desk.run("apply", str(path), "--yes") == 0

    def test_after_a_crash_before_the_change_was_there_it_can_be_applied(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = desk.plan()
        with monkeypatch.context() as patch:
            patch.setattr(reviewed, "begin", lambda *_: 1 / 0)
            assert desk.run("apply", str(path), "--yes") == 1
        assert desk.kept() == []
        record = desk.state / once.RECORDS / bundle.read(path).digest
        assert json.loads(record.read_text())["begun"] is False
        assert desk.run("apply", str(path), "--yes") == 0

    def test_after_a_crash_before_the_record_was_settled_it_is_known_by_its_change(
        self, desk: Desk, capsys: Captured
    ) -> None:
        path = desk.plan()
        assert desk.run("apply", str(path), "--yes") == 0
        record = desk.state / once.RECORDS / bundle.read(path).digest
        record.write_text(json.dumps({**json.loads(record.read_text()), "begun": False}))
        assert desk.run("apply", str(path), "--yes") == 8
        for text in ("", "[]", '{"change": 1'):
            record.write_text(text)
            assert desk.run("apply", str(path), "--yes") == 8
        assert "already applied" in capsys.readouterr().err

    def test_the_order_and_flags_of_the_plan_stay(self, desk: Desk, capsys: Captured) -> None:
        path = desk.plan("b", "-l", "h2", "-u", "deploy", "-b")
        for flags in (["-i", "x"], ["-l", "h1"], ["-e", "a=b"], ["-u", "root"], ["--accept-irreversible", "h2"]):
            assert desk.run("apply", str(path), "--yes", *flags) == 64
            assert "was settled when the bundle was made" in capsys.readouterr().err
        assert desk.run("apply", str(path), "--yes") == 0
        assert {row[0] for row in desk.fleet.ledger} == {"h2"}
        assert all("--user deploy --become" in request.cmdline for request in desk.fleet.requests)
        (directory,) = desk.kept()
        assert desk.run("rollback", directory.name, "--yes", "-u", "root") == 64
        assert desk.run("rollback", directory.name, "--yes") == 0
        assert "--user deploy --become" in desk.fleet.requests[-1].cmdline


class TestFile:
    def test_damage_is_refused_as_such(self, desk: Desk, capsys: Captured) -> None:
        path = desk.plan()
        whole = path.read_bytes()
        for damaged in (whole[:-1], whole[:500], whole + b"\n", whole.replace(b'"alice"', b'"mallory"'), whole[:20]):
            path.write_bytes(damaged)
            assert desk.run("apply", str(path), "--yes") == 8
            assert "damaged or was edited" in capsys.readouterr().err

    @pytest.mark.parametrize("name", ["../outside", "/etc/outside", "inventory/../../outside", ""])
    def test_no_file_of_it_lands_outside(self, desk: Desk, name: str) -> None:
        path = edited(desk.plan(), lambda f: f["content"]["inventory"]["files"].update({name: "x"}))
        assert desk.run("apply", str(path), "--yes") == 8
        assert not list(desk.home.glob("**/outside"))

    @pytest.mark.parametrize("raw", [b"", b"[]", b'{"approvals":[', b'{"approvals":[],"content":1}\n', b"\xff\xfe"])
    def test_what_is_none_is_none(self, raw: bytes, tmp_path: Path) -> None:
        with pytest.raises(StaleError):
            bundle.parse(raw)
        (tmp_path / "x").write_bytes(raw)
        assert bundle.is_bundle(tmp_path / "x") == raw.startswith(b'{"approvals":[')

    def test_a_missing_file_is_a_plan_that_cannot_be_read(self, desk: Desk, capsys: Captured) -> None:
        assert desk.run("apply", str(desk.home / "none"), "--yes") == 64
        assert desk.run("approve", str(desk.home / "none")) == 64

    def test_other_bytes_than_text_come_back(self, desk: Desk, tmp_path: Path) -> None:
        odd = tmp_path / "odd"
        (odd / "inventory").mkdir(parents=True)
        (odd / "inventory" / "a").write_bytes(b"\xff\x00")
        (odd / "inventory" / "b").write_text("base64:not")
        files = reviewed._frozen_files(odd)
        made = bundle.read(desk.plan())
        laid = made.content.inventory.model_copy(update={"files": files, "kept": ()})
        other = bundle.Bundle.of(made.content.model_copy(update={"inventory": laid}))
        bundle.lay_out(other, tmp_path / "laid")
        assert (tmp_path / "laid" / "inventory" / "a").read_bytes() == b"\xff\x00"
        assert (tmp_path / "laid" / "inventory" / "b").read_text() == "base64:not"
        assert (tmp_path / "laid" / "inventory" / "a").stat().st_mode & 0o777 == 0o600

    def test_writing_where_one_may_not(self, desk: Desk) -> None:
        made = bundle.read(desk.plan())
        with pytest.raises(UsageError, match="cannot write"):
            bundle.write(Path("/proc/nowhere/b"), made)


def test_a_fingerprint_compares_only_what_is_told() -> None:
    assert fingerprint.of({}) == {}
    assert fingerprint.of({"facts": "odd", "moves": "odd"}) == {}
    assert fingerprint.moved({"kernel": "1"}, {}) == ()
    assert fingerprint.moved({"cards": "odd"}, {"cards": {"a": "b"}}) == ("card at a was absent, is b",)


def test_sudo_does_not_hide_the_author(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuchange.cli import bundles

    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setenv("SUDO_USER", "carol")
    assert re.fullmatch(r"carol@\S+", bundles._myself())


def test_a_change_without_a_bundle_has_nothing_reviewed(desk: Desk) -> None:
    assert desk.run("apply", str(desk.home / "plan.yaml"), "--yes") == 0
    opened = change.Change.open(desk.kept()[0], readonly=True)
    assert opened.reviewed == {}
    opened.journal.close()
    assert not any(r.role == "preflight_host" and r.tasks == "probe" for r in desk.fleet.requests)
