"""What the resolver is asked and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Literal

from gpuchange.compat.tables import Card

Outcome = Literal["fits", "note", "warning", "unknown", "refused"]
"""`unknown`: the tables do not say. `warning`: it works, but; `note`: worth knowing. Neither changes the verdict."""

Verdict = Literal["fits", "unknown", "refused"]
Part = Literal["driver", "module", "cuda", "cudnn", "pytorch", "tensorflow", "fabric_manager", "libraries", "kernel"]


@dataclass(frozen=True)
class Question:
    """A host and the parts that shall be on it. A part that is "" is not asked about.

    `module`: open, proprietary or "". `machine`: x86_64 or aarch64. `nvswitch`, `secure_boot`: None when not known.
    `cuda_compat`: the host carries the CUDA forward compatibility package for this CUDA.
    `pytorch` may name its build: 2.9.0+cu128. `today` decides what has reached its end of life.
    """

    today: date
    cards: tuple[Card, ...] = ()
    machine: str = "x86_64"
    kernel: str = ""
    distribution: str = ""
    secure_boot: bool | None = None
    nvswitch: bool | None = None
    cuda_compat: bool = False
    driver: str = ""
    module: str = ""
    cuda: str = ""
    cudnn: str = ""
    pytorch: str = ""
    tensorflow: str = ""
    fabric_manager: str = ""
    libraries: str = ""


@dataclass(frozen=True)
class Said:
    """What one rule says of a question. `source` only where it is another than the rule's table."""

    outcome: Outcome
    says: str
    remedy: str = ""
    source: str = ""


@dataclass(frozen=True)
class Finding:
    """`rule` by its id, the parts that it looks at, its words, what to do about it, and where that is published."""

    rule: str
    parts: tuple[Part, ...]
    outcome: Outcome
    says: str
    remedy: str
    source: str

    def sentence(self) -> str:
        todo = f"; {self.remedy}" if self.remedy else ""
        return f"{self.says}{todo} [{self.rule}; source: {self.source}]"


@dataclass(frozen=True)
class Answer:
    findings: tuple[Finding, ...]

    def of(self, outcome: Outcome) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.outcome == outcome)

    @property
    def verdict(self) -> Verdict:
        return "refused" if self.of("refused") else "unknown" if self.of("unknown") else "fits"
