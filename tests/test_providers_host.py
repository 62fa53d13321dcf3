"""The looking and proving providers: what they ask of the host and how they judge what it says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from test_checks_host import TWO_H100, patched

from gpuchange.checks import snapshot
from gpuchange.providers.backup.tar import PROVIDER as TAR
from gpuchange.providers.baseline.gpu import PROVIDER as BASELINE
from gpuchange.providers.contract import HostView, Provider
from gpuchange.providers.preflight.host import PROVIDER as PREFLIGHT
from gpuchange.providers.record.host import PROVIDER as RECORD
from gpuchange.providers.seal.host import PROVIDER as SEAL
from gpuchange.providers.verify.gpu import PROVIDER as SPEED
from gpuchange.providers.verify.host import PROVIDER as VERIFY
from gpuchange.reports import Verdict

UUIDS = [card.uuid for card in snapshot.parse(TWO_H100).cards]
PLAN = {"record": {"paths": ["/srv/models"], "services": ["modelserver.service"], "rehash": "moved"}}
COUNTS = {
    "expected": 10,
    "checked": 10,
    "equal": 10,
    "mismatch": 0,
    "missing": 0,
    "extra": 0,
    "metadata": 0,
    "unreadable": 0,
}
MANIFEST = {"files": 7, "bytes": 9, "read_files": 0, "content": "c" * 64, "metadata": "m", "jsonl_sha256": "j" * 64}


def checked_card(index: int, mismatches: int = 0) -> dict[str, Any]:
    checks = {name: {"mismatches": mismatches, "elements": 4} for name in ("copy", "words", "floats")}
    return {"index": index, "uuid": UUIDS[index], "ok": not mismatches, "checks": checks}


FUNCTION = {"ok": True, "count": 2, "cards": [checked_card(0), checked_card(1)]}
WRONG = {"ok": False, "count": 2, "cards": [checked_card(0), checked_card(1, 3)]}
SEALED = {"state": "done", "facts": TWO_H100, "manifest": MANIFEST, "function": FUNCTION}


def bench(h2d: float) -> dict[str, Any]:
    cards = [
        {"index": i, "uuid": uuid, "metrics": {"h2d": {"median": h2d, "spread": 0.01}}} for i, uuid in enumerate(UUIDS)
    ]
    return {"ok": True, "cards": cards}


def view(provider: Provider, last: dict[str, Any] | None = None, **more: Any) -> HostView:
    params = more.pop("params", provider.params().model_dump(mode="json"))
    return HostView("gpu1", {**PLAN, **more.pop("plan", {})}, params, first=last or {}, last=last or {}, **more)


def report(provider: Provider, **fields: Any) -> Any:
    return provider.report.model_validate({"state": "done", "facts": TWO_H100, **fields})


def proved(fields: dict[str, Any], waited: float = 0.0, seal: dict[str, Any] = SEALED) -> Verdict:
    given = {"manifest": {**MANIFEST, "compare": COUNTS}, "function": FUNCTION, **fields}
    seen = view(SEAL, {"seal/host": seal}, direction="undo", waited=waited)
    return SEAL.judge_undo(seen, report(SEAL, **given))


# ------------------------------------------------------------------------------------------- preflight, record


def test_a_ready_host_is_accepted_and_its_versions_shown() -> None:
    seen, said = view(PREFLIGHT), report(PREFLIGHT)
    assert PREFLIGHT.judge(seen, said).outcome == "accept"
    assert "driver: 550.54.15" in PREFLIGHT.preview(seen, said)
    assert "gpus: 2 x NVIDIA H100 80GB HBM3" in PREFLIGHT.preview(seen, said)


def test_an_objection_stops_the_change_unless_the_plan_accepts_its_kind() -> None:
    said = report(PREFLIGHT, facts=patched({"packages.broken": {"nvidia-dkms-550": "half-configured"}}))
    verdict = PREFLIGHT.judge(view(PREFLIGHT), said)
    assert verdict.outcome == "reject" and "accept: [broken_packages]" in verdict.why
    params = {**PREFLIGHT.params().model_dump(mode="json"), "accept": ["broken_packages"]}
    accepted = PREFLIGHT.judge(view(PREFLIGHT, params=params), said)
    assert accepted.outcome == "accept" and "half-configured" in accepted.findings[0]


def test_a_missing_fact_cannot_be_accepted_away() -> None:
    verdict = PREFLIGHT.judge(view(PREFLIGHT), report(PREFLIGHT, errors={"packages": "OSError: x"}))
    assert verdict.outcome == "reject" and "preflight:" not in verdict.why


def test_preflight_asks_read_only_and_for_the_plans_mounts() -> None:
    params = {**PREFLIGHT.params().model_dump(mode="json"), "mounts": ["/data"]}
    asked = PREFLIGHT.args(view(PREFLIGHT, params=params), "apply")
    base = {"paths": ["/srv/models", "/data"], "services": ["modelserver.service"], "guard": True}
    rights = asked.pop("rights")
    assert asked == {**base, "binaries": []}
    assert "seal/host" in rights and all(rights.values())


def test_programs_of_chosen_providers_must_be_there() -> None:
    plan = {"backup": [{"provider": "rsync", "paths": ["/srv"], "to": "/backup"}], "stack": {"provider": "none"}}
    seen = view(PREFLIGHT, plan=plan)
    assert PREFLIGHT.args(seen, "apply")["binaries"] == ["rsync"]
    verdict = PREFLIGHT.judge(seen, report(PREFLIGHT, facts={**TWO_H100, "binaries": {"rsync": ""}}))
    assert verdict.outcome == "reject" and "rsync is not installed" in verdict.why


def test_the_program_that_compresses_must_be_there_too() -> None:
    tar = {"provider": "tar", "paths": ["/srv"], "to": "/backup", "compression": "zstd"}
    seen = view(PREFLIGHT, plan={"backup": [tar]})
    assert PREFLIGHT.args(seen, "apply")["binaries"] == ["tar", "zstd"]
    verdict = PREFLIGHT.judge(seen, report(PREFLIGHT, facts={**TWO_H100, "binaries": {"tar": "/bin/tar", "zstd": ""}}))
    assert verdict.outcome == "reject" and "zstd is not installed" in verdict.why
    plain = view(PREFLIGHT, plan={"backup": [{**tar, "compression": "none"}]})
    assert PREFLIGHT.args(plain, "apply")["binaries"] == ["tar"]


def test_an_archive_says_what_it_is_and_an_empty_one_is_none() -> None:
    seen = HostView("h1", {}, TAR.params(paths=["/srv"], to="/backup").model_dump(mode="json"))
    assert TAR.args(seen, "apply") == {
        "paths": ["/srv"], "to": "/backup", "exclude": [], "allow_shrink": 50.0,
        "compression": "none", "may_change": [],
    }  # fmt: skip
    made = {"path": "/backup/c1.tar", "checked": 3, "expected": 3, "bytes": 2**20, "archive": "archive.tar.zst"}
    made |= {
        "archive_is": {"size": 2**20},
        "archive_sha256": "a1",
        "restored": 2,
        "sockets": 1,
        "replaces": "hash differs",
    }
    verdict = TAR.judge(seen, report(TAR, set=made))
    assert verdict.outcome == "accept" and verdict.findings == (
        "backup /backup/c1.tar: 3 of 3 read back and equal, 1 MiB",
        "archive.tar.zst: 1 MiB, sha256 a1",
        "restored for a test and equal: 2 files",
        "made anew, the one before was damaged: hash differs",
        "1 sockets left out",
    )
    assert TAR.judge(seen, report(TAR, set={})).outcome == "reject"
    refused = TAR.judge(seen, report(TAR, state="not_done", why="changed during backup: /srv/db (required)"))
    assert refused.outcome == "reject" and "/srv/db (required)" in refused.why


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({"manifest": MANIFEST}, "accept"),
        ({"manifest": {**MANIFEST, "busy": 1, "names": {"busy": ["/srv/models/log"]}}}, "accept"),
        ({"manifest": {**MANIFEST, "unreadable": 1, "names": {"unreadable": ["/srv/x (EIO)"]}}}, "reject"),
        ({"errors": {"smi": "OSError: x"}}, "reject"),
        ({"state": "running", "why": "hashing"}, "again"),
    ],
)
def test_record_accepts_what_can_be_proved_later(fields: dict[str, Any], outcome: str) -> None:
    assert RECORD.judge(view(RECORD), report(RECORD, **fields)).outcome == outcome


def test_without_paths_there_is_no_manifest() -> None:
    assert RECORD.args(view(RECORD, plan={"record": {}}), "apply")["manifest"] is None


# ------------------------------------------------------------------------------------------- seal


def test_the_seal_waits_for_files_that_are_still_written_but_not_for_ever() -> None:
    busy = {**MANIFEST, "busy": 1, "names": {"busy": ["/srv/models/log"]}}
    assert SEAL.judge(view(SEAL), report(SEAL, manifest=busy)).outcome == "again"
    late = SEAL.judge(view(SEAL, waited=60.0), report(SEAL, manifest=busy))
    assert late.outcome == "reject" and "changed while being read: /srv/models/log" in late.why


def test_a_final_backup_is_made_where_there_is_one_to_go_on_from() -> None:
    rsync = {"provider": "rsync", "paths": ["/srv"], "to": "/backup"}
    plan = {"backup": [{"provider": "packages"}, rsync]}
    assert SEAL.args(view(SEAL, plan=plan), "apply")["backup"] is None
    assert SEAL.args(view(SEAL, {"backup/rsync": {"state": "done"}}, plan=plan), "apply")["backup"] == rsync
    made = {"path": "/backup/c1.seal", "checked": 3, "expected": 3, "in_flux": 0}
    verdict = SEAL.judge(view(SEAL), report(SEAL, manifest=MANIFEST, backup=made))
    assert "final backup /backup/c1.seal: 3 of 3 equal" in verdict.findings
    still = SEAL.judge(view(SEAL), report(SEAL, manifest=MANIFEST, backup={**made, "in_flux": 2}))
    assert still.outcome == "reject" and "2 names still changed" in still.why


def test_a_driver_replaced_behind_our_back_is_no_seal() -> None:
    swapped = patched({"packages.packages.libnvidia-compute-550": "550.90.07-0ubuntu1"})
    verdict = SEAL.judge(
        view(SEAL, {"record/host": {"facts": TWO_H100}}), report(SEAL, facts=swapped, manifest=MANIFEST)
    )
    assert verdict.outcome == "reject" and "baseline inconsistent" in verdict.why
    assert any(line.startswith("since record: packages") for line in verdict.findings)


def test_a_proof_is_asked_against_the_seals_own_manifest() -> None:
    asked = SEAL.args(view(SEAL, {"seal/host": SEALED}, direction="undo"), "undo")
    assert (asked["manifest"]["name"], asked["manifest"]["compare"]) == ("prove", "seal")
    assert asked["manifest"]["compare_sha256"] == MANIFEST["jsonl_sha256"] and asked["function"]
    everything = view(
        SEAL, {"seal/host": SEALED}, direction="undo", plan={"record": {"paths": ["/x"], "rehash": "all"}}
    )
    assert SEAL.args(everything, "undo")["manifest"]["previous"] == []


def test_equal_is_proved_line_by_line() -> None:
    verdict = proved({})
    assert verdict.outcome == "accept"
    said = "\n".join(verdict.findings)
    assert "packages: 15 of 15 equal" in said and "manifest: checked 10 of 10 equal" in said and "GPU function" in said


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"facts": patched({"packages.holds": ["x"]})}, "holds: 1 differ"),
        ({"facts": patched({"machine_id": "other"})}, "this is another machine"),
        ({"manifest": {**MANIFEST, "compare": {**COUNTS, "equal": 9, "mismatch": 1}}}, "1 mismatch"),
        ({"manifest": {**MANIFEST, "compare": None}}, "not compared"),
        ({"manifest": None}, "nothing is proved"),
        ({"function": WRONG}, "wrong results"),
        ({"function": None}, "GPU function"),
        ({"errors": {"services": "OSError: x"}}, "services could not be looked at"),
    ],
)
def test_anything_unequal_is_a_failed_rollback(fields: dict[str, Any], says: str) -> None:
    verdict = proved(fields)
    assert verdict.outcome == "reject" and says in verdict.why


def test_services_may_settle_after_a_boot_but_not_for_ever() -> None:
    starting = copy.deepcopy(TWO_H100)
    starting["services"]["modelserver.service"]["active"] = "inactive"
    assert proved({"facts": starting}).outcome == "again"
    assert proved({"facts": starting}, waited=60.0).outcome == "reject"


def test_a_unit_that_drain_stopped_may_come_back_with_a_boot_only() -> None:
    stopped, running = copy.deepcopy(TWO_H100), copy.deepcopy(TWO_H100)
    stopped["services"]["modelserver.service"]["active"] = "inactive"
    seal = {**SEALED, "facts": stopped}
    assert proved({"facts": running}, waited=60.0, seal=seal).outcome == "reject"
    running["boot_id"] = "another boot"
    assert proved({"facts": running}, waited=60.0, seal=seal).outcome == "accept"
    running["services"]["modelserver.service"]["enabled"] = "disabled"
    assert proved({"facts": running}, waited=60.0, seal=seal).outcome == "reject"


def test_cards_that_did_not_work_when_sealed_need_not_work_after_a_rollback() -> None:
    assert proved({"function": WRONG}, seal={**SEALED, "function": WRONG}).outcome == "accept"


def test_nothing_sealed_means_nothing_to_prove() -> None:
    assert SEAL.judge_undo(view(SEAL, direction="undo"), report(SEAL)).outcome == "accept"


# ------------------------------------------------------------------------------------------- verify, baseline


def verified(fields: dict[str, Any], plan: dict[str, Any] | None = None, waited: float = 0.0, **more: Any) -> Verdict:
    last = {"seal/host": SEALED, **more}
    given = {"manifest": {**MANIFEST, "compare": COUNTS}, "function": FUNCTION, **fields}
    return VERIFY.judge(view(VERIFY, last, plan=plan or {}, waited=waited), report(VERIFY, **given))


def test_an_unchanged_host_verifies() -> None:
    verdict = verified({})
    assert verdict.outcome == "accept"
    assert "driver loaded: 550.54.15" in verdict.findings


@pytest.mark.parametrize(
    ("fields", "plan", "says"),
    [
        ({}, {"stack": {"provider": "apt", "driver": "570.86.15"}}, "driver loaded should be 570.86.15, is 550.54.15"),
        ({"function": WRONG}, {}, "wrong results"),
        ({"function": None}, {}, "GPU function"),
        ({"manifest": {**MANIFEST, "compare": {**COUNTS, "missing": 2}}}, {}, "2 missing"),
        ({"errors": {"smi": "x"}}, {}, "smi could not be looked at"),
    ],
)
def test_what_does_not_hold_fails_and_says_what_it_should_be(fields: Any, plan: Any, says: str) -> None:
    verdict = verified(fields, plan)
    assert verdict.outcome == "reject" and says in verdict.why


def test_another_card_in_a_slot_is_held_for_a_human() -> None:
    uuid = UUIDS[0] or ""
    facts = patched({"smi.out": TWO_H100["smi"]["out"].replace(uuid, "GPU-00000000-new")})
    other = {**FUNCTION, "cards": [{**checked_card(0), "uuid": uuid}, checked_card(1)]}
    verdict = verified({"facts": facts, "function": other})
    assert verdict.outcome == "hold" and f"uuid should be {uuid}, is GPU-00000000-new" in verdict.why


def test_a_lost_card_fails_and_is_named() -> None:
    out = TWO_H100["smi"]["out"]
    first, second = out.index("<gpu "), out.rindex("<gpu ")
    facts = patched({"smi.out": out[:second] + "</nvidia_smi_log>"})
    assert first != second
    verdict = verified({"facts": facts, "function": {"ok": True, "count": 1, "cards": [checked_card(0)]}})
    assert verdict.outcome == "reject"
    assert "1 of 2 GPUs" in verdict.why and "on the PCI bus but not initialised" in verdict.why


BASE = {"baseline/gpu": {"state": "done", "bench": bench(54.0)}, "seal/host": SEALED}


def sped(last: dict[str, Any], params: dict[str, Any] | None = None, plan: Any = None, **fields: Any) -> Verdict:
    asked = view(SPEED, last, plan=plan or {}, params=params or {"tolerance": 5.0})
    return SPEED.judge(asked, SPEED.report.model_validate({"state": "done", **fields}))


def test_a_slow_card_fails_against_its_baseline_and_noise_does_not() -> None:
    assert sped(BASE, bench=bench(52.0)).outcome == "accept"
    slow = sped(BASE, bench=bench(20.0))
    assert slow.outcome == "reject" and "54 GB/s → 20 GB/s" in slow.why
    assert "not measured" in sped(BASE).why
    assert "bench" in SPEED.args(view(SPEED, BASE), "apply")
    assert sped(BASE, state="running").outcome == "again"


def test_a_baseline_that_was_not_measured_is_not_compared_with() -> None:
    none = {"baseline/gpu": {"state": "not_done", "bench": {"ok": False, "cards": []}}}
    assert sped(none).outcome == "accept"
    assert "bench" not in SPEED.args(view(SPEED, none), "apply")


def test_a_floor_binds_also_without_a_baseline() -> None:
    plan = {"baseline": {"floors": {"h2d": 50.0}}}
    assert sped({}, plan=plan, bench=bench(51.0)).outcome == "accept"
    low = sped({}, plan=plan, bench=bench(49.0))
    assert low.outcome == "reject" and f"card 0 ({UUIDS[0]})" in low.why and "at least 50 GB/s" in low.why


def test_stress_is_asked_for_with_the_begin_of_the_change_and_judged() -> None:
    params = SPEED.params.model_validate({"stress": "20s"}).model_dump(mode="json", by_alias=True, exclude_none=True)
    asked = SPEED.args(view(SPEED, {"seal/host": SEALED}, params=params), "apply")
    assert asked["stress"]["seconds"] == 20 and asked["stress"]["since"] == TWO_H100["at"]
    cards = [{"index": i, "uuid": uuid, "pci": "0000:1b:00.0", "ok": not i, "why": "no progress for 30 s at round 7"}
             for i, uuid in enumerate(UUIDS)]  # fmt: skip
    said = sped({"seal/host": SEALED}, params, stress={"cards": cards, "seconds": 20})
    assert said.outcome == "reject" and f"card 1 ({UUIDS[1]} at 0000:1b:00.0): no progress for 30 s" in said.why


@pytest.mark.parametrize(
    ("mode", "fields", "outcome"),
    [
        ("required", {"state": "done", "bench": bench(54.0)}, "accept"),
        ("best_effort", {"state": "not_done", "why": "no driver", "bench": {"ok": False}}, "accept"),
        ("required", {"state": "not_done", "why": "no driver", "bench": {"ok": False}}, "reject"),
        ("best_effort", {"state": "unknown", "why": "hung", "bench": {"ok": False, "hung": True}}, "hold"),
        ("best_effort", {"state": "running"}, "again"),
    ],
)
def test_how_much_a_baseline_matters_is_the_plans_word(mode: str, fields: dict[str, Any], outcome: str) -> None:
    said = BASELINE.report.model_validate(fields)
    assert BASELINE.judge(view(BASELINE, params={"mode": mode}), said).outcome == outcome


HOLDER = {"pid": 41, "comm": "python3", "unit": "modelserver.service", "devices": ["/dev/nvidia0"]}
REMEDY = "gpu_users: {policy: stop, services: [modelserver.service]}"


def test_preflight_tells_before_the_question_who_holds_a_gpu_and_what_is_past_its_life() -> None:
    said = report(PREFLIGHT, facts=patched({"gpu_users": [HOLDER], "clock": {"epoch": 1780000000}}))
    plan = {"gpu_users": {"policy": "wait"}, "stack": {"provider": "apt", "driver": "570.172.08"}}
    lines = PREFLIGHT.preview(view(PREFLIGHT, plan=plan), said)
    assert "GPU in use by pid 41 python3 (modelserver.service): is waited for" in lines
    assert f"warning: modelserver.service holds the GPU; policy wait will time out: {REMEDY}" in lines
    assert any("driver branch R570 (PB) reached its end of life" in line for line in lines)
    stopped = {**plan, "gpu_users": {"policy": "stop", "services": ["modelserver.service"]}}
    assert not [line for line in PREFLIGHT.preview(view(PREFLIGHT, plan=stopped), said) if "warning" in line]


def test_a_drain_that_a_service_held_up_names_the_remedy() -> None:
    from gpuchange.providers.drain.gpu_users import PROVIDER as USERS

    held = USERS.report.model_validate({"state": "not_done", "why": "300 of 300 s waited", "users": [HOLDER]})
    assert USERS.judge(view(USERS), held).why == f"300 of 300 s waited; {REMEDY}"
    by_hand = held.model_copy(update={"users": tuple(u.model_copy(update={"unit": "s.scope"}) for u in held.users)})
    assert USERS.judge(view(USERS), by_hand).why == "300 of 300 s waited"
