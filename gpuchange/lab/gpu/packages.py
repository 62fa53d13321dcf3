"""The lab's apt repository: stand-in packages under NVIDIA's real names and versions, built on the spot."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpuchange.errors import LabError
from gpuchange.lab.gpu import catalog
from gpuchange.lab.gpu.catalog import File, Package


def _stack(driver: str, cuda: str, cudnn: str, toolkit: str) -> tuple[str, ...]:
    """apt arguments: each package with its version, because apt does not downgrade dependencies by itself."""
    versions = [row for row in catalog.CUDAS if row[0] == cuda]
    rows = [
        *catalog.driver(driver),
        *(package for row in versions for package in catalog.cuda(*row)),
        *catalog.cudnn(cudnn),
        *catalog.container_toolkit(toolkit),
    ]
    return tuple(f"{package.name}={package.version}" for package in rows)


START: tuple[str, ...] = (
    f"linux-headers-{os.uname().release}",
    "dkms",
    *_stack("550.54.15", "12.4", "9.1.0.70", "1.16.2"),
)
"""apt arguments of the stack that a fresh lab host has."""

NEW: tuple[str, ...] = _stack("570.172.08", "12.8", "9.8.0.87", "1.17.8")
"""apt arguments of the newest stack in the repository."""

NEWEST_ONLY = "newest"
"""Folder of a second index in the repository, which lists each package's newest version only."""

SCRIPTS = ("preinst", "postinst", "prerm", "postrm")
"""Every package has the first three; one with a postrm leaves its name behind (dpkg's state "rc") when removed."""

HERE = Path(__file__).parent
TOOLS = {"dpkg-deb": "dpkg", "apt-ftparchive": "apt-utils", "gcc": "gcc libc6-dev"}


def build_repo(out: Path) -> None:
    """Builds a flat apt repository in `out` (`deb [trusted=yes] URL ./`), complete or not at all.

    A second index, `deb [trusted=yes] URL newest/`, lists newest versions only. Packages are for the kernel
    that runs here, which is the guests' too. Raises LabError when a tool is missing or a command fails.
    """
    _require_tools()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="repo-", dir=out.parent) as scratch:
        work, repo = Path(scratch) / "work", Path(scratch) / "repo"
        (repo / "pool").mkdir(parents=True)
        objects = _compile(work / "objects")
        rows = catalog.catalog(os.uname().release)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda package: _build(package, work, objects, repo / "pool"), rows))
        _index(repo)
        repo.chmod(0o755)
        shutil.rmtree(out, ignore_errors=True)
        repo.rename(out)


def _require_tools() -> None:
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        raise LabError(
            "the lab's packages cannot be built",
            why=f"missing on this machine: {', '.join(t for t in TOOLS if shutil.which(t) is None)}",
            remedy=f"apt-get install {' '.join(missing)}",
        )


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"{command[0]} failed", why=done.stderr.strip()[-2000:], remedy=" ".join(command))
    return done.stdout


# --- compiled parts -------------------------------------------------------------------------------


def _compile(folder: Path) -> dict[str, Path]:
    """Shared libraries and kernel module files, by the key that catalog.File.source names."""
    folder.mkdir(parents=True)
    jobs = {key: command for version in catalog.DRIVERS for key, command in _driver_objects(version).items()}
    jobs |= {f"libcudnn/{v.rpartition('.')[0]}": _cudnn_object(v) for v in catalog.CUDNNS}
    jobs |= {f"libcudart/{row[2]}": _stub_object("libcudart.so.12", row[2]) for row in catalog.CUDAS}
    jobs |= {f"libnvidia-container/{v}": _stub_object("libnvidia-container.so.1", v) for v in catalog.TOOLKITS}
    paths = {key: folder / key.replace("/", "_") for key in jobs}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda key: _run(*jobs[key], "-o", str(paths[key]), cwd=HERE / "src"), jobs))
    return paths


def _define(**values: str) -> list[str]:
    return [f"-D{name}={value}" for name, value in values.items()]


def _quoted(text: str) -> str:
    return f'"{text}"'


def _shared(soname: str) -> list[str]:
    return ["gcc", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-s", f"-Wl,-soname,{soname}"]


def _driver_objects(version: str) -> dict[str, list[str]]:
    major, minor = catalog.CUDA_OF_BRANCH[catalog.branch_of(version)].split(".")
    defines = _define(DRIVER_VERSION=_quoted(version), CUDA_VERSION=str(int(major) * 1000 + int(minor) * 10))
    modules = {
        f"{name}.ko/{version}": ["gcc", "-c", "-O2", *defines, *_module_defines(name), "module.c"]
        for name in catalog.MODULES
    }
    return modules | {
        f"libcuda/{version}": [*_shared("libcuda.so.1"), *defines, "libcuda.c", "ptx.c", "-lm", "-lpthread"],
        f"libnvidia-ml/{version}": [*_shared("libnvidia-ml.so.1"), *defines, "libnvidia_ml.c"],
    }


def _module_defines(name: str) -> list[str]:
    underscored = name.replace("-", "_")
    texts = _define(
        MODULE_NAME=_quoted(underscored),
        MODULE_DEPENDS=_quoted(catalog.MODULES[name].replace("-", "_")),
        KERNEL_RELEASE=_quoted(os.uname().release),
    )
    return texts + (["-DMODULE_FIRMWARE"] if name == "nvidia" else [])


def _cudnn_object(version: str) -> list[str]:
    major, minor, patch, _ = (int(part) for part in version.split("."))
    number = str(major * 10000 + minor * 100 + patch)
    return [
        "gcc",
        "-O2",
        "-fPIC",
        "-shared",
        "-s",
        "-Wl,-soname,libcudnn.so.9",
        *_define(CUDNN_VERSION=number),
        "cudnn.c",
    ]


def _stub_object(soname: str, version: str) -> list[str]:
    return [*_shared(soname), *_define(LIBRARY_VERSION=_quoted(version)), "stub.c"]


# --- packages -------------------------------------------------------------------------------------


def _filled(text: str, package: Package, **more: str) -> str:
    values = {"PACKAGE": package.name, "VERSION": package.version, "UPSTREAM": package.upstream} | package.values | more
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def _template(name: str, package: Package, **more: str) -> str:
    return _filled((HERE / "files" / name).read_text(), package, **more)


def _build(package: Package, work: Path, objects: dict[str, Path], pool: Path) -> None:
    root = work / f"{package.name}_{package.version}"
    for path, file in package.files.items():
        _place(root / path, file, package, objects)
    control = root / "DEBIAN"
    control.mkdir(parents=True)
    (control / "control").write_text(_control(package))
    (control / "triggers").write_text(package.triggers)
    (control / "conffiles").write_text("".join(f"{path}\n" for path in package.conffiles))
    for script in (s for s in SCRIPTS if s != "postrm" or s in package.actions):
        (control / script).write_text(_script(package, script))
        (control / script).chmod(0o755)
    _run("dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "-b", str(root), str(pool))


def _place(path: Path, file: File, package: Package, objects: dict[str, Path]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if file.link:
        path.symlink_to(file.link)
        return
    if file.source in objects:
        shutil.copyfile(objects[file.source], path)
    else:
        path.write_text(_template(file.source, package) if file.source else file.text)
    path.chmod(file.mode)


def _control(package: Package) -> str:
    relations = {"Depends": ", ".join(package.depends)}
    if package.provides:
        relations |= dict.fromkeys(("Provides", "Conflicts", "Replaces"), package.provides)
    fields = {
        "Package": package.name,
        "Version": package.version,
        "Architecture": "amd64",
        "Maintainer": "gpuchange lab <lab@localhost>",
        "Section": package.section,
        "Priority": "optional",
        **{name: text for name, text in relations.items() if text},
        "Description": package.summary,
    }
    return "".join(f"{name}: {text}\n" for name, text in fields.items())


def _script(package: Package, script: str) -> str:
    action = package.actions.get(script, "")
    if action.endswith(".sh"):
        action = _template(action, package)
    hang = _template("hang.sh", package) if script == "postinst" else ""
    return _template("maintainer.sh", package, SCRIPT=script, ACTION=hang + action)


# --- indexes --------------------------------------------------------------------------------------


def _index(repo: Path) -> None:
    everything = _run("apt-ftparchive", "packages", "pool", cwd=repo)
    paragraphs = [p for p in everything.split("\n\n") if p.strip()]
    _write_index(repo, paragraphs, "./")
    (repo / NEWEST_ONLY).mkdir()
    _write_index(repo / NEWEST_ONLY, _newest(paragraphs), f"{NEWEST_ONLY}/")


def _field(paragraph: str, name: str) -> str:
    return next(line.partition(": ")[2] for line in paragraph.splitlines() if line.startswith(name + ": "))


def _newest(paragraphs: list[str]) -> list[str]:
    best: dict[str, str] = {}
    for paragraph in paragraphs:
        name = _field(paragraph, "Package")
        if name not in best or _is_newer(_field(paragraph, "Version"), _field(best[name], "Version")):
            best[name] = paragraph
    return list(best.values())


def _is_newer(version: str, than: str) -> bool:
    return subprocess.run(["dpkg", "--compare-versions", version, "gt", than], check=False).returncode == 0


def _write_index(folder: Path, paragraphs: list[str], suite: str) -> None:
    (folder / "Packages").write_text("\n\n".join(p.strip("\n") for p in paragraphs) + "\n")
    _run("gzip", "-9nkf", "Packages", cwd=folder)
    labels = {"Origin": "NVIDIA", "Label": "NVIDIA CUDA", "Suite": suite, "Architectures": "amd64"}
    options = [f"-oAPT::FTPArchive::Release::{name}={text}" for name, text in labels.items()]
    (folder / "Release").write_text(_run("apt-ftparchive", *options, "release", ".", cwd=folder))
