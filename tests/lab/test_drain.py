"""Drain, release and watch on real hosts behind a real HAProxy, under a client that forgives nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from steps import Change, provider_of

from gpuchange.lab import Host, Lab
from gpuchange.lab.load import Load, Tally
from gpuchange.states import Kind
from gpuchange.waiting import wait_until

MODEL = "modelserver.service"
HAPROXY = {"balancers": ["loadbalancers"], "backend": "gpu", "timeout": "60s"}
FILES = "find /etc/nginx -maxdepth 1 -type f | sort | xargs sha256sum; stat -c %a,%u,%Y /etc/nginx/models.servers"
NGINX = {"balancers": ["loadbalancers"], "upstream": "models", "timeout": "60s", "health": "/healthz"}
STOP = {"policy": "stop", "services": [MODEL], "timeout": "60s"}


@pytest.fixture(autouse=True)
def serving(lab: Lab) -> None:
    """Every test begins with all hosts in service and leaves none out."""
    for name in ("gpu1", "gpu2", "gpu3"):
        lab.haproxy(f"set server gpu/{name} state ready")
        lab.host(name).run(["systemctl", "start", MODEL])
    for host in lab.hosts:
        host.run(["rm", "-rf", "/var/lib/gpuchange"])
    lab.wait_serving()


@contextmanager
def client(lab: Lab, port: int = 80) -> Iterator[Tally]:
    """A client without retries: 60 requests a second and a 5 s stream every second; its tally is whole afterwards."""
    over = threading.Event()
    load = Load(f"{lab.lb_url}:{port}", rate=60, stream_every=1, stream_seconds=5)
    thread = threading.Thread(target=load.run, args=(over.is_set,))
    thread.start()
    try:
        wait_until(lambda: load.tally.streams_ok > 0, timeout=30, what="the first stream to end")
        yield load.tally
    finally:
        over.set()
        thread.join(60)


def server(lab: Lab, name: str = "gpu1") -> dict[str, str]:
    header, row = [
        line for line in lab.haproxy("show servers state gpu").splitlines() if "be_id" in line or name in line
    ]
    return dict(zip(header.lstrip("# ").split(), row.split(), strict=False))


def admin(lab: Lab, name: str = "gpu1") -> str:
    return {"0": "ready", "8": "drain"}.get(server(lab, name)["srv_admin_state"], "maint")


def active(host: Host, unit: str = MODEL) -> str:
    return host.run(["systemctl", "is-active", unit], check=False).strip()


def test_a_restart_behind_a_drain_loses_no_request(lab: Lab) -> None:
    change = Change(lab)
    with client(lab) as tally:
        assert change.settle("drain/haproxy", "apply", "gpu1", **HAPROXY).kind is Kind.ACCEPTED
        at_drain = tally.by_host["gpu1"]
        assert change.settle("drain/gpu_users", "apply", "gpu1", **STOP).kind is Kind.ACCEPTED
        assert active(lab.host("gpu1")) == "inactive"
        assert change.settle("drain/gpu_users", "undo", "gpu1", **STOP).kind is Kind.ACCEPTED
        assert tally.by_host["gpu1"] == at_drain, "requests reached a drained host"
        assert change.settle("drain/haproxy", "undo", "gpu1", **HAPROXY).kind is Kind.ACCEPTED
        wait_until(lambda: tally.by_host["gpu1"] > at_drain, timeout=20, what="gpu1 to answer again")
    assert (tally.failed, tally.reasons) == (0, [])
    assert tally.streams_ok > 5 and (admin(lab), active(lab.host("gpu1"))) == ("ready", "active")


def test_a_restart_behind_a_drain_from_nginx_loses_no_request(lab: Lab) -> None:
    """The servers stand by address in a file that is included; two hosts are out at once, each by its own mark."""
    change, other, lb = Change(lab), Change(lab), lab.host("lb1")
    found = lb.run(["sh", "-c", FILES])
    with client(lab, 8080) as tally:
        assert change.settle("drain/nginx", "apply", "gpu1", **NGINX).kind is Kind.ACCEPTED
        assert other.settle("drain/nginx", "apply", "gpu2", **NGINX).kind is Kind.ACCEPTED
        assert lb.run(["grep", "-c", "down;", "/etc/nginx/models.servers"]).strip() == "2"
        at_drain = tally.by_host["gpu1"]
        assert change.settle("drain/gpu_users", "apply", "gpu1", **STOP).kind is Kind.ACCEPTED
        looked = change.settle("drain/nginx", "undo", "gpu1", **{**NGINX, "ready_within": "2s"})
        assert looked.kind is Kind.REJECTED and "does not answer" in looked.data["why"]
        assert change.settle("drain/gpu_users", "undo", "gpu1", **STOP).kind is Kind.ACCEPTED
        assert tally.by_host["gpu1"] == at_drain, "requests reached a drained host"
        for mine, host in ((change, "gpu1"), (other, "gpu2")):
            assert mine.settle("drain/nginx", "undo", host, **NGINX).kind is Kind.ACCEPTED
        wait_until(lambda: tally.by_host["gpu1"] > at_drain, timeout=20, what="gpu1 to answer again")
    assert (tally.failed, tally.reasons) == (0, [])
    assert lb.run(["sh", "-c", FILES]) == found


def test_the_same_restart_without_a_drain_loses_some(lab: Lab) -> None:
    """The control: if this loses nothing, the test above proves nothing."""
    with client(lab) as tally:
        lab.host("gpu1").run(["systemctl", "restart", MODEL])
        lab.wait_serving()
    assert tally.failed > 0


def test_released_only_when_the_service_answers(lab: Lab) -> None:
    change = Change(lab)
    change.settle("drain/haproxy", "apply", "gpu1", **HAPROXY)
    lab.host("gpu1").run(["systemctl", "stop", MODEL])
    failed = change.settle("drain/haproxy", "undo", "gpu1", **{**HAPROXY, "ready_within": "2s"})
    assert failed.kind is Kind.REJECTED and "gpu/gpu1 is DOWN" in failed.data["why"]
    assert admin(lab) == "drain"
    lab.host("gpu1").run(["systemctl", "start", MODEL])
    assert change.settle("drain/haproxy", "undo", "gpu1", **HAPROXY).kind is Kind.ACCEPTED


def test_killed_while_it_waits_a_drain_is_taken_up_again(lab: Lab) -> None:
    """The controller dies while a stream is awaited: the probe says that it is not done, and nothing is forgotten."""
    change = Change(lab)
    with client(lab):
        provider = provider_of("drain/haproxy")
        view = change.view(provider, "gpu1", "do", 0.0, HAPROXY)
        with change.started(provider, view, "apply"):
            wait_until(lambda: admin(lab) == "drain", timeout=60, what="the drain")
        # leaving the block ends the play with all its processes, as a kill would
        looked = change.play("drain/haproxy", "probe", "gpu1", aim="do", **HAPROXY)
        assert looked.kind in (Kind.NOT_DONE, Kind.ACCEPTED)
        assert change.settle("drain/haproxy", "apply", "gpu1", **HAPROXY).kind is Kind.ACCEPTED
    assert change.settle("drain/haproxy", "undo", "gpu1", **HAPROXY).kind is Kind.ACCEPTED
    assert admin(lab) == "ready"


@pytest.mark.case("crash-leaves-node-out-of-service")
def test_the_balancer_tells_who_took_a_host_out_and_why(lab: Lab) -> None:
    """cases: crash-leaves-node-out-of-service"""
    mine, other = Change(lab), Change(lab)
    mine.settle("drain/haproxy", "apply", "gpu1", **HAPROXY)
    marker = lab.host("lb1").run(["cat", "/var/lib/gpuchange/owner-gpu1.json"])
    assert all(word in marker for word in (mine.id, "rehearsal", "T-1", "since"))
    refused = other.play("drain/haproxy", "apply", "gpu1", **HAPROXY)
    assert refused.kind is not Kind.ACCEPTED and mine.id in str(refused.data)
    assert other.settle("drain/haproxy", "apply", "gpu2", **HAPROXY).kind is Kind.ACCEPTED
    assert mine.settle("drain/haproxy", "undo", "gpu1", **HAPROXY).kind is Kind.ACCEPTED
    assert other.settle("drain/haproxy", "undo", "gpu2", **HAPROXY).kind is Kind.ACCEPTED
    assert lab.host("lb1").run(["sh", "-c", "ls /var/lib/gpuchange/owner-*"], check=False) == ""


def test_unknown_balancer_and_backend_are_named(lab: Lab) -> None:
    change = Change(lab)
    nobody = change.play("drain/haproxy", "probe", "gpu1", balancers=["nope"])
    assert "no host of the inventory matches drain[].balancers: nope" in str(nobody.data)
    wrong = change.play("drain/haproxy", "probe", "gpu1", balancers=["lb1"], backend="gpus")
    assert "no backend gpus; it has gpu" in str(wrong.data)


# ---------------------------------------------------------------------------------------------- GPU users


@contextmanager
def job_on(host: Host) -> Iterator[None]:
    """A program of nobody's plan that holds a card."""
    host.run(["systemd-run", "--unit=somejob", "--collect", "sh", "-c", "exec 3</dev/nvidia1; exec sleep 600"])
    held = "ls -l /proc/[0-9]*/fd 2>/dev/null | grep -q nvidia1 && echo held"
    wait_until(lambda: host.run(["sh", "-c", held], check=False).strip() == "held", timeout=20, what="the job to begin")
    try:
        yield
    finally:
        host.run(["systemctl", "stop", "somejob"], check=False)


def test_users_are_refused_waited_for_and_named(lab: Lab) -> None:
    host, change = lab.host("gpu1"), Change(lab)
    host.run(["systemctl", "stop", MODEL])
    with job_on(host):
        refused = change.settle("drain/gpu_users", "apply", "gpu1", policy="refuse")
        assert refused.kind is Kind.REJECTED and "sleep (somejob.service)" in refused.data["why"]
        late = change.settle("drain/gpu_users", "apply", "gpu1", policy="wait", timeout="1s")
        assert late.kind is Kind.REJECTED and "somejob.service" in late.data["why"]
        assert active(host, "somejob") == "active", "a process was ended that nobody listed"
    assert change.settle("drain/gpu_users", "apply", "gpu1", policy="wait").kind is Kind.ACCEPTED


def test_what_is_left_after_the_listed_services_is_named_and_lives(lab: Lab) -> None:
    host, change = lab.host("gpu1"), Change(lab)
    with job_on(host):
        left = change.settle("drain/gpu_users", "apply", "gpu1", **STOP)
        assert left.kind is Kind.REJECTED and "after the listed services were stopped" in left.data["why"]
        assert (active(host, "somejob"), active(host)) == ("active", "inactive")
        assert change.settle("drain/gpu_users", "undo", "gpu1", **STOP).kind is Kind.ACCEPTED
    assert active(host) == "active"


def test_only_what_ran_is_started_again_also_after_a_reboot(lab: Lab) -> None:
    host, change = lab.host("gpu1"), Change(lab)
    host.run(["tee", "/etc/systemd/system/idle.service"], stdin="[Service]\nExecStart=/bin/sleep 600\n")
    host.run(["systemctl", "daemon-reload"])
    both = {**STOP, "services": [MODEL, "idle.service"]}
    assert change.settle("drain/gpu_users", "apply", "gpu1", **both).kind is Kind.ACCEPTED
    host.power("cycle")
    host.wait_ready()
    wait_until(lambda: active(host) == "active", timeout=30, what="the enabled service to start by itself")
    assert change.settle("drain/gpu_users", "undo", "gpu1", **both).kind is Kind.ACCEPTED
    assert change.last["started"] == [MODEL] and active(host, "idle") == "inactive"


def test_a_service_that_does_not_exist_is_named_before_anything_is_stopped(lab: Lab) -> None:
    change = Change(lab)
    wrong = change.settle("drain/gpu_users", "apply", "gpu1", policy="stop", services=[MODEL, "modelserer.service"])
    assert wrong.kind is Kind.REJECTED and "no such unit on this host: modelserer.service" in wrong.data["why"]
    assert active(lab.host("gpu1")) == "active"


# -------------------------------------------------------------------------------------------------- hooks


def test_hooks_run_once_in_order_on_both_machines(lab: Lab, tmp_path: Any) -> None:
    host, change, log = lab.host("gpu1"), Change(lab), tmp_path / "log"
    hooks = [
        {"command": ["/bin/sh", "-c", f'echo "first $GPUCHANGE_HOST $GPUCHANGE_TICKET" >> {log}']},
        {"command": ["/bin/sh", "-c", "echo second >> /root/hooks; test -e /root/allow"], "on": "host"},
        {"command": ["/bin/sh", "-c", f"echo third >> {log}"]},
    ]
    host.run(["rm", "-f", "/root/hooks", "/root/allow"])
    failed = change.settle("drain/hooks", "apply", "gpu1", before_drain=hooks)
    assert failed.kind is Kind.REJECTED and "ended with 1" in failed.data["why"]
    assert log.read_text() == "first gpu1 T-1\n"
    host.run(["touch", "/root/allow"])
    assert change.settle("drain/hooks", "apply", "gpu1", before_drain=hooks).kind is Kind.ACCEPTED
    assert change.settle("drain/hooks", "apply", "gpu1", before_drain=hooks).kind is Kind.ACCEPTED
    assert log.read_text() == "first gpu1 T-1\nthird\n"
    assert host.run(["cat", "/root/hooks"]) == "second\nsecond\n"
    assert change.play("drain/hooks", "probe", "gpu1", aim="do", before_drain=hooks).kind is Kind.ACCEPTED


# -------------------------------------------------------------------------------------------------- watch


def test_a_quiet_host_passes_and_a_reboot_fails(lab: Lab) -> None:
    change, host = Change(lab), lab.host("gpu1")
    quiet = {"for": "4s", "services": [MODEL]}
    assert change.settle("watch/host", "apply", "gpu1", **quiet).kind is Kind.ACCEPTED
    assert change.play("watch/host", "apply", "gpu1", **{**quiet, "for": "60s"}).kind is Kind.AGAIN
    host.power("cycle")
    host.wait_ready()
    failed = change.play("watch/host", "apply", "gpu1", waited=15.0, **{**quiet, "for": "60s"})
    assert failed.kind is Kind.REJECTED and "rebooted" in failed.data["why"]


def test_a_service_that_dies_while_watched_fails_the_host(lab: Lab) -> None:
    change = Change(lab)
    watched = {"for": "60s", "services": [MODEL]}
    assert change.play("watch/host", "apply", "gpu1", **watched).kind is Kind.AGAIN
    lab.host("gpu1").run(["systemctl", "stop", MODEL])
    failed = change.play("watch/host", "apply", "gpu1", waited=15.0, **watched)
    assert failed.kind is Kind.REJECTED and "modelserver.service is inactive" in failed.data["why"]


def test_two_hosts_that_leave_at_once_do_not_count_on_each_other(lab: Lab) -> None:
    """With two servers left and min_serving 1, only one of two simultaneous drains may pass."""
    lab.haproxy("set server gpu/gpu3 state drain")
    first, second, outcomes = Change(lab), Change(lab), {}

    def drain(change: Change, name: str) -> None:
        outcomes[name] = change.settle("drain/haproxy", "apply", name, **HAPROXY).kind

    threads = [threading.Thread(target=drain, args=pair) for pair in ((first, "gpu1"), (second, "gpu2"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(kind.name for kind in outcomes.values()) == ["ACCEPTED", "REJECTED"]
    assert sorted([admin(lab, "gpu1"), admin(lab, "gpu2")]) == ["drain", "ready"]


def test_haproxy_restarted_meanwhile_is_drained_again_and_ends_as_found(lab: Lab) -> None:
    change = Change(lab)
    change.settle("drain/haproxy", "apply", "gpu1", **HAPROXY)
    lab.host("lb1").run(["systemctl", "restart", "haproxy"])
    lab.wait_serving()
    assert change.settle("drain/haproxy", "apply", "gpu1", **HAPROXY).kind is Kind.ACCEPTED
    assert admin(lab) == "drain"
    assert change.settle("drain/haproxy", "undo", "gpu1", **HAPROXY).kind is Kind.ACCEPTED
    assert admin(lab) == "ready"
