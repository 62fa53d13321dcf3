"""Plays single steps on a lab as the engine does: through the player, judged by the provider, again while it asks."""

from __future__ import annotations

import select
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuchange import content
from gpuchange.judging import Outcome, Situation, judge
from gpuchange.lab import Lab
from gpuchange.player import Play, Request
from gpuchange.providers import find
from gpuchange.providers.contract import HostView, Provider
from gpuchange.reports import Evidence
from gpuchange.states import Kind

LOGS = Path("/tmp/gpuchange-test-plays")


@dataclass
class Change:
    """One change on the lab. `last` is the latest report body."""

    lab: Lab
    id: str = field(default_factory=lambda: f"t-{uuid.uuid4().hex[:8]}")
    fence: int = 1
    last: dict[str, Any] = field(default_factory=dict)

    def play(self, step: str, tasks: str, host: str, *, aim: str = "", waited: float = 0.0, **params: Any) -> Outcome:
        """One play of `phase/provider`; `aim` (do, undo) is what a probe is asked about."""
        provider = provider_of(step)
        view = self.view(provider, host, aim or ("undo" if tasks == "undo" else "do"), waited, params)
        with self.started(provider, view, tasks) as play:
            evidence = _evidence(play)
        outcome = judge(Situation(provider, view, tasks), evidence)
        self.last = outcome.body or {}
        return outcome

    def settle(self, step: str, tasks: str, host: str, **params: Any) -> Outcome:
        """Play until the judge no longer says `again`."""
        outcome = self.play(step, tasks, host, **params)
        while outcome.kind is Kind.AGAIN:
            outcome = self.play(step, tasks, host, waited=outcome.data["waited"], **params)
        return outcome

    def view(self, provider: Provider, host: str, aim: Any, waited: float, params: dict[str, Any]) -> HostView:
        data = provider.params.model_validate(params).model_dump(mode="json", by_alias=True, exclude_none=True)
        return HostView(host=host, plan={}, params=data, direction=aim, waited=waited)

    @contextmanager
    def started(self, provider: Provider, view: HostView, tasks: Any) -> Iterator[Play]:
        owner = {"change": self.id, "controller": "test", "fence": self.fence, "reason": "rehearsal", "ticket": "T-1"}
        step = {"phase": provider.phase, "provider": provider.name, "direction": view.direction}
        request = Request(
            attempt=f"{self.id}/{uuid.uuid4().hex[:8]}",
            playbook=content.playbooks() / "phase.yml",
            role=provider.role,
            tasks=tasks,
            hosts=(view.host,),
            inventory=(str(self.lab.inventory),),
            host_args={view.host: provider.args(view, tasks)},
            shared={"gpuchange_owner": owner, "gpuchange_step": step},
        )
        play = Play(request, LOGS)
        try:
            yield play
        finally:
            if not play.ended:
                play.stop()
                with suppress(StopIteration):
                    _evidence(play)


def provider_of(step: str) -> Provider:
    provider = find(*step.split("/"))
    assert provider is not None, step
    return provider


def _evidence(play: Play) -> Evidence:
    """The host's evidence; the play is over afterwards."""
    found: list[Evidence] = []
    while not play.ended:
        select.select([play], [], [], 120)
        found += play.evidence()
    return found[0]
