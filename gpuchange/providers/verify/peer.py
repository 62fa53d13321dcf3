"""verify/peer: the changed host and another one sum and train together, through PyTorch: the way that jobs go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from gpuchange.checks.snapshot import mapping
from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.types import AbsPath, Count, Duration, HostPattern, Name, OneOrMany, Word
from gpuchange.reports import Report, Verdict, by_state

LOOK_AGAIN_S = 2.0
PORT = 29517


class PeerParams(Params):
    """A host to test with: one rank on it, one on the changed host."""

    hosts: Annotated[tuple[HostPattern, ...], Field(min_length=1), OneOrMany()] = Field(
        description="Hosts or groups of the inventory; the first that is not the changed host itself is the peer."
    )
    address: Name | None = Field(
        None, description="Where the changed hosts reach the peer; default: its address in the inventory."
    )
    port: Count = Field(PORT, ge=1, le=65535, description="TCP port on which rank 0 listens on the peer.")
    backend: Literal["auto", "nccl", "gloo"] = Field(
        "auto", description="auto: nccl where PyTorch sees a card on both hosts, else gloo, on the processors."
    )
    timeout: Duration = Field(
        120, ge=5, description="How long the test may take, and a port that is in use be waited for."
    )
    python: AbsPath | None = Field(None, description="Interpreter with PyTorch, on both hosts; default: python3.")
    env: dict[Name, Word] = Field(
        default_factory=dict, description="Environment of both ranks, such as NCCL_SOCKET_IFNAME."
    )


class PeerReport(Report):
    """What rank 1, on the changed host, came to; `first`: the same of rank 0, on the peer.

    `alone`: it failed before it met the other rank; `busy`: the port is taken; `result`: {torch, cards, backend, ...}.
    """

    host: str = ""
    alone: bool = False
    busy: bool = False
    result: dict[str, Any] | None = None
    first: PeerReport | None = None


def arguments(host: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """What the module is given on either host; the role adds which of them it is."""
    return {
        "host": host,
        "peers": list(params.get("hosts") or ()),
        "address": params.get("address") or "",
        "port": params.get("port", PORT),
        "backend": params.get("backend", "auto"),
        "timeout_s": params.get("timeout", 120),
        "python": params.get("python") or "",
        "env": dict(mapping(params.get("env"))),
    }


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    return {**arguments(view.host, view.params), "generation": view.retries}


def judge(view: HostView, report: PeerReport) -> Verdict:
    first = report.first
    if first is None or report.state == "unknown":
        return by_state(report)
    title = f"test with peer {first.host}"
    if first.busy and view.waited >= view.params.get("timeout", 120):
        return Verdict.hold(f"{title}: {first.why}, and was so for {view.waited:.0f} s")
    if first.busy or report.state == "running":
        return Verdict.again(LOOK_AGAIN_S, f"{title}: {report.why}")
    failed = tuple(f"{title}: {line}" for line in _failed(report, first))
    if not failed:
        return Verdict.accept(findings=(f"{title}: {_right(report, first)}",))
    said = "; ".join(failed)
    return Verdict.hold(said, failed) if first.alone else Verdict.reject(said, failed)  # the peer was not changed


def _failed(report: PeerReport, first: PeerReport) -> Iterator[str]:
    if first.state == "not_done":
        yield f"rank 0 on {first.host}: {first.why}"
    if report.state == "not_done" and not first.alone:
        yield f"rank 1 on {report.host}: {report.why}"


def _right(report: PeerReport, first: PeerReport) -> str:
    here, there = report.result or {}, first.result or {}
    said = (
        f"all-reduce and DDP step are right: rank 0 on {first.host} (PyTorch {there.get('torch')}), "
        f"rank 1 on {report.host} (PyTorch {here.get('torch')}), by {here.get('backend')}"
    )
    bare = [part.host for part, found in ((report, here), (first, there)) if not found.get("cards")]
    if bare and here.get("backend") == "gloo":
        said += f", without cards: PyTorch sees none on {' and '.join(dict.fromkeys(bare))}"
    return said + (" (no other host is named: it spoke with itself)" if first.host == report.host else "")


def preview(view: HostView, _report: PeerReport) -> tuple[str, ...]:
    return (f"an all-reduce and a training step together with {' or '.join(view.params.get('hosts') or ())}",)


PROVIDER = Provider(
    phase="verify",
    name="peer",
    does="Sum and train together with another host, through PyTorch's NCCL or gloo.",
    params=PeerParams,
    report=PeerReport,
    root_for="a host unit that uses the first GPU",
    root_on="host and its peer",
    args=args,
    judge=judge,
    preview=preview,
    foresees=True,
    delegates=lambda params: tuple(params["hosts"]),
    estimate_s=20.0,
)
