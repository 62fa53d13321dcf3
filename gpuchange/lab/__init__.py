"""The lab: a fleet of real systemd hosts on one machine, to learn, test and rehearse on."""

from __future__ import annotations

from gpuchange.lab.fleet import Lab
from gpuchange.lab.host import Host

__all__ = ["Host", "Lab"]
