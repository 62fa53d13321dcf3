"""stack/apt: the GPU stack in one apt transaction; reboot only if the loaded driver differs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from gpuchange.checks.driver import parse_proc
from gpuchange.checks.packages import Transaction, component_lines, count_line, sealed_packages
from gpuchange.checks.snapshot import mapping
from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.facts import evidence, sealed
from gpuchange.providers.preflight.apt import AptPreflightReport
from gpuchange.providers.types import Duration, Version, VersionOrAuto, refuse
from gpuchange.reports import Report, Verdict, by_state

LONGEST_REBOOT_S = 1800.0
LONGEST_BLOCK_S = 900.0
"""How long somebody else's package operation is waited for before a human has to look."""


class AptStack(Params):
    """Exact versions, in quotes; what is not named stays as it is; auto: the newest offered one known to fit."""

    driver: VersionOrAuto | None = Field(None, description="Driver version, for example 570.172.08, or auto.")
    cuda: Version | None = Field(None, description="CUDA toolkit version; toolkits of other releases stay beside it.")
    cudnn: VersionOrAuto | None = Field(None, description="cuDNN version, or auto.")
    nccl: Version | None = Field(None, description="NCCL version.")
    container_toolkit: Version | None = Field(None, description="NVIDIA container toolkit version.")
    deadline: Duration = Field(3000, description="How long one package transaction may take.")
    dkms_leftovers: Literal["refuse", "set_aside"] = Field(
        "refuse",
        description="set_aside: move trees that removed modules left in DKMS out of its way; undone on rollback.",
    )
    cuda_select: bool = Field(False, description="Switch /usr/local/cuda even where it was chosen by hand.")

    @model_validator(mode="after")
    def _something(self) -> AptStack:
        if not any((self.driver, self.cuda, self.cudnn, self.nccl, self.container_toolkit)):
            refuse("the stack names no version", 'name at least one: driver: "570.172.08"')
        return self


class AptStackReport(Report):
    """`installed`: {name: version} of the transaction's packages; `left`: how many are not as wanted."""

    installed: dict[str, str] = Field(default_factory=dict)
    driver: dict[str, Any] = Field(default_factory=dict)
    boot_id: str = ""
    rebooted: bool = False
    rebooting: bool = False
    blocked: bool = False
    left: int = 0
    repaired: tuple[str, ...] = ()


def transaction(view: HostView) -> Transaction:
    return Transaction.model_validate(evidence(view, "preflight/apt").get("transaction") or {})


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    seal = mapping(sealed(view).get("facts"))
    driver = parse_proc(str(mapping(seal.get("loaded")).get("proc_version") or "")) or ""
    return {
        "transaction": evidence(view, "preflight/apt").get("transaction"),
        "sealed": sealed_packages(seal, driver),
        "cuda_select": bool(view.params.get("cuda_select")),
        "dkms_set_aside": view.params.get("dkms_leftovers") == "set_aside",
        "deadline_s": view.params.get("deadline"),
        "generation": view.retries,
    }


def overdue(view: HostView, report: AptStackReport) -> bool:
    """Whether a reboot, or somebody else's package operation, takes longer than any should."""
    longest = LONGEST_REBOOT_S if report.rebooting else LONGEST_BLOCK_S if report.blocked else float("inf")
    return report.state == "running" and view.waited > longest


def judge(view: HostView, report: AptStackReport) -> Verdict:
    if overdue(view, report):
        return Verdict.hold(f"{report.why} for {view.waited:.0f} s")
    if report.state != "done":
        return by_state(report)
    wanted = transaction(view)
    wrong = wanted.unmet(report.installed)
    loaded = report.driver.get("loaded")
    if wanted.driver and loaded != wanted.driver:
        wrong = (*wrong, f"the loaded driver is {loaded or 'none'}, not {wanted.driver}")
    return Verdict.reject("; ".join(wrong)) if wrong else Verdict.accept(findings=report.repaired)


def judge_undo(view: HostView, report: AptStackReport) -> Verdict:
    """Going back is judged as installed: whether the old driver works again is for prove to say."""
    if report.state == "not_done" and (report.installed or report.driver) and not report.left:
        return Verdict.accept(findings=(report.why,))
    if overdue(view, report):
        return Verdict.hold(f"{report.why} for {view.waited:.0f} s")
    return by_state(report)


def preview(view: HostView, _report: AptStackReport) -> tuple[str, ...]:
    chosen = AptPreflightReport.model_validate({"state": "unknown", **evidence(view, "preflight/apt")})
    if chosen.as_wanted:
        return ("nothing to install",)
    reboot = "one reboot: the driver changes" if chosen.reboot_needed else "no reboot"
    return tuple(
        line for line in (*component_lines(chosen.before, chosen.after), count_line(chosen.moves), reboot) if line
    )


PROVIDER = Provider(
    phase="stack",
    name="apt",
    does="Install with apt from Debian or Ubuntu packages.",
    params=AptStack,
    report=AptStackReport,
    root_for="apt, dpkg, kernel modules, reboot",
    args=args,
    judge=judge,
    judge_undo=judge_undo,
    preview=preview,
    foresees=True,
    binaries=("apt-get", "apt-mark", "dpkg", "modinfo"),
    estimate_s=300.0,
)
