"""The edges of ansible-runner and ansible-core, each beside what plain ansible-runner does with the same input."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpuchange import content, playchild, player
from gpuchange.change import new_id
from gpuchange.reports import Evidence, Failed, Reported, Silent, Unreachable

CANARY = "canary-7f3a91"
MODULE = """#!/usr/bin/python
import os, time
from ansible.module_utils.basic import AnsibleModule
def main():
    m = AnsibleModule(argument_spec=dict(args=dict(type='dict')))
    args = m.params['args']
    time.sleep(float(args.get('sleep', 0)))
    if args.get('garble'):
        print('[master 1a2b3c] saving uncommitted changes {' + chr(10) + '}{')
        os._exit(0)
    if args.get('fail'):
        m.fail_json(msg='no way', refused={'kind': 'locked'})
    m.exit_json(report={'state': args.get('state', 'done'), 'args': args})
main()
"""
ROLE = {
    "apply": "- name: report\n  gc_echo:\n    args: '{{ gpuchange_args }}'\n",
    "loop": "- name: report\n  gc_echo:\n    args: '{{ gpuchange_args }}'\n"
    "  delegate_to: '{{ item }}'\n  loop: '{{ gpuchange_args.over }}'\n",
    "mute": "- name: other\n  ansible.builtin.command: 'true'\n",
    "environment": "- name: report\n  ansible.builtin.command: env\n"
    "- name: report\n  gc_echo:\n    args: {sleep: 0, checking: \"{{ lookup('env', 'ANSIBLE_HOST_KEY_CHECKING') }}\","
    " canary: \"{{ lookup('env', 'MY_TOKEN') }}\"}\n",
}
INVENTORY = """all:
  vars: {ansible_connection: local, ansible_python_interpreter: '%s'}
  hosts:
    a: {}
    b: {}
    gone: {ansible_connection: ssh, ansible_host: 127.0.0.9, ansible_port: 1}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("content"))


def build(root: Path, more_roles: Mapping[str, str] | None = None) -> Path:
    """Our own play with an echo module, its roles and an inventory below `root`."""
    tasks = root / "playbooks" / "roles" / "test_echo" / "tasks"
    tasks.mkdir(parents=True)
    (root / "playbooks" / "library").mkdir()
    shutil.copy(content.playbooks() / content.PLAYBOOK, root / "playbooks")
    (root / "playbooks" / "library" / "gc_echo.py").write_text(MODULE)
    for name, text in {**ROLE, **(more_roles or {})}.items():
        (tasks / f"{name}.yml").write_text("---\n" + text)
    (root / "inventory.yaml").write_text(INVENTORY % sys.executable)
    return root


def request(place: Path, tasks: str, args: Mapping[str, Mapping[str, Any]], attempt: str = "") -> player.Request:
    return player.Request(
        attempt=attempt or f"test{os.getpid()}/{time.monotonic_ns()}",
        playbook=place / "playbooks" / content.PLAYBOOK,
        role="test_echo",
        tasks=tasks,
        hosts=tuple(args),
        inventory=(str(place / "inventory.yaml"),),
        host_args=args,
        shared={"gpuchange_owner": {}, "gpuchange_step": {}},
    )


def arriving(play: player.Play) -> Iterator[tuple[float, Evidence]]:
    with selectors.DefaultSelector() as selector:
        selector.register(play, selectors.EVENT_READ)
        while not play.ended:
            selector.select(60)
            yield from ((time.monotonic(), item) for item in play.evidence())


def played(place: Path, tasks: str, args: Mapping[str, Mapping[str, Any]]) -> dict[str, Evidence]:
    play = player.Play(request(place, tasks, args), place / "artifacts")
    return {item.host: item for _, item in arriving(play)}


def plain(place: Path, tmp_path: Path, tasks: str, extravars: Mapping[str, Any], **more: Any) -> Any:
    """The same play through ansible_runner.run as its documentation shows it, in a process of its own."""
    code = (
        "import ansible_runner, json, sys; k = json.load(sys.stdin)\n"
        "r = ansible_runner.run(**k)\n"
        "ok = [e['event_data'].get('res') for e in r.events if e['event'] == 'runner_on_ok']\n"
        "every = [{k: e.get(k) for k in ('event', 'event_data')} for e in r.events]\n"
        "print('\\n' + json.dumps({'rc': r.rc, 'status': r.status, 'ok': ok, 'events': every}))\n"
    )
    arguments = {
        "private_data_dir": str(tmp_path),
        "playbook": str(place / "playbooks" / content.PLAYBOOK),
        "inventory": str(place / "inventory.yaml"),
        "extravars": {"gpuchange_role": "test_echo", "gpuchange_tasks": tasks, **extravars},
        "quiet": True,
        **more,
    }
    scripts = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": scripts, "MY_TOKEN": CANARY, "LC_ALL": "C.UTF-8"},
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_plan_values_are_never_templated(place: Path, tmp_path: Path) -> None:
    jinja = "{{ lookup('pipe', 'echo RAN-ON-CONTROLLER') }}"
    report = played(place, "apply", {"a": {"x": jinja, "deep": [{"y": jinja}]}})["a"]
    assert isinstance(report, Reported) and report.report["args"] == {"x": jinja, "deep": [{"y": jinja}]}
    naive = plain(place, tmp_path, "apply", {"gpuchange_host_args": {"a": {"x": jinja}}}, limit="a")
    assert "RAN-ON-CONTROLLER" in json.dumps(naive["ok"])


def test_host_key_checking_stays_on_and_the_environment_stays_here(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", CANARY)
    report = played(place, "environment", {"a": {}})["a"]
    assert isinstance(report, Reported)
    assert report.report["args"]["checking"] == "True"
    assert not report.report["args"]["canary"]
    naive = plain(place, tmp_path, "environment", {"gpuchange_host_args": {"a": {}}}, limit="a")
    assert "False" in json.dumps(naive["ok"][-1])
    kept = next(tmp_path.glob("artifacts/*/command")).read_text()
    assert CANARY in kept  # plain ansible-runner writes every variable of the controller to disk


def test_a_play_leaves_nothing_behind_and_shows_nothing_in_the_process_list(place: Path) -> None:
    before = set(player.runtime_root().iterdir())
    play = player.Play(request(place, "apply", {"a": {"secret": CANARY, "sleep": 1}}), place / "artifacts")
    assert play.private.stat().st_mode & 0o777 == 0o700
    lines = set()
    for _ in arriving_slowly(play):
        lines |= {path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if readable(path)}
    assert not [line for line in lines if CANARY.encode() in line]
    change = play.request.attempt.partition("/")[0]  # other changes of this machine come and go meanwhile
    left = set(player.runtime_root().glob(f"{change}*")) - {player.connections(change)}
    assert not left - before
    assert not play.log.exists()


def readable(path: Path) -> bool:
    try:
        path.read_bytes()
        return True
    except OSError:
        return False


def arriving_slowly(play: player.Play) -> Iterator[None]:
    with selectors.DefaultSelector() as selector:
        selector.register(play, selectors.EVENT_READ)
        while not play.ended:
            selector.select(0.1)
            list(play.evidence())
            yield None


@pytest.mark.case("no-hosts-matched-is-success")
def test_no_hosts_matched_is_not_success(place: Path, tmp_path: Path) -> None:
    found = played(place, "apply", {"a": {}, "gpu-o1": {}})
    assert isinstance(found["a"], Reported)
    assert isinstance(found["gpu-o1"], Silent)
    naive = plain(place, tmp_path, "apply", {"gpuchange_host_args": {}}, limit="gpu-o1")
    assert naive["status"] in ("successful", "failed") and not naive["ok"]


@pytest.mark.case("no-hosts-matched-is-success")
def test_a_host_without_a_report_is_silent_though_every_task_was_ok(place: Path, tmp_path: Path) -> None:
    assert isinstance(played(place, "mute", {"a": {}})["a"], Silent)
    naive = plain(place, tmp_path, "mute", {"gpuchange_host_args": {"a": {}}}, limit="a")
    assert naive["rc"] == 0 and naive["status"] == "successful"


@pytest.mark.case("unreachable-counted-as-success")
def test_failed_unreachable_and_refused_are_told_apart(place: Path) -> None:
    found = played(place, "apply", {"a": {"fail": True}, "gone": {}, "b": {}})
    failed, gone = found["a"], found["gone"]
    assert isinstance(failed, Failed) and failed.why == "no way" and failed.refused == {"kind": "locked"}
    assert isinstance(gone, Unreachable) and "refused" in gone.why.lower()
    assert isinstance(found["b"], Reported)


@pytest.mark.case("noise-in-front-of-json")
def test_output_that_is_no_result_is_no_failure_but_unknown(place: Path) -> None:
    found = played(place, "apply", {"a": {"garble": True}})["a"]
    assert isinstance(found, Silent) and "not parsable" in found.why


def test_of_a_module_that_a_reboot_cut_off_the_last_line_is_told() -> None:
    said = 'Traceback (most recent call last):\n  File "<stdin>", line 1, in <module>\nFileNotFoundError: payload.zip\n'
    result = {"msg": "Module result deserialization failed: No start", "module_stdout": "", "module_stderr": said}
    event = {"event": "runner_on_failed", "event_data": {"host": "a", "task": "report", "res": result}}
    told = playchild.evidence(event)
    assert told and told["kind"] == "silent" and "Traceback" not in told["why"]
    assert told["why"].endswith("No start\nFileNotFoundError: payload.zip")


def test_a_loops_reports_become_one_and_a_lost_delegate_is_named(place: Path) -> None:
    found = played(place, "loop", {"a": {"over": ["a", "b"]}, "b": {"over": ["a", "gone"]}})
    merged, lost = found["a"], found["b"]
    assert isinstance(merged, Reported) and len(merged.report["parts"]) == 2
    assert isinstance(lost, Unreachable) and lost.where == "gone"


def test_a_fast_host_does_not_wait_for_a_slow_one(place: Path) -> None:
    play = player.Play(request(place, "apply", {"a": {}, "b": {"sleep": 4}}), place / "artifacts")
    times = {item.host: when for when, item in arriving(play)}
    assert times["b"] - times["a"] > 2


@pytest.mark.case("worker-killed-by-oom")
def test_killed_play_is_silent_and_its_processes_are_gone(place: Path) -> None:
    asked = request(place, "apply", {"a": {"sleep": 600}})
    play = player.Play(asked, place / "artifacts")
    player.wait_until(lambda: len(player.carriers(asked.attempt)) > 2, timeout=30, what="the play to fork")
    play.process.kill()
    found = {item.host: item for _, item in arriving(play)}
    assert isinstance(found["a"], Silent) and "without a result" in found["a"].why
    assert player.end_orphans(asked.attempt) > 0
    assert player.carriers(asked.attempt) == []
    assert play.log.stat().st_size <= player.LOG_LIMIT


def test_ending_one_attempt_leaves_its_neighbours_alone() -> None:
    """1.1 is not the beginning of 1.10."""
    marks = ("c-1/1.1", "c-1/1.10", "c-1/2.1", "c-12/1.1")
    sleepers = [subprocess.Popen(["sleep", "60"], env={player.ATTEMPT: mark}) for mark in marks]
    one, ten, later, other = (sleeper.pid for sleeper in sleepers)
    try:
        player.wait_until(lambda: other in player.carriers("c-12"), timeout=10, what="sleep to begin")
        assert player.carriers("c-1/1.1") == [one]
        assert sorted(player.carriers("c-1")) == sorted([one, ten, later])
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


def test_kept_ssh_connections_end_with_their_change_and_not_with_one_play() -> None:
    """OpenSSH writes its title over its environment: the socket in it tells whose connection it is."""
    title = f"ssh: {player.connections('c-1')}/0123456789 [mux]"
    master = subprocess.Popen(["bash", "-c", f"exec -a '{title}' sleep 60"], env={"PATH": os.environ["PATH"]})
    try:
        player.wait_until(lambda: player.carriers("c-1") == [master.pid], timeout=10, what="the title")
        assert player.carriers("c-1/1.1") == player.carriers("c-12") == []
        assert player.environment("c-1/1.1")["ANSIBLE_SSH_CONTROL_PATH_DIR"] == str(player.connections("c-1"))
        assert player.end_orphans("c-1") == 1
    finally:
        master.kill()
        master.wait()


def test_a_control_socket_fits_its_path_limit() -> None:
    """107 bytes, of which ssh takes 17 for a temporary name and Ansible 11 for its own, with the longest change id."""
    assert len(str(player.connections(new_id("x" * 99)))) + 11 + 17 <= 107


def test_missing_statistics_mean_unknown(place: Path) -> None:
    play = player.Play(request(place, "apply", {"a": {}}), place / "artifacts")
    list(arriving(play))
    play.end = {"rc": 0, "status": "successful", "stats": {}}
    assert "no final statistics" in play._why_silent()


def test_events_that_are_not_reports_say_nothing() -> None:
    event = {
        "event": "runner_on_ok",
        "event_data": {"host": "a", "task": "other", "res": {"report": {"state": "done"}}},
    }
    assert playchild.evidence(event) is None
    skipped = {"event": "runner_on_skipped", "event_data": {"host": "a", "task": "report", "res": {}}}
    assert playchild.evidence(skipped) is None
    assert playchild.evidence({"event": "playbook_on_stats", "event_data": {}}) is None


def test_a_loop_with_one_missing_report_reports_nothing() -> None:
    assert playchild.merged({"results": [{"report": {"state": "done"}}, {"skipped": True}]}) is None
    assert playchild.merged({"results": []}) is None
    worst = playchild.merged({"results": [{"report": {"state": "done"}}, {"report": {"state": "running", "why": "w"}}]})
    assert worst is not None and worst["state"] == "running" and worst["why"] == "w"


def test_secrets_known_by_value_are_struck_out_of_kept_logs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"x {CANARY} y")
    player.bound_log(log, CANARY)
    assert CANARY not in log.read_text()
