"""The ordered table of phases: the order is the product."""

from __future__ import annotations

from gpuchange.phase import NOTHING_TO_UNDO, Phase, Play

PHASES: tuple[Phase, ...] = (
    Phase(
        "preflight",
        "Check that the change can be made: reachability, identity, space, rights, package candidates.",
        do=Play("preflight", "apply"),
        undo=NOTHING_TO_UNDO,
    ),
    Phase(
        "record",
        "Record versions, packages, modules, cards and the hash manifest.",
        do=Play("record", "apply"),
        undo=NOTHING_TO_UNDO,
    ),
    Phase(
        "backup",
        "Copy data and keep the old packages, while the host serves.",
        do=Play("backup", "apply"),
        undo=NOTHING_TO_UNDO,
    ),
    Phase(
        "drain",
        "Take the host out of load balancer and scheduler; wait for what runs.",
        do=Play("drain", "apply"),
        undo=Play("drain", "undo"),
        takes_out=True,
    ),
    Phase(
        "seal",
        "Record again: this is what a rollback must equal. Going back: prove that it does.",
        do=Play("seal", "apply"),
        undo=Play("seal", "undo"),
    ),
    Phase(
        "baseline",
        "Benchmark the idle host.",
        do=Play("baseline", "apply"),
        undo=NOTHING_TO_UNDO,
    ),
    Phase(
        "change",
        "Change instance type or hardware.",
        do=Play("change", "apply"),
        undo=Play("change", "undo"),
    ),
    Phase(
        "stack",
        "Install driver, CUDA, cuDNN and container toolkit; reboot only if needed.",
        do=Play("stack", "apply"),
        undo=Play("stack", "undo"),
    ),
    Phase(
        "verify",
        "Prove identity, versions, hashes, GPU function, and speed against the baseline.",
        do=Play("verify", "apply"),
        undo=NOTHING_TO_UNDO,
    ),
    Phase(
        "release",
        "Bring the host back into service as it was found.",
        do=Play("drain", "undo"),
        undo=Play("drain", "apply"),
        brings_back=True,
        reverse=True,
    ),
    Phase(
        "watch",
        "Watch the host in service for the time asked.",
        do=Play("watch", "apply"),
        undo=NOTHING_TO_UNDO,
    ),
)
