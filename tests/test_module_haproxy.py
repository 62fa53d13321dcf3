"""gpuchange_haproxy against a real HAProxy on loopback: no request is lost, what was found is what is left."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostcode
import pytest
from ansible.module_utils import gpuchange_connections as connections
from ansible.module_utils import gpuchange_haproxy_job as work
from ansible.module_utils import gpuchange_host as host
from realhaproxy import HAPROXY, Balancer, Model
from waiting import eventually

OWNER, call = hostcode.OWNER, hostcode.call
pytestmark = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed: apt-get install haproxy")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host, "ROOT", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def balancer(tmp_path: Path, state: Path) -> Iterator[Balancer]:
    running = Balancer(tmp_path)
    yield running
    running.stop()


def play(
    balancer: Balancer, mode: str, direction: str = "", owner: dict[str, Any] | None = None, **args: Any
) -> dict[str, Any]:
    given = {"server": "h1", "backends": ["gpu"], "socket": balancer.socket, "wait_s": 3, "balancer": "lb", **args}
    step = {"phase": "drain", "provider": "haproxy", "direction": direction or ("undo" if mode == "undo" else "do")}
    return call("gpuchange_haproxy", mode=mode, owner=owner or OWNER, args=given, step=step)


def report(balancer: Balancer, mode: str, direction: str = "", **args: Any) -> dict[str, Any]:
    result = play(balancer, mode, direction, **args)
    assert "report" in result, result
    return dict(result["report"])


def test_drain_and_release_restore_what_was_found(balancer: Balancer) -> None:
    before = balancer.server()
    drained = report(balancer, "apply")
    assert (drained["state"], drained["changed"], balancer.server()["admin"]) == ("done", True, "drain")
    assert all(balancer.get() == 200 for _ in range(6))
    released = report(balancer, "undo")
    assert (released["state"], released["changed"]) == ("done", True)
    after = balancer.server()
    assert {k: after[k] for k in ("admin", "weight", "up")} == {k: before[k] for k in ("admin", "weight", "up")}


def test_twice_is_once(balancer: Balancer) -> None:
    report(balancer, "apply")
    assert report(balancer, "apply")["changed"] is False
    report(balancer, "undo")
    again = report(balancer, "undo")
    assert (again["state"], again["changed"], balancer.server()["admin"]) == ("done", False, "ready")


def test_open_stream_is_awaited_and_ends_whole(balancer: Balancer) -> None:
    stream = balancer.stream()
    waiting = report(balancer, "apply", wait_s=0.5)
    assert waiting["state"] == "running" and "1 in backend gpu" in waiting["why"]
    assert report(balancer, "probe")["state"] == "not_done"
    balancer.h1.finish.set()
    assert report(balancer, "apply")["state"] == "done"
    assert stream.read() == b"first\nlast\n"
    assert report(balancer, "probe")["state"] == "done"


def test_timeout_fails_or_cuts_as_the_plan_says(balancer: Balancer) -> None:
    stream = balancer.stream()
    failed = report(balancer, "apply", timeout=0)
    assert failed["state"] == "not_done" and "still open: 1 in backend gpu" in failed["why"]
    assert report(balancer, "undo")["state"] == "done" and balancer.server()["admin"] == "ready"
    cut = report(balancer, "apply", timeout=0, on_timeout="cut")
    assert (cut["state"], cut["cut"], balancer.server()["sessions"]) == ("done", 1, 0)
    with pytest.raises((http.client.HTTPException, OSError)):
        assert stream.read().endswith(b"last\n") or _incomplete()


def _incomplete() -> None:
    raise http.client.IncompleteRead(b"first\n")


def test_a_refused_drain_leaves_no_lock_once_it_is_given_up(balancer: Balancer) -> None:
    report(balancer, "apply", backends=["lonely"], wait_s=0.1)
    assert host.read_owner("h1")
    assert report(balancer, "undo", backends=["lonely"])["state"] == "done"
    assert not host.read_owner("h1")
    report(balancer, "apply")  # now another change has it, and one that took nothing gives nothing of it back
    other = play(balancer, "undo", owner=dict(OWNER, change="c2"))["report"]
    assert other["state"] == "done" and (host.read_owner("h1") or {})["change"] == OWNER["change"]
    assert balancer.server()["admin"] == "drain"


def test_last_serving_server_is_not_taken_out(balancer: Balancer) -> None:
    refused = report(balancer, "apply", backends=["lonely"], wait_s=0.1)
    assert refused["state"] == "not_done" and "0 other servers serve (none), at least 1 must" in refused["why"]
    assert balancer.server("lonely")["admin"] == "ready"
    assert report(balancer, "apply", backends=["lonely"], min_serving=0)["state"] == "done"


def test_only_members_that_really_serve_are_counted(balancer: Balancer) -> None:
    balancer.h2.healthy = False
    eventually(lambda: not balancer.server(name="h2")["up"])
    refused = report(balancer, "apply", wait_s=0.1)
    assert refused["state"] == "not_done" and balancer.server()["admin"] == "ready"
    assert report(balancer, "probe")["short"]


def test_server_that_does_not_serve_may_always_leave(balancer: Balancer) -> None:
    balancer.h1.healthy = False
    eventually(lambda: not balancer.server("lonely")["up"])
    assert report(balancer, "apply", backends=["lonely"])["state"] == "done"


@pytest.mark.parametrize("foreign", ["drain", "maint"])
def test_drained_by_somebody_else_stays_so(balancer: Balancer, foreign: str) -> None:
    balancer.order(f"set server gpu/h1 state {foreign}")
    assert report(balancer, "apply")["state"] == "done"
    assert balancer.server()["admin"] == foreign
    assert report(balancer, "undo")["state"] == "done"
    assert balancer.server()["admin"] == foreign


def test_maintenance_set_meanwhile_is_left_to_a_human(balancer: Balancer) -> None:
    report(balancer, "apply")
    balancer.order("set server gpu/h1 state maint")
    held = report(balancer, "undo")
    assert held["state"] == "unknown" and "somebody else" in held["why"]
    assert balancer.server()["admin"] == "maint"


def test_weight_changed_at_runtime_is_kept_and_restored_after_reload(balancer: Balancer) -> None:
    balancer.order("set server gpu/h1 weight 7")
    report(balancer, "apply")
    balancer.reload()
    assert balancer.server()["weight"] == 50
    assert report(balancer, "undo")["state"] == "done"
    assert (balancer.server()["weight"], balancer.server()["admin"]) == (7, "ready")


def test_reload_that_forgets_the_drain_is_noticed(balancer: Balancer) -> None:
    report(balancer, "apply")
    balancer.reload()
    assert balancer.server()["admin"] == "ready"
    assert report(balancer, "probe")["state"] == "not_done"
    assert report(balancer, "apply")["state"] == "done"
    assert balancer.server()["admin"] == "drain"
    assert report(balancer, "undo")["state"] == "done" and balancer.server()["admin"] == "ready"


def test_foreign_drain_survives_a_reload(balancer: Balancer) -> None:
    balancer.order("set server gpu/h1 state drain")
    report(balancer, "apply")
    balancer.reload()
    assert report(balancer, "undo")["state"] == "done"
    assert balancer.server()["admin"] == "drain"


def test_stream_in_an_old_worker_is_seen(balancer: Balancer) -> None:
    stream = balancer.stream()
    balancer.reload()
    eventually(lambda: balancer.server()["sessions"] == 0)
    waiting = report(balancer, "apply", wait_s=0.5)
    assert waiting["state"] == "running" and "in old worker" in waiting["why"]
    balancer.h1.finish.set()
    assert report(balancer, "apply")["state"] == "done"
    assert stream.read() == b"first\nlast\n"


def test_not_released_before_a_fresh_check_passed(balancer: Balancer) -> None:
    """The check's last result may be from before the server was stopped: only a new one counts."""
    report(balancer, "apply")
    balancer.h1.healthy = False
    waiting = report(balancer, "undo", wait_s=1.5)
    assert waiting["state"] == "running" and "gpu/h1 is DOWN (last check: L7STS" in waiting["why"]
    assert balancer.server()["admin"] == "drain"
    assert report(balancer, "probe", "undo")["state"] == "not_done"
    assert all(balancer.get() == 200 for _ in range(6))
    balancer.h1.healthy = True
    assert report(balancer, "undo")["state"] == "done"
    assert balancer.server()["admin"] == "ready" and balancer.server()["up"]
    assert report(balancer, "probe", "undo")["state"] == "done"


def test_release_gives_up_with_the_checks_words(balancer: Balancer) -> None:
    report(balancer, "apply")
    balancer.h1.healthy = False
    failed = report(balancer, "undo", ready_within=0)
    assert failed["state"] == "not_done" and "gpu/h1 is DOWN" in failed["why"]
    assert balancer.server()["admin"] == "drain"


def test_found_down_need_not_come_up(balancer: Balancer) -> None:
    balancer.h1.healthy = False
    eventually(lambda: not balancer.server()["up"])
    report(balancer, "apply")
    assert report(balancer, "undo")["state"] == "done"
    assert balancer.server()["admin"] == "ready"


def test_persistent_clients_cannot_come_back(balancer: Balancer) -> None:
    """A drained server still takes clients that hold its cookie: it must end in maintenance, and come back checked."""
    assert report(balancer, "apply", backends=["sticky"])["state"] == "done"
    assert balancer.server("sticky")["admin"] == "maint"
    assert report(balancer, "undo", backends=["sticky"])["state"] == "done"
    assert balancer.server("sticky")["admin"] == "ready" and balancer.server("sticky")["up"]


def test_all_backends_that_have_the_server(balancer: Balancer) -> None:
    done = report(balancer, "apply", backends=[], min_serving=0)
    assert {row["backend"] for row in done["servers"]} == {"gpu", "sticky", "unchecked", "lonely"}
    assert "ready" not in {balancer.server(name)["admin"] for name in ("gpu", "sticky", "unchecked", "lonely")}
    assert report(balancer, "undo", backends=[])["state"] == "done"
    assert {balancer.server(name)["admin"] for name in ("gpu", "sticky", "unchecked", "lonely")} == {"ready"}


def test_without_health_checks_the_port_must_answer(balancer: Balancer) -> None:
    report(balancer, "apply", backends=["unchecked"])
    balancer.h1.stop()
    waiting = report(balancer, "undo", backends=["unchecked"], wait_s=0.5)
    assert waiting["state"] == "running" and "does not answer" in waiting["why"]
    balancer.h1 = Model(balancer.h1.port)
    assert report(balancer, "undo", backends=["unchecked"])["state"] == "done"


def test_probe_changes_nothing_and_shows_who_serves(balancer: Balancer, state: Path) -> None:
    before = balancer.api.ask("show servers state gpu")
    seen = report(balancer, "probe")
    assert seen["state"] == "not_done" and seen["others_serving"] == {"gpu": 1}
    assert [row["server"] for row in seen["members"]] == ["h1", "h2", "h3"]
    strip = lambda text: [row.split()[:9] for row in text.splitlines()]  # noqa: E731
    assert strip(balancer.api.ask("show servers state gpu")) == strip(before)
    assert seen["level"] == "admin" and not seen["foreign"]
    assert not state.exists()


def test_two_changes_may_hold_two_servers_but_not_one(balancer: Balancer, state: Path) -> None:
    other = dict(OWNER, change="c2")
    report(balancer, "apply", min_serving=0)
    marker = json.loads((state / "owner-h1.json").read_text())
    assert (marker["change"], marker["reason"]) == ("c1", "test")
    assert "report" in play(balancer, "apply", server="h2", min_serving=0, owner=other)
    refused = play(balancer, "apply", owner=other)
    assert (
        refused["failed"] and refused["refused"]["by"]["change"] == "c1" and "h1 belongs to change c1" in refused["msg"]
    )
    assert balancer.server()["admin"] == "drain"
    report(balancer, "undo")
    assert not (state / "owner-h1.json").exists() and (state / "owner-h2.json").exists()


def test_second_drain_after_release_finds_anew(balancer: Balancer) -> None:
    report(balancer, "apply")
    report(balancer, "undo")
    balancer.order("set server gpu/h1 state drain")
    report(balancer, "apply")
    report(balancer, "undo")
    assert balancer.server()["admin"] == "drain"


def test_killed_between_note_and_action_is_taken_up(balancer: Balancer, state: Path) -> None:
    """The note says drain, HAProxy still says ready: apply drains, and undo of it knows that ready was found."""
    notes = work.ServerNotes(str(state / OWNER["change"] / "haproxy-h1.json"))
    notes.begin_with(work.Look(balancer.api, ["gpu"], "h1"))
    notes.set_left("gpu", "drain")
    assert report(balancer, "probe")["state"] == "not_done"
    assert report(balancer, "apply")["state"] == "done" and balancer.server()["admin"] == "drain"
    assert report(balancer, "undo")["state"] == "done" and balancer.server()["admin"] == "ready"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"backends": ["nope"]}, "no backend nope; it has gpu, lonely, sticky, unchecked"),
        ({"server": "gpu9"}, "backend gpu has no server gpu9; it has h1, h2, h3"),
        ({"server": "gpu9", "backends": []}, "no backend has a server gpu9"),
        ({"socket": "/nonexistent/admin.sock"}, "/nonexistent/admin.sock does not exist"),
        ({"server": "h1; shutdown"}, "cannot be the name"),
    ],
)
def test_wrong_names_say_what_exists(balancer: Balancer, args: dict[str, Any], said: str) -> None:
    for mode in ("probe", "apply"):
        result = play(balancer, mode, **args)
        assert result["failed"] and said in result["msg"], result


def test_stopped_haproxy_and_weak_socket_are_named(tmp_path: Path, state: Path) -> None:
    balancer = Balancer(tmp_path, level="operator")
    try:
        assert report(balancer, "probe")["level"] == "operator"
        refused = play(balancer, "apply")
        assert refused["failed"] and "lacks admin level" in refused["msg"]
    finally:
        balancer.stop()
    gone = play(balancer, "apply")
    assert gone["failed"] and ("HAProxy is not running" in gone["msg"] or "does not exist" in gone["msg"])


def test_endpoints_of_proc_net_tcp() -> None:
    assert connections.endpoint("0100007F:1F90") == ("127.0.0.1", 8080)
    assert connections.endpoint("0000000000000000FFFF00000100007F:0050") == ("127.0.0.1", 80)
    assert connections.endpoint("B80D0120000000000000000001000000:01BB") == ("2001:db8::1", 443)


def test_unlock_frees_the_servers_of_a_lost_change_only(balancer: Balancer, state: Path) -> None:
    report(balancer, "apply", min_serving=0)
    play(balancer, "apply", server="h2", min_serving=0, owner=dict(OWNER, change="c2"))
    unlocker = dict(OWNER, change="unlock-1", fence=0)
    shown = call("gpuchange_owner", mode="probe", owner=unlocker)["report"]
    assert (shown["state"], sorted(shown["things"])) == ("not_done", ["h1", "h2"])
    call("gpuchange_owner", mode="apply", owner=unlocker, args={"expect": {"change": "c1", "fence": 1}})
    assert not (state / "owner-h1.json").exists() and (state / "owner-h2.json").exists()
    for mode in ("apply", "undo"):
        assert play(balancer, mode)["refused"]["kind"] == "released", "the stopped controller came back"
    assert report(balancer, "probe")["foreign"]["fence"] == 1
    assert "report" in play(balancer, "apply", owner=dict(OWNER, change="c3"))
