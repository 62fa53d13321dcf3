"""The preview: what a change would do, from what a dry run saw; and how it is shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpuchange import plan as plans
from gpuchange.cli import render
from gpuchange.history import typical
from gpuchange.phase import NOTHING_TO_UNDO, Irreversible, Phase, Play
from gpuchange.phases import PHASES
from gpuchange.preview import Row, build, downtime, found_versions, moved, rows, same_version, wanted_versions
from gpuchange.providers.contract import HostView, Params, Provider
from gpuchange.reports import Report
from gpuchange.states import Event, Kind

PLAN = """
version: 1
name: cuda-12-8
reason: new models
hosts: [gpu_hosts]
rollout: {max_unavailable: 1}
"""
PROC = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024"


def facts(driver: str = PROC, toolkit: str = "1.16.2") -> dict[str, Any]:
    return {
        "loaded": {"proc_version": driver},
        "packages": {"packages": {"nvidia-container-toolkit": f"{toolkit}-1"}},
        "cuda": {
            "toolkits": {"/usr/local/cuda-12.4": {"txt": "CUDA Version 12.4.1"}},
            "link": ["/usr/local/cuda", "/usr/local/cuda-12.4"],
        },
    }


def looked(as_wanted: bool = False) -> dict[str, Any]:
    return {
        "preflight/host": {"state": "done", "as_wanted": as_wanted},
        "record/host": {"state": "done", "facts": facts()},
    }


def row(phase: str, estimate: float, lines: tuple[str, ...] = (), reversible: str = "yes") -> Row:
    def preview(_view: HostView, _report: Any) -> tuple[str, ...]:
        return lines

    made = Provider(phase, "x", "", Params, Report, preview=preview, estimate_s=estimate, reversible=reversible)
    return Row(next(one for one in PHASES if one.name == phase), made, {})


def test_versions_found_on_the_host() -> None:
    assert found_versions({"facts": facts()}) == {
        "driver": "550.54.15",
        "cuda": "12.4.1",
        "cudnn": "",
        "container_toolkit": "1.16.2",
    }
    assert found_versions({}) == {}


def test_versions_wanted_by_the_plan() -> None:
    stack = {"provider": "apt", "driver": "570.172.08", "cuda": "12.8", "reboot": True}
    assert wanted_versions({"stack": stack}) == {"driver": "570.172.08", "cuda": "12.8"}
    assert wanted_versions({"stack": None}) == {}


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ("12.8", "12.8", True),
        ("12.8.93", "12.8", True),
        ("9.1.0.70-1", "9.1.0", True),
        ("12.80", "12.8", False),
        ("12.4", "12.8", False),
        ("", "12.8", False),
    ],
)
def test_a_finer_version_is_the_same(found: str, wanted: str, same: bool) -> None:
    assert same_version(found, wanted) is same


def test_what_moved_is_said_for_each_component() -> None:
    before, after = {"driver": "550.54.15", "cuda": "12.4"}, {"driver": "570.172.08", "cuda": "12.4", "cudnn": "9.8"}
    assert moved(before, after) == ("550.54.15 → 570.172.08", "12.4", "absent → 9.8", "-")


def test_downtime_counts_from_drain_to_release() -> None:
    steps = [row("preflight", 100), row("drain", 1), row("stack", 20), row("release", 3), row("watch", 100)]
    assert downtime([replace(one, seconds=one.provider.estimate_s) for one in steps]) == 24


def test_what_earlier_changes_took_counts_more_than_an_estimate() -> None:
    plan, looks = plans.loads(PLAN + 'stack: {provider: apt, driver: "570.172.08"}\n', "p"), {"gpu1": looked()}
    guessed = build(plan, PHASES, looks, {}).hosts[0]
    told = build(plan, PHASES, looks, {}, {"stack/apt": 7.0, "record/host": 99.0}).hosts[0]
    assert not guessed.learned and told.learned
    assert guessed.downtime_s - told.downtime_s == next(s for s in guessed.steps if s.phase == "stack").estimate_s - 7
    assert "out of service for about" in render.preview_text(build(plan, PHASES, looks, {}, {"stack/apt": 7.0}), "")
    assert "(as in earlier changes)" in render.preview_text(build(plan, PHASES, looks, {}, {"stack/apt": 7.0}), "")


def test_how_long_a_step_takes_is_the_median_over_hosts_and_changes() -> None:
    def step(host: str, start: str, end: str, kind: Kind = Kind.ACCEPTED) -> list[Event]:
        return [Event(one, host=host, phase="stack", provider="apt", direction="do", at=f"2026-01-01T00:{at}+00:00")
                for one, at in ((Kind.STARTED, start), (kind, end))]  # fmt: skip

    again = step("gpu1", "00:00", "00:05", Kind.AGAIN) + step("gpu1", "00:06", "00:10")
    other = step("gpu2", "01:00", "01:20") + step("gpu3", "01:00", "05:00", Kind.REJECTED)
    assert typical([again, other + step("gpu4", "02:00", "02:11")]) == {"stack/apt": 11.0}
    assert typical([]) == {}


def test_rows_mirror_drain_at_release() -> None:
    keys = [one.key for one in rows(plans.loads(PLAN, "p"), PHASES)]
    drained = [key.partition("/")[2] for key in keys if key.startswith("drain/")]
    released = [key.partition("/")[2] for key in keys if key.startswith("release/")]
    assert released == drained[::-1]


def test_a_host_as_wanted_has_nothing_to_do() -> None:
    seen = build(plans.loads(PLAN, "p"), PHASES, {"gpu1": looked(True), "gpu2": looked()}, {})
    assert [host.host for host in seen.to_change] == ["gpu2"]
    assert seen.hosts[0].downtime_s == 0


def test_a_problem_stands_in_the_way() -> None:
    seen = build(plans.loads(PLAN, "p"), PHASES, {"gpu1": looked()}, {"gpu1": ["/ has 1 GiB left"], "gpu2": ["gone"]})
    assert seen.problems
    assert seen.to_change == ()
    shown = render.preview_text(seen, "mend it")
    assert "! / has 1 GiB left" in shown
    assert "2 host(s) with problems" in shown


def test_a_phase_without_a_way_back_is_a_point_of_no_return() -> None:
    one_way = Phase("drain", "", do=Play("drain", "apply"), undo=Irreversible("cards are gone"))
    both = Phase("watch", "", do=Play("watch", "apply"), undo=NOTHING_TO_UNDO)
    provider = row("drain", 1).provider
    from gpuchange import preview

    step = preview._step({}, Row(one_way, provider, {}), "gpu1", {})
    assert step.reversible == "cards are gone"
    assert preview._step({}, Row(both, provider, {}), "gpu1", {}).reversible == "yes"


def test_a_report_that_cannot_be_read_is_said_not_raised() -> None:
    from gpuchange import preview

    step = preview._step({}, row("drain", 1), "gpu1", {"drain/x": {"state": "nonsense"}})
    assert "cannot be read" in step.lines[0]


def test_the_preview_names_versions_capacity_and_what_comes_next() -> None:
    plan = plans.loads(PLAN, "p")
    shown = render.preview_text(build(plan, PHASES, {"gpu1": looked(), "gpu2": looked()}, {}), "gpuchange apply p")
    assert "driver             550.54.15" in shown
    assert "at most 1 out at once: 1 of 2 stay in service" in shown
    assert shown.endswith("next:      gpuchange apply p")


def test_words_of_hosts_are_cleaned() -> None:
    seen = build(plans.loads(PLAN, "p"), PHASES, {}, {"gpu1": ["\x1b[31mred\x07"]})
    assert "\x07" not in render.preview_text(seen, "x")
    assert render.preview_json(seen)["hosts"][0]["problems"] == ["\x1b[31mred\x07"]


STACK = 'stack: {provider: apt, driver: "570.172.08"}\n'


def test_of_a_host_that_could_not_be_read_no_version_is_claimed() -> None:
    shown = render.preview_text(build(plans.loads(PLAN + STACK, "p"), PHASES, {"gpu1": {}}, {"gpu1": ["locked"]}), "x")
    assert "versions: not known" in shown and "absent" not in shown and "570" not in shown
    read = {"gpu1": {"preflight/host": {"state": "done", "facts": facts()}}}
    shown = render.preview_text(build(plans.loads(PLAN + STACK, "p"), PHASES, read, {"gpu1": ["/ is full"]}), "x")
    assert "550.54.15 → 570.172.08" in shown and "not known" not in shown


def test_preflight_alone_tells_the_reboot_the_watch_and_the_hooks() -> None:
    hooks = "hooks: {before_drain: [{command: [/bin/silence, on], on: controller}]}\n"
    chosen = {"state": "done", "reboot_needed": True, "before": {"driver": "550.54.15"}, "after": {"driver": "570"}}
    reports = {"gpu1": {"preflight/host": {"state": "done", "facts": facts()}, "preflight/apt": chosen}}
    shown = render.preview_text(build(plans.loads(PLAN + STACK + hooks, "p"), PHASES, reports, {}), "x")
    assert "stack/apt: one reboot: the driver changes" in shown
    assert "watch/host: watched for 30 s in service" in shown
    assert "drain/hooks: before drain on the controller: /bin/silence on" in shown and "release/hooks: " not in shown


def test_hosts_that_differ_in_open_sessions_only_are_shown_together() -> None:
    one, other = "lb1: gpu/h1 is UP, 1 session open", "lb1: gpu/h2 is UP, 12 sessions open"
    assert render._without_names("h1", one) == render._without_names("h2", other)
