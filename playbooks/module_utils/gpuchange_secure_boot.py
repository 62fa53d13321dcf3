"""Whether Secure Boot would let the kernel take a module that DKMS signs on this host. Read-only."""

from __future__ import annotations

import glob
import os
import re
from typing import List, Optional

from ansible.module_utils.gpuchange_facts_host import secure_boot
from ansible.module_utils.gpuchange_host import is_executable, read_text, run

SETTINGS = ("/etc/dkms/framework.conf", "/etc/dkms/framework.conf.d/*.conf")
CERTIFICATES = ("/var/lib/dkms/mok.pub", "/var/lib/dkms/mok.der", "/var/lib/shim-signed/mok/MOK.der")
NOT_ENROLLED = (
    "Secure Boot is on and the DKMS signing key is not enrolled; the new module will not load without console access"
)
HOW = ": enrol it first (mokutil --import %s, then confirm on the console at the next boot)"


def problem() -> str:
    """Why a module built now would be refused at the next boot; "" when nothing stands against it."""
    if not is_on():
        return ""
    if not is_executable("mokutil"):
        return "Secure Boot is on, and without mokutil it cannot be told whether the DKMS signing key is enrolled"
    keys = certificates()
    if any("is already enrolled" in "".join(run(["mokutil", "--test-key", key])[1:]) for key in keys):
        return ""
    return NOT_ENROLLED + HOW % (keys[0] if keys else CERTIFICATES[0])


def is_on() -> bool:
    """The firmware's own word; where its variables are not to be seen, mokutil's."""
    said: Optional[bool] = secure_boot()
    if said is not None:
        return said
    return is_executable("mokutil") and "SecureBoot enabled" in run(["mokutil", "--sb-state"])[1]


def certificates() -> List[str]:
    """The certificates that DKMS signs with: those that its settings name, else the usual ones."""
    texts = [read_text(path) for pattern in SETTINGS for path in sorted(glob.glob(pattern))]
    named = re.findall(r"^\s*mok_certificate=[\"']?([^\"'\s#]+)", "\n".join(texts), flags=re.M)
    return [path for path in dict.fromkeys(named[-1:] or CERTIFICATES) if os.path.exists(path)]
