"""Single steps of one host, as the engine plays and judges them, with the accepted reports kept as evidence."""

from __future__ import annotations

from typing import Any

from playing import Player

from gpuchange import providers
from gpuchange.providers.contract import HostView
from gpuchange.reports import Verdict

PLAN: dict[str, Any] = {
    "record": {"paths": ["/srv/models"], "services": ["modelserver.service"], "rehash": "moved"},
    "backup": [{"provider": "rsync", "paths": ["/srv/models"], "to": "/var/backup"}],
}


class Operator:
    """Plays steps of one host as the engine does and keeps the accepted reports as evidence."""

    def __init__(self, player: Player, **plan: Any) -> None:
        self.player, self.plan = player, {**PLAN, **plan}
        self.evidence: dict[str, Any] = {}

    def step(self, key: str, mode: str = "apply", **params: Any) -> tuple[dict[str, Any], Verdict]:
        phase, name = key.split("/")
        provider = providers.find(phase, name)
        assert provider
        direction: Any = "undo" if mode == "undo" else "do"
        given = {**provider.params(**params).model_dump(mode="json")}
        view = HostView(
            self.player.name, self.plan, given, self.evidence, self.evidence, waited=3600.0, direction=direction
        )
        body = self.player.until(provider.role, mode, provider.args(view, mode), direction)  # type: ignore[arg-type]
        judge = provider.judge_undo if direction == "undo" else provider.judge
        verdict = judge(view, provider.report.model_validate(body))
        if verdict.outcome == "accept" and mode == "apply":
            self.evidence[key] = body
        return body, verdict
