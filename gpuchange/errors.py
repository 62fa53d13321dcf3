"""Every exception of gpuchange.

GpuchangeError                     exit code (design section 8)
├── UsageError                     64  the command line is wrong
├── PlanError                      64  the plan file is wrong (carries file:line:column)
├── InventoryError                 64  the inventory is wrong or a host is not in it
├── BeforeChangeError               1  failed before any change
├── UnreachableError                4  hosts cannot be reached
├── NeedsOperator                   5  a human has to decide
├── RollbackFailed                  6  a rollback could not be proved
├── LockedError                     7  somebody else owns the change or the host
├── StaleError                      8  what was reviewed or recorded is no longer what is there
│   ├── VersionMismatch             8  another gpuchange version began this change
│   ├── NotApproved                 8  a bundle lacks approvals, or this one does not count
│   └── TamperedError               8  an audit found a journal altered or damaged
├── JournalError                    5  the journal is damaged or contradicts itself
│   └── IllegalTransition           5  an event that the transition table does not list
└── LabError                        1  the lab cannot do what was asked
"""

from __future__ import annotations

WORST_FIRST = (6, 5, 3, 7, 4, 1)
"""When several exit codes hold for one change, the first of these counts."""


class GpuchangeError(Exception):
    """An error said in an operator's words.

    `what` happened, `where` (file:line:column, or host and phase), `why`, and the `remedy`: what to do next.
    Raised anywhere, printed once by the CLI, never with a traceback.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", why: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.why, self.remedy = what, where, why, remedy

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return "\n".join([head, *(f"  {line}" for line in (self.why, self.remedy) if line)])


class UsageError(GpuchangeError):
    exit_code = 64


class PlanError(GpuchangeError):
    """The first fault of a plan; `others` are further ones of the same file, `left_out` counts those not kept."""

    exit_code = 64
    others: tuple[PlanError, ...] = ()
    left_out: int = 0

    def __str__(self) -> str:
        parts = [super().__str__(), *map(str, self.others)]
        return "\n".join([*parts, f"and {self.left_out} more"] if self.left_out else parts)


class InventoryError(GpuchangeError):
    exit_code = 64


class BeforeChangeError(GpuchangeError):
    exit_code = 1


class UnreachableError(GpuchangeError):
    exit_code = 4


class NeedsOperator(GpuchangeError):
    exit_code = 5


class RollbackFailed(GpuchangeError):
    exit_code = 6


class LockedError(GpuchangeError):
    exit_code = 7


class StaleError(GpuchangeError):
    exit_code = 8


class VersionMismatch(StaleError):
    pass


class NotApproved(StaleError):
    pass


class TamperedError(StaleError):
    pass


class JournalError(GpuchangeError):
    exit_code = 5


class IllegalTransition(JournalError):
    pass


class LabError(GpuchangeError):
    exit_code = 1
