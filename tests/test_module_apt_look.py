"""What preflight/apt finds in the way, each staged by itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hostcode  # noqa: F401  (puts module_utils on Ansible's path)
import pytest
from ansible.module_utils import gpuchange_apt_look as look
from ansible.module_utils import gpuchange_secure_boot as signing
from ansible.module_utils.gpuchange_apt_choice import Choice, Offer
from ansible.module_utils.gpuchange_apt_private import explained, first_error
from ansible.module_utils.gpuchange_packages import parse_policy

MOVES = [{"name": "nvidia-dkms-570", "from": "", "to": "570.1.1-1"}, {"name": "old", "from": "1", "to": ""}]


@pytest.fixture(autouse=True)
def nobody_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look.gpuchange_dpkg_lock, "lock_holder", lambda: None)


def facts(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "holds": [],
        "audit": "",
        "stack": {"nvidia-utils-460": "460.73.01-0ubuntu1"},
        "driver": {"loaded": "460.56", "boot_kernel": "6.8.0-60"},
    }
    return SimpleNamespace(**{**values, **changes})


def chosen(*install: str, remove: tuple[str, ...] = ()) -> Choice:
    choice = Choice()
    choice.install = dict.fromkeys(install, "570.1.1-1")
    choice.remove = list(remove)
    return choice


@pytest.fixture(autouse=True)
def plain_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "alternatives", dict)
    monkeypatch.setattr(look, "_is_active", lambda _unit: False)
    monkeypatch.setattr(look, "is_executable", lambda _name: False)


def test_a_hold_that_the_plan_does_not_name_stands_in_the_way() -> None:
    choice = chosen("nvidia-dkms-570", remove=("old",))
    held = facts(holds=["libc6", "old"])
    moves = [*MOVES, {"name": "libc6", "from": "2.36-9", "to": "2.36-10"}]
    found = look._problems(held, choice, moves, "")
    assert "the hold on libc6 stands in the way; the plan does not name it" in found
    assert not any("hold on old" in text for text in found)
    assert "beyond the plan, libc6 2.36-9 would become 2.36-10" in found


def test_missing_headers_are_found_before_drain() -> None:
    found = look._problems(facts(), chosen("nvidia-dkms-570", remove=("old",)), MOVES, "")
    assert found == ["no headers for kernel 6.8.0-60: dkms cannot build the module; install linux-headers-6.8.0-60"]


@pytest.mark.case("secure-boot-dkms-key-not-enrolled")
def test_secure_boot_without_an_enrolled_key_stops_before_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case: secure-boot-dkms-key-not-enrolled."""
    answers = {"--sb-state": "SecureBoot enabled\n", "--test-key": "/var/lib/dkms/mok.pub is not enrolled\n"}
    monkeypatch.setattr(signing, "is_executable", lambda name: name == "mokutil")
    monkeypatch.setattr(signing, "secure_boot", lambda: None)
    monkeypatch.setattr(signing, "run", lambda argv, **_more: (0, answers[argv[1]], ""))
    monkeypatch.setattr(signing.os.path, "exists", lambda _path: True)
    assert signing.NOT_ENROLLED in signing.problem() and "mokutil --import /var/lib/dkms/mok.pub" in signing.problem()
    answers["--test-key"] = "/var/lib/dkms/mok.pub is already enrolled\n"
    assert signing.problem() == ""
    answers["--sb-state"] = "SecureBoot disabled\n"
    assert signing.problem() == ""


def test_secure_boot_that_nobody_can_ask_about_is_no_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signing, "is_executable", lambda _name: False)
    monkeypatch.setattr(signing, "secure_boot", lambda: True)
    assert "without mokutil it cannot be told" in signing.problem()
    monkeypatch.setattr(signing, "secure_boot", lambda: False)
    assert signing.problem() == ""


def test_dkms_settings_name_the_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = tmp_path / "site.der"
    certificate.touch()
    (tmp_path / "framework.conf").write_text(f'# mok_certificate=/old.der\nmok_certificate="{certificate}"\n')
    monkeypatch.setattr(signing, "SETTINGS", (str(tmp_path / "framework.conf"),))
    assert signing.certificates() == [str(certificate)]


def test_an_inconsistent_baseline_is_named() -> None:
    """Case: nvml-mismatch-after-unattended-upgrade."""
    found = look._findings(facts(), chosen(), Offer([], {}), [])
    assert found == ["baseline inconsistent: module 460.56 loaded, userspace 460.73.01"]


def test_automatic_upgrades_and_other_candidates_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "_is_active", lambda unit: unit == "apt-daily-upgrade.timer")
    offer = Offer([], {"nvidia-dkms-570": "570.2.2-1"})
    found = look._findings(facts(stack={}), chosen("nvidia-dkms-570"), offer, MOVES)
    assert "nvidia-dkms-570: the plan's 570.1.1-1 is taken, apt itself would take 570.2.2-1" in found
    assert "automatic upgrades are on (apt-daily-upgrade.timer): blocked while the host is out of service" in found


def test_space_for_both_sets_and_the_build() -> None:
    sizes = {"download": 10 * look.MIB, "keep": 10 * look.MIB, "installed": 100 * look.MIB}
    little = {**sizes, "free_store": 80 * look.MIB, "free_usr": 600 * look.MIB}
    assert look._space_problems(little, MOVES) == [
        "/var/lib/gpuchange has 80 MiB free, the change needs 84 MiB",
        "/usr has 600 MiB free, the change needs 612 MiB",
    ]
    assert look._space_problems({**sizes, "free_store": 0, "free_usr": 0}, []) == []


def test_an_old_version_that_nobody_has_is_not_obtainable() -> None:
    moves = [{"name": "libcudnn8", "from": "8.9.7-1", "to": "8.9.8-1"}, {"name": "new", "from": "", "to": "1"}]
    assert look._not_obtainable(moves, {("libcudnn8", "8.9.7-1"): {"offered": False}}) == ["libcudnn8 8.9.7-1"]
    assert look._not_obtainable(moves, {("libcudnn8", "8.9.7-1"): {"offered": True}}) == []


def test_apts_own_reason_is_told() -> None:
    """Case: driver-branch-change-held-broken."""
    out = (
        "The following packages have unmet dependencies:\n"
        " cuda-drivers : Depends: nvidia-driver-440 (>= 440.33.01) but 440.26-0ubuntu1 is to be installed\n"
    )
    err = "E: Unable to correct problems, you have held broken packages.\n"
    assert first_error(out, err) == (
        "cuda-drivers : Depends: nvidia-driver-440 (>= 440.33.01) but 440.26-0ubuntu1 is to be installed; "
        "Unable to correct problems, you have held broken packages."
    )


@pytest.mark.case("driver-branch-change-held-broken")
def test_a_dependency_that_another_source_wins_is_told_with_priorities() -> None:
    policy = parse_policy(
        "nvidia-modprobe:\n  Installed: (none)\n  Candidate: 440.26-0ubuntu1\n  Version table:\n"
        "     440.33.01-1 400\n        400 http://cuda.example ./ Packages\n"
        "     440.26-0ubuntu1 500\n        500 http://archive.example focal/restricted amd64 Packages\n"
    )
    said = "cuda-drivers : Depends: nvidia-modprobe (>= 440.33.01) but 440.26-0ubuntu1 is to be installed"
    told = explained(said, lambda names: {name: policy[name] for name in names})
    assert told == (
        said + "; nvidia-modprobe: candidate 440.26-0ubuntu1 (http://archive.example focal/restricted at priority 500)"
        " wins over 440.33.01-1 (http://cuda.example at priority 400)"
    )
    assert explained("E: something else", lambda _names: pytest.fail("nothing to ask")) == "E: something else"
