"""DKMS of a host: trees that a removed version left behind, and setting them aside so that they can be put back."""

from __future__ import annotations

import glob
import os
import re
import shutil
from typing import List

from ansible.module_utils.gpuchange_look import PATH, read_text

TREE = "/var/lib/dkms"
NOT_VERSIONS = ("original_module",)
ASIDE = "dkms-leftovers"
LOG_LIMIT = 4 * 1024 * 1024


def leftovers(tree: str = TREE) -> List[str]:
    """`module/version` of each tree whose source is gone: dkms stops at it, and builds nothing any more."""
    found = []
    for path in sorted(glob.glob(tree + "/*/*")):
        name = os.path.basename(path)
        if os.path.islink(path) or not os.path.isdir(path) or name in NOT_VERSIONS:
            continue
        if not os.path.isfile(os.path.join(path, "source", "dkms.conf")):
            found.append(os.path.relpath(path, tree))
    return found


def set_aside(folder: str, tree: str = TREE) -> List[str]:
    """Move the leftovers into `folder`, as they are; returns what was moved. Safe to run twice."""
    moved = leftovers(tree)
    for name in moved:
        target = os.path.join(folder, ASIDE, name)
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        shutil.move(os.path.join(tree, name), target)
    return moved


def put_back(folder: str, tree: str = TREE) -> List[str]:
    """Undo set_aside: what lies in `folder` goes back to where it was, unless something else is there now."""
    back = []
    for path in sorted(glob.glob(os.path.join(folder, ASIDE, "*", "*"))):
        name = os.path.relpath(path, os.path.join(folder, ASIDE))
        target = os.path.join(tree, name)
        if not os.path.lexists(target):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.move(path, target)
            back.append(name)
    return back


def can_build(kernel: str) -> bool:
    """Whether DKMS is there, and the headers of this kernel."""
    return shutil.which("dkms", path=PATH) is not None and os.path.isdir("/lib/modules/%s/build" % kernel)


def headers_problem(kernel: str) -> str:
    if os.path.isdir("/lib/modules/%s/build" % kernel):
        return ""
    return "no headers for kernel %s: dkms cannot build the module; install linux-headers-%s" % (kernel, kernel)


def build_error(version: str, tree: str = TREE) -> str:
    """The first error in the build log of NVIDIA's module `version`, with the log's path; "" when there is none."""
    for path in sorted(glob.glob("%s/nvidia*/%s/build/make.log" % (tree, version))):
        errors = re.findall(r"^.*\berror: .*$|^.*\*\*\* .*$|^.*ERROR: .*$", read_text(path, LOG_LIMIT), flags=re.M)
        return "%s: %s" % (path, errors[0].strip()[-300:] if errors else "no error line in it")
    return ""
