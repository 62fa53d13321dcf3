"""The package store of a change: the exact .debs to go forward and to come back, proven without a network."""

from __future__ import annotations

import os
import re
from typing import Any, Dict, Iterable, List, Tuple

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpuchange_apt_private import Move, PrivateApt
from ansible.module_utils.gpuchange_host import read_json, run, state_path, write_atomic
from ansible.module_utils.gpuchange_packages import native_architecture

STATUS = "/var/lib/dpkg/status"


class Store:
    """`/var/lib/gpuchange/<change>/debs` with its manifest, and the offline apt that installs from it."""

    def __init__(self, module: AnsibleModule) -> None:
        self.folder = state_path(module, "debs")
        self.apt_folder = state_path(module, "apt")

    def manifest(self) -> Dict[str, Any]:
        """{"files": {"name=version": {file, sha256, size, source}}, "missing": [...]}; empty before the collection."""
        try:
            return dict(read_json(os.path.join(self.folder, "manifest.json"), {}) or {})
        except ValueError:
            return {}

    def paths(self, packages: Dict[str, str]) -> Tuple[List[str], List[str]]:
        """(files, missing) for {name: version}; a file whose size is not the recorded one counts as missing."""
        files = self.manifest().get("files", {})
        found, missing = [], []
        for name, version in sorted(packages.items()):
            entry = files.get("%s=%s" % (name, version))
            path = os.path.join(self.folder, entry["file"]) if entry else ""
            if path and os.path.exists(path) and os.path.getsize(path) == entry["size"]:
                found.append(path)
            else:
                missing.append("%s %s" % (name, version))
        return found, missing

    def offline(self, hooks: bool = False, status: str = "") -> PrivateApt:
        return PrivateApt(self.apt_folder, offline=True, hooks=hooks, status=status)

    def prove(self, forward: Dict[str, str], remove: List[str], back: Dict[str, str]) -> Dict[str, Any]:
        """Simulate both ways from the store alone. {forward, back: moves; problems: why one of them cannot be done}."""
        new, new_missing = self.paths(forward)
        old, old_missing = self.paths(back)
        result: Dict[str, Any] = {"problems": [], "not_obtainable": old_missing}
        if new_missing:
            result["problems"].append("not obtainable: %s" % ", ".join(new_missing))
            return result
        result["forward"] = self._try(new + [name + "-" for name in remove], "", "installing", result)
        if not old_missing:
            gone = [name + "-" for name in sorted(forward) if name not in back]
            status = self._status_after(new, remove)
            result["back"] = self._try(old + gone, status, "rolling back", result)
            os.unlink(status)
        return result

    def _try(self, targets: List[str], status: str, doing: str, result: Dict[str, Any]) -> List[Move]:
        moves, why = self.offline(status=status).simulate(targets)
        if why:
            result["problems"].append("%s from the package store alone fails: %s" % (doing, why))
        return moves

    def _status_after(self, new: Iterable[str], remove: Iterable[str]) -> str:
        """A dpkg status file as it will be after the change: what a simulated way back must start from."""
        with open(STATUS, encoding="utf-8", errors="surrogateescape") as file:
            paragraphs = [part for part in file.read().split("\n\n") if part.strip()]
        added = [_installed_paragraph(path) for path in new]
        native = native_architecture()
        gone = {_key(part, native) for part in added} | set(remove)
        kept = [part for part in paragraphs if _key(part, native) not in gone]
        path = os.path.join(self.apt_folder, "status-after")
        text = "\n\n".join(part.strip("\n") for part in kept + added) + "\n\n"
        write_atomic(path, text.encode("utf-8", "surrogateescape"))
        return path


def _key(paragraph: str, native: str) -> str:
    """The package's name as apt-get calls it: name, or name:arch for a foreign architecture."""
    said = dict(re.findall(r"^(Package|Architecture): (\S+)", paragraph, flags=re.M))
    arch = said.get("Architecture", native)
    return said.get("Package", "") + ("" if arch in (native, "all") else ":" + arch)


def _installed_paragraph(path: str) -> str:
    control = run(["dpkg-deb", "-f", path])[1].strip("\n")
    first, _, rest = control.partition("\n")
    return "%s\nStatus: install ok installed\n%s" % (first, rest)
