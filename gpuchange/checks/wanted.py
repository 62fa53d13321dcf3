"""Are the versions there that the plan wants, or else those that were there before? Each witness by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from gpuchange.checks import driver as driver_of
from gpuchange.checks.snapshot import Snapshot
from gpuchange.compat.floors import compat_package, too_old
from gpuchange.compat.versions import matches, parts


@dataclass(frozen=True)
class Finding:
    """What a component should be and what it is, as one witness tells it."""

    ok: bool
    says: str


def _judged(what: str, should: str, found: str | None) -> Finding:
    ok = agrees(should, found)
    return Finding(ok, f"{what}: {found}" if ok else f"{what} should be {should}, is {found or 'absent'}")


def agrees(should: str, found: str | None) -> bool:
    """Equal as far as both tell: a library file says 9.8.0 where the package says 9.8.0.87."""
    one, two = parts(should), parts(found or "")
    width = min(len(one), len(two))
    return width > 0 and one[:width] == two[:width]


def _driver(wanted: Mapping[str, str], before: Snapshot, now: Snapshot) -> Iterator[Finding]:
    should = wanted.get("driver") or before.driver.userspace or before.driver.loaded
    if not should:
        return
    driver = now.driver
    yield _judged("driver loaded", should, driver.loaded)
    yield _judged("driver installed", should, driver.userspace)
    kernel = driver.boot_kernel or now.kernel
    yield _judged(f"driver on disk for kernel {kernel}", should, driver.next_boot)
    yield _judged("driver reported by nvidia-smi", should, driver.reported)
    if not agrees(should, driver.loaded) and not agrees(should, driver.next_boot):
        yield Finding(False, f"no nvidia module {should} exists for kernel {kernel}; reboot will not fix this")
    for odd in driver_of.mixed_modules(driver):
        yield Finding(False, odd)


def _cuda(wanted: Mapping[str, str], before: Snapshot, now: Snapshot) -> Iterator[Finding]:
    should = wanted.get("cuda")
    if should and not any(matches(should, found) for found in now.cuda.toolkits.values()):
        yield Finding(
            False, f"CUDA toolkit should be {should}, installed: {', '.join(now.cuda.toolkits.values()) or 'none'}"
        )
    kept_by_hand = before.cuda.mode == "manual" and now.cuda.active == before.cuda.active
    active = before.cuda.active if kept_by_hand or not should else should
    if active:
        yield _judged("active CUDA toolkit", active, now.cuda.active)
        why = too_old(now.driver.loaded, now.cuda.active)
        if why and compat_package(now.cuda.active or "") not in now.packages:
            yield Finding(False, why)


def _cudnn(wanted: Mapping[str, str], before: Snapshot, now: Snapshot) -> Iterator[Finding]:
    should = wanted.get("cudnn") or before.cudnn.version
    if not should:
        return
    yield _judged("cuDNN loaded", should, now.cudnn.version)
    for copy in now.cudnn.copies:
        if copy.origin == "package" and wanted.get("cudnn"):
            yield _judged(f"cuDNN package {copy.path}", should, copy.version)
    for path, version in before.cudnn.by_hand.items():
        found = now.cudnn.by_hand.get(path)
        if found != version:
            yield Finding(False, f"cuDNN {version} in {path} is {found or 'gone'}: no package of the change brought it")


def _plain(name: str, title: str) -> Callable[[Mapping[str, str], Snapshot, Snapshot], Iterator[Finding]]:
    def check(wanted: Mapping[str, str], before: Snapshot, now: Snapshot) -> Iterator[Finding]:
        should = wanted.get(name) or getattr(before, name)
        if should:
            yield _judged(title, should, getattr(now, name))

    return check


def _fabric(wanted: Mapping[str, str], before: Snapshot, now: Snapshot) -> Iterator[Finding]:
    """Where there are NVSwitches it must be the driver's very version; elsewhere it does not matter."""
    if now.switches:
        should = wanted.get("fabric_manager") or now.driver.loaded or ""
        yield _judged("fabric manager", should, now.fabric_manager)


CHECKS: tuple[Callable[[Mapping[str, str], Snapshot, Snapshot], Iterator[Finding]], ...] = (
    _driver,
    _cuda,
    _cudnn,
    _plain("nccl", "NCCL"),
    _plain("container_toolkit", "container toolkit"),
    _fabric,
)


def compare(wanted: Mapping[str, str], before: Snapshot, now: Snapshot) -> tuple[Finding, ...]:
    """All findings, good ones included, component by component."""
    return tuple(finding for check in CHECKS for finding in check(wanted, before, now))
