"""The base systems the hosts are copied from, each built once for a hash of its recipe.

`base` is a minimal Debian with ssh, HAProxy and nginx, made by debootstrap from the machine's own apt sources (the
slow part); `gpu` is a copy of it with the model server, its data and the first GPU software stack.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from gpuchange.errors import LabError
from gpuchange.lab import gpu, pool, stack, state
from gpuchange.lab.gpu import packages
from gpuchange.lab.tools import sh

PACKAGES = (
    "ca-certificates", "curl", "dbus", "haproxy", "iproute2", "nginx-light", "openssh-server", "procps", "python3",
    "python3-apt", "rsync", "sudo", "systemd", "systemd-sysv",
    *gpu.guest_packages,
)  # fmt: skip
# timers that change packages or wake disks behind the operator's back have no place in a repeatable rehearsal
MASKED = (
    "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "e2scrub_reap.service",
    "fstrim.timer", "systemd-networkd-wait-online.service", "console-getty.service",
)  # fmt: skip
REVISION = 1  # raise when base_tree() changes in a way its own files do not show
FILES = Path(__file__).parent / "files"
KEPT_IMAGES = 6
# a build must not go on behind the back of the next one when `lab up` is killed
ENDS_WITH_US = ("setpriv", "--pdeathsig", "TERM")
APT_SOURCE = f"deb [trusted=yes] http://apt.lab:{state.APT_PORT} ./\n"
INSTALL_SCRIPT = """set -e
export DEBIAN_FRONTEND=noninteractive
echo '127.0.0.1 localhost apt.lab' > /etc/hosts
python3 -m http.server {port} --bind 127.0.0.1 --directory /run/lab-repo >/dev/null 2>&1 &
server=$!
until curl -sfo /dev/null http://127.0.0.1:{port}/; do sleep 0.1; done
apt-get -q update
apt-get -q -y --no-install-recommends install {packages}
apt-get clean
kill $server
"""


def _os_release() -> dict[str, str]:
    lines = (line.partition("=") for line in Path("/etc/os-release").read_text().splitlines())
    return {key: value.strip('"') for key, _, value in lines}


def debian_source() -> tuple[str, str]:
    """URI and suite of this machine's own distribution, read from its apt configuration."""
    codename = _os_release().get("VERSION_CODENAME", "")
    listing = sh(["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages"])
    for line in listing.splitlines():
        uri, suite, component = line.split()
        if suite == codename and component == "main":
            return uri, suite
    raise LabError(
        f"this machine's apt has no source for {codename or 'its own release'}, component main",
        why="the lab's hosts are built from the package sources the machine already uses",
        remedy="add it under /etc/apt/sources.list.d and run apt-get update",
    )


def _proxy_environment() -> dict[str, str]:
    """apt's own proxy setting, for debootstrap, which does not read apt's configuration."""
    found = sh(["apt-config", "dump", "--format", "%v%n", "Acquire::http::Proxy"]).strip()
    return {"http_proxy": found, "https_proxy": found} if found else {}


def base_image(say: Callable[[str], None]) -> Path:
    """Subvolume of the base system, built unless this recipe was before. Call under the `images` lock."""
    uri, suite = debian_source()
    recipe = json.dumps([REVISION, uri, suite, PACKAGES, MASKED])
    target = _images() / f"base-{_digest(recipe, stack.source_digest(FILES / 'base'))}"
    if target.exists():
        return target
    say("building the base system, once: a minute or two")
    pool.require_space(3 << 30)
    draft = _draft(target)
    pool.create(draft)
    try:
        cache = state.root() / "cache" / "debs"
        cache.mkdir(parents=True, exist_ok=True)
        sh(
            [*ENDS_WITH_US, "debootstrap", "--variant=minbase", f"--cache-dir={cache}",
             f"--include={','.join(PACKAGES)}", suite, draft, uri],
            env=_proxy_environment(), timeout=1500,
        )  # fmt: skip
        _finish_base(draft)
    except BaseException:
        pool.delete(draft)
        raise
    draft.rename(target)
    return target


def _finish_base(tree: Path) -> None:
    sh(["rsync", "-a", "--chown=root:root", f"{FILES / 'base'}/", f"{tree}/"])
    (tree / "etc/apt/sources.list").unlink(missing_ok=True)
    (tree / "etc/apt/sources.list.d/gpu-stack.list").write_text(APT_SOURCE)
    (tree / "etc/resolv.conf").unlink(missing_ok=True)
    (tree / "etc/resolv.conf").write_text("# no name server: the hosts know each other by /etc/hosts\n")
    (tree / "etc/machine-id").write_text("")
    for key in tree.glob("etc/ssh/ssh_host_*"):
        key.unlink()
    # systemd would make subvolumes of these at first boot, which snapshots of the root leave out
    for path in ("var/lib/machines", "var/lib/portables"):
        (tree / path).mkdir(mode=0o700, exist_ok=True)
    systemctl(tree, "enable", "systemd-networkd.service", "ssh.service")
    systemctl(tree, "disable", "haproxy.service", "nginx.service")
    systemctl(tree, "mask", *MASKED)


def gpu_image(base: Path, repository: Path, say: Callable[[str], None]) -> Path:
    """Subvolume of a GPU host with the first stack installed. Call under the `images` lock."""
    recipe = json.dumps([base.name, repository.name, packages.START, INSTALL_SCRIPT])
    target = _images() / f"gpu-{_digest(recipe, stack.source_digest(FILES / 'gpu'))}"
    if target.exists():
        return target
    say("installing the first GPU software stack, once")
    draft = _draft(target)
    pool.snapshot(base, draft)
    try:
        sh(["rsync", "-a", "--chown=root:root", f"{FILES / 'gpu'}/", f"{draft}/"])
        gpu.install_guest(draft)
        _install_start(draft, repository)
        in_tree(draft, ["python3", "/opt/modelserver/make_models.py", "/srv/models"])
        systemctl(draft, "enable", "modelserver.service", *gpu.guest_units)
    except BaseException:
        pool.delete(draft)
        raise
    draft.rename(target)
    _prune()
    return target


def _install_start(tree: Path, repository: Path) -> None:
    script = INSTALL_SCRIPT.format(port=state.APT_PORT, packages=" ".join(packages.START))
    in_tree(tree, ["sh", "-c", script], f"--bind-ro={repository}:/run/lab-repo")


def in_tree(tree: Path, command: list[str], *options: str) -> str:
    """Run a command inside a system tree that is not booted, without any network but its own loopback."""
    name = f"gclbuild-{hashlib.sha256(str(tree).encode()).hexdigest()[:8]}"
    return sh(
        [*ENDS_WITH_US, "systemd-nspawn", "-q", "-D", tree, "--as-pid2", "--private-network", f"--machine={name}",
         "--register=no", "--keep-unit", "--console=pipe", "--resolv-conf=off", "--timezone=off", "--settings=no",
         *options, *command],
        timeout=600,
    )  # fmt: skip


def systemctl(tree: Path, verb: str, *units: str) -> None:
    sh(["systemctl", f"--root={tree}", "--quiet", verb, *units])


def build_all(say: Callable[[str], None]) -> tuple[Path, Path, Path]:
    """The package repository and the subvolumes of a plain and of a GPU host. Call under the `images` lock."""
    repository = stack.repository()
    base = base_image(say)
    return repository, base, gpu_image(base, repository, say)


def _images() -> Path:
    return state.pool() / "images"


def _draft(target: Path) -> Path:
    """Where the image grows until it is whole; a left-over of a killed build is cleared."""
    draft = target.with_suffix(".new")
    pool.delete(draft)
    return draft


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _prune() -> None:
    """Keep the newest images and repositories; hosts already copied from an image do not need it."""
    for kind in ("base-*", "gpu-*"):
        for old in _oldest(_images(), kind):
            pool.delete(old)


def _oldest(directory: Path, pattern: str) -> list[Path]:
    found = sorted(directory.glob(pattern), key=lambda path: path.stat().st_ctime, reverse=True)
    return found[KEPT_IMAGES:]


def purge() -> None:
    """Remove the pool file with all images in it, and the cached packages. The pool must be unmounted."""
    pool.pool_file().unlink(missing_ok=True)
    shutil.rmtree(state.root() / "cache", ignore_errors=True)
