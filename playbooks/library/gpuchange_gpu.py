#!/usr/bin/python3
"""Test or measure the cards of a host through the CUDA driver API."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_gpu
short_description: Test or measure NVIDIA cards through the CUDA driver API
description:
  - Needs the driver only, no CUDA toolkit and no Python packages.
  - "function: every card allocates, copies in, within and out, and computes; results are compared with the CPU's."
  - "bench: copy bandwidth in each direction and launch latency, medians on the card's own clock."
  - The work runs in a child process with a deadline; a driver that hangs gives state C(unknown), not a hanging play.
  - apply keeps its result for this change and phase; probe tells whether there is one, and returns it.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args: {type: dict, default: {}, description: "test: function or bench; deadline_s: seconds, at most 40"}
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = "- gpuchange_gpu: {mode: apply, owner: '{{ gpuchange_owner }}', args: {test: bench}}"
RETURN = "report: {type: dict, returned: always, description: 'state, why, test, result'}"

from typing import Any  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.gpuchange_cuda import DEADLINE_S, bench_test, function_test  # noqa: E402
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

TESTS = {"function": function_test, "bench": bench_test}
MOST_DEADLINE_S = 40.0


def wanted_test(module: AnsibleModule) -> str:
    test = str(args_of(module).get("test", "function"))
    if test not in TESTS:
        module.fail_json(msg="args.test is %r; it must be one of: %s" % (test, ", ".join(sorted(TESTS))))
    return test


def deadline(module: AnsibleModule) -> float:
    given = args_of(module).get("deadline_s", DEADLINE_S)
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds <= MOST_DEADLINE_S:
        module.fail_json(msg="args.deadline_s is %r; it must be above 0 and at most %g" % (given, MOST_DEADLINE_S))
    return seconds


def kept_result(module: AnsibleModule, name: str) -> dict[str, Any] | None:
    """This change's result of the boot that still runs: a reboot may have brought another driver."""
    try:
        kept = read_json(state_path(module, name))
    except ValueError:
        return None
    return kept["result"] if isinstance(kept, dict) and kept.get("boot_id") == boot_id() else None


def state_of(result: dict[str, Any]) -> str:
    """A card that computes wrong is not_done; a driver that cannot be interrupted is a human's business."""
    if result.get("hung"):
        return "unknown"
    return "done" if result["ok"] else "not_done"


def main() -> None:
    module = open_module()
    test, seconds = wanted_test(module), deadline(module)
    name = "%s-%s.json" % (phase_of(module), test)
    if mode_of(module) == "undo":
        finish(module, "done", test=test)
    if mode_of(module) == "probe":
        result = kept_result(module, name)
        if result is None:
            finish(module, "not_done", why="not tested in this boot", test=test)
        finish(module, state_of(result), why=result["why"], test=test, result=result)
    with owned(module):
        result = TESTS[test](seconds)
        state_dir(module)
        write_atomic(state_path(module, name), {"boot_id": boot_id(), "result": result})
    finish(module, state_of(result), why=result["why"], test=test, result=result)


if __name__ == "__main__":
    main()
