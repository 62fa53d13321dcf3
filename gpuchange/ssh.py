"""The one door to paramiko: many hosts' reachability at once, host-key pinning, into which boot a host came back.

Connections are resolved as Ansible resolves them: inventory variables first, then what `ssh -G` says (so that
~/.ssh/config, ProxyJump and UserKnownHostsFile count). Keys are never accepted on their own.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpuchange.addresses import format_host

if TYPE_CHECKING:
    import paramiko

CONNECT_TIMEOUT = 10.0
AT_ONCE = 50


@dataclass(frozen=True)
class Address:
    """Where and how one host is reached over ssh."""

    name: str
    host: str
    port: int
    user: str
    known_hosts: tuple[Path, ...]
    identities: tuple[Path, ...] = ()
    proxy: str = ""  # a command whose standard input and output are the connection

    @property
    def key_name(self) -> str:
        """The name under which known_hosts files keep this host's key."""
        return self.host if self.port == 22 else f"[{self.host}]:{self.port}"


@dataclass(frozen=True)
class Reach:
    """What knocking at one host found. `key` is the presented key as in known_hosts (type and base64)."""

    name: str
    state: Literal["ok", "unreachable", "unknown_key", "changed_key", "local"]
    why: str = ""
    key: str = ""
    fingerprint: str = ""


def resolve(name: str, variables: Mapping[str, Any]) -> Address | None:
    """The address of an inventory host; None when it is not reached over ssh (ansible_connection: local …)."""
    if str(variables.get("ansible_connection", "ssh")) not in ("ssh", "smart", "paramiko", "ansible.builtin.ssh"):
        return None
    command = ["ssh", "-G", *_flags(variables), "--", str(variables.get("ansible_host", name))]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    options: dict[str, list[str]] = {}
    for line in shown.stdout.splitlines():
        key, _, value = line.partition(" ")
        options.setdefault(key, []).append(value)
    first = {key: values[0] for key, values in options.items()}
    known = shlex.split(first.get("userknownhostsfile", "")) + shlex.split(first.get("globalknownhostsfile", ""))
    return Address(
        name=name,
        host=first.get("hostname", str(variables.get("ansible_host", name))),
        port=int(first.get("port", 22)),
        user=first.get("user", "root"),
        known_hosts=tuple(Path(path).expanduser() for path in known),
        identities=tuple(Path(path).expanduser() for path in options.get("identityfile", [])),
        proxy=_proxy(first),
    )


def _flags(variables: Mapping[str, Any]) -> list[str]:
    flags: list[str] = []
    for variable in ("ansible_ssh_common_args", "ansible_ssh_extra_args"):
        flags += shlex.split(str(variables.get(variable, "")))
    named = {"ansible_port": "-p", "ansible_user": "-l", "ansible_ssh_private_key_file": "-i"}
    for variable, flag in named.items():
        if variables.get(variable):
            flags += [flag, str(variables[variable])]
    return flags


def _proxy(options: Mapping[str, str]) -> str:
    jump, command = options.get("proxyjump", "none"), options.get("proxycommand", "none")
    if jump != "none":
        return f"ssh -o BatchMode=yes -W [%h]:%p {shlex.quote(jump)}"
    return "" if command == "none" else command


def knock(addresses: Sequence[Address]) -> dict[str, Reach]:
    """Knock at all at once: is somebody there, and is it who known_hosts says? Bounded by CONNECT_TIMEOUT each."""
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        return {reach.name: reach for reach in pool.map(_knock, addresses)}


def _knock(address: Address) -> Reach:
    import paramiko

    try:
        with _transport(address) as transport:
            presented = transport.get_remote_server_key()
    except (OSError, paramiko.SSHException, EOFError) as error:
        place = format_host(address.host, address.port)
        return Reach(address.name, "unreachable", f"{place}: {error or type(error).__name__}")
    key = f"{presented.get_name()} {presented.get_base64()}"
    print_ = fingerprint(key)
    known = known_keys(address)
    if not known:
        return Reach(address.name, "unknown_key", f"the host key of {address.host} is not known", key, print_)
    if key not in known:
        return Reach(
            address.name, "changed_key", f"{address.name} is up but presents a different host key", key, print_
        )
    return Reach(address.name, "ok", key=key, fingerprint=print_)


@contextmanager
def _transport(address: Address) -> Iterator[paramiko.Transport]:
    import paramiko

    if address.proxy:
        command = address.proxy.replace("%h", address.host).replace("%p", str(address.port))
        line: Any = paramiko.ProxyCommand(command)
    else:
        line = socket.create_connection((address.host, address.port), timeout=CONNECT_TIMEOUT)
    transport = paramiko.Transport(line)
    transport.banner_timeout = transport.auth_timeout = CONNECT_TIMEOUT
    _prefer_known(transport, address)
    try:
        transport.start_client(timeout=CONNECT_TIMEOUT)
        yield transport
    finally:
        transport.close()


def _prefer_known(transport: paramiko.Transport, address: Address) -> None:
    """Ask for the key types that known_hosts has, as OpenSSH does; another type would look like a changed key."""
    kinds = {key.split()[0] for key in known_keys(address)}
    options = transport.get_security_options()
    wanted = [kind for kind in options.key_types if kind in kinds or (kind.startswith("rsa-") and "ssh-rsa" in kinds)]
    if wanted:
        options.key_types = tuple(wanted)


def known_keys(address: Address) -> set[str]:
    """The keys ("type base64") that the known_hosts files hold for this address. Hashed names are understood."""
    import paramiko

    found: set[str] = set()
    for path in address.known_hosts:
        if not path.is_file():
            continue
        try:
            kept: Mapping[str, Any] = paramiko.HostKeys(str(path)).lookup(address.key_name) or {}
        except (paramiko.SSHException, paramiko.hostkeys.InvalidHostKey, OSError):
            continue
        found |= {f"{kind} {key.get_base64()}" for kind, key in kept.items()}
    return found


def fingerprint(key: str) -> str:
    """SHA256:… as ssh-keygen -lf prints it, for a key "type base64"."""
    digest = hashlib.sha256(base64.b64decode(key.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def accept(address: Address, key: str) -> Path:
    """Write the host's key into its first known_hosts file (made if need be, 0600). Returns the file."""
    path = address.known_hosts[0] if address.known_hosts else Path("~/.ssh/known_hosts").expanduser()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as kept:
        kept.write(f"{address.key_name} {key}\n")
    path.chmod(0o600)
    return path


def boot_id(address: Address) -> str:
    """The boot id of a host whose key is known: into which boot it came back. Raises OSError or SSHException."""
    import paramiko

    client = paramiko.SSHClient()
    for path in address.known_hosts:
        if path.is_file():
            client.load_host_keys(str(path))
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    sock: Any = paramiko.ProxyCommand(address.proxy.replace("%h", address.host)) if address.proxy else None
    keys: Any = [str(path) for path in address.identities if path.is_file()] or None
    try:
        client.connect(
            address.host,
            address.port,
            address.user,
            key_filename=keys,
            timeout=CONNECT_TIMEOUT,
            sock=sock,
        )
        _, out, _ = client.exec_command("cat /proc/sys/kernel/random/boot_id", timeout=CONNECT_TIMEOUT)
        return out.read().decode().strip()
    finally:
        client.close()
