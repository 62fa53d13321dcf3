"""change/manual: a card changed by hand. The host is powered off and seen off, an operator is told what to do and
confirms, the host comes back, and its cards must be those that were announced. Undo: the old card is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gpuchange.checks import card_swap, identity, references
from gpuchange.checks.card_swap import Found, Swap
from gpuchange.checks.cards import Smi
from gpuchange.checks.snapshot import Snapshot, mapping, parse, rows
from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.facts import evidence, sealed
from gpuchange.providers.types import AbsPath, Argv, Duration, HostPattern, Name, Text, refuse
from gpuchange.reports import Report, Verdict, by_state

PREFLIGHT = "preflight/manual"
ASK_AGAIN_S, LOOK_AGAIN_S = 30.0, 5.0
LONGEST_WATCH_S = 40


def _a_card(value: str) -> str:
    known = card_swap.is_slot(value) or value.startswith("GPU-") or value.isalnum()
    if not known:
        refuse(f"{value} is neither a serial number nor a UUID nor a slot", "write what nvidia-smi -q shows")
    return value


def _watchable(value: int) -> int:
    if value > LONGEST_WATCH_S:
        refuse(f"{value}s is longer than {LONGEST_WATCH_S}s", f"write at most {LONGEST_WATCH_S}s")
    return value


class Coming(BaseModel):
    """What is known of the card that comes; what is not said is not checked, but the model must be the old one's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    serial: Name | None = Field(None, description="Its serial number, as printed on it.")
    uuid: Name | None = Field(None, description="Its UUID (GPU-...), where it is known.")
    name: Text | None = Field(None, description="Its model as nvidia-smi writes it; default: the same as before.")
    vbios: Name | None = Field(None, description="Its video BIOS version.")


class CardEntry(BaseModel):
    """One card that goes, and the one that comes into its slot."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: HostPattern | None = Field(None, description="Only on this host; default: on every host of the plan.")
    goes: Annotated[Text, AfterValidator(_a_card)] = Field(
        description="Serial, UUID or slot (0000:1b:00.0) of the old one."
    )
    comes: Coming = Field(Coming.model_validate({}), description="What is known of the new card.")


class ManualParams(Params):
    """A card change by hand."""

    cards: tuple[CardEntry, ...] = Field(min_length=1, description="Which cards go and what comes.")
    off_for: Annotated[Duration, AfterValidator(_watchable)] = Field(
        20, description="How long a host must be silent before it counts as off."
    )
    off_within: Duration = Field(600, description="How long it may take to shut down; then it is held.")
    confirm_within: Duration = Field(86400, description="How long to wait for the confirmation; then it is held.")
    return_within: Duration = Field(1800, description="How long the host may take to come back after it.")
    settle: Duration = Field(120, description="How long the cards may take to answer once it is back.")
    power_status: Argv | None = Field(
        None, description="Command on the controller; its last word must be off (a BMC's). {host} stands for the host."
    )
    references: tuple[AbsPath, ...] = Field((), description="More files and directories that may name cards by UUID.")
    stale_references: Literal["hold", "report"] = Field(
        "hold", description="What to do when configuration still names a card that is gone."
    )


class CardReport(Report):
    """`stage`: looked (cards in `seen`), ordered (told to power off), away, doubtful. `heard`: who said what of it."""

    stage: Literal["looked", "ordered", "away", "doubtful"]
    seen: dict[str, Any] = Field(default_factory=dict)  # not `facts`: these are the cards alone, no picture of a host
    references: tuple[Any, ...] = ()
    heard: tuple[str, ...] = ()
    ordered_boot: str = ""

    @property
    def picture(self) -> Snapshot:
        return parse(self.seen)


# ------------------------------------------------------------------------------------------------- what is wanted


def entries(view: HostView, params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The plan's cards of this host."""
    return [row for row in rows(params.get("cards")) if row.get("host") in (None, view.host)]


def before(view: HostView) -> Mapping[str, Any]:
    """The facts that tell the cards before the change: the seal's, or preflight's where nothing was sealed yet."""
    facts: Mapping[str, Any] = mapping(sealed(view).get("facts")) or mapping(evidence(view, PREFLIGHT).get("seen"))
    return facts


def swaps(view: HostView, params: Mapping[str, Any]) -> tuple[Swap, ...]:
    picture = parse(before(view))
    return card_swap.resolve(entries(view, params), picture.smi, picture.pci).swaps


def aimed(view: HostView) -> tuple[Swap, ...]:
    """What is to come in this direction: the plan's cards, or the old ones."""
    wanted = swaps(view, view.params)
    return card_swap.back(wanted) if view.direction == "undo" else wanted


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    command = [word.replace("{host}", view.host) for word in view.params.get("power_status") or ()]
    asked = view.memo.get("stage") in ("asked", "return")
    return {
        "goal": [_goal(swap) for swap in aimed(view)],
        "confirmed": view.confirmed,
        "generation": view.retries,
        "references": list(view.params.get("references") or ()),
        "knock": {
            "expected": bool(view.memo) or view.confirmed or view.retries > 0,
            "window": 0 if asked else view.params.get("off_for", 20),
            "power_status": command,
        },
    }


def _goal(swap: Swap) -> dict[str, str]:
    known = {"slot": swap.slot, "serial": swap.comes.serial, "uuid": swap.comes.uuid}
    known["other_than"] = swap.goes.uuid if swap.goes else None
    return {key: value for key, value in known.items() if value}


# ------------------------------------------------------------------------------------------------------- judging


def judge(view: HostView, report: CardReport) -> Verdict:
    """Where the work by hand stands. Pure; the same in both directions but for the cards that are to come."""
    if not aimed(view):
        return Verdict.accept("no card of this host is to be changed")
    if report.state not in ("done", "running"):
        return by_state(report)
    if report.stage == "looked":
        return _looked(view, report)
    return _confirmed_and_not_back(view, report) if view.confirmed else _going_off(view, report)


def _memo(view: HostView, stage: str) -> dict[str, Any]:
    """The stage and when it began (seconds of this step's waiting); an operator's retry begins it anew."""
    known = view.memo.get("stage") == stage and view.memo.get("retries") == view.retries
    return dict(view.memo) if known else {"stage": stage, "since": view.waited, "retries": view.retries}


def _within(view: HostView, stage: str, limit: str, again: Verdict, over: str) -> Verdict:
    """`again`, remembered as `stage`, until the plan's `limit` is over."""
    memo = _memo(view, stage)
    seconds = int(view.params.get(limit) or 0)
    if view.waited - float(memo["since"]) >= seconds:
        return Verdict.hold(f"{over} (waited {seconds} s, {limit})")
    return Verdict.again(again.after, again.why, again.asks, memo)


def _going_off(view: HostView, report: CardReport) -> Verdict:
    heard = "; ".join(report.heard)
    if report.stage == "ordered":
        wait = Verdict.again(LOOK_AGAIN_S, f"{view.host} is shutting down")
        return _within(view, "off", "off_within", wait, f"{view.host} was told to power off and still answers")
    if report.stage == "doubtful":
        wait = Verdict.again(LOOK_AGAIN_S, f"NOT safe to open {view.host}: {heard}")
        return _within(view, "off", "off_within", wait, f"{view.host} does not count as off, NOT safe to open: {heard}")
    why = f"{view.host} is off ({heard}); it waits for hands"
    return _ask(view, Verdict.again(ASK_AGAIN_S, why, _steps(view)))


def _ask(view: HostView, wait: Verdict) -> Verdict:
    return _within(view, "asked", "confirm_within", wait, f"nobody has confirmed the work on {view.host}")


def _steps(view: HostView) -> tuple[str, ...]:
    """What an operator is told, line by line."""
    wanted = aimed(view)
    was = {card.bus_id: card for card in parse(before(view)).cards}
    out = [f"take the card out of slot {swap.slot}{_known(view, swap, was)}" for swap in wanted]
    put = [f"put into slot {swap.slot}: {swap.comes}" for swap in wanted]
    return (
        f"{view.host} was powered off: make sure that it has no power (lights, plug, BMC) before you open it",
        *out,
        *put,
        f"close {view.host}, power it on, then confirm",
    )


def _known(view: HostView, swap: Swap, was: Mapping[str, Any]) -> str:
    if view.direction == "undo":
        return ", if it is not the one below"
    return f": {card_swap.described(swap.goes or was.get(swap.slot))}"


def _confirmed_and_not_back(view: HostView, report: CardReport) -> Verdict:
    heard = "; ".join(report.heard)
    if report.stage == "ordered":
        return Verdict.hold(
            f"the work on {view.host} was confirmed, but it has not been off since it was told to (boot id unchanged); "
            f"power-cycle it, then gpuchange resolve --retry"
        )
    wait = Verdict.again(LOOK_AGAIN_S, f"confirmed; waiting for {view.host} to come back ({heard})")
    return _within(view, "return", "return_within", wait, f"{view.host} has not come back after the work: {heard}")


def _looked(view: HostView, report: CardReport) -> Verdict:
    if report.ordered_boot and not view.confirmed:
        why = f"{view.host} is on again, but nobody has confirmed that the work is done; NOT safe to open"
        return _ask(view, Verdict.again(ASK_AGAIN_S, why, (f"when the work on {view.host} is done, confirm",)))
    now = report.picture
    if not now.smi.ok:
        wait = Verdict.again(LOOK_AGAIN_S, f"{view.host} is back; its cards do not answer yet: {now.smi.why}")
        settling = _within(view, "settle", "settle", wait, "")
        if settling.outcome == "again":
            return settling
    found = _found(view, report, now)
    if found.problems:
        return Verdict.hold(_words(view, found.problems), (*found.problems, *found.notes))
    return Verdict.accept("; ".join(str(line) for line in found.notes[:1]), found.notes)


def _found(view: HostView, report: CardReport, now: Snapshot) -> Found:
    was = parse(before(view))
    cards = card_swap.judge(aimed(view), was.smi, now.smi, now.pci, was.pci)
    machine = identity.moved(before(view), report.seen)
    stale, noted = _stale(view, report, now.smi) if now.smi.ok else ((), ())
    return Found((*machine, *cards.problems, *stale), (*cards.notes, *noted))


def _stale(view: HostView, report: CardReport, now: Smi) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(what this change left behind, what named no card before either)."""
    named = references.parse(list(report.references))
    dead = references.stale(named, [card.uuid for card in now.cards if card.uuid])
    known = references.stale(
        references.parse(evidence(view, PREFLIGHT).get("references")),
        [card.uuid for card in parse(before(view)).cards if card.uuid],
    )
    ours = references.sentences([each for each in dead if each not in known], "old UUID still referenced in")
    old = references.sentences([each for each in dead if each in known], "named no card before either:")
    return (ours, old) if view.params.get("stale_references", "hold") == "hold" else ((), (*ours, *old))


def _words(view: HostView, problems: Sequence[str]) -> str:
    """The problems and what to do: cards need the power off, files do not."""
    cards = any(not line.startswith("old UUID") for line in problems)
    remedy = f"power {view.host} off, put it right, power it on" if cards else "write the new UUID there"
    return f"{'; '.join(problems)}. To go on: {remedy}, then resolve --retry; or --undo"


def moves(view: HostView) -> Mapping[str, tuple[str, ...]]:
    """Slot → what of its card's identity this change may move."""
    wanted = swaps(view, view.params)
    return {swap.slot: ("gpu_uuid", "serial", *(("gpu_name",) if swap.comes.name else ())) for swap in wanted}


PROVIDER = Provider(
    phase="change",
    name="manual",
    does="Power the host off for a card change by hand, wait for the confirmation, check the cards that came back.",
    params=ManualParams,
    report=CardReport,
    args=args,
    judge=judge,
    judge_undo=judge,
    may_change=("gpu_uuid", "serial"),
    moves=moves,
    root_for="to power the host off, its unit, and configuration that names cards",
    binaries=("nvidia-smi", "systemctl"),
    estimate_s=1800.0,
)
