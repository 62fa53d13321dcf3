"""Where labs keep their state on disk, and the locks around it.

<root>/                 GPUCHANGE_LAB_DIR, default /var/lib/gpuchange-lab
  pool.btrfs            one file, loop-mounted on pool/: the images and every lab's hosts
  pool/images/<key>     base system subvolumes, keyed by a hash of their recipe
  pool/labs/<name>/     one subvolume a host, and .snapshots/<label>/<host>
  cache/                the stand-in package repository, keyed likewise
  labs/<name>/          lab.json, inventory.yaml, ssh keys, logs, power.sock
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from gpuchange.errors import LabError

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
APT_PORT = 8099


def root() -> Path:
    return Path(os.environ.get("GPUCHANGE_LAB_DIR") or "/var/lib/gpuchange-lab").resolve()


def pool() -> Path:
    return root() / "pool"


@dataclass(frozen=True)
class HostSpec:
    """One lab host as laid out: `role` is `gpu` or `lb`, `position` is the last number of its addresses."""

    name: str
    role: str
    position: int


@dataclass(frozen=True)
class LabSpec:
    """One lab as laid out. `index` N gives bridge gclN and subnets 10.88.N.0/24 and fd88:N::/64."""

    name: str
    index: int
    gpus: int
    hosts: tuple[HostSpec, ...]

    @property
    def bridge(self) -> str:
        return f"gcl{self.index}"

    @property
    def gateway(self) -> str:
        """The machine's own address on the bridge: package server and source of every connection."""
        return f"10.88.{self.index}.1"

    @property
    def directory(self) -> Path:
        return root() / "labs" / self.name

    @property
    def subvolumes(self) -> Path:
        return pool() / "labs" / self.name

    @property
    def socket(self) -> Path:
        return self.directory / "power.sock"

    def address(self, host: HostSpec) -> str:
        return f"10.88.{self.index}.{host.position}"

    def address6(self, host: HostSpec) -> str:
        return f"fd88:{self.index:x}::{host.position:x}"

    def machine(self, host: HostSpec) -> str:
        """Name known to nspawn; short, for the host's cable is vb-<machine> and its name ends at 15 letters."""
        return f"{self.bridge}-{host.name}"

    def tree(self, host: HostSpec) -> Path:
        return self.subvolumes / host.name

    def snapshot(self, host: HostSpec, label: str) -> Path:
        """Where the host's tree is kept under `label`."""
        return self.subvolumes / ".snapshots" / check_name(label) / host.name

    def find(self, name: str) -> HostSpec:
        for host in self.hosts:
            if host.name == name:
                return host
        known = ", ".join(host.name for host in self.hosts)
        raise LabError(f"lab {self.name} has no host {name!r}", remedy=f"its hosts are: {known}")


def plan_hosts(count: int) -> tuple[HostSpec, ...]:
    """lb1 at .10, gpu1 at .11 and so on."""
    if not 1 <= count <= 99:
        raise LabError(f"a lab has 1 to 99 GPU hosts, not {count}")
    gpus = (HostSpec(f"gpu{n}", "gpu", 10 + n) for n in range(1, count + 1))
    return (HostSpec("lb1", "lb", 10), *gpus)


def check_name(name: str) -> str:
    """The name itself. Raises LabError unless it is fit for paths of labs and snapshots."""
    if not NAME.fullmatch(name):
        raise LabError(
            f"{name!r} is no name for a lab or snapshot",
            remedy="use small letters, digits and hyphens, at most 31, for example: lab",
        )
    return name


def save(spec: LabSpec) -> None:
    spec.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = spec.directory / "lab.json.new"
    draft.write_text(json.dumps(asdict(spec), indent=1) + "\n")
    draft.replace(spec.directory / "lab.json")


def exists(name: str) -> bool:
    return (root() / "labs" / check_name(name) / "lab.json").is_file()


def load(name: str) -> LabSpec:
    """Raises LabError when there is no such lab."""
    if not exists(name):
        have = ", ".join(spec.name for spec in all_labs())
        raise LabError(
            f"there is no lab named {name!r}",
            why=f"labs under {root()}: {have}" if have else f"no lab is up under {root()}",
            remedy=f"gpuchange lab up --name {name}",
        )
    raw = json.loads((root() / "labs" / name / "lab.json").read_text())
    return LabSpec(raw["name"], raw["index"], raw["gpus"], tuple(HostSpec(**host) for host in raw["hosts"]))


def all_labs() -> list[LabSpec]:
    return [load(path.parent.name) for path in sorted((root() / "labs").glob("*/lab.json"))]


@contextmanager
def locked(what: str) -> Iterator[None]:
    """Hold the named lock of this state directory: `images`, `labs` or `lab-<name>`. Waits for its turn."""
    directory = root() / "locks"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(directory / f"{what}.lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
