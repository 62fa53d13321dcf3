"""drain/gpu_users: nothing uses a GPU any more; services that were stopped for it are started again on release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gpuchange.checks.snapshot import GpuUser
from gpuchange.providers.contract import WARNING, HostView, Mode, Params, Provider
from gpuchange.providers.types import Duration, UnitName
from gpuchange.reports import Report, Verdict, by_state

DAEMONS = (
    "nvidia-persistenced.service",
    "nvidia-fabricmanager.service",
    "nvidia-imex.service",
    "nvidia-powerd.service",
    "nvidia-dcgm.service",
    "dcgm.service",
)
"""Parts of the driver that hold its devices open by design; the stack stops and starts them with the driver."""


class GpuUsersParams(Params):
    """What to do with processes that still use a GPU once the host is drained."""

    policy: Literal["wait", "refuse", "stop"] = Field(
        "wait", description="wait: until none is left. refuse: fail at once. stop: stop the services listed."
    )
    timeout: Duration = Field(300, description="How long to wait for users to end or services to stop.")
    services: tuple[UnitName, ...] = Field((), description="Services to stop, and to start again on release.")
    start_within: Duration = Field(300, description="How long services may take to be active again.")


class User(BaseModel):
    """One process with a GPU device open or mapped."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    pid: int
    comm: str = ""
    cmdline: str = ""
    unit: str = ""


class GpuUsersReport(Report):
    users: tuple[User, ...] = ()
    count: int = 0
    services: dict[str, dict[str, str]] = Field(default_factory=dict)
    found: dict[str, dict[str, str]] = Field(default_factory=dict)
    started: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    return {**view.params, "daemons": list(DAEMONS)}


def judge(view: HostView, report: GpuUsersReport) -> Verdict:
    if report.state == "running":
        return Verdict.again(1.0, report.why)
    if report.state == "not_done":
        return Verdict.reject("; ".join(line for line in (report.why, remedy(view.params, report.users)) if line))
    if report.state != "done":
        return by_state(report)
    stopped = tuple(f"{unit} stopped" for unit, state in sorted(report.found.items()) if state["active"] == "active")
    return Verdict.accept(findings=(*stopped, "no process uses a GPU"))


def judge_undo(_view: HostView, report: GpuUsersReport) -> Verdict:
    if report.state == "running":
        return Verdict.again(1.0, report.why)
    if report.state != "done":
        return by_state(report)
    return Verdict.accept(findings=tuple(f"{unit} runs again" for unit in report.started))


def preview(view: HostView, report: GpuUsersReport) -> tuple[str, ...]:
    """Who uses a GPU now, and what would happen to them."""
    return (*foretold(view.params, report.users), *(f"{unit}: no such unit on this host" for unit in report.unknown))


def foretold(params: Mapping[str, Any], users: Sequence[User | GpuUser]) -> tuple[str, ...]:
    """What would happen to each user of a GPU, and what to write where that would end badly."""
    policy, listed = str(params.get("policy", "wait")), _listed(params)
    then = {"wait": "is waited for", "refuse": "stops the change of this host", "stop": "stops the change of this host"}
    lines = tuple(f"{_who(user)}: {'is stopped' if user.unit in listed else then[policy]}" for user in users)
    hint, ends = remedy(params, users), "will time out" if policy == "wait" else "will fail"
    held = ", ".join(_unlisted(params, users))
    return (*lines, f"{WARNING}{held} holds the GPU; policy {policy} {ends}: {hint}") if hint else lines


def remedy(params: Mapping[str, Any], users: Sequence[User | GpuUser]) -> str:
    """What to write into the plan when services hold the GPU: they do not end by themselves. "" when none does."""
    services = [*sorted(_listed(params)), *_unlisted(params, users)]
    return f"gpu_users: {{policy: stop, services: [{', '.join(services)}]}}" if _unlisted(params, users) else ""


def _listed(params: Mapping[str, Any]) -> set[str]:
    return set(params.get("services") or ()) if params.get("policy") == "stop" else set()


def _unlisted(params: Mapping[str, Any], users: Sequence[User | GpuUser]) -> list[str]:
    """System services among the users that the plan does not stop; a login's own manager is none that one stops."""
    units = dict.fromkeys(user.unit for user in users)
    return [u for u in units if u.endswith(".service") and not u.startswith("user@") and u not in _listed(params)]


def _who(user: User | GpuUser) -> str:
    return f"GPU in use by pid {user.pid} {user.comm}" + (f" ({user.unit})" if user.unit else "")


PROVIDER = Provider(
    phase="drain",
    name="gpu_users",
    does="See that no process uses a GPU: wait, refuse, or stop the services listed; start them again on release.",
    params=GpuUsersParams,
    report=GpuUsersReport,
    root_for="to stop units and to see every process that uses a GPU",
    args=args,
    judge=judge,
    judge_undo=judge_undo,
    preview=preview,
    estimate_s=4.0,
)
