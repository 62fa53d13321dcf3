"""preflight/host: look at the host and say what stands against changing it. Changes nothing."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gpuchange.checks.readiness import NOTES, Wish, is_daemon, objections
from gpuchange.checks.snapshot import summary
from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.drain import gpu_users
from gpuchange.providers.facts import FactsReport, base_args, section, services, wanted
from gpuchange.providers.types import AbsPath, Size
from gpuchange.reports import Verdict, by_state

Accepted = Literal[
    "low_space", "path", "mount", "no_gpu", "gpu_not_answering", "inconsistent_baseline", "broken_packages",
    "mixed_packages", "broken_dkms", "incompatible", "fabric_manager", "clock",
]  # fmt: skip


class PreflightParams(Params):
    """Checks before anything is changed."""

    min_free: Size = Field(2 * 1024**3, description="Free space that must be left on the filesystems concerned.")
    mounts: tuple[AbsPath, ...] = Field((), description="Directories that must be mount points.")
    accept: tuple[Accepted, ...] = Field((), description="Kinds of objection that do not stop the change.")


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    base = base_args(view)
    mounts = list(view.params.get("mounts") or ())
    paths = list(dict.fromkeys(base["paths"] + mounts))
    return {**base, "paths": paths, "binaries": programs(view), "guard": True, "rights": rights(view)}


def rights(view: HostView) -> dict[str, str]:
    """ "phase/provider" → what root on the host is needed for, for every step of the plan."""
    from gpuchange import providers  # the registry imports this module

    always = {("drain", "gpu_users"), ("preflight", "host"), ("record", "host"), ("seal", "host"), ("verify", "host")}
    rows = [row for row in providers.PROVIDERS if (row.phase, row.name) in always | set(_chosen(view))]
    return {f"{row.phase}/{row.name}": row.root_for for row in rows if row.root_for and row.root_on == "host"}


def programs(view: HostView) -> list[str]:
    """What the providers that the plan chooses need to find on the host."""
    from gpuchange import providers  # the registry imports this module

    chosen = _chosen(view)
    rows = [(row, chosen[row.phase, row.name]) for row in providers.PROVIDERS if (row.phase, row.name) in chosen]
    return sorted({program for row, params in rows for program in (*row.binaries, *row.also(params))})


def _chosen(view: HostView) -> dict[tuple[str, str], dict[str, Any]]:
    """(phase, provider) → its parameters, of every entry of the plan that names its provider."""
    phases = ("backup", "drain", "change", "stack")
    return {(phase, str(row["provider"])): row for phase in phases for row in _rows(view.plan.get(phase))}


def _rows(part: Any) -> list[dict[str, Any]]:
    rows = part if isinstance(part, list | tuple) else [part]
    return [row for row in rows if isinstance(row, dict) and "provider" in row]


def wish(view: HostView) -> Wish:
    record, versions = section(view, "record"), wanted(view)
    return Wish(
        paths=tuple(record.get("paths") or ()),
        mounts=tuple(view.params.get("mounts") or ()),
        min_free=int(view.params.get("min_free") or 0),
        services=tuple(services(view)),
        driver=versions.get("driver"),
        cuda=versions.get("cuda"),
        cudnn=versions.get("cudnn"),
        dkms_set_aside=section(view, "stack").get("dkms_leftovers") == "set_aside",
    )


def judge(view: HostView, report: FactsReport) -> Verdict:
    if report.state not in ("done", "not_done"):  # a probe looks as well as the play itself
        return by_state(report)
    found = objections(report.facts, report.errors, report.picture, wish(view))
    accepted = NOTES | set(view.params.get("accept") or ())
    against = [row for row in found if row.kind not in accepted]
    lines = tuple(row.says for row in found)
    if not against:
        return Verdict.accept(findings=lines)
    kinds = sorted({row.kind for row in against} - {"facts_missing", "not_root", "program"})
    hint = f" (to go on regardless: preflight: {{accept: [{', '.join(kinds)}]}})" if kinds else ""
    return Verdict.reject("; ".join(row.says for row in against) + hint, lines)


def preview(view: HostView, report: FactsReport) -> tuple[str, ...]:
    """Cards and versions as found: `driver: 550.54.15`; what is worth knowing before a yes; who holds a GPU."""
    picture = report.picture
    found = objections(report.facts, report.errors, picture, wish(view))
    users = [user for user in picture.gpu_users if not is_daemon(user.comm) and user.unit not in gpu_users.DAEMONS]
    return (
        *(f"{name.replace('_', ' ')}: {text}" for name, text in summary(picture).items()),
        *(f"note: {row.says}" for row in found if row.kind != "gpu_users"),
        *gpu_users.foretold(section(view, "gpu_users"), users),
    )


PROVIDER = Provider(
    phase="preflight",
    name="host",
    does="Check identity, rights, space, paths, baseline, compatibility and GPU users of the host.",
    params=PreflightParams,
    report=FactsReport,
    root_for="to see every process that uses a GPU, and package states",
    args=args,
    judge=judge,
    preview=preview,
    estimate_s=4.0,
)
