"""How close the sliding window comes to the best possible makespan, on a simulated clock.

    python benchmarks/makespan.py [--hosts 200] [--out 10] [--seeds 20] [--sigma 0.8] [--stragglers 0.0]

Per seed: phase times are drawn heavy-tailed (log-normal around a typical time per phase; sigma 0.8 makes one in a
hundred take more than six times as long as the typical one; `--stragglers` adds a share of fivefold ones on top). The
product's own planner carries all hosts through; every play costs its hosts 1.2 s to begin. Columns, as ratios:

bound         gpuchange against what no schedule can beat, even one that knows all times beforehand and starts plays for
              nothing: the longest way of one host, or the barrier, the fastest way to the first drain, all time out of
              service spread evenly over the window, and the shortest watch, whichever is longer
window        gpuchange against the ideal sliding window on the same draws: whenever a slot is free, the first host that
              is ready takes it, and plays start for nothing; this is the best that can be done without foresight
serial        Ansible's `serial: 10` against the bound: batch after batch, task after task, each as slow as its slowest
serial free   the same with `strategy: free` inside a batch
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1])]

from simulate import Outcome, Simulation, full_table

from gpuchange.planner import Limits, Start, StepKey, exit_code

PLAY_COST = 1.2
LIMIT = 1.10
TYPICAL: dict[str, float] = {  # seconds
    "preflight": 10,
    "record": 20,
    "backup": 60,
    "drain": 45,
    "seal": 30,
    "baseline": 60,
    "change": 2,
    "stack": 240,
    "verify": 90,
    "release": 10,
    "watch": 60,
}
KEYS = full_table().keys
Draws = dict[tuple[str, StepKey], float]


def draw(seed: int, hosts: Sequence[str], sigma: float, stragglers: float) -> Draws:
    dice = random.Random(seed)
    return {
        (host, key): TYPICAL[key[0]] * dice.lognormvariate(0, sigma) * (5 if dice.random() < stragglers else 1)
        for host in hosts
        for key in KEYS
    }


def ours(draws: Draws, hosts: Sequence[str], out: int) -> tuple[float, int]:
    """(makespan in simulated seconds, plays)"""

    def behave(start: Start, host: str) -> Outcome:
        return Outcome(after=draws[host, (start.phase, start.provider)])

    run = Simulation(full_table(), hosts, Limits(max_unavailable=out), behave, PLAY_COST)
    run.run()
    assert exit_code(run.state) == 0 and run.most_out <= out
    return run.now, run.plays


@dataclass(frozen=True)
class Way:
    """Seconds that one host needs: before it may be drained, out of service, and after."""

    before: float
    out: float
    after: float


def ways(draws: Draws, hosts: Sequence[str]) -> list[Way]:
    names = list(TYPICAL)
    drain, watch = names.index("drain"), names.index("watch")

    def spent(host: str, phases: Sequence[str]) -> float:
        return sum(draws[host, key] for key in KEYS if key[0] in phases)

    barrier = max(spent(host, names[:1]) for host in hosts)
    return [
        Way(max(barrier, spent(host, names[:drain])), spent(host, names[drain:watch]), spent(host, names[watch:]))
        for host in hosts
    ]


def bound(hosts: Sequence[Way], slots: int) -> float:
    spread = min(host.before for host in hosts) + sum(host.out for host in hosts) / slots
    longest = max(host.before + host.out + host.after for host in hosts)
    return max(longest, spread + min(host.after for host in hosts))


def window(hosts: Sequence[Way], slots: int) -> float:
    free, waiting, end = [0.0] * slots, list(range(len(hosts))), 0.0
    while waiting:
        now = max(heapq.heappop(free), min(hosts[each].before for each in waiting))
        chosen = next(each for each in waiting if hosts[each].before <= now)
        waiting.remove(chosen)
        heapq.heappush(free, now + hosts[chosen].out)
        end = max(end, now + hosts[chosen].out + hosts[chosen].after)
    return end


def serial(draws: Draws, hosts: Sequence[str], out: int, free: bool) -> float:
    total = 0.0
    for first in range(0, len(hosts), out):
        batch = hosts[first : first + out]
        columns = [[draws[host, key] for host in batch] for key in KEYS]
        longest = max(map(sum, zip(*columns, strict=True))) if free else sum(map(max, columns))
        total += PLAY_COST + longest
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, default=200)
    parser.add_argument("--out", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--sigma", type=float, default=0.8)
    parser.add_argument("--stragglers", type=float, default=0.0)
    options = parser.parse_args()
    hosts = [f"gpu{number:03}" for number in range(options.hosts)]
    print(f"{options.hosts} hosts, {options.out} out at once, {PLAY_COST} s a play, sigma {options.sigma}")
    print("seed    bound   window   serial   serial free   plays")
    rows = []
    for seed in range(1, options.seeds + 1):
        draws = draw(seed, hosts, options.sigma, options.stragglers)
        ideal = ways(draws, hosts)
        least, sliding = bound(ideal, options.out), window(ideal, options.out)
        span, plays = ours(draws, hosts, options.out)
        rows.append(
            (
                span / least,
                span / sliding,
                serial(draws, hosts, options.out, free=False) / least,
                serial(draws, hosts, options.out, free=True) / least,
            )
        )
        print(f"{seed:4}   " + "   ".join(f"{ratio:6.3f}" for ratio in rows[-1]) + f"        {plays:5}")
    means, worst = (tuple(map(of, zip(*rows, strict=True))) for of in (mean, max))
    print("mean   " + "   ".join(f"{ratio:6.3f}" for ratio in means))
    print("worst  " + "   ".join(f"{ratio:6.3f}" for ratio in worst))
    good = means[0] <= LIMIT and worst[1] <= LIMIT
    print(f"mean against the bound and worst against the window at most {LIMIT}: {'yes' if good else 'NO'}")
    sys.exit(not good)


if __name__ == "__main__":
    main()
