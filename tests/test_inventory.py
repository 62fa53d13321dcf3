"""Inventories, resolved and frozen by the real Ansible."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gpuchange.ansible_cli import environment, run, said
from gpuchange.errors import InventoryError
from gpuchange.frozen import as_yaml_inventory, freeze
from gpuchange.inventory import Inventory, exact_names, resolve, select, split_pattern
from gpuchange.plan import load
from gpuchange.waiting import wait_until

HOSTS = """\
[gpus]
gpu-01 ansible_host=10.0.0.5
gpu-02 ansible_host=2001:db8::10
gpu-03

[rack1]
gpu-01
gpu-02

[loadbalancers]
lb-1

[empty]

[site:children]
gpus
loadbalancers
"""
SCRIPT = """\
#!%s
import json, os, sys
count = os.path.join(os.path.dirname(os.path.abspath(__file__)), "calls.bak")
with open(count, "a") as file:
    file.write("x")
names = ["gpu-%%02d" %% number for number in range(1, 1 + int(os.environ.get("FLEET", "2")))]
variables = {name: {"slot": name[-1]} for name in names}
print(json.dumps({"gpus": {"hosts": names, "vars": {"rack": "a"}}, "_meta": {"hostvars": variables}}))
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An INI inventory with group_vars and host_vars beside it."""
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "host_vars").mkdir()
    (tmp_path / "hosts.ini").write_text(HOSTS)
    (tmp_path / "group_vars" / "gpus.yml").write_text("ansible_user: admin\n")
    (tmp_path / "host_vars" / "gpu-03.yml").write_text("note: Grüße\n")
    return tmp_path


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> Inventory:
    """One inventory for tests that only choose from it: each run of Ansible costs most of a second."""
    path = tmp_path_factory.mktemp("inventory") / "hosts.ini"
    path.write_text(HOSTS)
    return resolve([str(path)], None, ["all"])


def vault(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (site / "password").write_text("hunter2")
    command = [sys.executable, "-m", "ansible", "vault", *arguments, f"--vault-password-file={site / 'password'}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment())


def named(inventory: Inventory) -> list[str]:
    return list(inventory.hosts)


def refused(*arguments: object, **more: object) -> InventoryError:
    with pytest.raises(InventoryError) as caught:
        resolve(*arguments, **more)  # type: ignore[arg-type]
    return caught.value


def test_hosts_come_in_the_order_of_the_plan_with_their_variables(site: Path) -> None:
    found = resolve([str(site / "hosts.ini")], None, ["gpu-02", "gpus"])
    assert named(found) == ["gpu-02", "gpu-01", "gpu-03"]
    assert found.hosts["gpu-01"] == {"ansible_host": "10.0.0.5", "ansible_user": "admin"}
    assert found.hosts["gpu-03"]["note"] == "Grüße"
    assert found.groups["site"] == ("gpu-01", "gpu-02", "gpu-03", "lb-1")
    assert found.groups["empty"] == ()
    assert found.known["lb-1"] == {}
    assert found.address("gpu-02") == "2001:db8::10"
    assert found.address("gpu-03") == "gpu-03"


@pytest.mark.parametrize(
    ("patterns", "limit", "hosts"),
    [
        (["gpus:&rack1"], None, ["gpu-01", "gpu-02"]),
        (["gpus:&rack1", "gpu-03"], None, ["gpu-01", "gpu-02"]),
        (["gpus", "!gpu-02"], None, ["gpu-01", "gpu-03"]),
        (["gpu-0?", "!gpu-03"], None, ["gpu-01", "gpu-02"]),
        (["gpus[0]"], None, ["gpu-01"]),
        (["~gpu-0[13]"], None, ["gpu-01", "gpu-03"]),
        (["site"], "gpu*,!gpu-01", ["gpu-02", "gpu-03"]),
        (["all"], "loadbalancers", ["lb-1"]),
    ],
)
def test_patterns_and_limit_mean_what_ansible_means(
    resolved: Inventory, patterns: list[str], limit: str | None, hosts: list[str]
) -> None:
    assert list(select(resolved, patterns, limit)) == hosts


def test_plain_names_mean_what_ansible_means(resolved: Inventory) -> None:
    """`exact_names` saves a run of Ansible; a limit to everything makes Ansible decide instead."""
    for pieces in (["gpus"], ["site"], ["loadbalancers", "gpu-02", "rack1"], ["all"], ["gpu-03", "gpus"]):
        assert exact_names(pieces, resolved.known, resolved.groups) == select(resolved, pieces, "all"), pieces
    for piece in ("gpu*", "!gpu-01", "gpus[0]", "~gpu", "gpu-o1"):
        assert exact_names(["gpus", piece], resolved.known, resolved.groups) is None


def test_a_limit_file_is_read_as_ansible_reads_it(resolved: Inventory, tmp_path: Path) -> None:
    (tmp_path / "retry").write_text("gpu-02\n")
    assert select(resolved, ["gpus"], f"@{tmp_path / 'retry'}") == ("gpu-02",)


@pytest.mark.case("no-hosts-matched-is-success")
def test_a_mistyped_host_is_named_with_the_nearest_one(site: Path) -> None:
    """case: no-hosts-matched-is-success."""
    error = refused([str(site / "hosts.ini")], None, ["gpus", "gpu-o1"])
    assert error.what == "plan names gpu-o1, not in inventory (did you mean gpu-01?)"
    assert error.where == str(site / "hosts.ini")
    assert error.remedy and error.exit_code == 64


@pytest.mark.case("no-hosts-matched-is-success")
@pytest.mark.parametrize(
    ("patterns", "limit", "words"),
    [
        (["gpus", "empty"], None, "the group empty has no hosts"),
        (["empty"], None, "the group empty has no hosts"),
        (["gpus"], "loadbalancers", "gpus with --limit loadbalancers names no host"),
        (["gpus"], "gpu-o1,gpu-02", "--limit names gpu-o1, not in inventory (did you mean gpu-01?)"),
        (["gpus", "!gpu-o1"], None, "plan names gpu-o1, not in inventory"),
        (["rack1:&loadbalancers"], None, "rack1:&loadbalancers names no host"),
        (["node*"], None, "plan names node*, not in inventory"),
        (["localhost"], None, "localhost is not in the inventory"),
    ],
)
def test_nothing_matched_is_an_error(resolved: Inventory, patterns: list[str], limit: str | None, words: str) -> None:
    with pytest.raises(InventoryError) as caught:
        select(resolved, patterns, limit)
    assert words in caught.value.what


@pytest.mark.case("no-hosts-matched-is-success")
def test_a_host_removed_since_is_an_error(site: Path) -> None:
    """case: no-hosts-matched-is-success (removed between apply and resume)."""
    (site / "hosts.ini").write_text(HOSTS.replace("gpu-03\n", ""))
    assert "gpu-03" in refused([str(site / "hosts.ini")], None, ["gpu-03"]).what


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gpu-01 ansible_host=-oProxyCommand=id", "begins with a dash"),
        ("gpu-01 ansible_host='10.0.0.5 -oProxyCommand=id'", "holds a blank"),
        ("gpu-01 ansible_user=-lroot", "begins with a dash"),
        ("gpu-01 ansible_port=ssh", "is not a port"),
        ("gpu-01 ansible_port=70000", "is not a port"),
        ("gpu-01 ansible_host=[2001:db8::10]", "write 2001:db8::10"),
        ("-oProxyCommand=id", "begins with a dash"),
    ],
)
def test_what_ssh_would_read_as_an_option_is_refused(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "hosts.ini").write_text(f"{line}\n")
    assert words in refused([str(tmp_path / "hosts.ini")], None, ["all"]).what


def test_an_address_made_by_ansible_from_a_template_is_left_to_ansible(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text('all: {hosts: {gpu-01: {ansible_host: "{{ inventory_hostname }}.example"}}}\n')
    assert named(resolve([str(tmp_path / "hosts.yml")], None, ["all"])) == ["gpu-01"]


@pytest.mark.case("ipv6-host-in-rsync-step")
def test_inline_and_ipv6_hosts(site: Path) -> None:
    """case: ipv6-host-in-rsync-step (as the host's own name)."""
    found = resolve(["gpu-01,2001:db8::1", str(site / "hosts.ini")], None, ["2001:db8::1", "gpus"])
    assert named(found) == ["2001:db8::1", "gpu-01", "gpu-02", "gpu-03"]


def test_an_unreadable_inventory_is_an_error_and_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "bad.ini").write_text("[gpus\nsecret_token=hunter2\n")
    error = refused([str(tmp_path / "bad.ini")], None, ["all"])
    assert "pars" in error.why and error.remedy
    assert "hunter2" not in str(error)
    assert "does not exist" in refused([str(tmp_path / "none.ini")], None, ["all"]).what


def test_inline_vault_values_stay_encrypted_and_files_need_the_password(site: Path) -> None:
    value = vault(site, "encrypt_string", "s3cret", "--name", "token").stdout
    (site / "group_vars" / "gpus.yml").write_text(value)
    found = resolve([str(site / "hosts.ini")], None, ["gpu-01"])
    assert "s3cret" not in json.dumps(dict(found.known))
    vault(site, "encrypt", str(site / "host_vars" / "gpu-03.yml"))
    error = refused([str(site / "hosts.ini")], None, ["gpus"])
    assert "--vault-id" in error.remedy
    again = resolve([str(site / "hosts.ini")], None, ["gpus"], vault_ids=[str(site / "password")])
    assert again.hosts["gpu-03"]["note"] == "Grüße"


@pytest.mark.case("locale-changes-the-output")
def test_the_callers_locale_and_settings_do_not_matter(site: Path) -> None:
    """case: locale-changes-the-output (controller started with LC_ALL=C)."""
    env = {
        **os.environ,
        "LC_ALL": "C",
        "LANG": "de_DE.UTF-8",
        "ANSIBLE_FORCE_COLOR": "1",
        "ANSIBLE_HOST_PATTERN_MISMATCH": "ignore",
    }
    found = resolve([str(site / "hosts.ini")], None, ["gpus"], env=env)
    assert found.hosts["gpu-03"]["note"] == "Grüße"
    assert "did you mean gpu-01" in refused([str(site / "hosts.ini")], None, ["gpus", "gpu-o1"], env=env).what


def test_the_default_inventory_is_ansibles(site: Path, tmp_path: Path) -> None:
    env = {**os.environ, "ANSIBLE_INVENTORY": str(site / "hosts.ini")}
    assert named(resolve([], None, ["rack1"], env=env)) == ["gpu-01", "gpu-02"]
    kept = freeze([], tmp_path / "frozen", env=env)
    assert named(resolve(kept, None, ["rack1"])) == ["gpu-01", "gpu-02"]


def test_extra_arguments_reach_ansible(site: Path) -> None:
    found = resolve([str(site / "hosts.ini")], None, ["gpu-01"], extra=["-e", "rack=b"])
    assert found.hosts["gpu-01"]["rack"] == "b"


def test_a_frozen_inventory_gives_the_same_hosts_after_the_sources_are_gone(site: Path, tmp_path: Path) -> None:
    value = vault(site, "encrypt_string", "s3cret", "--name", "token").stdout
    (site / "group_vars" / "rack1.yml").write_text(value)
    vault(site, "encrypt", str(site / "host_vars" / "gpu-03.yml"))
    ids = [str(site / "password")]
    before = resolve([str(site / "hosts.ini"), "extra-1,"], None, ["gpus", "extra-1"], vault_ids=ids)
    kept = freeze([str(site / "hosts.ini"), "extra-1,"], tmp_path / "frozen")
    password = tmp_path / "password-kept"
    password.write_text("hunter2")
    for path in [*site.glob("*_vars/*"), site / "hosts.ini"]:
        path.unlink()
    after = resolve(kept, None, ["gpus", "extra-1"], vault_ids=[str(password)])
    assert (after.hosts, after.known) == (before.hosts, before.known)
    everything = b"".join(path.read_bytes() for path in (tmp_path / "frozen").rglob("*") if path.is_file())
    assert b"s3cret" not in everything and "Grüße".encode() not in everything
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "frozen").rglob("*") if path.is_file()}
    assert modes == {0o600}


def test_sources_of_one_directory_share_their_variables(site: Path, tmp_path: Path) -> None:
    (site / "more.yml").write_text("gpus: {hosts: {gpu-04: {}}}\n")
    kept = freeze([str(site / "hosts.ini"), str(site / "more.yml")], tmp_path / "frozen")
    assert len({Path(path).parent for path in kept}) == 1
    assert resolve(kept, None, ["gpu-04"]).hosts["gpu-04"] == {"ansible_user": "admin"}


def script(directory: Path) -> Path:
    path = directory / "fleet.py"
    path.write_text(SCRIPT % sys.executable)
    path.chmod(0o755)
    return path


def test_a_script_is_asked_once_and_its_answer_is_kept(site: Path, tmp_path: Path) -> None:
    path = script(site)
    assert named(resolve([str(path)], None, ["gpus"])) == ["gpu-01", "gpu-02"]
    assert (site / "calls.bak").read_text() == "x"
    (tmp_path / "frozen").mkdir()
    kept = freeze([str(path)], tmp_path / "frozen")
    env = {**os.environ, "FLEET": "5"}
    after = resolve(kept, None, ["gpus"], env=env)
    assert named(after) == ["gpu-01", "gpu-02"]
    assert after.hosts["gpu-02"] == {"slot": "2", "rack": "a", "ansible_user": "admin"}
    assert not os.access(kept[0], os.X_OK)


def test_a_directory_is_kept_with_scripts_and_plugins_as_their_answers(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "group_vars").mkdir(parents=True)
    (site / "01-hosts.ini").write_text(HOSTS)
    (site / "02-generated.yml").write_text(
        'plugin: generator\nhosts: {name: "node-{{ n }}"}\nlayers: {n: ["1", "2"]}\n'
    )
    (site / "03-rule.yml").write_text("plugin: constructed\ngroups: {odd: inventory_hostname.endswith('1')}\n")
    (site / "group_vars" / "all.yml").write_text("site: north\n")
    script(site)
    before = resolve([str(site)], None, ["all"])
    kept = freeze([str(site)], tmp_path / "frozen")
    after = resolve(kept, None, ["all"])
    assert sorted(named(after)) == sorted(named(before))
    assert after.hosts == before.hosts
    assert {name: sorted(members) for name, members in after.groups.items()} == {
        name: sorted(members) for name, members in before.groups.items()
    }
    assert after.groups["odd"] and "node-1" in after.hosts
    texts = [path.read_text() for path in Path(kept[0]).rglob("*.json")]
    assert len(texts) == 2 and not any("north" in text for text in texts)


def test_a_script_without_meta_is_asked_for_every_host(tmp_path: Path) -> None:
    path = tmp_path / "old.sh"
    path.write_text(
        '#!/bin/sh\n[ "$1" = --list ] && echo \'{"gpus": ["a", "b"]}\' || echo "{\\"name_is\\": \\"$2\\"}"\n'
    )
    path.chmod(0o755)
    kept = freeze([str(path)], tmp_path / "frozen")
    assert resolve(kept, None, ["gpus"]).hosts == {"a": {"name_is": "a"}, "b": {"name_is": "b"}}


def test_a_script_that_fails_or_babbles_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "bad.sh"
    for body, words in (("echo no json", "gave no JSON"), ("echo broken >&2; exit 3", "failed")):
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        with pytest.raises(InventoryError, match=words):
            freeze([str(path)], tmp_path / "frozen")


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_a_tool_that_hangs_is_ended_with_all_its_children(tmp_path: Path) -> None:
    path = tmp_path / "hang.sh"
    path.write_text("#!/bin/sh\nsleep 1000 & echo $! > child; wait\n")
    path.chmod(0o755)
    with pytest.raises(InventoryError, match="no answer"):
        run(["/bin/sh", "-c", f"cd {tmp_path} && exec ./hang.sh"], what="it", env=environment(), timeout=1.0)
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: gone(child), timeout=10, what="the end of the child")


def test_the_listing_of_a_script_becomes_a_file_that_ansible_reads() -> None:
    listing = {"gpus": ["a"], "all": {"children": ["gpus"], "vars": {"x": 1}}, "_meta": {"hostvars": {"a": {"y": 2}}}}
    made = as_yaml_inventory(listing)
    assert made["all"] == {"hosts": {"a": {"y": 2}}, "children": {"gpus": {}}, "vars": {"x": 1}}
    assert made["gpus"]["hosts"] == {"a": {}}


def test_patterns_are_cut_where_ansible_cuts_them() -> None:
    assert split_pattern("a:&b:!c") == ["a", "&b", "!c"]
    assert split_pattern("gpu[01:03]:b") == ["gpu[01:03]", "b"]
    assert split_pattern("a, b") == ["a", "b"]
    assert split_pattern("2001:db8::1") == ["2001:db8::1"]
    assert split_pattern("!2001:db8::1") == ["!2001:db8::1"]


def test_an_excerpt_is_never_part_of_an_error() -> None:
    text = "[WARNING]: odd\n[ERROR]: cannot read\nOrigin: f.yml:3:1\n\n3 password: hunter2\n"
    assert said(text) == "odd; cannot read"
    assert "hunter2" not in said("password: hunter2\nTraceback: boom")


def test_the_example_can_be_used_as_it_stands(tmp_path: Path) -> None:
    example = Path(__file__).parents[1] / "inventories" / "example"
    plan = load(example / "plan.yaml")
    found = resolve(plan.inventory_sources(), None, plan.hosts)
    assert named(found) == ["gpu-01", "gpu-02", "gpu-03"]
    assert found.hosts["gpu-03"]["ansible_become"] is True
