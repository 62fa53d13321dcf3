"""Ways into a host that ask, changed or grew: sudo passwords, key passphrases, host keys over a reboot, IPv6."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from changes import Operator
from steps import Change

from gpuchange.judging import Outcome
from gpuchange.lab import Lab
from gpuchange.states import Kind

WITHOUT_LOOKING = {"policy": "refuse"}
NEW_KEYS = "rm -f /etc/ssh/ssh_host_*; ssh-keygen -A; mkdir -p /run/sshd"
NEW_KEY_AT_START = f"[Service]\nExecStartPre=\nExecStartPre=/bin/sh -c '{NEW_KEYS}'\n"


def inventory(lab: Lab, path: Path, hosts: dict[str, dict[str, Any]]) -> str:
    """The lab's inventory with only these GPU hosts, their variables laid over, written to `path`."""
    data = yaml.safe_load(lab.inventory.read_text())
    groups = data["all"]["children"]
    known = groups["gpu_hosts"]["hosts"]
    groups["gpu_hosts"]["hosts"] = {name: {**known[name], **more} for name, more in hosts.items()}
    path.write_text(yaml.safe_dump(data))
    return str(path)


def encrypted_key(lab: Lab, path: Path) -> str:
    """The lab's key with a passphrase on it."""
    variables = yaml.safe_load(lab.inventory.read_text())["all"]["children"]["gpu_hosts"]["hosts"]["gpu1"]
    path.write_bytes(Path(variables["ansible_ssh_private_key_file"]).read_bytes())
    path.chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "a passphrase", "-f", str(path)], check=True)
    return str(path)


def let_in(lab: Lab, name: str, prompt: str) -> None:
    """A user `ops` who logs in with the lab's key and whose sudo asks for a password, in its own words."""
    script = f"""
        id ops 2>/dev/null || useradd -m -s /bin/bash ops
        install -d -m 700 -o ops ~ops/.ssh; install -m 600 -o ops ~root/.ssh/authorized_keys ~ops/.ssh/
        printf 'Defaults passprompt="%s", passprompt_override\\nops ALL=(ALL) ALL\\n' '{prompt}' > /etc/sudoers.d/ops
    """
    lab.host(name).run(["sh", "-ec", script])


@pytest.mark.case("runner-waits-for-unseen-prompt")
def test_what_would_ask_ends_preflight_soon_and_is_named_for_its_host(fresh_hosts: Lab, tmp_path: Path) -> None:
    lab, operator = fresh_hosts, Operator(fresh_hosts, tmp_path)
    let_in(lab, "gpu1", "Passwort des Benutzers: ")
    asking = {
        "gpu1": {"ansible_user": "ops", "ansible_become": True},
        "gpu2": {"ansible_ssh_private_key_file": encrypted_key(lab, tmp_path / "key")},
    }
    hosts = inventory(lab, tmp_path / "asking.yaml", asking)
    said = operator.run("plan", operator.plan(inventory=hosts), timeout=150)
    assert said.code in (1, 4), said.text
    assert (
        "Missing sudo password" in said.text and "give it with -K" in said.text and "gpu2 unreachable" in said.text
    ), said.text
    assert "Permission denied" in said.text, said.text
    # A password is given, but sudo asks for it in words that nobody waits for.
    (tmp_path / "become.yaml").write_text("ansible_become_password: not-it\n")
    more = ("-l", "gpu1", "-e", f"@{tmp_path / 'become.yaml'}")
    said = operator.run("plan", operator.plan(inventory=hosts), *more, timeout=150)
    assert said.code in (1, 4) and "gpu1" in said.text and "password" in said.text, said.text


@pytest.mark.case("runner-waits-for-unseen-prompt")
def test_an_unknown_host_key_is_shown_not_asked_about_and_not_taken(lab: Lab, tmp_path: Path) -> None:
    operator, known = Operator(lab, tmp_path), tmp_path / "known_hosts"
    known.touch()
    new = {"ansible_ssh_common_args": f"-o UserKnownHostsFile={known} -o GlobalKnownHostsFile=/dev/null"}
    said = operator.run("plan", operator.plan(inventory=inventory(lab, tmp_path / "i.yaml", {"gpu1": new})))
    assert "gpu1: SHA256:" in said.ended(1).err and "--accept-new-host-keys" in said.err
    assert known.read_text() == ""


def again(change: Change, *tries: str) -> Outcome:
    """Look at gpu1 as the engine would after a lost connection: until it is neither lost nor tried often enough."""
    outcome = Outcome(Kind.LOST)
    for _ in tries:
        outcome = change.play("drain/gpu_users", "probe", "gpu1", **WITHOUT_LOOKING)
        if outcome.kind is not Kind.LOST:
            break
    return outcome


@pytest.mark.case("host-key-changes-over-reboot")
def test_a_dead_connection_is_replaced_and_another_host_key_is_held(fresh_hosts: Lab) -> None:
    lab, change, host = fresh_hosts, Change(fresh_hosts), fresh_hosts.host("gpu1")
    variables = yaml.safe_load(lab.inventory.read_text())["all"]["children"]["gpu_hosts"]["hosts"]["gpu1"]
    known = Path(variables["ansible_ssh_common_args"].split("UserKnownHostsFile=")[1].split()[0])
    before = known.read_bytes()
    assert again(change, "once").kind is not Kind.LOST  # leaves a master connection that lives for two minutes
    host.power("cycle")
    host.wait_ready()
    assert again(change, "over the dead one", "anew", "late").kind is not Kind.LOST
    host.run(["mkdir", "-p", "/etc/systemd/system/ssh.service.d"])
    host.run(["tee", "/etc/systemd/system/ssh.service.d/new-key.conf"], stdin=NEW_KEY_AT_START)
    host.power("cycle")
    host.wait_ready()
    held = again(change, "over the dead one", "anew", "late")
    assert (held.kind, held.data["why"]) == (Kind.HELD, "gpu1 is up but presents a different host key")
    assert known.read_bytes() == before


@pytest.mark.case("ipv6-host-in-rsync-step")
def test_hosts_and_balancer_are_reached_by_ipv6(fresh_hosts: Lab, tmp_path: Path) -> None:
    """Preflight goes every way that the change will go; the backup itself never leaves the host."""
    lab, operator = fresh_hosts, Operator(fresh_hosts, tmp_path)
    lab.host("gpu1").run(["mkdir", "-p", "/var/backups/models"])
    six = {"gpu1": {"ansible_host": lab.host("gpu1").spec.address6(lab.host("gpu1").layout)}}
    backup = [{"provider": "rsync", "paths": ["/srv/models"], "to": "/var/backups/models"}]
    plan = operator.plan(inventory=inventory(lab, tmp_path / "six.yaml", six), backup=backup)
    assert "backup/rsync" in operator.run("plan", plan).ended(0).out
