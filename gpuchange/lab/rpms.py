"""RPMs for a lab: the stand-in stack under the names of NVIDIA's repository for RHEL, built from the lab's packages."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gpuchange.errors import LabError
from gpuchange.lab import stack, state
from gpuchange.lab.tools import sh

TOOLS = {"rpmbuild": "rpm", "createrepo_c": "createrepo-c"}
VERSIONS = ("550.54.15", "570.172.08")
TOOLKITS = ("1.16.2", "1.17.8")
RELEASE = "1.lab"
LEDGER = "mkdir -p /var/log/gpuchange-lab; echo {name} {version} $1 >> /var/log/gpuchange-lab/rpms.log"
HANG = "fifo=/etc/gpuchange-lab/faults/apt-hangs; if [ -p $fifo ]; then read -r answer < $fifo; fi"
BUILD = "dkms add -m nvidia -v {version} || :\ndkms install -m nvidia -v {version} || :"
UNBUILD = "dkms remove -m nvidia -v {version} --all || :"


@dataclass(frozen=True)
class Rpm:
    """One package: what its files come from (the lab's .deb of the same version), what it needs at its own version."""

    name: str
    version: str
    deb: str = ""
    epoch: int = 0
    needs: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    posttrans: str = ""
    preun: str = ""

    @property
    def evr(self) -> str:
        return f"{self.epoch}:{self.version}-{RELEASE}" if self.epoch else f"{self.version}-{RELEASE}"


BASE = Rpm("lab-base", "12", provides=("/bin/sh", "/usr/bin/sh", "system-release = 12"))
"""What RPMs find of a system that itself is not made of RPMs."""


def driver(version: str) -> list[Rpm]:
    branch = version.partition(".")[0]

    def row(name: str, deb: str = "", **more: object) -> Rpm:
        return Rpm(name, version, f"{deb}-{branch}" if deb else "", 3, **more)  # type: ignore[arg-type]

    return [
        row("nvidia-driver-cuda-libs", "libnvidia-compute"),
        row("nvidia-driver-cuda", "nvidia-utils", needs=("nvidia-driver-cuda-libs",)),
        row("nvidia-kmod-common", "nvidia-kernel-common"),
        row("kmod-nvidia-latest-dkms", "nvidia-dkms", needs=("nvidia-kmod-common",), posttrans=BUILD, preun=UNBUILD),
        row("cuda-drivers", needs=("nvidia-driver-cuda", "kmod-nvidia-latest-dkms")),
    ]


def toolkit(version: str) -> list[Rpm]:
    base = Rpm("nvidia-container-toolkit-base", version, "nvidia-container-toolkit-base")
    return [base, Rpm("nvidia-container-toolkit", version, "nvidia-container-toolkit", needs=(base.name,))]


def repository() -> Path:
    """A dnf repository, built once for each state of its sources. Raises LabError when a tool is missing."""
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        raise LabError("the lab's RPMs cannot be built", remedy=f"apt-get install {' '.join(missing)}")
    debs = stack.repository()
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    target = state.root() / "cache" / f"rpms-{recipe}-{debs.name}"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / "repo"
            made.mkdir()
            rows = [BASE, *(row for version in VERSIONS for row in driver(version))]
            for row in rows + [row for version in TOOLKITS for row in toolkit(version)]:
                build(row, debs, made, Path(scratch))
            sh(["createrepo_c", "-q", made])
            made.rename(target)
    return target


def build(rpm: Rpm, debs: Path, target: Path, scratch: Path) -> None:
    tree = scratch / f"{rpm.name}-{rpm.version}"
    tree.mkdir()
    if rpm.deb:
        (found,) = (debs / "pool").glob(f"{rpm.deb}_{rpm.version}-*.deb")
        sh(["dpkg-deb", "-x", found, tree])
    spec = scratch / f"{rpm.name}-{rpm.version}.spec"
    spec.write_text(_spec(rpm, tree))
    defines = {"_topdir": scratch / "top", "_rpmdir": target, "_rpmfilename": "%{NAME}-%{VERSION}-%{RELEASE}.rpm"}
    options = [word for name, value in defines.items() for word in ("--define", f"{name} {value}")]
    sh(["rpmbuild", "-bb", "--quiet", *options, spec])


def _spec(rpm: Rpm, tree: Path) -> str:
    files = [f"/{path.relative_to(tree)}" for path in sorted(tree.rglob("*")) if path.is_symlink() or path.is_file()]
    scripts = {
        "post": f"{LEDGER}\n{HANG}",
        "posttrans": rpm.posttrans,
        "preun": rpm.preun,
    }
    head = [
        f"Name: {rpm.name}",
        f"Epoch: {rpm.epoch}",
        f"Version: {rpm.version}",
        f"Release: {RELEASE}",
        "Summary: stand-in",
        "License: none",
        "AutoReqProv: no",
        *(f"Provides: {name}" for name in rpm.provides),
        *(f"Requires: {name} = {rpm.epoch}:{rpm.version}-{RELEASE}" for name in rpm.needs),
    ]
    parts = [
        "%description\nA stand-in of the lab.",
        f"%install\nmkdir -p %{{buildroot}}\ncp -a {tree}/. %{{buildroot}}/",
        *(f"%{name}\n{text.format(name=rpm.name, version=rpm.version)}" for name, text in scripts.items() if text),
        "%files\n" + "\n".join(files),
    ]
    settings = "%global __os_install_post %{nil}\n%global debug_package %{nil}\n"
    return settings + "\n".join(head) + "\n\n" + "\n\n".join(parts) + "\n"


def sources(url: str) -> str:
    """A .repo file for the repository at `url`."""
    return f"[cuda-lab]\nname=cuda-lab\nbaseurl={url}\nenabled=1\ngpgcheck=0\nmetadata_expire=1\n"
