"""gpuchange_nginx against a real nginx on loopback: no request is lost, every byte of the configuration comes back."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostcode
import pytest
from ansible.module_utils import gpuchange_host as host
from ansible.module_utils import gpuchange_nginx_job as job
from realhaproxy import Model
from realnginx import NGINX, Balancer
from waiting import eventually

OWNER, call = hostcode.OWNER, hostcode.call
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx-light")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host, "ROOT", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def balancer(tmp_path: Path, state: Path) -> Iterator[Balancer]:
    running = Balancer(tmp_path)
    yield running
    running.stop()


def play(balancer: Balancer, mode: str, model: Model | None = None, direction: str = "", **more: Any) -> dict[str, Any]:
    server = balancer.name(model or balancer.h1)
    owner = more.pop("owner", OWNER)
    given = {"server": server, "backends": ["gpu"], "config": str(balancer.config)}
    step = {"phase": "drain", "provider": "nginx", "direction": direction or ("undo" if mode == "undo" else "do")}
    return call(
        "gpuchange_nginx", mode=mode, owner=owner, step=step, args={**given, "wait_s": 3, "balancer": "lb", **more}
    )


def report(
    balancer: Balancer, mode: str, model: Model | None = None, direction: str = "", **more: Any
) -> dict[str, Any]:
    result = play(balancer, mode, model, direction, **more)
    assert "report" in result, result
    return dict(result["report"])


def test_drain_and_release_leave_every_byte_mode_and_owner(balancer: Balancer) -> None:
    balancer.servers.chmod(0o640)
    before = (balancer.servers.read_bytes(), balancer.servers.stat().st_mode, balancer.servers.stat().st_mtime_ns)
    drained = report(balancer, "apply")
    assert (drained["state"], drained["changed"], drained["sessions"]) == ("done", True, 0)
    assert f":{balancer.h1.port} weight=2 down;" in balancer.servers.read_text()
    assert all(balancer.get() == 200 for _ in range(6))
    released = report(balancer, "undo")
    assert (released["state"], released["changed"]) == ("done", True)
    now = (balancer.servers.read_bytes(), balancer.servers.stat().st_mode, balancer.servers.stat().st_mtime_ns)
    assert now == before
    assert not json.loads((balancer.folder / "state" / "nginx-files.json").read_text())


def test_a_link_to_the_file_stays_one(balancer: Balancer) -> None:
    real = balancer.servers.rename(balancer.folder / "really")
    balancer.servers.symlink_to(real)
    report(balancer, "apply")
    assert balancer.servers.is_symlink() and " down;" in real.read_text()
    assert report(balancer, "undo")["state"] == "done" and balancer.servers.is_symlink()


def test_a_drained_server_gets_nothing_and_nobody_else_loses_a_request(balancer: Balancer) -> None:
    over, codes = threading.Event(), list[int]()

    def client() -> None:
        while not over.is_set():
            codes.append(balancer.get())

    thread = threading.Thread(target=client)
    thread.start()
    report(balancer, "apply")
    balancer.h1.stop()
    eventually(lambda: len(codes) > 20)
    balancer.h1 = Model(balancer.h1.port)
    report(balancer, "undo")
    over.set()
    thread.join(10)
    assert set(codes) == {200}


def test_twice_is_once_and_reloads_once(balancer: Balancer) -> None:
    report(balancer, "apply")
    workers = set(balancer.nginx().workers())
    assert report(balancer, "apply")["changed"] is False
    assert set(balancer.nginx().workers()) == workers
    report(balancer, "undo")
    again = report(balancer, "undo")
    assert (again["state"], again["changed"]) == ("done", False)


def test_a_stream_in_an_old_worker_is_awaited_and_ends_whole(balancer: Balancer) -> None:
    stream = balancer.stream(balancer.h1)
    waiting = report(balancer, "apply", wait_s=1)
    assert waiting["state"] == "running" and sum(waiting["old_workers"].values()) == 1
    assert "1 in old worker" in waiting["why"] and "(before a reload)" in waiting["why"]
    balancer.h1.finish.set()
    assert stream.read() == b"first\nlast\n"
    assert report(balancer, "apply")["state"] == "done"


def test_over_time_a_stream_fails_the_drain_or_is_cut_as_the_plan_says(balancer: Balancer) -> None:
    stream = balancer.stream(balancer.h1)
    over = report(balancer, "apply", timeout=0)
    assert over["state"] == "not_done" and "after 0 s still open" in over["why"]
    cut = report(balancer, "apply", timeout=0, on_timeout="cut")
    assert (cut["state"], cut["cut"]) == ("done", 1)
    stream.close()


def test_what_was_down_before_stays_down(balancer: Balancer) -> None:
    before = balancer.servers.read_bytes()
    assert report(balancer, "apply", balancer.h3)["changed"] is False
    assert report(balancer, "undo", balancer.h3)["state"] == "done"
    assert balancer.servers.read_bytes() == before


def test_the_last_one_stays(balancer: Balancer) -> None:
    refused = report(balancer, "apply", min_serving=2, wait_s=0.1)
    assert refused["state"] == "not_done" and "1 other server serves" in refused["why"]
    lonely = report(balancer, "apply", backends=["lonely"], wait_s=0.1)
    assert "upstream lonely: 0 other servers serve (none), at least 1 must" in lonely["why"]
    balancer.h2.stop()
    sick = report(balancer, "apply", wait_s=0.1)
    assert "0 other servers serve" in sick["why"], "a server that accepts no connection serves nobody"


def test_two_hosts_leave_and_come_back_in_any_order(balancer: Balancer) -> None:
    before = balancer.servers.read_bytes()
    for model in (balancer.h1, balancer.h2):
        report(balancer, "apply", model, min_serving=0)
    report(balancer, "undo", balancer.h1)
    assert balancer.servers.read_text().count("down") == 2
    report(balancer, "undo", balancer.h2)
    assert balancer.servers.read_bytes() == before


@pytest.mark.case("nginx-drain-means-reload")
def test_a_preview_says_whom_a_reload_may_cut(tmp_path: Path, state: Path) -> None:
    balancer = Balancer(tmp_path, more="worker_shutdown_timeout 60s;")
    try:
        stream = balancer.stream(balancer.h2)
        told = report(balancer, "probe")
        assert (told["state"], told["reload"]) == ("not_done", {"others": 1, "limit": "60s", "not_loaded": []})
        balancer.servers.write_text(balancer.servers.read_text() + "# edited\n")
        later = balancer.servers.stat().st_mtime + 10
        os.utime(balancer.servers, (later, later))
        assert report(balancer, "probe")["reload"]["not_loaded"] == [str(balancer.servers)]
        stream.close()
    finally:
        balancer.stop()


def test_a_configuration_that_fails_its_test_is_never_loaded(balancer: Balancer) -> None:
    balancer.servers.write_text(balancer.servers.read_text() + "sever x;\n")
    before, workers = balancer.servers.read_bytes(), balancer.nginx().workers()
    for mode in ("probe", "apply"):
        refused = play(balancer, mode)
        assert (
            refused["failed"] and 'unknown directive "sever"' in refused["msg"] and "nginx -t fails" in refused["msg"]
        )
    assert (balancer.servers.read_bytes(), balancer.nginx().workers()) == (before, workers)


def test_a_mark_that_would_break_it_is_taken_back(balancer: Balancer, monkeypatch: pytest.MonkeyPatch) -> None:
    before = balancer.servers.read_bytes()
    monkeypatch.setattr(job.conf, "with_down", lambda text, _ends: text + b"broken")
    assert "with the server marked down" in play(balancer, "apply")["msg"]
    assert balancer.servers.read_bytes() == before


def test_a_file_that_somebody_else_wrote_is_not_touched(balancer: Balancer) -> None:
    report(balancer, "apply")
    edited = balancer.servers.read_text() + "# mine\n"
    balancer.servers.write_text(edited)
    held = report(balancer, "undo")
    assert held["state"] == "unknown" and "was edited by somebody else during this change" in held["why"]
    assert balancer.name(balancer.h1) in held["why"] and balancer.servers.read_text() == edited
    assert "was edited by somebody else while" in play(balancer, "apply", balancer.h2, min_serving=0)["msg"]


def test_a_server_that_does_not_answer_stays_out(balancer: Balancer) -> None:
    report(balancer, "apply")
    balancer.h1.healthy = False
    sick = report(balancer, "undo", health="/healthz", wait_s=0.5)
    assert sick["state"] == "running" and "/healthz answers 503" in sick["why"]
    balancer.h1.healthy = True
    assert report(balancer, "undo", health="/healthz")["state"] == "done"


@pytest.mark.parametrize("at", ["mark", "reload"])
def test_killed_between_mark_and_reload_the_next_call_goes_on(
    balancer: Balancer, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    before = balancer.servers.read_bytes()

    def killed(*_args: Any, **_more: Any) -> None:
        raise KeyboardInterrupt

    for mode in ("apply", "undo"):
        with monkeypatch.context() as patch:
            patch.setattr(job.Nginx, "reload" if at == "reload" else "check", killed)
            with pytest.raises(KeyboardInterrupt):
                play(balancer, mode)
        done = report(balancer, mode)
        assert done["state"] == "done", done
    assert balancer.servers.read_bytes() == before


def test_names_that_are_not_there_are_named_with_what_is(balancer: Balancer) -> None:
    assert "no upstream gpus; it has gpu, lonely" in play(balancer, "probe", backends=["gpus"])["msg"]
    said = play(balancer, "probe", server="gpu9")["msg"]
    assert "no server gpu9 in upstream gpu; there are 127.0.0.1:" in said and "drain[].servers" in said
    assert "cannot be read: No such file" in play(balancer, "probe", config="/nowhere/nginx.conf")["msg"]


def test_a_server_is_known_by_its_hosts_address_where_the_plan_names_none(balancer: Balancer) -> None:
    seen = report(balancer, "probe", server="gpu1", host="gpu1", address=balancer.name(balancer.h1))
    assert [row["server"] for row in seen["servers"]] == [balancer.name(balancer.h1)]
    named = play(balancer, "probe", server="gpu9", host="gpu1", address=balancer.name(balancer.h1))
    assert "no server gpu9 in upstream gpu" in named["msg"], "a name of the plan's own is the only one"


def test_an_nginx_that_is_not_running_is_said(balancer: Balancer) -> None:
    balancer.process.terminate()
    balancer.process.wait(10)
    assert "nginx is not running" in play(balancer, "apply")["msg"]
