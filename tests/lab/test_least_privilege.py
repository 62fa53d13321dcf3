"""Accounts with no, few, asking and full sudo rights: told in preflight, before anything moved; or a whole change."""

from __future__ import annotations

from pathlib import Path

import pytest
from changes import NEW_DRIVER, Operator, drained, loaded_driver, owner_marker
from reliability.figures import Figures, Row
from terminal import Typed
from test_ways_in import inventory

from gpuchange.lab import Lab

ROW = Row(
    "Missing rights are said in preflight, with the steps that need them: nothing was changed yet",
    peer="Ansible: fails at the first task that needs the right, whenever that comes",
    source="docs.ansible.com, become: limitations",
)
FEW = "ops ALL=(root) NOPASSWD: /usr/bin/systemctl status *, /usr/bin/nvidia-smi"
ALL = "ops ALL=(ALL) NOPASSWD: ALL"
ASKING = "ops ALL=(ALL) ALL"
NONE = "# nothing for ops"
PASSWORD = "kanarie-ab12cd34"


def let_in(lab: Lab, name: str, rights: str, password: str = PASSWORD) -> None:
    """A user `ops` with the lab's key, a password, and these lines of sudoers."""
    script = f"""
        id ops 2>/dev/null || useradd -m -s /bin/bash ops
        chpasswd < /root/ops-password; rm /root/ops-password
        install -d -m 700 -o ops ~ops/.ssh; install -m 600 -o ops ~root/.ssh/authorized_keys ~ops/.ssh/
        printf '%s\\n' '{rights}' > /etc/sudoers.d/ops; chmod 440 /etc/sudoers.d/ops
    """
    (lab.host(name).root / "root/ops-password").write_text(f"ops:{password}\n")  # no command line has it
    lab.host(name).run(["sh", "-ec", script])


def as_ops(lab: Lab, path: Path) -> str:
    return inventory(lab, path, {"gpu1": {"ansible_user": "ops", "ansible_become": True}})


REFUSED = {
    "few": (FEW, ("may not become root by sudo", "it may run only", "nvidia-smi", "seal/host", "stack/apt")),
    "asking": (ASKING, ("Missing sudo password", "give it with -K")),
    "none": (NONE, ("sudo", "-K")),
}


@pytest.mark.parametrize("rights", REFUSED)
def test_missing_rights_are_said_before_anything_moves(lab: Lab, tmp_path: Path, rights: str, figures: Figures) -> None:
    operator, (line, wanted) = Operator(lab, tmp_path), REFUSED[rights]
    let_in(lab, "gpu1", line)
    said = operator.run("apply", operator.plan(inventory=as_ops(lab, tmp_path / "i.yaml")), "--yes", timeout=150)
    figures.tried += 1
    missing = [word for word in wanted if word not in said.text]
    if missing or said.code != 1:
        figures.broken.append(f"{rights}: exit {said.code}, not said: {missing}\n{said.text}")
    if owner_marker(lab.host("gpu1")) or drained(operator.events()):
        figures.broken.append(f"{rights}: something was changed")


def test_a_typed_password_opens_what_asks_for_it(lab: Lab, tmp_path: Path, figures: Figures) -> None:
    operator = Operator(lab, tmp_path)
    let_in(lab, "gpu1", ASKING)
    plan = operator.plan(inventory=as_ops(lab, tmp_path / "i.yaml"))
    code, text = Typed(operator, ["plan", plan, "-K"], PASSWORD).end()
    figures.tried += 2
    if code != 0 or PASSWORD in text:
        figures.broken.append(f"the right password: exit {code}\n{text}")
    code, text = Typed(operator, ["plan", plan, "-K"], "wrong-one").end()
    if code != 1 or "give the right one with -K" not in text or "wrong-one" in text:
        figures.broken.append(f"a wrong password: exit {code}\n{text}")


@pytest.mark.timeout(1500)
def test_an_ordinary_account_with_sudo_carries_a_whole_change_out(
    fresh_hosts: Lab, tmp_path: Path, figures: Figures
) -> None:
    lab, operator = fresh_hosts, Operator(fresh_hosts, tmp_path)
    let_in(lab, "gpu1", ALL)
    plan = operator.plan(inventory=as_ops(lab, tmp_path / "i.yaml"))
    said = operator.run("apply", plan, "--yes").ended(0)
    figures.tried += 1
    if loaded_driver(lab.host("gpu1")) != NEW_DRIVER or owner_marker(lab.host("gpu1")):
        figures.broken.append(said.text)
