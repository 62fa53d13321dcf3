"""What is said about HAProxy, the kernel log and a soak: pure, from data as hosts report it."""

from __future__ import annotations

from typing import Any

import pytest

from gpuchange.checks import kernel_log, soak
from gpuchange.checks.balancer import Part, before_drain, differences, drained, released, unfinished
from gpuchange.providers.contract import HostView
from gpuchange.providers.drain.gpu_users import PROVIDER as GPU_USERS
from gpuchange.providers.drain.haproxy import PROVIDER as HAPROXY
from gpuchange.providers.drain.hooks import PROVIDER as HOOKS
from gpuchange.providers.preflight.haproxy import PROVIDER as PREFLIGHT
from gpuchange.providers.watch.host import PROVIDER as WATCH


def server(**changes: Any) -> dict[str, Any]:
    row = {"backend": "gpu", "server": "gpu1", "address": "10.0.0.1", "port": 8000, "admin": "ready", "up": True}
    return {**row, "status": "UP", "weight": 100, "check": "L7OK 200", "sessions": 0, **changes}


def part(**fields: Any) -> Part:
    return Part.model_validate({"state": "done", "balancer": "lb1", "servers": [server()], **fields})


def view(params: dict[str, Any], **fields: Any) -> HostView:
    return HostView(host="gpu1", plan=fields.pop("plan", {}), params=params, **fields)


# --------------------------------------------------------------------------------------------- HAProxy


def test_preview_tells_sessions_others_and_what_stands_against() -> None:
    seen = part(servers=[server(sessions=3)], others_serving={"gpu": 2})
    assert before_drain(seen) == ("lb1: gpu/gpu1 is UP, 3 sessions open, 2 other server(s) serve",)
    blocked = before_drain(part(others_serving={"gpu": 0}, short="backend gpu: 0 other servers serve"))
    assert blocked[-1] == "lb1: would not be drained now: backend gpu: 0 other servers serve"
    foreign = part(servers=[server(admin="drain", status="DRAIN")])
    assert before_drain(foreign)[0].endswith("already drained: stays so")


@pytest.mark.parametrize(
    ("reload", "said"),
    [
        ({"others": 12, "limit": "60s"}, ["12 connections on other servers may be cut after 60s"]),
        ({"others": 1}, ["1 connection on other servers keep an old worker until they end"]),
        ({"not_loaded": ["/etc/nginx/x"]}, ["nothing else is open now", "also brings in /etc/nginx/x, edited since"]),
    ],
)
def test_preview_tells_whom_a_reload_concerns(reload: dict[str, Any], said: list[str]) -> None:
    lines = before_drain(part(servers=[server(admin="ready", status="reachable")], reload=reload))[1:]
    assert lines[0].startswith("lb1: the drain needs a reload; ")
    assert all(words in line for words, line in zip(said, lines, strict=True))


def test_drained_tells_cut_sessions_and_foreign_states() -> None:
    now = [server(admin="drain", status="DRAIN")]
    assert drained(part(servers=now)) == ("lb1: gpu/gpu1 drained, no session left",)
    assert drained(part(servers=now, cut=2)) == ("lb1: gpu/gpu1 drained, 2 session(s) cut",)
    kept = drained(part(servers=now, found={"gpu": server(admin="drain")}))
    assert kept[-1] == "lb1: gpu/gpu1 was drained before this change"


def test_released_names_every_difference_to_what_was_found() -> None:
    found = {"gpu": server()}
    assert released(part(found=found)) == ("lb1: gpu/gpu1 serves again (UP, weight 100)",)
    changed = released(part(servers=[server(weight=7, port=8001)], found=found))
    assert changed[1:] == ("lb1: gpu/gpu1: weight was 100, is 7", "lb1: gpu/gpu1: port was 8000, is 8001")
    foreign = released(part(servers=[server(admin="maint")], found={"gpu": server(admin="maint")}))
    assert foreign == ("lb1: gpu/gpu1 was in maintenance before this change: left so",)


def test_differences_are_of_lasting_state_only() -> None:
    found = part(servers=[server(sessions=4, check="L7OK 200")]).servers[0]
    now = part(servers=[server(sessions=0, check="L4OK", status="UP 1/2")]).servers[0]
    assert differences(found, now) == ()


def test_unfinished_speaks_of_those_only_that_are() -> None:
    parts = (part(), part(state="running", why="lb2: gpu1 sessions left"))
    assert unfinished(parts) == "lb2: gpu1 sessions left"


def test_arguments_name_the_server_of_this_host() -> None:
    params = HAPROXY.params.model_validate({"balancers": "lbs", "backend": "gpu", "servers": {"gpu1": "node-a"}})
    data = params.model_dump(mode="json", by_alias=True)
    built = HAPROXY.args(view(data), "apply")
    assert (built["server"], built["backends"], built["balancers"]) == ("node-a", ["gpu"], ["lbs"])
    other = HostView(host="gpu2", plan={}, params=data)
    assert HAPROXY.args(other, "apply")["server"] == "gpu2"


@pytest.mark.parametrize(
    ("state", "outcome"), [("done", "accept"), ("not_done", "reject"), ("running", "again"), ("unknown", "hold")]
)
def test_judges_follow_the_state(state: str, outcome: str) -> None:
    for provider in (HAPROXY, GPU_USERS, HOOKS):
        report = provider.report.model_validate({"state": state, "why": "because", "parts": []})
        for judge in (provider.judge, provider.judge_undo):
            verdict = judge(view({}), report)
            assert verdict.outcome == outcome
            assert outcome == "accept" or verdict.why == "because"


# ------------------------------------------------------------------------------------------------ hooks


def test_hooks_keep_their_order_over_both_machines() -> None:
    hooks = [{"command": ["a"]}, {"command": ["b"], "on": "host"}, {"command": ["c"], "on": "host"}, {"command": ["d"]}]
    params = HOOKS.params.model_validate({"before_drain": hooks}).model_dump(mode="json", by_alias=True)
    groups = HOOKS.args(view(params), "apply")["groups"]
    told = [(group["on"], [hook["command"][0] for hook in group["hooks"]]) for group in groups]
    assert told == [("controller", ["a"]), ("host", ["b", "c"]), ("controller", ["d"])]
    nothing = HOOKS.args(view(params, direction="undo"), "undo")["groups"]
    assert nothing == [{"on": "host", "hooks": []}]


# ------------------------------------------------------------------------------------------- kernel log

FELL_OFF = """\
[   12.345678] nvidia-nvlink: Nvlink Core is being initialized
[   14.000001] NVRM: The NVIDIA GPU 0000:b3:00.0
                 NVRM: (PCI ID: 10de:26b5) installed in this system has
                 NVRM: fallen off the bus and is not responding to commands.
[   14.000002] NVRM: The NVIDIA probe routine failed for 1 device(s).
"""


def test_loss_without_xid_is_recognised_over_its_lines() -> None:
    """cases: fell-off-bus-without-xid-number"""
    lost, probe = kernel_log.parse(FELL_OFF)
    assert (lost.kind, lost.pci) == ("lost", "0000:b3:00.0")
    assert lost.sentence == "GPU 0000:b3:00.0 fell off the bus (no Xid line)"
    assert probe.kind == "probe_failed"
    stamped = "\n".join(f"[14.0] {line.strip().split('] ')[-1]}" for line in FELL_OFF.splitlines())
    assert kernel_log.parse(stamped)[0].pci == "0000:b3:00.0"


def test_an_old_boot_does_not_count() -> None:
    log = FELL_OFF + "-- Boot 5d1c0f --\n[    1.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.172.08\n"
    assert kernel_log.parse(log) == ()


@pytest.mark.parametrize(
    ("line", "pci", "xid"),
    [
        ("NVRM: Xid (PCI:0000:03:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", "03", 79),
        ("[  1.5] NVRM: Xid (PCI:0000:3b:00): 94, pid=4711, name=python3, Contained: CE User Channel", "3b", 94),
        ("Nov 30 host kernel: NVRM: Xid (0000:1b:00): 13, 0001 00000000 0000a0c0", "1b", 13),
    ],
)
def test_xid_lines_of_several_drivers(line: str, pci: str, xid: int) -> None:
    (event,) = kernel_log.parse(line)
    assert (event.kind, event.pci, event.xid) == ("xid", f"0000:{pci}:00.0", xid)
    assert f"Xid {xid}" in event.sentence


def test_one_loss_told_twice_is_one() -> None:
    told = "GPU has fallen off the bus."
    log = f"NVRM: Xid (PCI:0000:03:00): 79, {told}\nNVRM: GPU 0000:03:00.0: {told}\n"
    assert [event.xid for event in kernel_log.parse(log)] == [79]


def test_accepted_xids_are_no_faults_and_quiet_logs_have_none() -> None:
    events = kernel_log.parse("NVRM: Xid (PCI:0000:03:00): 31, pid=1\nNVRM: Xid (PCI:0000:03:00): 48, pid=1\n")
    assert kernel_log.bad(events, frozenset({31})) == ("GPU 0000:03:00.0: Xid 48 (double-bit memory error)",)
    assert kernel_log.parse("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15\nusb 1-1: new device\n") == ()


# ------------------------------------------------------------------------------------------------- soak

GOOD = "0, GPU-a, 00000000:1B:00.0, 31, 0, 0x0000000000000001\n1, GPU-b, 00000000:43:00.0, 33, [N/A], Not Active\n"


def look(out: str = GOOD, rc: int = 0, **fields: Any) -> dict[str, Any]:
    smi = {"rc": rc, "out": out, "err": "", "hung": False}
    return {"boot_id": "b1", "smi": smi, "log": {"text": ""}, "services": {}, **fields}


def test_a_quiet_host_has_no_fault() -> None:
    assert soak.faults(look(), look(), soak.Limits(cards=("GPU-a", "GPU-b"))) == ()


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (look(boot_id="b2"), "rebooted"),
        (look(GOOD.splitlines()[0]), "GPU 0000:43:00.0 does not answer any more"),
        (look(GOOD.replace(" 31,", " 96,")), "96 °C, at most 90 °C"),
        (look(GOOD.replace("31, 0,", "31, 3,")), "3 uncorrectable memory errors since the watch began"),
        (look(GOOD.replace("0x0000000000000001", "0x0000000000000048")), "slowed down by hardware, heat (hardware"),
        (look("No devices were found\n", rc=6), "nvidia-smi ended with 6: No devices were found"),
        (look(log={"text": FELL_OFF}), "fell off the bus"),
        (look(services={"m.service": {"active": "failed", "restarts": "0"}}), "m.service is failed"),
        (look(services={"m.service": {"active": "active", "restarts": "2"}}), "m.service was restarted 2 time(s)"),
    ],
)  # fmt: skip
def test_each_fault_is_named(now: dict[str, Any], said: str) -> None:
    first = look(services={"m.service": {"active": "active", "restarts": "0"}})
    now["services"] = now["services"] or first["services"]
    found = soak.faults(now, first, soak.Limits())
    assert any(said in fault for fault in found), found


def test_a_card_lost_before_the_first_look_is_missed_too() -> None:
    one = look(GOOD.splitlines()[0])
    assert soak.faults(one, one, soak.Limits(cards=("GPU-a", "GPU-b"))) == ("GPU-b does not answer any more",)
    assert soak.faults(look("\n"), look("\n"), soak.Limits()) == ("no card answers",)


def test_watch_goes_on_until_its_time_is_over_and_fails_at_once() -> None:
    plan = {"gpu_users": {"services": ["m.service"]}, "record": {"services": ["m.service", "n.service"]}}
    params = WATCH.params.model_validate({"for": "10m"}).model_dump(mode="json", by_alias=True)
    asked = WATCH.args(view(params, plan=plan), "apply")
    assert (asked["for_s"], asked["services"], asked["fresh"]) == (600, ["m.service", "n.service"], True)
    assert WATCH.args(view(params, waited=15.0), "apply")["fresh"] is False
    body = {"state": "running", "elapsed_s": 10, "left_s": 590, "now": look(), "first": look()}
    again = WATCH.judge(view(params), WATCH.report.model_validate(body))
    assert (again.outcome, again.after) == ("again", 15.0)
    bad = WATCH.judge(view(params), WATCH.report.model_validate({**body, "now": look(boot_id="b2")}))
    assert bad.outcome == "reject" and "rebooted" in bad.why
    unread = look(log={"text": "", "why": "no kernel log here"})
    done = WATCH.judge(view(params), WATCH.report.model_validate({**body, "state": "done", "now": unread}))
    assert done.outcome == "accept" and "no kernel log here" in done.findings


# -------------------------------------------------------------------------------------------- preflight


def test_preflight_refuses_what_a_drain_could_not_do() -> None:
    entry = {"provider": "haproxy", "balancers": ["lbs"], "backend": ["gpu"], "servers": {"gpu1": "node-a"}}
    asked = PREFLIGHT.args(view({}, plan={"drain": [{"provider": "other"}, entry]}), "apply")
    assert (asked["server"], asked["backends"], asked["balancers"]) == ("node-a", ["gpu"], ["lbs"])
    good = {
        "state": "not_done",
        "balancer": "lb1",
        "servers": [server()],
        "level": "admin",
        "others_serving": {"gpu": 2},
    }
    fine = PREFLIGHT.judge(view({}), PREFLIGHT.report.model_validate({"state": "not_done", "parts": [good]}))
    assert fine.outcome == "accept" and "2 other server(s) serve" in fine.findings[0]
    for changes, said in (
        ({"level": "operator"}, "lb1: the socket has level operator"),
        ({"foreign": {"change": "c9", "since": "2026-01-01T00:00:00Z"}}, "gpu1 belongs to change c9 since 2026"),
    ):
        parts = [{**good, **changes}]
        bad = PREFLIGHT.judge(view({}), PREFLIGHT.report.model_validate({"state": "not_done", "parts": parts}))
        assert bad.outcome == "reject" and said in bad.why


def test_preflight_refuses_a_pool_that_is_too_small_for_the_drain() -> None:
    entry = {"provider": "haproxy", "balancers": ["lbs"]}
    short = "backend gpu: 0 other servers serve (none), at least 1 must"
    alone = {
        "state": "not_done",
        "balancer": "lb1",
        "servers": [server()],
        "others_serving": {"gpu": 0},
        "short": short,
    }

    def judged(part: dict[str, Any], **more: Any) -> Any:
        report = PREFLIGHT.report.model_validate({"state": "not_done", "parts": [part]})
        return PREFLIGHT.judge(view({}, plan={"drain": [{**entry, **more}]}), report)

    refused = judged(alone)
    assert refused.outcome == "reject" and f"lb1: {short}" in refused.why and "min_serving: 0" in refused.why
    assert judged({**alone, "short": ""}, min_serving=0).outcome == "accept"
    peer = {"backend": "gpu", "server": "gpu2", "admin": "drain", "weight": 100}
    assert judged({**alone, "members": [peer]}).outcome == "accept", "another change has it out for now"
    assert judged({**alone, "members": [{**peer, "admin": "maint"}]}).outcome == "reject"
