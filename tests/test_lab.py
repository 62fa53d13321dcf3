"""What of the lab can be tested without root: layout, inventory, tools, the load client, and every refusal."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpuchange.cli.lab import lab as lab_command
from gpuchange.errors import GpuchangeError, LabError
from gpuchange.lab import Lab, faults, hosts, network, state, tools
from gpuchange.lab.gpu.faults import FAULTS as GPU_FAULTS
from gpuchange.lab.load import Load, Target
from gpuchange.lab.power import OrderServer
from gpuchange.waiting import WaitTimeout, wait_until

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUCHANGE_LAB_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def spec() -> state.LabSpec:
    made = state.LabSpec("demo", 7, 2, state.plan_hosts(3))
    state.save(made)
    return made


def test_a_busy_power_daemon_refuses_nobody(tmp_path: Path) -> None:
    """A Unix socket's full queue answers "try again" at once to a client with a timeout, instead of letting it wait."""
    door = str(tmp_path / "door")
    with OrderServer(door, socketserver.StreamRequestHandler), contextlib.ExitStack() as clients:
        for _ in range(64):  # nobody takes orders yet
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.settimeout(5)
            client.connect(door)


def test_layout_gives_every_host_its_own_address(spec: state.LabSpec) -> None:
    assert [(host.name, spec.address(host)) for host in spec.hosts] == [
        ("lb1", "10.88.7.10"),
        ("gpu1", "10.88.7.11"),
        ("gpu2", "10.88.7.12"),
        ("gpu3", "10.88.7.13"),
    ]
    assert spec.address6(spec.find("gpu1")) == "fd88:7::b"


@pytest.mark.parametrize("count", [0, -1, 100])
def test_layout_refuses_impossible_sizes(count: int) -> None:
    with pytest.raises(LabError, match="1 to 99"):
        state.plan_hosts(count)


def test_cable_names_fit_the_kernel_limit() -> None:
    spec = state.LabSpec("x", 250, 1, state.plan_hosts(99))
    assert max(len(network.cable(spec, host)) for host in spec.hosts) <= 15


@pytest.mark.parametrize("name", ["", "../etc", "Großer", "a/b", "-x", "x" * 40, ".snapshots"])
def test_names_that_would_leave_the_directory_are_refused(name: str) -> None:
    with pytest.raises(LabError, match="no name for a lab"):
        state.check_name(name)


def test_state_survives_being_written_and_read(spec: state.LabSpec) -> None:
    assert state.load("demo") == spec
    assert state.all_labs() == [spec]


def test_a_missing_lab_is_said_with_those_there_are(spec: state.LabSpec) -> None:
    with pytest.raises(LabError) as refusal:
        Lab.load("other")
    assert refusal.value.what == "there is no lab named 'other'"
    assert "demo" in refusal.value.why
    assert refusal.value.remedy == "gpuchange lab up --name other"


def test_an_unknown_host_is_said_with_those_there_are(spec: state.LabSpec) -> None:
    with pytest.raises(LabError, match="no host 'gpu9'") as refusal:
        Lab.load("demo").host("gpu9")
    assert "lb1, gpu1, gpu2, gpu3" in refusal.value.remedy


def test_a_daemon_that_is_not_there_is_said(spec: state.LabSpec) -> None:
    with pytest.raises(LabError, match="power daemon of lab demo does not answer"):
        Lab.load("demo").status()


def test_inventory_file_says_the_same_as_the_dynamic_one(spec: state.LabSpec) -> None:
    yaml = pytest.importorskip("yaml")
    listing = hosts.inventory(spec)
    assert listing["gpu_hosts"]["hosts"] == ["gpu1", "gpu2", "gpu3"]
    assert listing["loadbalancers"]["hosts"] == ["lb1"]
    children = yaml.safe_load(hosts.write_inventory(spec).read_text())["all"]["children"]
    assert children["gpu_hosts"]["hosts"]["gpu2"] == listing["_meta"]["hostvars"]["gpu2"]
    assert children["loadbalancers"]["hosts"]["lb1"]["ansible_host"] == "10.88.7.10"


def test_dynamic_inventory_script_is_what_ansible_asks_for(spec: state.LabSpec, own_directory: Path) -> None:
    script = Path(__file__).parents[1] / "inventories/lab/hosts.sh"
    environment = {
        **os.environ,
        "GPUCHANGE_PYTHON": sys.executable,
        "GPUCHANGE_LAB": "demo",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    done = subprocess.run([script, "--list"], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == hosts.inventory(spec)


def test_missing_tools_are_named_as_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "NEEDED", {"no-such-program": "debootstrap", "sh": "dash"})
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(LabError, match="debootstrap") as refusal:
        tools.require_machine()
    assert "apt-get install debootstrap" in refusal.value.remedy


def test_not_root_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="needs root") as refusal:
        Lab.up("demo")
    assert "sudo gpuchange lab up" in refusal.value.remedy


def test_not_debian_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(tools.shutil, "which", lambda *_, **__: None)
    with pytest.raises(LabError, match="Debian-like"):
        tools.require_machine()


def test_a_failing_command_shows_its_last_words() -> None:
    with pytest.raises(LabError, match="exit code 3") as refusal:
        tools.sh(["sh", "-c", "echo the reason >&2; exit 3"])
    assert refusal.value.why == "the reason"


def test_every_fault_is_described_in_one_line() -> None:
    assert {"hang", "network-cut", "power-cut", "disk-full", "ssh-down", "driver-build-fails"} <= set(
        faults.catalogue()
    )
    for fault in faults.catalogue().values():
        assert fault.summary and "\n" not in fault.summary


def test_every_fault_stands_in_the_manual_with_what_catches_it() -> None:
    """tests/cases and scripts/fault-table show it; a fault that nothing catches has no row with a word in it."""
    rows = [line for line in (ROOT / "docs/verify.md").read_text().splitlines() if line.startswith("| `")]
    met = {row.split("`")[1]: row for row in rows if "caught" in row or "tests/lab/" in row}
    assert set(met) >= set(GPU_FAULTS)
    shown = {row.rsplit("|", 2)[1].strip() for row in met.values() if "tests/lab/" in row}
    assert all((ROOT / path).exists() for path in shown)


def test_an_unknown_fault_lists_the_known(spec: state.LabSpec) -> None:
    with pytest.raises(LabError, match="no fault 'flood'") as refusal:
        Lab.load("demo").host("gpu1").break_("flood")
    assert "power-cut" in refusal.value.remedy
    assert Lab.load("demo").host("gpu1").staged_faults() == []


def test_wait_until_gives_what_came_true() -> None:
    answers = iter([0, 0, 5])
    assert wait_until(lambda: next(answers), timeout=5, interval=0.01, what="five") == 5


def test_wait_until_says_what_it_waited_for() -> None:
    with pytest.raises(WaitTimeout, match="in vain for rain"):
        wait_until(lambda: False, timeout=0.05, interval=0.01, what="rain")


def test_wait_until_counts_named_errors_as_not_yet() -> None:
    def fail() -> bool:
        raise OSError("still shut")

    with pytest.raises(WaitTimeout) as refusal:
        wait_until(fail, timeout=0.05, interval=0.01, what="the door", retry_on=(OSError,))
    assert "still shut" in refusal.value.why
    with pytest.raises(OSError):
        wait_until(fail, timeout=1, what="the door")


class Awkward(BaseHTTPRequestHandler):
    """A server with every way to disappoint: /infer works once in two, streams end without their last line."""

    protocol_version = "HTTP/1.1"
    count = 0

    def do_GET(self) -> None:
        Awkward.count += 1
        if self.path.startswith("/stream"):
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"4\r\nhalf\r\n")
        else:
            body = b'{"host": "gpu1"}'
            self.send_response(200 if Awkward.count % 2 else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def awkward_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Awkward)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def stop_after(calls: int) -> Iterator[bool]:
    yield from [False] * calls
    while True:
        yield True


def test_load_counts_bad_status_and_broken_streams(awkward_url: str) -> None:
    ends = stop_after(21)
    tally = Load(awkward_url, rate=200, stream_every=0.02).run(lambda: next(ends))
    assert tally.streams_ok == 0 and tally.streams_failed >= 1
    assert tally.ok >= 1 and tally.failed > tally.streams_failed
    assert any("status 503" in reason for reason in tally.reasons)
    assert tally.by_host == {"gpu1": tally.ok}


def test_load_counts_refused_connections() -> None:
    ends = stop_after(5)
    tally = Load("http://127.0.0.1:9", rate=200, stream_every=0).run(lambda: next(ends))
    assert (tally.ok, tally.failed) == (0, 5)
    assert "ConnectionRefusedError" in tally.reasons[0]


@pytest.mark.parametrize("url", ["https://x", "10.0.0.1", "http://"])
def test_load_refuses_other_urls(url: str) -> None:
    with pytest.raises(ValueError, match="no http URL"):
        Target.parse(url)


def test_load_verb_writes_its_summary(awkward_url: str, tmp_path: Path) -> None:
    into = tmp_path / "load.json"
    done = CliRunner().invoke(
        lab_command,
        ["load", "--url", awkward_url, "--seconds", "0.3", "--stream-every", "0s", "--json-into", str(into)],
    )
    summary = json.loads(into.read_text())
    assert summary["failed"] > 0 and done.exit_code == 1
    assert f"{summary['ok']} ok, {summary['failed']} failed" in done.output


@pytest.mark.parametrize("arguments", [["load", "--url", "http://x"], ["load", "--url", "ftp://x", "--seconds", "1"]])
def test_load_verb_refuses_half_an_order(arguments: list[str]) -> None:
    done = CliRunner().invoke(lab_command, arguments)
    assert isinstance(done.exception, GpuchangeError) and done.exception.exit_code == 64


def test_faults_verb_lists_them() -> None:
    done = CliRunner().invoke(lab_command, ["faults"])
    assert done.exit_code == 0 and "power-cut" in done.output
