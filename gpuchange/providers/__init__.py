"""The registry: every provider that a plan can choose. A new one is one module, one import and one row."""

from __future__ import annotations

from gpuchange.providers.backup.dnf import PROVIDER as BACKUP_DNF
from gpuchange.providers.backup.packages import PROVIDER as BACKUP_PACKAGES
from gpuchange.providers.backup.rsync import PROVIDER as BACKUP_RSYNC
from gpuchange.providers.backup.runfile import PROVIDER as BACKUP_RUNFILE
from gpuchange.providers.backup.tar import PROVIDER as BACKUP_TAR
from gpuchange.providers.baseline.gpu import PROVIDER as BASELINE_GPU
from gpuchange.providers.change.manual import PROVIDER as CHANGE_MANUAL
from gpuchange.providers.contract import Provider
from gpuchange.providers.drain.gpu_users import PROVIDER as DRAIN_GPU_USERS
from gpuchange.providers.drain.haproxy import PROVIDER as DRAIN_HAPROXY
from gpuchange.providers.drain.hooks import PROVIDER as DRAIN_HOOKS
from gpuchange.providers.drain.nginx import PROVIDER as DRAIN_NGINX
from gpuchange.providers.preflight.apt import PROVIDER as PREFLIGHT_APT
from gpuchange.providers.preflight.dnf import PROVIDER as PREFLIGHT_DNF
from gpuchange.providers.preflight.haproxy import PROVIDER as PREFLIGHT_HAPROXY
from gpuchange.providers.preflight.host import PROVIDER as PREFLIGHT_HOST
from gpuchange.providers.preflight.manual import PROVIDER as PREFLIGHT_MANUAL
from gpuchange.providers.preflight.nginx import PROVIDER as PREFLIGHT_NGINX
from gpuchange.providers.preflight.peer import PROVIDER as PREFLIGHT_PEER
from gpuchange.providers.preflight.runfile import PROVIDER as PREFLIGHT_RUNFILE
from gpuchange.providers.record.host import PROVIDER as RECORD_HOST
from gpuchange.providers.seal.host import PROVIDER as SEAL_HOST
from gpuchange.providers.stack.apt import PROVIDER as STACK_APT
from gpuchange.providers.stack.dnf import PROVIDER as STACK_DNF
from gpuchange.providers.stack.runfile import PROVIDER as STACK_RUNFILE
from gpuchange.providers.verify.gpu import PROVIDER as VERIFY_GPU
from gpuchange.providers.verify.host import PROVIDER as VERIFY_HOST
from gpuchange.providers.verify.peer import PROVIDER as VERIFY_PEER
from gpuchange.providers.watch.host import PROVIDER as WATCH_HOST

PROVIDERS: tuple[Provider, ...] = (
    PREFLIGHT_HOST,
    PREFLIGHT_HAPROXY,
    PREFLIGHT_NGINX,
    PREFLIGHT_APT,
    PREFLIGHT_DNF,
    PREFLIGHT_RUNFILE,
    PREFLIGHT_MANUAL,
    PREFLIGHT_PEER,
    RECORD_HOST,
    BACKUP_PACKAGES,
    BACKUP_DNF,
    BACKUP_RUNFILE,
    DRAIN_HOOKS,
    BACKUP_RSYNC,
    BACKUP_TAR,
    DRAIN_HAPROXY,
    DRAIN_NGINX,
    DRAIN_GPU_USERS,
    SEAL_HOST,
    BASELINE_GPU,
    CHANGE_MANUAL,
    STACK_APT,
    STACK_DNF,
    STACK_RUNFILE,
    VERIFY_HOST,
    VERIFY_GPU,
    VERIFY_PEER,
    WATCH_HOST,
)


def find(phase: str, name: str) -> Provider | None:
    """The provider `name` of `phase`, or None."""
    return next((row for row in PROVIDERS if (row.phase, row.name) == (phase, name)), None)


def of_phase(phase: str) -> tuple[Provider, ...]:
    """All providers of `phase`, in the order of the registry."""
    return tuple(row for row in PROVIDERS if row.phase == phase)
