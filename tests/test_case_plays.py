"""Known cases in real plays (local connection): streams cut short, noise, caches, paths, locales."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import test_player as plays

from gpuchange import player
from gpuchange.reports import Reported, Silent, Unreachable

LONG_NAME = "ec2-203-0-113-25.a-region-with-a-long-name.compute.example.net"
ROLES = {
    "ignoring": "- name: report\n  gc_echo:\n    args: {}\n  ignore_unreachable: true\n",
    "facts": "- name: report\n  gc_echo:\n"
    "    args: {driver: \"{{ ansible_local.nvidia.driver | default('not read') }}\"}\n",
}
SHIM = '#!/bin/sh\n{before}\n{python} "$@"\nrc=$?\n{after}\nexit $rc\n'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plays.build(tmp_path_factory.mktemp("content"), ROLES)


def add_host(place: Path, name: str, **variables: str) -> None:
    shown = json.dumps({"ansible_connection": "local", "ansible_python_interpreter": sys.executable, **variables})
    with open(place / "inventory.yaml", "a") as inventory:
        inventory.write(f"    {name}: {shown}\n")


@pytest.mark.case("unreachable-counted-as-success")
def test_unreachable_is_no_success_even_where_a_task_ignores_it(place: Path, tmp_path: Path) -> None:
    found = plays.played(place, "ignoring", {"a": {}, "gone": {}})
    assert isinstance(found["a"], Reported) and isinstance(found["gone"], Unreachable)
    naive = plays.plain(place, tmp_path, "ignoring", {"gpuchange_host_args": {}}, limit="gone")
    assert naive["rc"] == 0 and naive["status"] == "successful"


# -------------------------------------------------------------------------------- streams that end early

REPLAY = """import json, pathlib, types
def run(event_handler, **_):
    for event in json.loads((pathlib.Path(__file__).parent / "events.json").read_text()):
        event_handler(event)
    return types.SimpleNamespace(rc=0, status="successful")
"""


def replayed(place: Path, folder: Path, events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> player.Play:
    """A play whose child gets these events from ansible-runner, and exit code 0."""
    (folder / "ansible_runner.py").write_text(REPLAY)
    (folder / "events.json").write_text(json.dumps(events))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return player.Play(plays.request(place, "apply", {"a": {}, "b": {}}), place / "artifacts")


@pytest.mark.case("final-stats-event-missing")
@pytest.mark.parametrize("lost", ["stats", "report and stats", "report, stats contradict"])
def test_a_stream_cut_short_makes_nobody_done(
    place: Path, tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded from a real run of host a; host b was in flight as well."""
    recorded = plays.plain(place, tmp_path, "apply", {"gpuchange_host_args": {"a": {}}}, limit="a")["events"]
    assert recorded[-1]["event"] == "playbook_on_stats" and recorded[-1]["event_data"]["ok"]
    kept = recorded[:-1] if "contradict" not in lost else recorded
    if "report" in lost:
        kept = [event for event in kept if event["event"] != "runner_on_ok"]
    play = replayed(place, tmp_path, kept, monkeypatch)
    found = {item.host: item for _, item in plays.arriving(play)}
    assert isinstance(found["b"], Silent)
    if "contradict" in lost:  # totals alone never make a host done
        assert "without a report from this host: state unknown" in found["a"].why and isinstance(found["a"], Silent)
        return
    assert found["b"].why == "no final statistics from ansible: result unknown"
    assert isinstance(found["a"], Silent if "report" in lost else Reported)
    assert play.log.exists()  # output is kept of a play that ended oddly


# ------------------------------------------------------------------------------------- noise


@pytest.mark.case("noise-in-front-of-json")
@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("echo '[master 1a2b3c] saving uncommitted changes'", "", Reported),
        ("echo '{notice}'", "", Silent),
        ("echo Welcome to this host", "echo; echo 'Broadcast message from root@host:'", Reported),
    ],
)
def test_noise_around_a_result_is_passed_over_or_unknown(
    place: Path, tmp_path: Path, before: str, after: str, kind: type
) -> None:
    shim, name = tmp_path / "python3", f"noisy-{abs(hash(before))}"
    shim.write_text(SHIM.format(before=before, after=after, python=sys.executable))
    shim.chmod(0o755)
    add_host(place, name, ansible_python_interpreter=str(shim))
    found = plays.played(place, "apply", {name: {}})[name]
    assert isinstance(found, kind), found
    assert isinstance(found, Reported) or "module output not parsable" in found.why


@pytest.mark.case("worker-killed-by-oom")
def test_a_killed_worker_leaves_its_host_unknown_and_the_other_as_it_is(place: Path) -> None:
    asked = plays.request(place, "apply", {"a": {"sleep": 600}, "b": {}})
    play = player.Play(asked, place / "artifacts")
    found = {}
    for _, item in plays.arriving(play):
        found[item.host] = item
        if item.host == "b":
            player.wait_until(lambda: bool(workers(asked.attempt)), timeout=60, what="the worker of host a")
            for pid in workers(asked.attempt):
                os.kill(pid, signal.SIGKILL)
    assert isinstance(found["b"], Reported)
    assert isinstance(found["a"], Silent) and "unknown" in found["a"].why
    assert play.log.exists()
    player.end_orphans(asked.attempt)


def workers(attempt: str) -> list[int]:
    """Forks of ansible-playbook: those whose parent is an ansible-playbook, too."""
    playbooks = [pid for pid in player.carriers(attempt) if b"ansible-playbook" in command(pid)]
    return [pid for pid in playbooks if parent(pid) in playbooks]


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


# ------------------------------------------------------------------------------- what the caller's settings must not do


@pytest.mark.case("fact-cache-serves-yesterday")
def test_a_users_fact_cache_is_not_read(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia.fact").write_text('{"driver": "535"}')
    cache = f"fact_caching=jsonfile\nfact_caching_connection={tmp_path}/cache\nfact_caching_timeout=86400\n"
    settings = f"gathering=smart\n{cache}"
    (tmp_path / "ansible.cfg").write_text(f"[defaults]\n{settings}")
    monkeypatch.chdir(tmp_path)
    setup = ["-m", "setup", "-a", f"fact_path={tmp_path} gather_subset=!all,!min,local"]
    ansible = str(Path(sys.executable).parent / "ansible")
    subprocess.run([ansible, "-i", str(place / "inventory.yaml"), "a", *setup], check=True, capture_output=True)
    (tmp_path / "nvidia.fact").write_text('{"driver": "550"}')  # what is true from here on
    found = plays.played(place, "facts", {"a": {}})["a"]
    assert isinstance(found, Reported) and found.report["args"]["driver"] == "not read"
    monkeypatch.setenv("ANSIBLE_CONFIG", str(tmp_path / "ansible.cfg"))
    extra = json.dumps({"gpuchange_role": "test_echo", "gpuchange_tasks": "facts", "gpuchange_host_args": {"a": {}}})
    playbook = [f"{ansible}-playbook", "-v", "-i", str(place / "inventory.yaml"), "-l", "a", "-e", extra]
    naive = subprocess.run([*playbook, str(asked_for(place))], check=True, capture_output=True, text=True)
    assert '"driver": "535"' in naive.stdout


def asked_for(place: Path) -> Path:
    return plays.request(place, "apply", {}).playbook


@pytest.mark.case("control-socket-path-too-long")
def test_control_sockets_are_short_whatever_is_long(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "a-long-way-down" / ("x" * 60)
    home.mkdir(parents=True)
    (home / "ansible.cfg").write_text(
        f"[ssh_connection]\ncontrol_path_dir={home}\ncontrol_path=%(directory)s/%%h-%%p-%%r-{'y' * 60}\n"
    )
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    add_host(place, LONG_NAME, ansible_connection="ssh", ansible_host="127.0.0.9", ansible_port="1")
    asked = plays.request(place, "apply", {LONG_NAME: {}})
    play = player.Play(player.Request(**{**vars(asked), "verbosity": 3}), home / "artifacts")
    assert [type(item) for _, item in plays.arriving(play)] == [Unreachable]
    said = play.log.read_text()
    (path,) = {word.split('"')[1] for word in said.split("'") if word.startswith("ControlPath=")}
    assert len(path.encode()) + len(".0123456789abcdef") <= 107, path  # ssh puts that behind it while it connects


@pytest.mark.case("locale-changes-the-output")
@pytest.mark.parametrize("spoken", ["C", "de_DE.UTF-8", ""])
def test_a_play_speaks_utf_8_whatever_the_caller_speaks(
    place: Path, spoken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LC_ALL", "LANG", "LC_NUMERIC"):
        monkeypatch.setenv(name, spoken) if spoken else monkeypatch.delenv(name, raising=False)
    name = "Gerät *[ß] 1,5"
    found = plays.played(place, "apply", {"a": {"path": name}})["a"]
    assert isinstance(found, Reported) and found.report["args"]["path"] == name
