"""The changes that are killed at every write: what is asked for, what goes wrong, what the operator does.

A script is a list of stages, each a command line of gpuchange. A stage that is killed is followed by its own remedy:
a run by `resume`, an order by the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gpuchange.providers.contract import HostView, Params, Provider
from gpuchange.reports import Report, Verdict, by_state

RUN = ("resume", "{change}")
ROLLBACK = ("rollback", "{change}")


def resolve(host: str, answer: str) -> tuple[str, ...]:
    return ("resolve", "{change}", host, f"--{answer}")


def soon(_view: HostView, report: Report) -> Verdict:
    """As by_state, but looks again at once: a crash test has no two seconds to wait."""
    return Verdict.again(0.01, report.why) if report.state == "running" else by_state(report)


NAMES = {
    "preflight": "host",
    "record": "host",
    "drain": "gpu_users",
    "seal": "host",
    "baseline": "gpu",
    "verify": "host",
}
WHOLE = (*NAMES, "watch")
PROVED = ("preflight", "drain", "seal", "verify")
BARE = ("preflight", "drain", "verify")


def registry(phases: tuple[str, ...]) -> tuple[Provider, ...]:
    return tuple(
        Provider(
            phase, NAMES.get(phase, "host"), "stands for the real one", Params, Report, judge=soon, judge_undo=soon
        )
        for phase in phases
    )


@dataclass(frozen=True)
class Script:
    """`faults`: see crash_playbook.py; `remedy`: what follows a killed run, `resume` where nothing is said."""

    hosts: int = 1
    phases: tuple[str, ...] = BARE
    options: dict[str, str] = field(default_factory=dict)
    faults: dict[str, Any] = field(default_factory=dict)
    stages: tuple[tuple[str, ...], ...] = (RUN,)
    remedy: tuple[str, ...] = RUN
    twice: bool = False  # the remedy is killed as well
    free: bool = False  # how it ends depends on the point: it must go back the way it came, wherever it was
    real: bool = False  # with the real ansible-runner

    def plan(self) -> str:
        rollout = {"max_unavailable": "1", "canary": "0", **self.options}
        on_failure = rollout.pop("on_failure", "host")
        limits = ", ".join(f"{key}: {value}" for key, value in rollout.items())
        lines = [
            "version: 1",
            "name: crash",
            "reason: a test",
            "inventory: inventory.yaml",
            "hosts: [all]",
            f"rollout: {{{limits}}}",
        ]
        return "\n".join([*lines, f"rollback: {{on_failure: {on_failure}}}", ""])


VERIFY_FAILS = {"h1 verify_host apply": "failed"}
SCRIPTS: dict[str, Script] = {
    "forward": Script(phases=WHOLE),
    "forward-two-hosts": Script(hosts=2, options={"canary": "1"}),
    "forward-side-by-side": Script(hosts=3, options={"max_unavailable": "3"}),
    "forward-waits": Script(phases=(*BARE, "watch"), faults={"h1 drain_gpu_users apply": 2, "h1 watch_host apply": 1}),
    "forward-without-a-word": Script(faults={"h1 drain_gpu_users apply": "silent"}),
    "failure-rolled-back": Script(phases=PROVED, faults=VERIFY_FAILS),
    "failure-all-rolled-back": Script(
        hosts=2, options={"on_failure": "change"}, faults={"h2 verify_host apply": "failed"}
    ),
    "failure-held-undone": Script(
        options={"on_failure": "hold"}, faults=VERIFY_FAILS, stages=(RUN, resolve("h1", "undo"), RUN)
    ),
    "failed-rollback-marked-done": Script(
        phases=PROVED, faults={**VERIFY_FAILS, "h1 seal_host undo": "failed"}, stages=(RUN, resolve("h1", "done"), RUN)
    ),
    "held-retried": Script(
        phases=PROVED, faults={"h1 seal_host apply": "unknown"}, stages=(RUN, resolve("h1", "retry"), RUN)
    ),
    "forward-then-back": Script(phases=PROVED, stages=(RUN, ROLLBACK)),
    "killed-then-back": Script(hosts=2, options={"stop_after_failures": "9"}, remedy=ROLLBACK, free=True),
    "resume-killed": Script(phases=PROVED, twice=True),
    "failure-resume-killed": Script(phases=PROVED, faults=VERIFY_FAILS, twice=True),
    "waits-resume-killed": Script(faults={"h1 drain_gpu_users apply": 2}, twice=True),
    "back-resume-killed": Script(stages=(RUN, ROLLBACK), twice=True),
    "forward-real-runner": Script(real=True),
}
"""By test id. Between them: forward, failure and rollback, waits, people's answers, kills of what mends a kill."""
CARELESS = "careless"
ALL = {**SCRIPTS, CARELESS: Script(faults={"careless": True})}
