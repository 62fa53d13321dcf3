"""Steps of one lab host played through their providers' arguments and judges, for states that a test stages there."""

from __future__ import annotations

from typing import Any

from playing import Player

from gpuchange import providers
from gpuchange.lab import Host
from gpuchange.providers.contract import HostView
from gpuchange.reports import Verdict

TOOLKIT = {"container_toolkit": "1.17.8"}
OLD, OVERNIGHT, WANTED = "550.54.15", "550.163.01", "570.172.08"


class Steps:
    """Plays steps of one host through their providers' arguments and judges; accepted reports become evidence."""

    def __init__(self, player: Player, **stack: Any) -> None:
        self.player = player
        self.plan: dict[str, Any] = {"stack": {"provider": "apt", **stack}} if stack else {}
        self.evidence: dict[str, Any] = {}

    @property
    def host(self) -> Host:
        return self.player.host

    def step(self, key: str, mode: str = "apply", waited: float = 3600.0, **params: Any) -> Verdict:
        provider = providers.find(*key.split("/"))
        assert provider
        direction: Any = "undo" if mode == "undo" else "do"
        given = provider.params(**params).model_dump(mode="json")
        view = HostView("gpu1", self.plan, given, self.evidence, self.evidence, waited=waited, direction=direction)
        body = self.player.until(provider.role, mode, provider.args(view, mode), direction)  # type: ignore[arg-type]
        judge = provider.judge_undo if direction == "undo" else provider.judge
        verdict = judge(view, provider.report.model_validate(body))
        if verdict.outcome == "accept" and mode == "apply":
            self.evidence[key] = body
        self.body = body
        return verdict


def seen_by(verdict: Verdict) -> str:
    return "\n".join([verdict.why, *verdict.findings])
