"""stack/runfile: the driver by NVIDIA's .run installer; reboot only if the loaded driver differs."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.facts import evidence
from gpuchange.providers.preflight.runfile import RunfilePreflightReport
from gpuchange.providers.stacks import (
    Deadline,
    DkmsLeftovers,
    StackReport,
    judge_stack,
    judge_stack_undo,
    stack_preview,
)
from gpuchange.providers.types import AbsPath, Version, refuse
from gpuchange.reports import Verdict

PREFLIGHT = "preflight/runfile"
OURS = (
    "--silent", "--uninstall", "--tmpdir", "--dkms", "--no-dkms", "--kernel-module-type", "--ui", "--extract-only",
    "--kernel-module-build-directory", "--target", "--add-this-kernel", "--apply-patch", "--check", "--info",
    "--sanity",
)  # fmt: skip
"""What the step decides itself, and what would not be an installation."""


def _sha256(value: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", value):
        refuse(f'"{value}" is not a sha256 sum', "write the 64 hexadecimal digits that sha256sum prints, in quotes")
    return value


def _option(value: str) -> str:
    if not re.fullmatch(r"--[a-z][a-z0-9-]*(=[A-Za-z0-9_./:,+-]+)?", value):
        refuse(f'"{value}" is not an option of the installer', "write --name or --name=value, without blanks")
    if value.partition("=")[0] in OURS:
        refuse(f"{value} is not for the plan to give", "leave it out: module, dkms and the rest have keys of their own")
    return value


Sha256 = Annotated[str, AfterValidator(_sha256), Field(json_schema_extra={"pattern": "^[0-9a-f]{64}$"})]
Option = Annotated[str, AfterValidator(_option), Field(json_schema_extra={"pattern": "^--[a-z]"})]


class Installer(Params):
    """One .run file on the host."""

    file: AbsPath = Field(description="The installer on the host: a mounted share, or a copy.")
    sha256: Sha256 = Field(description="Its sha256 sum; another file is not run.")


class RunfileStack(Params):
    """The driver alone: CUDA, cuDNN and what else is there stay as they are."""

    driver: Version = Field(description="Driver version, for example 570.172.08: the one that the file installs.")
    file: AbsPath = Field(description="NVIDIA's installer on the host: a mounted share, or a copy.")
    sha256: Sha256 = Field(description="Its sha256 sum; another file is not run.")
    previous: Installer | None = Field(
        None, description="The installer of the driver that is there now; needless where an earlier change kept it."
    )
    module: Literal["keep", "open", "proprietary"] = Field(
        "keep", description="Kernel modules: as they are now, open, or proprietary."
    )
    dkms: bool = Field(True, description="Have DKMS build the modules, so that the next kernel gets its own.")
    options: tuple[Option, ...] = Field((), description="More options of the installer: --no-opengl-files.")
    deadline: Deadline = 3000
    dkms_leftovers: DkmsLeftovers = "refuse"


class RunfileStackReport(StackReport):
    """`installed`: the driver that a .run file has installed; `libraries`: {library: version}."""

    installed: str = ""
    files: int = 0
    libraries: dict[str, str] = Field(default_factory=dict)


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    return {
        "transaction": evidence(view, PREFLIGHT).get("transaction"),
        "dkms_set_aside": view.params.get("dkms_leftovers") == "set_aside",
        "deadline_s": view.params.get("deadline"),
        "generation": view.retries,
    }


def judge(view: HostView, report: RunfileStackReport) -> Verdict:
    wanted = str((evidence(view, PREFLIGHT).get("transaction") or {}).get("driver") or "")
    witnesses = {"installed driver": report.installed, **report.libraries}
    wrong = tuple(
        f"{name} is {version or 'absent'}, not {wanted}" for name, version in witnesses.items() if version != wanted
    )
    return judge_stack(view, report, wrong, wanted)


def judge_undo(view: HostView, report: RunfileStackReport) -> Verdict:
    return judge_stack_undo(view, report, report.installed)


def preview(view: HostView, _report: RunfileStackReport) -> tuple[str, ...]:
    chosen = RunfilePreflightReport.model_validate({"state": "unknown", **evidence(view, PREFLIGHT)})
    file = str((chosen.transaction.get("installer") or {}).get("file") or "")
    return stack_preview(chosen, f"by {file}")


PROVIDER = Provider(
    phase="stack",
    name="runfile",
    does="Install the driver with NVIDIA's self-extracting .run file.",
    params=RunfileStack,
    report=RunfileStackReport,
    root_for="NVIDIA's installer, kernel modules, reboot",
    args=args,
    judge=judge,
    judge_undo=judge_undo,
    preview=preview,
    foresees=True,
    binaries=("modinfo", "modprobe"),
    estimate_s=300.0,
)
