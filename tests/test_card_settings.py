"""What an operator has set on the cards, compared over a change; and what holds a host for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_checks_host import TWO_H100
from test_providers_host import COUNTS, FUNCTION, MANIFEST, SEALED, report, view

from gpuchange.checks import card_settings, gpu_function, soak, stress
from gpuchange.checks.cards import Card, Mig
from gpuchange.providers.seal.host import PROVIDER as SEAL
from gpuchange.providers.verify.gpu import PROVIDER as SPEED
from gpuchange.providers.verify.host import PROVIDER as VERIFY
from gpuchange.reports import Verdict

FIRST = "0000:1b:00.0"


def devices(*profiles: str, place: bool = True) -> tuple[Mig, ...]:
    return tuple(
        Mig(profile=profile, uuid=f"MIG-{n}", instance=str(n), compute="0", place=f"{n}:1" if place else "")
        for n, profile in enumerate(profiles)
    )


WELL = Card(
    uuid="GPU-a", bus_id=FIRST, ecc="Enabled", ecc_pending="Enabled", mig_mode="Enabled", mig_pending="Enabled",
    persistence="Enabled", power_limit="700.00 W", compute_mode="Default", clocks="1980 MHz/2619 MHz",
    mig=devices("1g.10gb", "1g.10gb", "3g.40gb"),
)  # fmt: skip


def told(**moved: Any) -> str:
    return "; ".join(card_settings.compare([WELL], [WELL.model_copy(update=moved)]).problems)


@pytest.mark.parametrize(
    ("moved", "says"),
    [
        ({"ecc": "Disabled", "ecc_pending": "Disabled"}, f"ECC mode of GPU 0 ({FIRST}) should be Enabled, is Disabled"),
        (
            {"ecc": "Disabled"},
            f"ECC mode of GPU 0 ({FIRST}) should be Enabled, is Disabled, Enabled is pending: "
            "a reset or reboot is still needed",
        ),
        (
            {"mig_pending": "Disabled"},
            f"MIG mode of GPU 0 ({FIRST}) is Enabled, Disabled is pending: a reset or reboot makes it count",
        ),
        ({"power_limit": "500.00 W"}, f"power limit of GPU 0 ({FIRST}) should be 700.00 W, is 500.00 W"),
        ({"persistence": None}, f"persistence mode of GPU 0 ({FIRST}) should be Enabled, is not told"),
        (
            {"clocks": "1200 MHz/2619 MHz"},
            f"application clocks of GPU 0 ({FIRST}) should be 1980 MHz/2619 MHz, is 1200 MHz/2619 MHz",
        ),
        ({"clocks": None}, ""),
        ({"power_limit": "699.98 W"}, ""),
        (
            {"mig": ()},
            f"MIG geometry differs: had 1x3g.40gb+2x1g.10gb on GPU 0 ({FIRST}), now none: "
            "nvidia-smi mig -i 0 -cgi 1g.10gb:0,1g.10gb:1,3g.40gb:2 -C",
        ),
        (
            {"mig": devices("1g.10gb")},
            f"MIG geometry differs: had 1x3g.40gb+2x1g.10gb on GPU 0 ({FIRST}), now 1x1g.10gb",
        ),
        ({"mig": devices("3g.40gb", "1g.10gb", "1g.10gb")}, ""),
    ],
)  # fmt: skip
def test_a_setting_that_a_change_lost_is_told_with_its_card(moved: dict[str, Any], says: str) -> None:
    assert told(**moved) == says


def test_what_was_pending_before_is_the_operators_own_wish() -> None:
    waits = WELL.model_copy(update={"ecc_pending": "Disabled"})
    assert card_settings.compare([waits], [waits]).problems == ()
    assert len(card_settings.pending([waits])) == 1


def test_exchanged_and_sick_cards_are_left_to_others() -> None:
    lost = WELL.model_copy(update={"power_limit": "1 W"})
    assert card_settings.compare([WELL], [lost], but={FIRST: ("gpu_uuid",)}).problems == ()
    assert card_settings.compare([WELL], [lost.model_copy(update={"sick": "GPU is lost"})]).problems == ()


def test_new_uuids_of_the_same_geometry_are_worth_a_note() -> None:
    renamed = WELL.model_copy(update={"mig": tuple(d.model_copy(update={"uuid": "MIG-x"}) for d in WELL.mig)})
    found = card_settings.compare([WELL], [renamed])
    assert found.problems == () and "MIG-0, MIG-1, MIG-2 are gone" in found.notes[0]


@pytest.mark.parametrize("mig", [devices("1g.10gb", place=False), devices("1c.3g.40gb"), ()])
def test_no_command_is_told_that_would_make_something_else(mig: tuple[Mig, ...]) -> None:
    assert card_settings.create(0, WELL.model_copy(update={"mig": mig})) == ""


# ------------------------------------------------------------------------------------------------------- verify


def verified(out: str, waited: float = 3600.0, **params: Any) -> Verdict:
    facts = {**TWO_H100, "smi": {**TWO_H100["smi"], "out": out}}
    seen = view(VERIFY, {"seal/host": SEALED}, waited=waited)
    fields = {"facts": facts, "manifest": {**MANIFEST, "compare": COUNTS}, "function": FUNCTION}
    return VERIFY.judge(replace(seen, params={**seen.params, **params}), report(VERIFY, **fields))


POWER = "<current_power_limit>700.00 W</current_power_limit>"
LOWER = TWO_H100["smi"]["out"].replace(POWER, POWER.replace("700", "500"), 1)


def test_a_lost_setting_is_waited_for_then_holds_the_host_unless_the_plan_says_otherwise() -> None:
    assert TWO_H100["smi"]["out"] != LOWER
    assert verified(LOWER, waited=0.0).outcome == "again"
    held = verified(LOWER)
    assert held.outcome == "hold" and "power limit of GPU 0" in held.why, held
    passed = verified(LOWER, card_settings="report")
    assert passed.outcome == "accept" and any("power limit of GPU 0" in line for line in passed.findings), passed


def test_settings_are_asked_to_be_set_again_only_where_the_plan_says_so() -> None:
    for word, cards in (("hold", 0), ("report", 0), ("restore", 2)):
        seen = view(VERIFY, {"seal/host": SEALED}, plan={"verify": {"card_settings": word}})
        assert len(VERIFY.args(seen, "apply")["card_settings"]) == cards, word
        back = replace(view(SEAL, {"seal/host": SEALED}, plan=seen.plan), direction="undo")
        assert len(SEAL.args(back, "undo")["card_settings"]) == cards, word
        assert "card_settings" not in SEAL.args(replace(back, direction="do"), "apply")
    goal = card_settings.goal([WELL])[0]
    assert goal["mig"] == ["1g.10gb:0", "1g.10gb:1", "3g.40gb:2"] and goal["power_limit"] == 700.0
    assert card_settings.goal([WELL.model_copy(update={"mig": devices("1c.3g.40gb")})])[0]["mig"] == []


def test_what_was_set_again_and_what_could_not_be_is_told() -> None:
    rows = [{"command": "nvidia-smi -pm 1", "rc": 0}, {"command": "nvidia-smi -pl 9", "rc": 2, "said": "no"}, "x", None]
    told = card_settings.restored(rows)
    assert told == ("set again: nvidia-smi -pm 1", "could not be set again: nvidia-smi -pl 9: no")


def test_a_host_in_mig_mode_shows_one_device_and_none_while_its_devices_are_gone() -> None:
    assert gpu_function.expected([WELL], ["GPU-a"]) == 1
    assert gpu_function.expected([WELL.model_copy(update={"mig_mode": "Disabled"})], ["GPU-a"]) == ["GPU-a"]


def test_the_load_of_a_host_in_mig_mode_is_not_missed_on_cards_that_no_process_sees() -> None:
    loaded = {"index": 0, "uuid": "MIG-0", "pci": FIRST, "ok": True, "rounds": 9}
    mode = "<current_mig>Disabled", "<current_mig>Enabled"
    for out, outcome in ((TWO_H100["smi"]["out"], "reject"), (TWO_H100["smi"]["out"].replace(*mode), "accept")):
        facts = {**TWO_H100, "smi": {**TWO_H100["smi"], "out": out}}
        seen = view(SPEED, {"verify/host": {"facts": facts}, "seal/host": SEALED})
        given = replace(seen, params={**seen.params, "stress": {"for": 20}})
        verdict = SPEED.judge(given, SPEED.report.model_validate({"state": "done", "stress": {"cards": [loaded]}}))
        assert verdict.outcome == outcome, verdict


# ----------------------------------------------------------------------------- a sick card that is listed, in CSV


def test_a_card_that_waits_for_a_reset_fails_the_watch_and_the_stress() -> None:
    word = "[GPU requires reset]"
    row = f"0, GPU-a, 00000000:1B:00.0, {word}, [N/A], {word}\n"
    looked = {"boot_id": "b", "smi": {"rc": 0, "out": row}}
    first = {"boot_id": "b", "smi": {"rc": 0, "out": "0, GPU-a, 00000000:1B:00.0, 31, 0, 0x0000000000000001\n"}}
    assert list(soak.faults(first, first, soak.Limits())) == []
    assert soak.faults(looked, first, soak.Limits()) == (f"GPU {FIRST} is not well: GPU requires reset",)
    sample = {"rc": 0, "out": f"GPU-a, 00000000:1B:00.0, {word}, 0, 0, 0x1, {word}, {word}\n"}
    loaded = {"index": 0, "uuid": "GPU-a", "pci": FIRST, "ok": True, "rounds": 9}
    judged = stress.judge({"cards": [loaded], "samples": [sample]}, stress.Limits())
    assert any("nvidia-smi says of it: GPU requires reset" in line for line in judged.failures), judged
    other = {**loaded, "uuid": "GPU-b"}
    judged = stress.judge({"cards": [other], "samples": [sample, sample]}, stress.Limits())
    assert judged.failures == (f"stress: card GPU-a at {FIRST}: nvidia-smi says of it: GPU requires reset",)
