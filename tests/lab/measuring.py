"""Baseline and verify/gpu of one lab host, played and judged as the engine does, with faults that are there at once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from playing import Player

from gpuchange import providers
from gpuchange.lab import Host
from gpuchange.lab.gpu import CARDS_FILE
from gpuchange.lab.gpu.faults import FOLDER, REFRESH
from gpuchange.providers.contract import HostView
from gpuchange.reports import Verdict

HANG_S = 8
CHANGE = "measured"


@dataclass
class Bench:
    """One idle host. `evidence` is what earlier steps of the change have reported."""

    player: Player
    plan: dict[str, Any] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)
    tries: int = 0
    since: float = 0.0  # when "the change" began, for the kernel log

    @property
    def host(self) -> Host:
        return self.player.host

    def card(self, index: int) -> str:
        """The card as sentences name it."""
        cards = json.loads((self.host.root / CARDS_FILE).read_text())["cards"]
        return f"card {index} ({cards[index]['uuid']} at {cards[index]['pci'][4:].lower()})"

    def play(self, key: str, **params: Any) -> tuple[dict[str, Any], Verdict]:
        """Measured anew each time, as after an operator's retry."""
        provider = providers.find(*key.split("/"))
        assert provider
        self.tries += 1
        given = provider.params.model_validate(params).model_dump(mode="json", by_alias=True, exclude_none=True)
        view = HostView(self.player.name, self.plan, given, last=self.evidence, retries=self.tries)
        body = self.player.until(provider.role, "apply", provider.args(view, "apply"))
        return body, provider.judge(view, provider.report.model_validate(body))

    def baseline(self) -> Verdict:
        body, verdict = self.play("baseline/gpu", **self.plan.get("baseline", {}))
        self.evidence["baseline/gpu"] = body
        return verdict

    def speed(self) -> Verdict:
        return self.play("verify/gpu")[1]

    def stress(self, seconds: int = 4) -> tuple[dict[str, Any], Verdict]:
        """Stress alone, without the benchmark."""
        kept, self.evidence = self.evidence, {"seal/host": {"facts": {"at": self.since or time.time()}}}
        try:
            return self.play("verify/gpu", stress={"for": f"{seconds}s", "hang": f"{HANG_S}s"})
        finally:
            self.evidence = kept

    @contextmanager
    def broken(self, fault: str, reload: bool = False) -> Iterator[None]:
        """The fault as if the loaded driver were the bad one; `reload`: it shows when the driver is loaded."""
        self.since = self.since or time.time()
        self.player.sh(f"mkdir -p {FOLDER}; echo none > {FOLDER}/{fault}; {RELOAD if reload else REFRESH}")
        try:
            yield
        finally:
            self.since = 0.0
            self.player.sh(f"rm -f {FOLDER}/{fault}; {REFRESH}")


RELOAD = "modprobe -r nvidia_drm nvidia_uvm && modprobe nvidia-drm && modprobe nvidia-uvm"
