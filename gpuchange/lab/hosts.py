"""Laying out one host's system tree, and the keys and inventory by which controllers reach it."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

from gpuchange.lab import image, pool, stack, state
from gpuchange.lab.tools import sh

NETWORK = """[Match]
Name=host0

[Network]
Address={address}/24
Address={address6}/64
LinkLocalAddressing=ipv6
IPv6AcceptRA=no
IPv6DuplicateAddressDetection=0
"""


def client_key(spec: state.LabSpec) -> Path:
    return spec.directory / "ssh" / "id_ed25519"


def known_hosts(spec: state.LabSpec) -> Path:
    return spec.directory / "ssh" / "known_hosts"


def make_keys(spec: state.LabSpec) -> None:
    """One client key for the lab, one host key a host, and a known_hosts file over all of them."""
    directory = spec.directory / "ssh"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    _keygen(client_key(spec), "gpuchange-lab")
    lines = []
    for host in spec.hosts:
        key = directory / f"{host.name}.host"
        _keygen(key, host.name)
        public = " ".join(key.with_suffix(".host.pub").read_text().split()[:2])
        lines.append(f"{spec.address(host)},{spec.address6(host)} {public}\n")
    known_hosts(spec).write_text("".join(lines))


def _keygen(path: Path, comment: str) -> None:
    if not path.exists():
        sh(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", path])


def lay_out(spec: state.LabSpec, host: state.HostSpec, source: Path) -> None:
    """Copy the base system `source` and make it this host. Its pristine state is kept as snapshot `start`."""
    tree = spec.tree(host)
    pool.snapshot(source, tree)
    _write(tree / "etc/hostname", f"{host.name}\n")
    _write(tree / "etc/hosts", _hosts_file(spec))
    _write(tree / "etc/machine-id", f"{uuid.uuid4().hex}\n", 0o444)
    _write(
        tree / "etc/systemd/network/10-host0.network",
        NETWORK.format(address=spec.address(host), address6=spec.address6(host)),
    )
    key = spec.directory / "ssh" / f"{host.name}.host"
    _write(tree / "etc/ssh/ssh_host_ed25519_key", key.read_text(), 0o600)
    _write(tree / "etc/ssh/ssh_host_ed25519_key.pub", key.with_suffix(".host.pub").read_text())
    (tree / "root/.ssh").mkdir(mode=0o700, exist_ok=True)
    _write(tree / "root/.ssh/authorized_keys", client_key(spec).with_suffix(".pub").read_text(), 0o600)
    if host.role == "gpu":
        stack.write_cards(tree, host.name, spec.gpus)
    else:
        _write(tree / "etc/haproxy/haproxy.cfg", _haproxy(spec))
        _write(tree / "etc/nginx/nginx.conf", (image.FILES / "nginx.conf").read_text())
        _write(tree / "etc/nginx/models.servers", "".join(f"server {end};\n" for end in _models(spec).values()))
        image.systemctl(tree, "enable", "haproxy.service", "nginx.service")


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(mode)


def _hosts_file(spec: state.LabSpec) -> str:
    names = "".join(f"{spec.address(host)} {host.name}\n" for host in spec.hosts)
    return f"127.0.0.1 localhost\n::1 localhost ip6-localhost\n{spec.gateway} apt.lab\n{names}"


def _models(spec: state.LabSpec) -> dict[str, str]:
    """Where each GPU host serves its models."""
    return {host.name: f"{spec.address(host)}:8000" for host in spec.hosts if host.role == "gpu"}


def _haproxy(spec: state.LabSpec) -> str:
    servers = (f"    server {name} {end}\n" for name, end in _models(spec).items())
    return (image.FILES / "haproxy.cfg").read_text() + "".join(servers)


def ansible_vars(spec: state.LabSpec, host: state.HostSpec) -> dict[str, str]:
    options = f"-o UserKnownHostsFile={known_hosts(spec)} -o StrictHostKeyChecking=yes -o IdentitiesOnly=yes"
    return {
        "ansible_host": spec.address(host),
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(client_key(spec)),
        "ansible_python_interpreter": "/usr/bin/python3",
        "ansible_ssh_common_args": options,
    }


def inventory(spec: state.LabSpec) -> dict[str, Any]:
    """Ansible's dynamic inventory form: groups gpu_hosts and loadbalancers, with every host's variables."""
    groups = {"gpu_hosts": "gpu", "loadbalancers": "lb"}
    listing: dict[str, Any] = {
        group: {"hosts": [host.name for host in spec.hosts if host.role == role]} for group, role in groups.items()
    }
    listing["_meta"] = {"hostvars": {host.name: ansible_vars(spec, host) for host in spec.hosts}}
    return listing


def write_inventory(spec: state.LabSpec) -> Path:
    """The same as a YAML inventory file. JSON scalars are YAML, so no YAML library is needed here."""
    listing = inventory(spec)
    lines = ["# Written by `gpuchange lab up`.\nall:\n  children:\n"]
    for group in ("gpu_hosts", "loadbalancers"):
        lines.append(f"    {group}:\n      hosts:\n")
        for name in listing[group]["hosts"]:
            lines.append(f"        {name}:\n")
            variables = listing["_meta"]["hostvars"][name].items()
            lines.extend(f"          {key}: {json.dumps(value)}\n" for key, value in variables)
    path = spec.directory / "inventory.yaml"
    path.write_text("".join(lines))
    return path
