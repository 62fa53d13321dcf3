"""Host keys before any play: unknown ones are shown, changed ones refused; real ssh servers on the loopback answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import paramiko
import pytest

from gpuchange import engine as engines
from gpuchange.change import Connection
from gpuchange.errors import BeforeChangeError
from gpuchange.ssh import Address, fingerprint
from tests.fakechange import events, run
from tests.fleetfake import World

pytest_plugins = ["tests.fakechange"]


class Doors:
    """ssh servers that show a host key and no more, one for each host; `keys` may be changed at any time."""

    def __init__(self, known_hosts: Path) -> None:
        self.known_hosts = known_hosts
        self.keys: dict[str, paramiko.PKey] = {}
        self.ports: dict[str, int] = {}
        self._listening: dict[str, socket.socket] = {}

    def address(self, name: str, _variables: object) -> Address:
        if name not in self._listening:
            self.keys[name] = paramiko.ECDSAKey.generate()
            self._listening[name] = socket.create_server(("127.0.0.1", 0))
            self.ports[name] = self._listening[name].getsockname()[1]
            threading.Thread(target=self._serve, args=(name,), daemon=True).start()
        return Address(name, "127.0.0.1", self.ports[name], "root", (self.known_hosts,))

    def fingerprint(self, name: str) -> str:
        return fingerprint(f"{self.keys[name].get_name()} {self.keys[name].get_base64()}")

    def _serve(self, name: str) -> None:
        while True:
            try:
                connection, _ = self._listening[name].accept()
            except OSError:
                return
            transport = paramiko.Transport(connection)
            transport.add_server_key(self.keys[name])
            try:
                transport.start_server(server=paramiko.ServerInterface())
                transport.join(5)
            except (paramiko.SSHException, EOFError, OSError):
                continue

    def close(self) -> None:
        for listening in self._listening.values():
            with suppress(OSError):  # closed already
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()


@pytest.fixture
def doors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Doors]:
    made = Doors(tmp_path / "known_hosts")
    monkeypatch.setattr("gpuchange.ssh.resolve", made.address)
    yield made
    made.close()


ACCEPTING = Connection(accept_new_host_keys=True)


def test_unknown_keys_stop_a_change_before_any_play_and_are_shown(begin: Callable[..., Path], doors: Doors) -> None:
    home, world = begin(2), World()
    with pytest.raises(BeforeChangeError) as caught:
        run(home, world)
    said = caught.value
    assert str(said).count("is not known") == 2 and "is not known; the host key of" in str(said)
    for host in ("h1", "h2"):
        assert f"{host}: {doors.fingerprint(host)}" in said.why
    assert "ssh-keygen -lf" in said.remedy and "--accept-new-host-keys" in said.remedy
    assert "mend known_hosts" not in said.remedy
    assert world.requests == [] and not doors.known_hosts.exists()


def test_keys_that_the_operator_accepts_are_kept_and_asked_for_once(begin: Callable[..., Path], doors: Doors) -> None:
    home, world = begin(2), World()
    assert run(home, world, ACCEPTING, last_phase="preflight") == 5
    noted = {event.host: event.data["host_key_accepted"] for event in events(home) if "host_key_accepted" in event.data}
    assert noted == {host: doors.fingerprint(host) for host in ("h1", "h2")}
    assert len(doors.known_hosts.read_text().splitlines()) == 2
    assert run(home, world) == 0  # known by now
    assert sum("host_key_accepted" in event.data for event in events(home)) == 2


@pytest.mark.parametrize("connection", [Connection(), ACCEPTING])
def test_a_changed_key_is_never_accepted(begin: Callable[..., Path], doors: Doors, connection: Connection) -> None:
    home, world = begin(2), World()
    run(home, world, ACCEPTING, last_phase="preflight")
    played = len(world.requests)
    doors.keys["h2"] = paramiko.ECDSAKey.generate()
    with pytest.raises(BeforeChangeError, match="h2 is up but presents a different host key") as caught:
        run(home, world, connection)
    assert caught.value.why == f"h2: {doors.fingerprint('h2')}"
    assert "mend known_hosts" in caught.value.remedy and "ssh-keygen -lf" in caught.value.remedy
    assert len(world.requests) == played


def test_changed_keys_are_named_before_unknown_ones(begin: Callable[..., Path], doors: Doors) -> None:
    home, world = begin(2), World()
    run(home, world, ACCEPTING, last_phase="preflight")
    kept = doors.known_hosts.read_text().splitlines()
    doors.known_hosts.write_text("".join(f"{line}\n" for line in kept if f":{doors.ports['h2']} " in line))
    doors.keys["h2"] = paramiko.ECDSAKey.generate()
    with pytest.raises(BeforeChangeError) as caught:
        run(home, world)
    assert [line.strip().split(":")[0] for line in caught.value.why.splitlines()] == ["h2", "h1"]


def test_once_a_host_is_touched_a_strange_key_holds_nobody_else_up(begin: Callable[..., Path], doors: Doors) -> None:
    """Its own plays find out what it is; the change may have to take a host back that waits drained."""
    home, world = begin(2), World()
    assert run(home, world, ACCEPTING, last_phase="drain") == 5
    doors.keys["h2"] = paramiko.ECDSAKey.generate()
    assert run(home, world) == 0


def test_a_host_that_does_not_answer_is_no_matter_of_keys(begin: Callable[..., Path], doors: Doors) -> None:
    home, world = begin(1), World()
    run(home, world, ACCEPTING, last_phase="preflight")
    doors.close()
    assert run(home, world) == 0


def test_what_is_not_reached_over_ssh_is_not_knocked_at(
    begin: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(engines.ssh, "knock", lambda addresses: asked.append(len(addresses)) or {})
    assert run(begin(2), World()) == 0  # ansible_connection: local
    assert asked == [0]
