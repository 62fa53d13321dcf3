"""stack/apt: the GPU stack in one apt transaction; reboot only if the loaded driver differs."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from gpuchange.checks.driver import parse_proc
from gpuchange.checks.packages import Transaction, count_line, sealed_packages
from gpuchange.checks.snapshot import mapping
from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.facts import evidence, sealed
from gpuchange.providers.preflight.apt import AptPreflightReport
from gpuchange.providers.stacks import (
    Deadline,
    DkmsLeftovers,
    StackReport,
    judge_stack,
    judge_stack_undo,
    stack_preview,
)
from gpuchange.providers.types import Version, VersionOrAuto, refuse
from gpuchange.reports import Verdict


class AptStack(Params):
    """Exact versions, in quotes; what is not named stays as it is; auto: the newest offered one known to fit."""

    driver: VersionOrAuto | None = Field(None, description="Driver version, for example 570.172.08, or auto.")
    cuda: Version | None = Field(None, description="CUDA toolkit version; toolkits of other releases stay beside it.")
    cudnn: VersionOrAuto | None = Field(None, description="cuDNN version, or auto.")
    nccl: Version | None = Field(None, description="NCCL version.")
    container_toolkit: Version | None = Field(None, description="NVIDIA container toolkit version.")
    deadline: Deadline = 3000
    dkms_leftovers: DkmsLeftovers = "refuse"
    cuda_select: bool = Field(False, description="Switch /usr/local/cuda even where it was chosen by hand.")

    @model_validator(mode="after")
    def _something(self) -> AptStack:
        if not any((self.driver, self.cuda, self.cudnn, self.nccl, self.container_toolkit)):
            refuse("the stack names no version", 'name at least one: driver: "570.172.08"')
        return self


class AptStackReport(StackReport):
    """`installed`: {name: version} of the transaction's packages."""

    installed: dict[str, str] = Field(default_factory=dict)


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


def judge(view: HostView, report: AptStackReport) -> Verdict:
    wanted = transaction(view)
    return judge_stack(view, report, wanted.unmet(report.installed), wanted.driver)


def judge_undo(view: HostView, report: AptStackReport) -> Verdict:
    return judge_stack_undo(view, report, report.installed)


def preview(view: HostView, _report: AptStackReport) -> tuple[str, ...]:
    chosen = AptPreflightReport.model_validate({"state": "unknown", **evidence(view, "preflight/apt")})
    return stack_preview(chosen, count_line(chosen.moves))


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
