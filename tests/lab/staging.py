"""States that a test stages on a lab host: the versions there are, and steps played there one by one."""

from __future__ import annotations

from typing import Any

from playing import Player
from stepping import Operator

from gpuchange.reports import Verdict

TOOLKIT = {"container_toolkit": "1.17.8"}
OLD, OVERNIGHT, WANTED = "550.54.15", "550.163.01", "570.172.08"


class Steps:
    """An operator's steps under a plan of this stack alone; `body` is the last report."""

    def __init__(self, player: Player, **stack: Any) -> None:
        self.player, self.operator = player, Operator(player)
        self.plan = {"stack": {"provider": "apt", **stack}} if stack else {}
        self.body: dict[str, Any] = {}

    @property
    def evidence(self) -> dict[str, Any]:
        return self.operator.evidence

    def step(self, key: str, mode: str = "apply", **params: Any) -> Verdict:
        self.operator.plan = self.plan
        self.body, verdict = self.operator.step(key, mode, **params)
        return verdict


def seen_by(verdict: Verdict) -> str:
    return "\n".join([verdict.why, *verdict.findings])
