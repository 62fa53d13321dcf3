"""Which packages the lab's repository holds: names, versions and relations as NVIDIA publishes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial


@dataclass(frozen=True)
class File:
    """One file of a package: a template in files/ or a compiled object (`source`), a `text`, or a `link`."""

    source: str = ""
    text: str = ""
    link: str = ""
    mode: int = 0o644


@dataclass(frozen=True)
class Package:
    """One version of one package. `values` fill the @NAME@ marks of its files and scripts."""

    name: str
    version: str
    summary: str
    depends: tuple[str, ...] = ()
    provides: str = ""
    files: dict[str, File] = field(default_factory=dict)
    actions: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    triggers: str = ""
    conffiles: tuple[str, ...] = ()
    section: str = "non-free/libs"

    @property
    def upstream(self) -> str:
        return self.version.split(":")[-1].rpartition("-")[0]


LIB = "usr/lib/x86_64-linux-gnu"

KMS_OPTIONS = "/etc/modprobe.d/nvidia-graphics-drivers-kms.conf"
CUDA_OF_BRANCH = {"550": "12.4", "570": "12.8"}
DRIVERS = ("550.54.15", "550.163.01", "570.124.06", "570.172.08")
MODULES = {"nvidia": "", "nvidia-uvm": "nvidia", "nvidia-modeset": "nvidia", "nvidia-drm": "nvidia-modeset"}
"""Kernel modules of a driver and the module each one depends on."""


def branch_of(driver: str) -> str:
    return driver.partition(".")[0]


def driver(version: str) -> list[Package]:
    """The five packages of one driver version; two branches exclude each other through what they provide."""
    branch, debian = branch_of(version), f"{version}-0ubuntu1"
    values = {"UPSTREAM": version, "CUDA": CUDA_OF_BRANCH[branch]}
    make = partial(Package, version=debian, values=values)
    exact = " (= " + debian + ")"
    return _userland(make, branch, exact, version) + _kernel_side(make, branch, exact, version)


def _userland(make: Callable[..., Package], branch: str, exact: str, version: str) -> list[Package]:
    parts = [f"{part}-{branch}{exact}" for part in ("libnvidia-compute", "nvidia-utils", "nvidia-dkms")]
    return [
        make(
            f"nvidia-driver-{branch}",
            summary="NVIDIA driver metapackage",
            depends=(*parts, f"nvidia-kernel-common-{branch}{exact}"),
            provides="nvidia-driver",
            files={f"usr/share/doc/nvidia-driver-{branch}/NVIDIA_Changelog": File(text=f"Release {version}\n")},
            section="non-free/utils",
        ),
        make(
            f"nvidia-utils-{branch}",
            summary="NVIDIA driver support binaries",
            depends=(f"libnvidia-compute-{branch}{exact}", "python3"),
            provides="nvidia-utils",
            files={
                "usr/bin/nvidia-smi": File("nvidia-smi", mode=0o755),
                "usr/share/nvidia/smi/smi_fields.py": File("smi_fields.py"),
                "usr/share/nvidia/smi/smi_mig.py": File("smi_mig.py"),
            },
            section="non-free/utils",
        ),
        make(
            f"libnvidia-compute-{branch}",
            summary="NVIDIA libcompute package",
            provides="libnvidia-compute",
            files=_library("libcuda", 1, version) | _library("libnvidia-ml", 1, version),
            triggers="activate-noawait ldconfig\n",
        ),
    ]


def _kernel_side(make: Callable[..., Package], branch: str, exact: str, version: str) -> list[Package]:
    return [
        make(
            f"nvidia-dkms-{branch}",
            summary="NVIDIA DKMS package",
            depends=("dkms", f"nvidia-kernel-common-{branch}{exact}"),
            provides="nvidia-dkms-kernel",
            files=_module_source(version),
            actions={"postinst": "dkms/postinst.sh", "prerm": "dkms/prerm.sh", "postrm": ":"},
            section="non-free/kernel",
        ),
        make(
            f"nvidia-kernel-common-{branch}",
            summary="Shared files used with the kernel module",
            provides="nvidia-kernel-common",
            files={
                KMS_OPTIONS.lstrip("/"): File(text="options nvidia-drm modeset=1\n"),
                f"usr/share/nvidia/{branch}/release": File(text=f"{version}\n"),
            },
            conffiles=(KMS_OPTIONS,),
            section="non-free/kernel",
        ),
    ]


def _library(name: str, soname: int, version: str, folder: str = LIB) -> dict[str, File]:
    """lib.so.VERSION compiled for this version, and the links the linker and ldconfig would make."""
    real = f"{name}.so.{version}"
    return {
        f"{folder}/{real}": File(f"{name}/{version}"),
        f"{folder}/{name}.so.{soname}": File(link=real),
    }


def _module_source(version: str) -> dict[str, File]:
    root = f"usr/src/nvidia-{version}"
    conf = "".join(
        f'BUILT_MODULE_NAME[{i}]="{name}"\nDEST_MODULE_LOCATION[{i}]="/kernel/drivers/char/drm"\n'
        for i, name in enumerate(MODULES)
    )
    head = f'PACKAGE_NAME="nvidia"\nPACKAGE_VERSION="{version}"\nAUTOINSTALL="yes"\n'
    objects = {f"{root}/prebuilt/{name}.ko_": File(f"{name}.ko/{version}") for name in MODULES}
    return objects | {f"{root}/dkms.conf": File(text=head + conf)}


def fabric_manager(version: str) -> list[Package]:
    """The service that hosts with NVSwitches need, of exactly the driver's version."""
    return [
        Package(
            f"nvidia-fabricmanager-{branch_of(version)}",
            f"{version}-1",
            "Fabric Manager for NVSwitch based systems",
            files={
                "usr/bin/nv-fabricmanager": File("nv-fabricmanager", mode=0o755),
                "lib/systemd/system/nvidia-fabricmanager.service": File("nvidia-fabricmanager.service"),
            },
            section="multiverse/admin",
        )
    ]


def cuda(release: str, update: str, cudart: str, nvcc: str) -> list[Package]:
    """A toolkit that lives beside others; the newest configured one is behind /usr/local/cuda."""
    dash, prefix = release.replace(".", "-"), f"usr/local/cuda-{release}"
    number = release.replace(".", "")
    link = f"/usr/local/cuda cuda /{prefix}"
    json = f'{{"cuda": {{"name": "CUDA SDK", "version": "{update}"}}, "nvcc": {{"version": "{nvcc}"}}}}\n'
    values = {"RELEASE": release, "NVCC": nvcc}
    return [
        Package(
            f"cuda-toolkit-{dash}",
            f"{update}-1",
            "CUDA Toolkit meta-package",
            depends=(f"cuda-cudart-{dash} (>= {cudart})", f"cuda-nvcc-{dash} (>= {nvcc})"),
            files={f"{prefix}/version.json": File(text=json)},
            actions={
                "postinst": f"update-alternatives --install {link} {number}",
                "prerm": f'[ "$1" = upgrade ] || update-alternatives --remove cuda /{prefix}',
            },
            section="multiverse/devel",
        ),
        Package(
            f"cuda-nvcc-{dash}",
            f"{nvcc}-1",
            "CUDA nvcc",
            files={f"{prefix}/bin/nvcc": File("nvcc", mode=0o755)},
            values=values,
            section="multiverse/devel",
        ),
        Package(
            f"cuda-cudart-{dash}",
            f"{cudart}-1",
            "CUDA Runtime native libraries",
            files=_library("libcudart", 12, cudart, folder=f"{prefix}/lib64")
            | {f"etc/ld.so.conf.d/cuda-{dash}.conf": File(text=f"/{prefix}/lib64\n")},
            triggers="activate-noawait ldconfig\n",
            section="multiverse/libs",
        ),
    ]


def cudnn(version: str) -> list[Package]:
    upstream = version.rpartition(".")[0]
    major, minor, patch = upstream.split(".")
    defines = zip(("MAJOR", "MINOR", "PATCHLEVEL"), (major, minor, patch), strict=True)
    header = "".join(f"#define CUDNN_{name} {number}\n" for name, number in defines)
    plain = "/usr/include/cudnn_version.h"
    versioned = f"/usr/include/x86_64-linux-gnu/cudnn_version_v{major}.h"
    return [
        Package(
            "libcudnn9-cuda-12",
            f"{version}-1",
            "cuDNN runtime libraries for CUDA 12",
            files=_library("libcudnn", 9, upstream),
            triggers="activate-noawait ldconfig\n",
            section="multiverse/libs",
        ),
        Package(
            "libcudnn9-headers-cuda-12",
            f"{version}-1",
            "cuDNN header files for CUDA 12",
            files={versioned.lstrip("/"): File(text=header)},
            actions={
                "postinst": f"update-alternatives --install {plain} libcudnn {versioned} 90",
                "prerm": f'[ "$1" = upgrade ] || update-alternatives --remove libcudnn {versioned}',
            },
            section="multiverse/libs",
        ),
    ]


def container_toolkit(upstream: str) -> list[Package]:
    version = f"{upstream}-1"
    make = partial(Package, version=version, values={"UPSTREAM": upstream}, section="utils")
    return [
        make(
            "nvidia-container-toolkit",
            summary="NVIDIA Container toolkit",
            depends=(
                f"nvidia-container-toolkit-base (= {version})",
                f"libnvidia-container-tools (>= {version})",
            ),
            files={"usr/bin/nvidia-container-runtime-hook": File("nvidia-ctk", mode=0o755)},
        ),
        make(
            "nvidia-container-toolkit-base",
            summary="NVIDIA Container Toolkit Base",
            files={"usr/bin/nvidia-ctk": File("nvidia-ctk", mode=0o755)},
        ),
        make(
            "libnvidia-container-tools",
            summary="NVIDIA container runtime library (command-line tools)",
            depends=(f"libnvidia-container1 (>= {version})",),
            files={"usr/bin/nvidia-container-cli": File("nvidia-container-cli", mode=0o755)},
        ),
        make(
            "libnvidia-container1",
            summary="NVIDIA container runtime library",
            files=_library("libnvidia-container", 1, upstream),
            triggers="activate-noawait ldconfig\n",
        ),
    ]


def kernel_build(kernel: str) -> list[Package]:
    """What a module build needs from the distribution: dkms, and headers for the kernel that runs."""
    source = f"usr/src/linux-headers-{kernel}"
    return [
        Package(
            "dkms",
            "3.0.10-8+deb12u1",
            "Dynamic Kernel Module System (DKMS)",
            depends=("kmod",),
            files={"usr/sbin/dkms": File("dkms/dkms", mode=0o755)},
            section="kernel",
        ),
        Package(
            f"linux-headers-{kernel}",
            "6.18-1",
            "Header files for the running kernel",
            files={
                f"{source}/Makefile": File(text="VERSION = 6\nPATCHLEVEL = 18\n"),
                f"{source}/include/config/kernel.release": File(text=kernel + "\n"),
                f"usr/lib/modules/{kernel}/build": File(link=f"/{source}"),
            },
            section="kernel",
        ),
    ]


CUDAS = (("12.4", "12.4.1", "12.4.127", "12.4.131"), ("12.8", "12.8.1", "12.8.90", "12.8.93"))
CUDNNS = ("9.1.0.70", "9.8.0.87")
FABRIC_MANAGERS = ("550.54.15", "570.124.06")
"""Not for each driver: that the matching one is not to be had yet is a common obstacle."""
TOOLKITS = ("1.16.2", "1.17.8")

_TABLE: tuple[tuple[Callable[..., list[Package]], tuple[tuple[str, ...], ...]], ...] = (
    (driver, tuple((v,) for v in DRIVERS)),
    (fabric_manager, tuple((v,) for v in FABRIC_MANAGERS)),
    (cuda, CUDAS),
    (cudnn, tuple((v,) for v in CUDNNS)),
    (container_toolkit, tuple((v,) for v in TOOLKITS)),
)


def catalog(kernel: str) -> list[Package]:
    """Every package of the repository, for guests that run `kernel` (a uname -r)."""
    rows = [package for make, versions in _TABLE for v in versions for package in make(*v)]
    return rows + kernel_build(kernel)
