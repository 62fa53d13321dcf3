"""CUDA toolkits and cuDNN copies on a host: all of them, which one is active, and on which evidence that stands."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict

from gpuchange.compat.versions import parts


class Cuda(BaseModel):
    """`toolkits`: {directory: version}; `active`: version behind /usr/local/cuda; `mode`: auto, manual or ''."""

    model_config = ConfigDict(frozen=True)

    toolkits: dict[str, str] = {}
    active: str | None = None
    link: tuple[str, ...] = ()
    mode: str = ""
    selection: str = ""
    nvcc: dict[str, str] = {}

    def sentence(self) -> str:
        """`active toolkit 11.1 (alternatives, manual); others: 12.4; /usr/bin/nvcc 9.1.85`."""
        how = f" (alternatives, {self.mode})" if self.mode else ""
        others = [version for path, version in self.toolkits.items() if path != self.home]
        said = [f"active toolkit {self.active}{how}" if self.active else "no active toolkit"]
        said += [f"others: {', '.join(others)}"] if others else []
        said += [f"{path} {version}" for path, version in self.nvcc.items() if not path.startswith("/usr/local/cuda")]
        return "; ".join(said)

    @property
    def home(self) -> str:
        return self.link[-1] if self.link else ""


class Copy(BaseModel):
    model_config = ConfigDict(frozen=True)

    version: str
    path: str
    origin: str
    """package, library, header or wheel: the evidence."""


class Cudnn(BaseModel):
    """Every copy found; `version` is the one that the loader picks (or the package's), None when there is none."""

    model_config = ConfigDict(frozen=True)

    version: str | None = None
    evidence: str = ""
    copies: tuple[Copy, ...] = ()

    @property
    def by_hand(self) -> dict[str, str]:
        """{path: version} of copies that no system package brings: wheels, and what lies outside /usr/lib."""
        system = re.compile(r"/usr/(?!local/)|/lib")
        return {c.path: c.version for c in self.copies if c.path.startswith("/") and not system.match(c.path)}

    def sentence(self) -> str:
        if not self.copies:
            return "cuDNN: none found"
        others = sorted({copy.version for copy in self.copies if copy.origin != "wheel"} - {self.version or ""})
        wheels = [f"venv {_venv(copy.path)} has {copy.version}" for copy in self.copies if copy.origin == "wheel"]
        head = f"cuDNN {self.version} ({self.evidence})" if self.version else "cuDNN: only in wheels"
        return "; ".join([head, *([f"also {', '.join(others)}"] if others else []), *wheels])


def _venv(path: str) -> str:
    """/srv/app/lib/python3.11/site-packages/nvidia_cudnn_cu12-9.1.0.70.dist-info → /srv/app."""
    return re.sub(r"/lib/python[^/]*/(?:site|dist)-packages/.*", "", path)


def parse_cuda(raw: Any) -> Cuda:
    """From the fact `cuda`. Never raises on strange content."""
    facts = raw if isinstance(raw, Mapping) else {}
    toolkits = {str(path): _toolkit(str(path), files) for path, files in _items(facts.get("toolkits"))}
    hops = facts.get("link")
    link = tuple(str(hop) for hop in hops) if isinstance(hops, list) else ()
    alternatives = str(facts.get("alternatives") or "")
    return Cuda(
        toolkits=toolkits,
        active=toolkits.get(link[-1]) if link else None,
        link=link,
        mode=_field(alternatives, "Status"),
        selection=_field(alternatives, "Value"),
        nvcc={str(path): _release(str(text)) for path, text in _items(facts.get("nvcc"))},
    )


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, Mapping) else []


def _field(text: str, name: str) -> str:
    found = re.search(rf"^{name}: (.*)$", text, re.M)
    return found[1].strip() if found else ""


def _release(text: str) -> str:
    found = re.search(r"\bV(\d+(?:\.\d+)+)", text) or re.search(r"release (\d+(?:\.\d+)+)", text)
    return found[1] if found else ""


def _toolkit(path: str, files: Any) -> str:
    """The version in version.json, else in version.txt, else in the directory's name."""
    files = files if isinstance(files, Mapping) else {}
    try:
        document = json.loads(str(files.get("json") or ""))
        found = str(document["cuda"]["version"])
    except (ValueError, KeyError, TypeError, RecursionError):
        found = ""
    text = re.search(r"CUDA Version (\d+(?:\.\d+)+)", str(files.get("txt") or ""))
    name = re.search(r"cuda-(\d+(?:\.\d+)*)$", path)
    return found or (text[1] if text else "") or (name[1] if name else "")


def parse_cudnn(raw: Any, packages: Mapping[str, str]) -> Cudnn:
    """From the fact `cudnn` and the installed packages {name: version}: packages, then libraries, then headers."""
    facts = raw if isinstance(raw, Mapping) else {}
    copies = [
        *_packages(packages),
        *_libraries(facts.get("libraries")),
        *_headers(facts.get("headers")),
        *_wheels(facts.get("wheels")),
    ]
    chosen = _chosen(copies, facts.get("picks"), facts.get("loader"))
    if not chosen:
        return Cudnn(copies=tuple(copies))
    agreeing = [
        copy for copy in copies if copy.origin != "wheel" and parts(copy.version)[:3] == parts(chosen.version)[:3]
    ]
    version = max((copy.version for copy in agreeing), key=lambda text: len(parts(text)))
    evidence = "; ".join(dict.fromkeys(f"{copy.origin} {PurePosixPath(copy.path).name}" for copy in agreeing))
    return Cudnn(version=version, evidence=evidence, copies=tuple(copies))


def _packages(packages: Mapping[str, str]) -> list[Copy]:
    runtime = re.compile(r"libcudnn\d+(?:-cuda-\d+)?")
    return [
        Copy(version=version.partition("-")[0], path=name, origin="package")
        for name, version in sorted(packages.items())
        if runtime.fullmatch(name)
    ]


def _libraries(raw: Any) -> list[Copy]:
    found: dict[str, Copy] = {}
    for row in raw if isinstance(raw, list) else []:
        real = str(row.get("real") or "") if isinstance(row, Mapping) else ""
        version = re.search(r"/libcudnn\.so\.(\d+(?:\.\d+)+)$", real)
        if version:
            found[real] = Copy(version=version[1], path=real, origin="library")
    return list(found.values())


def _headers(raw: Any) -> list[Copy]:
    copies = []
    for path, text in _items(raw):
        numbers = dict(re.findall(r"CUDNN_(MAJOR|MINOR|PATCHLEVEL)\s+(\d+)", str(text)))
        if {"MAJOR", "MINOR", "PATCHLEVEL"} <= numbers.keys():
            version = f"{numbers['MAJOR']}.{numbers['MINOR']}.{numbers['PATCHLEVEL']}"
            copies.append(Copy(version=version, path=str(path), origin="header"))
    return copies


def _wheels(raw: Any) -> list[Copy]:
    copies = []
    for path in raw if isinstance(raw, list) else []:
        found = re.search(r"/nvidia_cudnn_cu\d+-(\d+(?:\.\d+)+)\.dist-info$", str(path))
        if found:
            copies.append(Copy(version=found[1], path=str(path), origin="wheel"))
    return copies


def _chosen(copies: list[Copy], picks: Any, loader: Any) -> Copy | None:
    """The copy that the loader picks first; without a loader entry the package, then library, then header.

    `picks` are the real files behind the loader's cache, in its order: /lib may be a link to /usr/lib.
    """
    by_path = {copy.path: copy for copy in copies}
    for real in picks if isinstance(picks, list) else []:
        if str(real) in by_path:
            return by_path[str(real)]
    for line in loader if isinstance(loader, list) else []:
        path = str(line).rpartition(" => ")[2]
        match = by_path.get(path) or next(
            (c for c in copies if c.origin == "library" and c.path.startswith(path + ".")), None
        )
        if match:
            return match
    return next((copy for copy in copies if copy.origin != "wheel"), None)
