"""One of two ranks of a distributed PyTorch test, run by the host's own interpreter. Python 3.8, no Ansible.

Usage: gpuchange_rank.py JOB, with {rank, address, port, backend: auto | nccl | gloo, timeout_s, stop}. Rank 0 listens
at the port, rank 1 connects to it. Both sum a tensor and take a training step whose outcome is known beforehand.
Each line is `gpuchange-rank JSON`: {step}, and at last {result: {ok, why, at, backend, torch, cards, alone, hung}}.
It ends by itself after `timeout_s`, and as soon as the file `stop` is there, whatever its other thread hangs in.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import importlib
import json
import os
import socket
import struct
import sys
import threading
import time
from typing import Any, Dict, NoReturn

MARK = "gpuchange-rank "
WORLD = 2
LENGTH = 1 << 20
ROWS, COLUMNS, RATE = 4, 8, 0.5
POLL_S = 0.2
SIOCGIFADDR = 0x8915


def say(**message: Any) -> None:
    print(MARK + json.dumps(message), flush=True)


class Rank:
    """The test as one rank sees it; `at` is the step that it is in."""

    def __init__(self, job: Dict[str, Any]) -> None:
        self.job, self.rank, self.at = job, int(job["rank"]), "starting"
        self.store_at = "%s port %d" % (job["address"], job["port"])
        self.found: Dict[str, Any] = {}
        self.card = 0
        self.over = threading.Lock()

    def step(self, text: str) -> None:
        self.at = text
        say(step=text)

    def end(self, why: str = "", **more: Any) -> NoReturn:
        """Say the result and leave at once: a library that hangs must not keep the process."""
        self.over.acquire()  # whoever comes first has the word
        say(result=dict(self.found, ok=not why, why=why, at=self.at, **more))
        os._exit(0)

    def watch(self) -> None:
        until = time.monotonic() + float(self.job["timeout_s"])
        while time.monotonic() < until:
            if os.path.exists(self.job["stop"]):
                self.end("it was told to end while %s" % self.at)
            time.sleep(POLL_S)
        self.end("no end within %g s while %s" % (self.job["timeout_s"], self.at), hung=True)

    def run(self) -> NoReturn:
        threading.Thread(target=self.watch, daemon=True).start()
        torch = self.library()
        try:
            self.meet(torch)
            device = "cuda:%d" % self.card if self.found["backend"] == "nccl" else "cpu"
            found = self.sums(torch, device), self.trains(torch, device)  # both, or the other rank would wait in vain
            self.leave()
        except Exception as error:
            self.end("%s while %s" % (first_line(error), self.at))
        self.end("; ".join(filter(None, found)))

    def library(self) -> Any:
        self.step("loading PyTorch")
        try:
            torch: Any = importlib.import_module("torch")
            importlib.import_module("torch.distributed")
        except Exception as error:
            self.end("PyTorch cannot be used: %s" % first_line(error), alone=True)
        cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self.found = {"torch": str(torch.__version__), "cards": cards}
        return torch

    def meet(self, torch: Any) -> None:
        """Both ranks tell what they have; NCCL if it fits both."""
        timeout = datetime.timedelta(seconds=float(self.job["timeout_s"]))
        address, port = str(self.job["address"]), int(self.job["port"])
        self.step("waiting for rank 1 at %s" % self.store_at if self.rank == 0 else "connecting to %s" % self.store_at)
        if self.rank == 1:
            wait_for(address, port)
        found = interface_of(local_address(self.rank, address, port))
        if found:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
        self.store = torch.distributed.TCPStore(address, port, WORLD, self.rank == 0, timeout, wait_for_workers=False)
        self.found["backend"] = self.agreed()
        self.step("joining the %s group" % self.found["backend"])
        torch.distributed.init_process_group(
            self.found["backend"], store=self.store, rank=self.rank, world_size=WORLD, timeout=timeout
        )

    def agreed(self) -> str:
        """The backend, the same on both sides; two ranks of one machine need a card each."""
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            mine = [self.found["cards"], socket.gethostname() + file.read().strip()]
        self.store.set("has-%d" % self.rank, json.dumps(mine))
        others = json.loads(self.store.get("has-%d" % (1 - self.rank)))
        shared = mine[1] == others[1]
        self.card = self.rank if shared else 0
        enough = min(mine[0], others[0]) > int(shared)
        wanted = str(self.job["backend"])
        return wanted if wanted != "auto" else "nccl" if enough else "gloo"

    def leave(self) -> None:
        """Rank 0 keeps the store, so it goes last."""
        if self.rank == 1:
            self.store.set("done", "yes")
        else:
            self.step("waiting for rank 1 to end")
            self.store.get("done")

    def sums(self, torch: Any, device: str) -> str:
        """Why the all-reduce is wrong, or ""."""
        self.step("summing by all-reduce")
        values = torch.full((LENGTH,), float(self.rank + 1), device=device)
        torch.distributed.all_reduce(values)
        return unequal("all-reduce", values.unique().tolist(), WORLD * (WORLD + 1) / 2)

    def trains(self, torch: Any, device: str) -> str:
        """Why one step of DistributedDataParallel is wrong, or "": each rank has other data, both get one mean."""
        self.step("taking a DDP step")
        model = torch.nn.Linear(COLUMNS, 1, bias=False, device=device)
        torch.nn.init.constant_(model.weight, 1.0)
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        data = torch.full((ROWS, COLUMNS), float(self.rank + 1), device=device)
        parallel(data).sum().backward()
        torch.optim.SGD(parallel.parameters(), lr=RATE).step()
        mean = ROWS * (WORLD + 1) / 2  # of the ranks' gradients, ROWS * (rank + 1)
        return unequal("DDP step", model.weight.detach().unique().tolist(), 1.0 - RATE * mean)


def unequal(what: str, values: Any, wanted: float) -> str:
    if list(values) == [wanted]:
        return ""
    shown = ", ".join("%g" % value for value in list(values)[:3])
    return "%s: %s%s instead of %g" % (what, shown, " …" if len(values) > 3 else "", wanted)


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]


def wait_for(address: str, port: int) -> None:
    """Until something listens there; the watch ends this if nothing ever does."""
    while True:
        try:
            socket.create_connection((address, port), timeout=5.0).close()
            return
        except OSError:
            time.sleep(POLL_S)


def local_address(rank: int, address: str, port: int) -> str:
    """The address under which the other rank sees us: rank 0's own, or the one that we reach rank 0 from."""
    family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    if rank == 0:
        return str(target[0])
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The interface that has the address, or "": left to itself, gloo may choose one that the other cannot reach."""
    if ":" in address:
        return ipv6_interface(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                said = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(said[20:24]) == address:
                return name
    return ""


def ipv6_interface(address: str) -> str:
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            rows = [line.split() for line in file]
    except OSError:
        return ""
    return next((row[5] for row in rows if len(row) == 6 and row[0] == packed), "")


def port_taken(port: int) -> bool:
    """Whether something else listens at the port of this host."""
    family = socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trying:
            trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trying.bind(("", port))
            trying.listen(1)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


if __name__ == "__main__":
    Rank(json.loads(sys.argv[1])).run()
