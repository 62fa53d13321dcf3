"""What a host must tell us, and what we make of it: Report, Evidence, Verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

REPORT_SCHEMA = 1
"""Raised when a report changes its meaning; a change begun with another schema is not resumed."""


class Report(BaseModel):
    """What every report says. A provider's own report adds typed fields.

    `state`: done (as the mode wanted it), not_done, running (work goes on in a host unit; look again), unknown
    (cannot tell: a human must). `why`: one sentence when the state is not done.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    state: Literal["done", "not_done", "running", "unknown"]
    why: str = ""
    changed: bool = False


@dataclass(frozen=True)
class Verdict:
    """The judge's word: accept, reject(why), hold(why), again(after seconds, why). `findings` are lines to show.

    Of an `again`, `asks` tells an operator, line by line, what to do by hand and then to confirm; `memo` (small JSON)
    is what the step has to remember until it is looked at again.
    """

    outcome: Literal["accept", "reject", "hold", "again"]
    why: str = ""
    after: float = 0.0
    findings: tuple[str, ...] = field(default=())
    asks: tuple[str, ...] = field(default=())
    memo: Mapping[str, Any] | None = None

    @classmethod
    def accept(cls, why: str = "", findings: tuple[str, ...] = ()) -> Verdict:
        return cls("accept", why, findings=findings)

    @classmethod
    def reject(cls, why: str, findings: tuple[str, ...] = ()) -> Verdict:
        return cls("reject", why, findings=findings)

    @classmethod
    def hold(cls, why: str, findings: tuple[str, ...] = ()) -> Verdict:
        return cls("hold", why, findings=findings)

    @classmethod
    def again(
        cls, after: float, why: str, asks: tuple[str, ...] = (), memo: Mapping[str, Any] | None = None
    ) -> Verdict:
        return cls("again", why, after=after, asks=asks, memo=memo)


def by_state(report: Report) -> Verdict:
    """The verdict that the state alone asks for."""
    return {
        "done": Verdict.accept(report.why),
        "not_done": Verdict.reject(report.why),
        "running": Verdict.again(2.0, report.why),
        "unknown": Verdict.hold(report.why),
    }[report.state]


@dataclass(frozen=True)
class Reported:
    """The host published its report. `where` is the delegate that spoke, or the host itself."""

    host: str
    report: dict[str, Any]
    where: str = ""


@dataclass(frozen=True)
class Failed:
    """A task failed. `refused` is set when the host's owner marker shut us out."""

    host: str
    why: str
    where: str = ""
    refused: dict[str, Any] | None = None


@dataclass(frozen=True)
class Unreachable:
    host: str
    why: str
    where: str = ""


@dataclass(frozen=True)
class Silent:
    """The play ended and said nothing about this host: its state is unknown until probed.

    `stopped`: it was we who ended the play, so that finding nothing done is no failure.
    """

    host: str
    why: str
    stopped: bool = False


Evidence = Reported | Failed | Unreachable | Silent
