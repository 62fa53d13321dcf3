"""stack/dnf: the GPU stack in one dnf transaction; reboot only if the loaded driver differs."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from gpuchange.checks.packages import Transaction, count_line
from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.facts import evidence
from gpuchange.providers.preflight.dnf import DnfPreflightReport
from gpuchange.providers.stacks import (
    Deadline,
    DkmsLeftovers,
    StackReport,
    judge_stack,
    judge_stack_undo,
    stack_preview,
)
from gpuchange.providers.types import Version, refuse
from gpuchange.reports import Verdict

PREFLIGHT = "preflight/dnf"


class DnfStack(Params):
    """Exact versions, in quotes; what is not named stays as it is."""

    driver: Version | None = Field(None, description="Driver version, for example 570.172.08.")
    cuda: Version | None = Field(None, description="CUDA toolkit version; toolkits of other releases stay beside it.")
    cudnn: Version | None = Field(None, description="cuDNN version.")
    nccl: Version | None = Field(None, description="NCCL version.")
    container_toolkit: Version | None = Field(None, description="NVIDIA container toolkit version.")
    deadline: Deadline = 3000
    dkms_leftovers: DkmsLeftovers = "refuse"

    @model_validator(mode="after")
    def _something(self) -> DnfStack:
        if not any((self.driver, self.cuda, self.cudnn, self.nccl, self.container_toolkit)):
            refuse("the stack names no version", 'name at least one: driver: "570.172.08"')
        return self


class DnfStackReport(StackReport):
    """`installed`: {name: version} of the transaction's packages."""

    installed: dict[str, str] = Field(default_factory=dict)


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    return {
        "transaction": evidence(view, PREFLIGHT).get("transaction"),
        "dkms_set_aside": view.params.get("dkms_leftovers") == "set_aside",
        "deadline_s": view.params.get("deadline"),
        "generation": view.retries,
    }


def judge(view: HostView, report: DnfStackReport) -> Verdict:
    wanted = Transaction.model_validate(evidence(view, PREFLIGHT).get("transaction") or {})
    return judge_stack(view, report, wanted.unmet(report.installed), wanted.driver)


def judge_undo(view: HostView, report: DnfStackReport) -> Verdict:
    return judge_stack_undo(view, report, report.installed)


def preview(view: HostView, _report: DnfStackReport) -> tuple[str, ...]:
    chosen = DnfPreflightReport.model_validate({"state": "unknown", **evidence(view, PREFLIGHT)})
    return stack_preview(chosen, count_line(chosen.moves))


PROVIDER = Provider(
    phase="stack",
    name="dnf",
    does="Install with dnf from RPMs of Fedora, RHEL and its kin.",
    params=DnfStack,
    report=DnfStackReport,
    root_for="dnf, rpm, kernel modules, reboot",
    args=args,
    judge=judge,
    judge_undo=judge_undo,
    preview=preview,
    foresees=True,
    binaries=("dnf", "rpm", "modinfo"),
    estimate_s=300.0,
)
