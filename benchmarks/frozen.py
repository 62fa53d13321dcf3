"""One host that hangs must not hold back the others.

    python benchmarks/frozen.py --lab NAME [--rounds 1]

Carries a drain-and-verify change (no new packages) over all hosts of a lab, every host allowed out at once; first with
all hosts well, then with the last one frozen after preflight. Prints when each other host was done, in both runs, and
the ratio. Ends with 1 when a host was done more than half as late again as without the frozen one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from gpuchange.change import Connection, create
from gpuchange.engine import Engine
from gpuchange.lab import Lab
from gpuchange.states import Event, Kind

MOST_RATIO = 1.5
HELD_AFTER = "45s"


def plan(lab: Lab, hosts: int) -> dict[str, Any]:
    return {
        "version": 1,
        "name": "frozen-host",
        "reason": "benchmark",
        "inventory": str(lab.inventory),
        "hosts": ["gpu_hosts"],
        "rollout": {"max_unavailable": hosts, "canary": 0, "stop_after_failures": hosts}
        | {"unreachable_timeout": HELD_AFTER},
        "gpu_users": {"policy": "stop", "services": ["modelserver.service"]},
        "record": {"paths": ["/srv/models"]},
        "baseline": "skip",
        "watch": {"for": "1s"},
    }


def finish_times(lab: Lab, names: list[str], frozen: str) -> dict[str, float]:
    """host → seconds from the start until its last step was accepted; the frozen one is missing."""
    done: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "plan.yaml"
        path.write_text(yaml.safe_dump(plan(lab, len(names))))
        engine = Engine(create(Path(scratch) / "state", path, Connection()), Connection())
        engine.run(last_phase="preflight")
        if frozen:
            lab.host(frozen).freeze()
        began = time.monotonic()

        def observer(event: Event, _state: Any) -> None:
            if event.phase == "watch" and event.kind is Kind.ACCEPTED:
                done[event.host] = time.monotonic() - began

        engine.observers.append(observer)
        try:
            engine.run()
        finally:
            if frozen:
                lab.host(frozen).thaw()
            engine.close()
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lab", required=True)
    lab = Lab.load(parser.parse_args().lab)
    names = [host.name for host in lab.hosts if host.name.startswith("gpu")]
    well, frozen = finish_times(lab, names, ""), finish_times(lab, names, names[-1])
    lab.restore("start")
    worst = 0.0
    print(f"{'host':<8}{'all well':>10}{'one frozen':>12}{'ratio':>8}   seconds until done")
    for name in names[:-1]:
        ratio = frozen[name] / well[name]
        worst = max(worst, ratio)
        print(f"{name:<8}{well[name]:>10.1f}{frozen[name]:>12.1f}{ratio:>8.2f}")
    return int(worst > MOST_RATIO)


if __name__ == "__main__":
    sys.exit(main())
