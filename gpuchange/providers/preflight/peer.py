"""preflight/peer: both hosts of verify/peer have a PyTorch that can be used. Starts and changes nothing."""

from __future__ import annotations

from typing import Any

from gpuchange.checks.snapshot import mapping
from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.facts import section
from gpuchange.providers.verify.peer import PeerReport, arguments
from gpuchange.reports import Verdict, by_state


class PeerPreflight(Params):
    """Brought along by `verify: {peer: HOST}`."""


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    return {**arguments(view.host, mapping(section(view, "verify").get("peer"))), "look": True}


def judge(view: HostView, report: PeerReport) -> Verdict:
    if report.state != "done" or report.first is None:
        return by_state(report)
    parts = {part.host: part for part in (report.first, report)}
    against = tuple(
        f"{host} has no PyTorch for verify.peer: {(part.result or {}).get('why') or 'nothing was reported'}"
        for host, part in parts.items()
        if not (part.result or {}).get("ok")
    )
    lines = tuple(_line(host, part.result or {}) for host, part in parts.items())
    return Verdict.reject("; ".join(against), against) if against else Verdict.accept(findings=lines)


def _line(host: str, found: dict[str, Any]) -> str:
    return f"verify.peer: PyTorch {found.get('torch')} on {host} sees {found.get('cards')} card(s)"


PROVIDER = Provider(
    phase="preflight",
    name="peer",
    does="Ask the host and its peer for the PyTorch that they are tested with.",
    params=PeerPreflight,
    report=PeerReport,
    args=args,
    judge=judge,
    estimate_s=5.0,
)
