"""What moved since the review, on hosts, in the inventory, in the software: named, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from bundling import FACTS, Desk, edited, facts

from gpuchange import content

pytest_plugins = ["bundling"]
Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def fact(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def move(facts: dict[str, Any]) -> None:
        node, keys = facts, path.split(".")
        for key in keys[:-1]:
            node = node[key]
        node[keys[-1]] = value

    return move


MOVED = {
    "machine": (fact("machine_id", "f" * 32), "machine-id was"),
    "boot": (fact("boot_id", "later"), "boot-id was boot-of-h2, is later (it was rebooted)"),
    "kernel": (fact("kernel", "6.9.9"), f"kernel was {FACTS['kernel']}, is 6.9.9"),
    "driver": (
        fact("loaded.proc_version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.1.2  Tue"),
        "driver was 550.54.15, is 535.1.2",
    ),
    "driver gone": (fact("loaded.proc_version", ""), "driver was 550.54.15, is absent"),
    "card": (
        lambda facts: facts["smi"].update(out=facts["smi"]["out"].replace("GPU-h2", "GPU-h9", 1)),
        "card at 0000:",
    ),
    "no cards": (fact("smi.rc", 9), "card at 0000:"),
}


class TestHosts:
    @pytest.mark.parametrize("what", MOVED)
    def test_a_host_that_moved_is_named_and_nothing_is_changed(self, desk: Desk, capsys: Captured, what: str) -> None:
        move, says = MOVED[what]
        path = desk.plan()
        move(desk.fleet.facts["h2"])
        assert desk.run("apply", str(path), "--yes") == 8
        err = capsys.readouterr().err
        assert f"host h2: {says}" in err
        assert "host h1" not in err
        assert desk.fleet.changed == [] and desk.kept() == []
        desk.fleet.facts["h2"] = facts("h2")
        assert desk.run("apply", str(path), "--yes") == 0  # it is as it was: the refusal did not use the bundle up

    def test_another_package_choice_is_named(self, desk: Desk, capsys: Captured) -> None:
        path = desk.plan()
        desk.fleet.moves["h1"] = [{"name": "libcudnn9", "from": "9.1.0-1", "to": "9.9.0-1"}]
        assert desk.run("apply", str(path), "--yes") == 8
        assert "host h1: package libcudnn9 to become was 9.8.0-1, is 9.9.0-1" in capsys.readouterr().err

    @pytest.mark.parametrize("phase", ["record_host", "drain_gpu_users", "seal_host"])
    def test_a_host_that_moves_later_is_never_changed(self, desk: Desk, capsys: Captured, phase: str) -> None:
        """Moved after preflight: found in record, by the look right before drain, or in seal."""
        path = desk.plan()
        seen: list[Any] = []

        def move(request: Any) -> None:
            seen.append(request)
            before_drain = phase == "drain_gpu_users" and request.role == "preflight_host" and request.tasks == "probe"
            if "h2" in request.hosts and (before_drain or request.role == phase):
                desk.fleet.facts["h2"]["boot_id"] = "later"

        desk.fleet.before = move
        code = desk.run("apply", str(path), "--yes")
        out = capsys.readouterr().out
        assert "boot-id was boot-of-h2, is later" in out
        done = {role for host, role, tasks in desk.fleet.changed if host == "h2"}
        assert not done & {"baseline_gpu", "verify_host"}
        assert code == {"record_host": 5, "drain_gpu_users": 3, "seal_host": 5}[phase]
        assert ("h1", "watch_host", "apply") in desk.fleet.changed

    def test_a_host_that_does_not_answer_the_last_look_is_judged_by_seal(self, desk: Desk, capsys: Captured) -> None:
        """Unreachable just then is no drift; moved as well, it is found before the host itself is changed."""
        path = desk.plan()
        desk.fleet.faults["h1", "preflight_host", "probe"] = ["unreachable"]
        desk.fleet.faults["h2", "preflight_host", "probe"] = ["unreachable"]

        def move(request: Any) -> None:
            if request.role == "seal_host" and "h2" in request.hosts:
                desk.fleet.facts["h2"]["boot_id"] = "later"

        desk.fleet.before = move
        assert desk.run("apply", str(path), "--yes") == 5
        assert "boot-id was boot-of-h2, is later" in capsys.readouterr().out
        assert ("h1", "watch_host", "apply") in desk.fleet.changed
        assert not {role for host, role, _ in desk.fleet.changed if host == "h2"} & {"baseline_gpu", "verify_host"}

    def test_a_resume_looks_anew_as_long_as_nothing_was_changed(self, desk: Desk, capsys: Captured) -> None:
        path = desk.plan()
        desk.fleet.faults["h1", "preflight_host", "apply"] = ["unreachable"]
        assert desk.run("apply", str(path), "--yes") == 4
        desk.fleet.facts["h2"]["kernel"] = "6.9.9"
        capsys.readouterr()
        assert desk.run("resume", "--yes") == 8
        assert "host h2: kernel was" in capsys.readouterr().err
        desk.fleet.facts["h2"]["kernel"] = FACTS["kernel"]
        assert desk.run("resume", "--yes") == 0


class TestRest:
    def test_the_inventory_moved(self, desk: Desk, capsys: Captured) -> None:
        path, source = desk.plan(), desk.home / "inventory.yaml"
        before = source.read_text()
        for text, says in (
            (before.replace("10.0.0.2", "10.0.0.9"), "h2: ansible_host was 10.0.0.2, is 10.0.0.9"),
            (before.replace("r7", "r8"), "h2: rack differs"),
            (before + "    h3: {}\n", "h3 is new among the hosts"),
            ("all:\n  hosts:\n    h1: {ansible_host: 10.0.0.1}\n", "h2 is no longer among the hosts"),
            (before + "  children:\n    more: {hosts: {h1: {}}}\n", "the hosts stand in another order"),
            ("all: [", ""),
        ):
            source.write_text(text)
            assert desk.run("apply", str(path), "--yes") == 8
            assert f"inventory changed: {says}" in capsys.readouterr().err
        source.write_text(f"# said otherwise\n{before}\n")
        assert desk.run("apply", str(path), "--yes") == 0

    def test_without_its_sources_the_bundles_own_inventory_counts(self, desk: Desk, capsys: Captured) -> None:
        path = desk.plan()
        (desk.home / "inventory.yaml").unlink()
        assert desk.run("apply", str(path), "--yes") == 0
        assert "not here, so not compared" in capsys.readouterr().err
        assert {row[0] for row in desk.fleet.ledger} == {"h1", "h2"}

    def test_expired_and_from_the_future(self, desk: Desk, capsys: Captured) -> None:
        path = desk.plan()

        def times(created: str, expires: str) -> int:
            moved = edited(path, lambda f: f["content"].update(created=created, expires=expires))
            return desk.run("apply", str(moved), "--yes")

        assert times("2020-01-01T00:00:00Z", "2020-01-02T00:00:00Z") == 8
        assert "expired since 2020-01-02T00:00:00Z" in capsys.readouterr().err
        assert times("2999-01-01T00:00:00Z", "2999-01-02T00:00:00Z") == 8
        assert "made in the future" in capsys.readouterr().err
        assert times("soon", "later") == 8
        assert "cannot be read" in capsys.readouterr().err

    def test_another_version_and_other_code(self, desk: Desk, capsys: Captured, monkeypatch: Patch) -> None:
        path = desk.plan()
        moved = edited(path, lambda f: f["content"].update(version="9.9.9"))
        assert desk.run("apply", str(moved), "--yes") == 8
        assert "gpuchange version differs: the bundle was made by 9.9.9" in capsys.readouterr().err
        monkeypatch.setattr(content, "code", lambda: "0" * 64)
        assert desk.run("apply", str(path), "--yes") == 8
        assert "own code differs" in capsys.readouterr().err

    def test_playbooks_that_moved_are_named(self, desk: Desk, capsys: Captured, monkeypatch: Patch) -> None:
        path = desk.plan()
        real = content.files(content.playbooks())
        now = {**real, "phase.yml": "0" * 64, "roles/x/tasks/apply.yml": "1" * 64}
        del now["library/gpuchange_apt.py"]
        monkeypatch.setattr(content, "files", lambda _tree: now)
        assert desk.run("apply", str(path), "--yes") == 8
        err = capsys.readouterr().err
        for line in ("phase.yml changed", "roles/x/tasks/apply.yml is new", "library/gpuchange_apt.py is gone"):
            assert f"playbooks/{line}" in err

    def test_all_that_moved_is_said_at_once(self, desk: Desk, capsys: Captured, monkeypatch: Patch) -> None:
        path = desk.plan()
        monkeypatch.setattr(content, "code", lambda: "0" * 64)
        (desk.home / "inventory.yaml").write_text("all: {hosts: {h1: {}, h2: {}}}\n")
        assert desk.run("apply", str(path), "--yes") == 8
        err = capsys.readouterr().err
        assert "own code differs" in err and "h1: ansible_host was 10.0.0.1, is not set" in err

    @pytest.mark.parametrize(
        ("alter", "says"),
        [
            (lambda c: c["hosts"].reverse(), "its hosts"),
            (lambda c: c["steps"].pop(), "its steps"),
            (lambda c: c.update(at_once=9), "at most out at once"),
            (lambda c: c.update(name="other"), "its name"),
            (lambda c: c["hosts"][0]["preview"]["versions"].clear(), "its versions"),
            (lambda c: c.update(delegates=["lb9"]), "its delegates"),
        ],
    )
    def test_a_bundle_that_shows_what_its_plan_does_not_say(
        self, desk: Desk, capsys: Captured, alter: Any, says: str
    ) -> None:
        path = edited(desk.plan(), lambda f: alter(f["content"]))
        assert desk.run("apply", str(path), "--yes") == 8
        assert f"{says}: what it shows" in capsys.readouterr().err
        assert desk.kept() == []

    def test_what_it_froze_is_still_the_same_on_resume(self, desk: Desk, capsys: Captured) -> None:
        path = desk.plan()
        desk.fleet.faults["h1", "seal_host", "apply"] = ["silent"]
        desk.fleet.faults["h1", "seal_host", "probe"] = ["failed"] * 3
        assert desk.run("apply", str(path), "--yes") == 5
        (directory,) = desk.kept()
        frozen = directory / "frozen" / "plan.yaml"
        frozen.write_text(frozen.read_text() + "# edited\n")
        assert desk.run("resume") == 8
        assert "altered since it began: plan.yaml" in capsys.readouterr().err
