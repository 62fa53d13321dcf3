"""Do the cards work? Reads what the GPU tester measured on a host (`gpuchange_cuda.function_test`); pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from gpuchange.checks.cards import Card
from gpuchange.reports import Verdict


class CallError(BaseModel):
    """The first driver API call that failed."""

    model_config = ConfigDict(frozen=True)

    call: str
    code: int
    name: str
    text: str


class Check(BaseModel):
    """One comparison with the CPU: how many 32-bit words differ."""

    model_config = ConfigDict(frozen=True)

    mismatches: int
    bytes: int = 0
    elements: int = 0


class TestedCard(BaseModel):
    model_config = ConfigDict(frozen=True)

    index: int
    uuid: str = ""
    pci: str = ""
    name: str = ""
    memory_bytes: int = 0
    ok: bool
    why: str = ""
    checks: Mapping[str, Check] = {}
    error: CallError | None = None


class FunctionResult(BaseModel):
    """What came back for all cards of a host. `driver_api` 12040 is CUDA 12.4; `hung`: SIGKILL did not end it."""

    model_config = ConfigDict(frozen=True)

    ok: bool
    why: str = ""
    count: int = 0
    driver_api: int = 0
    hung: bool = False
    cards: tuple[TestedCard, ...] = ()
    error: CallError | None = None


REQUIRED_CHECKS = frozenset({"copy", "words", "floats"})


def judge_function(report: Mapping[str, Any], expected_cards: Collection[str] | int) -> Verdict:
    """accept when every expected card (UUIDs, or how many) answered and computed right; reject naming what did not.

    hold when the driver hung so that the test could not even be killed: nothing more can be done from here.
    """
    try:
        result = FunctionResult.model_validate(report)
    except ValidationError as error:
        return Verdict.hold(f"the GPU test's report cannot be read: {error.errors()[0]['msg']}")
    if result.hung:
        return Verdict.hold(f"GPU test {result.why}")
    findings = (*_start(result), *_missing(result, expected_cards), *_broken(result))
    if findings:
        return Verdict.reject(findings[0], findings=findings)
    return Verdict.accept(f"{result.count} cards compute right", findings=tuple(map(_sentence, result.cards)))


def expected(cards: Collection[Card], count: Collection[str] | int) -> Collection[str] | int:
    """What the driver API is to show: `count`, but where a card is in MIG mode a process sees one device, under its
    own MIG name.
    """
    return 1 if any(card.mig_mode == "Enabled" for card in cards) else count


def _start(result: FunctionResult) -> tuple[str, ...]:
    """Why no card was even reached."""
    return (f"GPU test failed: {result.why}",) if not result.ok and not result.cards else ()


def _missing(result: FunctionResult, expected: Collection[str] | int) -> tuple[str, ...]:
    if isinstance(expected, int):
        short = len(result.cards) < expected
        return (f"{expected} cards expected, the driver sees {len(result.cards)}",) if short else ()
    seen = {card.uuid for card in result.cards}
    return tuple(f"card {uuid} is missing" for uuid in sorted(set(expected) - seen))


def _broken(result: FunctionResult) -> tuple[str, ...]:
    return tuple(f"{_name(card)}: {why}" for card in result.cards if (why := _fault(card)))


def _fault(card: TestedCard) -> str:
    """Judged by the numbers, not by the card's own `ok`; a check that did not run counts as failed."""
    if card.error:
        return card.why
    wrong = [f"{check.mismatches} wrong results in {name}" for name, check in card.checks.items() if check.mismatches]
    unknown = [f"{name} was not checked" for name in sorted(REQUIRED_CHECKS - card.checks.keys())]
    return "; ".join(wrong + unknown) or ("" if card.ok else card.why or "failed")


def _name(card: TestedCard) -> str:
    return f"card {card.index} ({card.uuid or card.pci or 'unidentified'})"


def _sentence(card: TestedCard) -> str:
    compared = sum(check.elements for check in card.checks.values())
    return f"{_name(card)}: {card.name}, {card.memory_bytes >> 20} MiB, {compared} results equal the CPU's"
