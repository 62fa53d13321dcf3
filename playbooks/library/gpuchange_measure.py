#!/usr/bin/python3
"""Measure and stress the cards of a host, as a host unit."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_measure
short_description: Benchmark, the plan's own benchmark command, and stress of all cards
description:
  - The work runs in a host unit; a call waits for it for some seconds only and reports C(running) until it has ended.
  - Needs the driver only, no CUDA toolkit. Whatever hangs, a driver or a command, costs its own deadline.
  - A result counts for the boot and the arguments that it was made with; anything else is measured anew.
  - What is reported is what was measured; whether it is good enough is judged on the controller.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args:
    type: dict
    default: {}
    description: >-
      bench: {deadline_s}; command: {argv, warm_ups, repeats, timeout_s}; stress: {seconds, hang_s, since, query,
      python}; each may be absent. generation: raised by an operator's retry. wait_s
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = "- gpuchange_measure: {mode: apply, owner: '{{ gpuchange_owner }}', args: {bench: {deadline_s: 300}}}"
RETURN = "report: {type: dict, returned: always, description: 'state, why, bench, command, stress'}"

import contextlib  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from typing import Any, Dict, NoReturn, Optional  # noqa: E402

from ansible.module_utils import (  # noqa: E402
    gpuchange_bench,
    gpuchange_child,
    gpuchange_cuda,
    gpuchange_cuda_driver,
    gpuchange_gpu_work,
    gpuchange_kernel_log,
    gpuchange_look,
    gpuchange_runner,
    gpuchange_stress,
    gpuchange_torch,
)
from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.gpuchange_host import (  # noqa: E402
    args_of,
    boot_id,
    finish,
    mode_of,
    open_module,
    owned,
    phase_of,
    read_json,
    state_dir,
    state_path,
    write_atomic,
)
from ansible.module_utils.gpuchange_measuring import STEP, stop_path  # noqa: E402
from ansible.module_utils.gpuchange_unit import forget_unit, host_unit, install_script, unit_name, unit_state  # noqa: E402

PARTS = (
    gpuchange_bench,
    gpuchange_child,
    gpuchange_cuda,
    gpuchange_cuda_driver,
    gpuchange_gpu_work,
    gpuchange_kernel_log,
    gpuchange_look,
    gpuchange_runner,
    gpuchange_stress,
    gpuchange_torch,
)
WORKS = ("bench", "command", "stress")
START = """
import sys
sys.path.insert(0, sys.argv[1])
from ansible.module_utils.gpuchange_gpu_work import main
main(sys.argv[2])
"""
LOST_LIMIT = 2
MARGIN_S = 300.0


class Job:
    """The work asked for, and its files in the change's state directory; a result must answer what is `asked`."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module, args = module, args_of(module)
        self.wait_s = float(args.get("wait_s", 20.0))
        self.asked = {name: args[name] for name in WORKS if args.get(name)}
        self.asked["generation"] = int(args.get("generation") or 0)
        self.unit = unit_name(module, STEP)
        stem = "%s-%s" % (phase_of(module), STEP)
        self.job, self.out, self.progress = (state_path(module, stem + end) for end in (".job", ".result", ".progress"))
        self.stop = stop_path(module, phase_of(module))

    @property
    def kept(self) -> Dict[str, Any]:
        """{asked, boot_id, lost} of the work begun last."""
        return dict(_read(self.job).get("kept") or {})

    def current(self) -> bool:
        return self.kept.get("asked") == self.asked and self.kept.get("boot_id") == boot_id()

    def result(self) -> Optional[Dict[str, Any]]:
        """What was measured, if it is what is asked for now and was measured in this boot."""
        found = _read(self.out)
        return found if found and self.current() and found.get("boot_id") == boot_id() else None

    def begin(self, lost: int) -> None:
        state_dir(self.module)
        for path in (self.out, self.progress, self.stop):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        forget_unit(self.unit)
        works = {name: self.asked[name] for name in WORKS if name in self.asked}
        kept = {"asked": self.asked, "boot_id": boot_id(), "lost": lost}
        write_atomic(self.job, dict(works, out=self.out, progress=self.progress, stop=self.stop, kept=kept))

    def run(self) -> Dict[str, Any]:
        folder = install(self.module)
        argv = [sys.executable, "-I", "-c", START, folder, self.job]
        return host_unit(self.module, STEP, argv, wait_s=self.wait_s, deadline_s=self.deadline_s())

    def deadline_s(self) -> float:
        bench, command, stress = (self.asked.get(name) or {} for name in WORKS)
        runs = (int(command.get("warm_ups", 0)) + int(command.get("repeats", 0))) * float(command.get("timeout_s", 0))
        return float(bench.get("deadline_s", 0)) + runs + float(stress.get("seconds", 0)) + MARGIN_S


def _read(path: str) -> Dict[str, Any]:
    try:
        found = read_json(path, {})
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def install(module: AnsibleModule) -> str:
    """The program and its parts, importable under the names that they have in Ansible; returns the folder."""
    top = os.path.join(state_dir(module), "measure-lib")
    folder = os.path.join(top, "ansible", "module_utils")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    for package in (os.path.dirname(folder), folder):
        if not os.path.exists(os.path.join(package, "__init__.py")):
            write_atomic(os.path.join(package, "__init__.py"), "")
    for part in PARTS:
        install_script(module, part, folder)
    return top


def act(job: Job) -> NoReturn:
    state = unit_state(job.unit)["state"]
    lost = int(job.kept.get("lost") or 0) if job.kept.get("asked") == job.asked else 0
    if state != "running" and not (state == "finished" and job.current()):
        lost += state == "lost"
        if lost > LOST_LIMIT:
            finish(job.module, "not_done", why="it was cut short %d times, by a restart or a kill" % lost)
        job.begin(lost)
    found = job.run()
    if found["state"] == "running":
        finish(job.module, "running", why=str(_read(job.progress).get("text") or "measuring"), changed=True)
    if found["state"] == "lost":
        finish(job.module, "running", why="measuring was interrupted; it begins anew")
    say(job, found)


def say(job: Job, unit: Dict[str, Any]) -> NoReturn:
    result = job.result()
    if result is None:
        end = "did not end in time" if unit.get("timed_out") else "ended with %s" % unit.get("rc")
        tail = str(unit.get("out", "")).strip().splitlines()[-1:]
        finish(job.module, "not_done", why="the measuring program %s%s" % (end, ": " + tail[0] if tail else ""))
    finish(job.module, "done", changed=True, **{name: result.get(name) for name in WORKS})


def probe(job: Job) -> NoReturn:
    found = unit_state(job.unit)
    if found["state"] == "running":
        finish(job.module, "running", why=str(_read(job.progress).get("text") or "measuring"))
    if found["state"] == "finished" and job.current():
        say(job, found)
    finish(job.module, "not_done", why="not measured in this boot")


def main() -> None:
    module = open_module()
    if mode_of(module) == "undo":
        finish(module, "done")
    job = Job(module)
    if not any(name in job.asked for name in WORKS):
        finish(module, "done")
    if mode_of(module) == "probe":
        probe(job)
    with owned(module):
        act(job)


if __name__ == "__main__":
    main()
