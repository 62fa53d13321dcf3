"""From evidence to outcome: which event a report, a failure or a silence becomes. Pure.

The provider's judge speaks about a report that could be read; this module knows what all providers share: broken
reports, failures, owner markers, unreachable and silent hosts, and what a probe's answer means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from gpuchange.checks import fingerprint
from gpuchange.providers.contract import HostView, Provider
from gpuchange.reports import Evidence, Failed, Report, Reported, Silent, Unreachable, Verdict
from gpuchange.states import Kind

FIRST_BACKOFF, LONGEST_BACKOFF = 2.0, 30.0
SILENT_LIMIT = 2
CHANGED_KEY = "REMOTE HOST IDENTIFICATION HAS CHANGED"  # OpenSSH's own words


@dataclass(frozen=True)
class Situation:
    """What the engine knows beside the evidence: the step's play, how long it waited, how often it was lost."""

    provider: Provider
    view: HostView
    tasks: str  # apply, undo or probe
    lost: int = 0  # LOST in a row before this one
    lost_waited: float = 0.0  # seconds spent waiting for an unreachable host so far
    unreachable_limit: float = 600.0
    before_change: bool = False  # preflight: nothing to lose by giving up at once
    was_silent: bool = False  # the intent now probed ended without a word
    silence: str = ""  # what was known of that silence
    stopping: bool = False  # the controller was told to stop; a stop of its whole service ends the plays as well
    reviewed: Mapping[str, Any] | None = None  # what the host must still be, when that was reviewed and not yet changed


@dataclass(frozen=True)
class Outcome:
    kind: Kind
    data: dict[str, Any] = field(default_factory=dict)
    body: dict[str, Any] | None = None


def judge(situation: Situation, evidence: Evidence) -> Outcome:
    if isinstance(evidence, Reported):
        return _reported(situation, evidence)
    if isinstance(evidence, Failed):
        return _failed(situation, evidence)
    if isinstance(evidence, Unreachable):
        return _unreachable(situation, evidence)
    return _silent(situation, evidence)


def _reported(situation: Situation, evidence: Reported) -> Outcome:
    try:
        report = situation.provider.report.model_validate(evidence.report)
    except ValidationError as error:
        first = error.errors()[0]
        field_name = ".".join(str(part) for part in first["loc"])
        return _failed(situation, Failed(evidence.host, f"unreadable report: {field_name}: {first['msg']}"))
    probed = _probed(situation, report) if situation.tasks == "probe" else None
    outcome = probed or _verdict(situation, _ask(situation, report))
    if moved := _moved(situation, evidence.report) if outcome.kind is Kind.ACCEPTED else ():
        return Outcome(
            Kind.HELD, {"why": f"not as reviewed: {'; '.join(moved)}", "moved": list(moved)}, evidence.report
        )
    return Outcome(outcome.kind, {**outcome.data, **_flags(evidence.report)}, evidence.report)


def _moved(situation: Situation, report: dict[str, Any]) -> tuple[str, ...]:
    return fingerprint.moved(situation.reviewed, fingerprint.of(report)) if situation.reviewed else ()


def _flags(report: dict[str, Any]) -> dict[str, Any]:
    return {"as_wanted": bool(report["as_wanted"])} if "as_wanted" in report else {}


def _ask(situation: Situation, report: Report) -> Verdict:
    provider = situation.provider
    undone = situation.view.direction == "undo"
    try:
        return (provider.judge_undo if undone else provider.judge)(situation.view, report)
    except Exception as error:  # a judge that stumbles over one host's words must not stop the others
        return Verdict.hold(f"the report could not be judged ({type(error).__name__}: {error}); this is a defect")


def _probed(situation: Situation, report: Report) -> Outcome | None:
    """What only a probe can say; None: the judge decides as for a play that acted."""
    if report.state != "not_done":
        return None
    if situation.was_silent:
        return Outcome(Kind.REJECTED, {"why": f"{situation.silence or 'no result'}; a look shows that it was not done"})
    return Outcome(Kind.NOT_DONE, {"why": report.why})


def _verdict(situation: Situation, verdict: Verdict) -> Outcome:
    data: dict[str, Any] = {"why": verdict.why}
    if verdict.findings:
        data["findings"] = list(verdict.findings)
    if verdict.outcome == "again":
        data |= {"after": verdict.after, "waited": situation.view.waited + verdict.after}
        data |= {"asks": list(verdict.asks)} if verdict.asks else {}
        data |= {"memo": dict(verdict.memo)} if verdict.memo is not None else {}
        return Outcome(Kind.AGAIN, data)
    kinds = {"accept": Kind.ACCEPTED, "reject": Kind.REJECTED, "hold": Kind.HELD}
    return Outcome(kinds[verdict.outcome], data)


def _failed(situation: Situation, evidence: Failed) -> Outcome:
    data: dict[str, Any] = {"why": evidence.why}
    if evidence.where and evidence.where != evidence.host:
        data["where"] = evidence.where
    if evidence.refused:
        return Outcome(Kind.HELD, {**data, "refused": evidence.refused})
    # A probe that fails says nothing about the host: a human must look.
    return Outcome(Kind.HELD if situation.tasks == "probe" else Kind.REJECTED, data)


def _unreachable(situation: Situation, evidence: Unreachable) -> Outcome:
    where = evidence.where or evidence.host
    data: dict[str, Any] = {"why": f"{where} unreachable: {evidence.why}", "unreachable": True, "where": where}
    if situation.before_change:
        return Outcome(Kind.REJECTED, data)
    if CHANGED_KEY in evidence.why:
        return Outcome(Kind.HELD, {**data, "why": f"{where} is up but presents a different host key"})
    if situation.lost_waited >= situation.unreachable_limit:
        return Outcome(Kind.HELD, data)
    after = min(FIRST_BACKOFF * 2**situation.lost, LONGEST_BACKOFF)
    return Outcome(Kind.LOST, {**data, "after": after, "waited": situation.lost_waited + after})


def _silent(situation: Situation, evidence: Silent) -> Outcome:
    ours = evidence.stopped or situation.stopping  # says nothing about the host: a look on resume decides
    data = {"why": evidence.why, "silent": not ours, "after": 0.0, "waited": situation.lost_waited}
    if ours:
        return Outcome(Kind.LOST, data)
    if situation.before_change:
        return Outcome(Kind.REJECTED, data)
    if situation.lost >= SILENT_LIMIT:
        return Outcome(Kind.HELD, data)
    return Outcome(Kind.LOST, data)
