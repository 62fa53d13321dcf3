"""A host's facts as one typed picture, and two pictures compared: what a rollback must equal, said line by line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from gpuchange.checks import card_settings
from gpuchange.checks import cards as cards_of
from gpuchange.checks import cuda as cuda_of
from gpuchange.checks import driver as driver_of
from gpuchange.checks.cards import Card, Smi
from gpuchange.checks.cuda import Cuda, Cudnn
from gpuchange.checks.driver import Driver
from gpuchange.checks.slots import bus_id


class GpuUser(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    pid: int = 0
    comm: str = ""
    unit: str = ""
    devices: tuple[str, ...] = ()


class Snapshot(BaseModel):
    """Everything that the facts of one moment mean. Absent facts are empty, never invented."""

    model_config = ConfigDict(frozen=True)

    machine_id: str = ""
    boot_id: str = ""
    kernel: str = ""
    smi: Smi = Smi()
    driver: Driver = Driver()
    cuda: Cuda = Cuda()
    cudnn: Cudnn = Cudnn()
    packages: dict[str, str] = {}
    nccl: str | None = None
    fabric_manager: str | None = None
    container_toolkit: str | None = None
    pci: tuple[str, ...] = ()
    """Addresses of NVIDIA's GPUs on the bus."""
    switches: tuple[str, ...] = ()
    gpu_users: tuple[GpuUser, ...] = ()

    @property
    def cards(self) -> tuple[Card, ...]:
        return self.smi.cards


def mapping(value: Any) -> dict[str, Any]:
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def rows(value: Any) -> list[dict[str, Any]]:
    return [mapping(row) for row in value if isinstance(row, Mapping)] if isinstance(value, Sequence) else []


def parse(facts: Mapping[str, Any]) -> Snapshot:
    """The picture of `report["facts"]`. Never raises: strange content leaves its field empty."""
    packages = {name: str(version) for name, version in mapping(mapping(facts.get("packages")).get("packages")).items()}
    smi = cards_of.parse(mapping(facts.get("smi")))
    devices = rows(facts.get("pci"))
    return Snapshot(
        machine_id=str(facts.get("machine_id") or ""),
        boot_id=str(facts.get("boot_id") or ""),
        kernel=str(facts.get("kernel") or ""),
        smi=smi,
        driver=driver_of.parse(facts, smi.driver, driver_of.library_version(packages)),
        cuda=cuda_of.parse_cuda(facts.get("cuda")),
        cudnn=cuda_of.parse_cudnn(facts.get("cudnn"), packages),
        packages=packages,
        nccl=_upstream(packages, "libnccl2"),
        fabric_manager=_upstream(packages, "nvidia-fabricmanager", "nvidia-fabricmanager-"),
        container_toolkit=_upstream(packages, "nvidia-container-toolkit"),
        pci=tuple(_address(row) for row in devices if str(row.get("class", "")).startswith(("0x0300", "0x0302"))),
        switches=tuple(_address(row) for row in devices if str(row.get("class", "")).startswith("0x0680")),
        gpu_users=tuple(_user(row) for row in rows(facts.get("gpu_users"))),
    )


def _address(row: Mapping[str, Any]) -> str:
    return bus_id(str(row.get("address", "")))


def _user(row: Mapping[str, Any]) -> GpuUser:
    pid = row.get("pid")
    devices = row.get("devices")
    return GpuUser(
        pid=pid if isinstance(pid, int) else 0,
        comm=str(row.get("comm") or ""),
        unit=str(row.get("unit") or ""),
        devices=tuple(str(device) for device in devices) if isinstance(devices, list) else (),
    )


def _upstream(packages: Mapping[str, str], name: str, prefix: str = "\0") -> str | None:
    for key in sorted(packages):
        if key == name or (key.startswith(prefix) and key.removeprefix(prefix).isdigit()):
            return packages[key].rpartition(":")[2].partition("-")[0]
    return None


# ------------------------------------------------------------------------------------------- proof


@dataclass(frozen=True)
class Line:
    """One line of a proof: `equal` or not, with the first differences in words."""

    what: str
    total: int
    differences: tuple[str, ...] = ()
    note: str = ""

    @property
    def equal(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        if self.equal:
            return f"{self.what}: {self.total} of {self.total} equal{self.note}"
        more = f" (and {len(self.differences) - 5} more)" if len(self.differences) > 5 else ""
        return f"{self.what}: {len(self.differences)} differ: {'; '.join(self.differences[:5])}{more}{self.note}"


def _compared(what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Line:
    keys = sorted(before.keys() | after.keys())
    unequal = [key for key in keys if before.get(key) != after.get(key)]
    said = [f"{key} should be {_shown(before.get(key))}, is {_shown(after.get(key))}" for key in unequal]
    return Line(what, len(keys), tuple(said))


def _shown(value: Any) -> str:
    if value is None:
        return "absent"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}={item}" for key, item in sorted(value.items())) + "}"
    return str(value) or "empty"


def _set(values: Any) -> dict[str, str]:
    return {str(value): "set" for value in values} if isinstance(values, list | tuple) else {}


def _services(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Enabled and active; what is not loaded and not active is as good as absent."""
    states = {name: mapping(row) for name, row in mapping(facts.get("services")).items()}
    steady = {"activating": "active", "reloading": "active", "deactivating": "inactive"}
    return {
        name: {"active": steady.get(str(row.get("active")), row.get("active")), "enabled": row.get("enabled")}
        for name, row in states.items()
        if row.get("load") != "not-found"
    }


def _rebooted(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    return before.get("boot_id") != after.get("boot_id")


def _as_before_boot(before: Mapping[str, Any], after: Mapping[str, Any], rebooted: bool) -> dict[str, Any]:
    """A unit that drain had stopped and that is enabled comes back with a boot by itself: that is no difference."""
    return {
        name: {**state, "active": "inactive"}
        if rebooted
        and state["active"] == "active"
        and state["enabled"] == "enabled"
        and before.get(name) == {**state, "active": "inactive"}
        else state
        for name, state in after.items()
    }


def _cards(facts: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("name", "serial", "uuid", "vbios", *card_settings.NAMES)
    return {
        card.bus_id: {**{key: getattr(card, key) for key in kept}, "MIG devices": card.geometry}
        for card in cards_of.parse(mapping(facts.get("smi"))).cards
    }


def _modules_on_disk(facts: Mapping[str, Any]) -> dict[str, Any]:
    kernels = driver_of.parse(facts, None, None).kernels
    return {f"{name} for {kernel}": version for kernel, modules in kernels.items() for name, version in modules.items()}


def _loaded(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Equal version numbers are not equal drivers: the module's flavour belongs to it."""
    driver = driver_of.parse(facts, None, None)
    flavour = {True: ", open module", False: "", None: ""}[driver.open_module]
    return {"driver": driver.loaded and driver.loaded + flavour, **driver.loaded_modules}


def _cuda(facts: Mapping[str, Any]) -> dict[str, Any]:
    cuda = cuda_of.parse_cuda(facts.get("cuda"))
    link = {"link": " -> ".join(cuda.link), "mode": cuda.mode, "selection": cuda.selection}
    return {**cuda.toolkits, **{key: value for key, value in link.items() if value}}


def _cudnn(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Every copy by its path; packages are a part of their own."""
    copies = cuda_of.parse_cudnn(facts.get("cudnn"), {}).copies
    return {copy.path: copy.version for copy in copies}


def _packages(key: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    def take(facts: Mapping[str, Any]) -> dict[str, Any]:
        value = mapping(facts.get("packages")).get(key)
        return mapping(value) if isinstance(value, Mapping) else _set(value)

    return take


PARTS: tuple[tuple[str, Callable[[Mapping[str, Any]], dict[str, Any]]], ...] = (
    ("packages", _packages("packages")),
    ("other packages", _packages("others")),
    ("broken packages", _packages("broken")),
    ("holds", _packages("holds")),
    ("automatic marks", _packages("auto")),
    ("origins", _packages("origins")),
    ("alternatives", _packages("alternatives")),
    ("pins", _packages("pins")),
    ("package sources", _packages("sources")),
    ("driver by .run file", lambda facts: mapping(facts.get("runfile"))),
    ("driver libraries", lambda facts: dict(driver_of.parse(facts, None, None).libraries)),
    ("modules on disk", _modules_on_disk),
    ("modules in the initramfs", lambda facts: dict(driver_of.parse(facts, None, None).initramfs)),
    ("modules loaded", _loaded),
    ("CUDA toolkits", _cuda),
    ("cuDNN copies", _cudnn),
    ("container toolkit configuration", lambda facts: mapping(mapping(facts.get("container_toolkit")).get("config"))),
    ("cards", _cards),
)
"""What is compared, in the order in which it is said."""


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Line, ...]:
    """The proof that the facts `after` equal those `before`, part by part. A part that is empty in both is left out."""
    lines = [_compared(what, take(before), take(after)) for what, take in PARTS]
    services = _services(before)
    lines.append(_compared("services", services, _as_before_boot(services, _services(after), _rebooted(before, after))))
    lines.append(_answers(before, after))
    return tuple(line for line in lines if line.total or line.differences)


def _answers(before: Mapping[str, Any], after: Mapping[str, Any]) -> Line:
    """nvidia-smi answers now if it did before: without it, equal card lists would be two times nothing."""
    was, now = (cards_of.parse(mapping(facts.get("smi"))) for facts in (before, after))
    if was.ok and not now.ok:
        return Line("nvidia-smi", 1, (f"answered before, now: {now.why}",))
    return Line("nvidia-smi", 1, note="" if now.ok else f" (did not answer before either: {now.why})")


def summary(picture: Snapshot) -> dict[str, str]:
    """What a table of before and after shows of one host; absent components are left out."""
    names = sorted({card.name or "unknown card" for card in picture.cards})
    counts = [f"{sum((card.name or 'unknown card') == name for card in picture.cards)} x {name}" for name in names]
    shown = {
        "gpus": ", ".join(counts),
        "driver": picture.driver.loaded or picture.driver.userspace,
        "cuda": picture.cuda.active,
        "cudnn": picture.cudnn.version,
        "nccl": picture.nccl,
        "fabric_manager": picture.fabric_manager,
        "container_toolkit": picture.container_toolkit,
    }
    return {key: value for key, value in shown.items() if value}
