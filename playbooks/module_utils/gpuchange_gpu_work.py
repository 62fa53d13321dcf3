"""What the host unit of gpuchange_measure does: benchmark, the plan's own command, stress. Python 3.8, no Ansible.

`main(JOB.json)` with {out, progress, stop, bench: {deadline_s}, command: {argv, warm_ups, repeats, timeout_s}, stress};
a work that is not named is not done. It ends as soon as the file `stop` is there.
Results are in `out` as {boot_id, bench, command, stress}.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Callable, Dict

from ansible.module_utils.gpuchange_bench import bench_test
from ansible.module_utils.gpuchange_look import run
from ansible.module_utils.gpuchange_runner import boot_id, put
from ansible.module_utils.gpuchange_stress import stress_test

OUTPUT_LIMIT = 32 * 1024

Note = Callable[[str], None]


def bench(job: Dict[str, Any], note: Note) -> Dict[str, Any]:
    note("benchmark of the cards")
    return bench_test(float(job["deadline_s"]))


def command(job: Dict[str, Any], note: Note) -> Dict[str, Any]:
    """{runs: [{rc, out, err, hung, cut, seconds}]}: those that count. A run that fails is the last one."""
    warm_ups, runs = int(job["warm_ups"]), []
    for number in range(warm_ups + int(job["repeats"])):
        note("benchmark command, run %d of %d" % (number + 1, warm_ups + int(job["repeats"])))
        said = run(list(job["argv"]), float(job["timeout_s"]), OUTPUT_LIMIT)
        if number >= warm_ups or said["rc"] != 0:
            runs.append({key: said[key] for key in ("rc", "out", "err", "hung", "cut", "seconds")})
        if said["rc"] != 0:
            break
    return {"runs": runs}


WORKS = (("bench", bench), ("command", command), ("stress", stress_test))


def main(path: str) -> None:
    with open(path, encoding="utf-8") as file:
        job = json.load(file)

    def note(text: str) -> None:
        if os.path.exists(job["stop"]):
            sys.exit("it was told to end")
        put(job["progress"], {"text": text}, once=False)

    done = {name: work(job[name], note) for name, work in WORKS if job.get(name)}
    put(job["out"], dict(done, boot_id=boot_id()), once=False)
