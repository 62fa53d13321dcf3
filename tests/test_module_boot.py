"""What the next boot takes: GRUB's default, modules inside an initramfs; and what DKMS has left behind."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import hostcode  # noqa: F401  (puts module_utils on Ansible's path)
import pytest
from ansible.module_utils import gpuchange_boot as boot
from ansible.module_utils import gpuchange_dkms as dkms
from ansible.module_utils import gpuchange_driver as driver

GRUB = """
if [ "${next_entry}" ] ; then
   set default="${next_entry}"
else
   set default="%s"
fi
function load_video {
  insmod all_video
}
menuentry 'Debian GNU/Linux' --class debian $menuentry_id_option 'gnulinux-simple-1' {
        linux   /boot/vmlinuz-6.1.0-57-amd64 root=UUID=1 ro quiet
        initrd  /boot/initrd.img-6.1.0-57-amd64
}
submenu 'Advanced options' $menuentry_id_option 'gnulinux-advanced-1' {
        menuentry 'Debian, with Linux 6.1.0-57-amd64' $menuentry_id_option 'gnulinux-6.1.0-57-amd64-advanced-1' {
                linux   /boot/vmlinuz-6.1.0-57-amd64 root=UUID=1 ro
        }
        menuentry "Debian, with Linux 6.1.0-50-amd64" $menuentry_id_option 'gnulinux-6.1.0-50-amd64-advanced-1' {
                linux   /vmlinuz-6.1.0-50-amd64 root=UUID=1 ro
        }
}
"""
OLD = "gnulinux-advanced-1>gnulinux-6.1.0-50-amd64-advanced-1"


@pytest.mark.parametrize(
    ("default", "state", "kernel"),
    [
        ("0", "", "6.1.0-57-amd64"),
        ("1", "", "6.1.0-57-amd64"),
        ("1>1", "", "6.1.0-50-amd64"),
        ("Advanced options>Debian, with Linux 6.1.0-50-amd64", "", "6.1.0-50-amd64"),
        ("${saved_entry}", f"# GRUB Environment Block\nsaved_entry={OLD}\n", "6.1.0-50-amd64"),
        ("${saved_entry}", "# GRUB Environment Block\n", "6.1.0-57-amd64"),
        ("0", f"next_entry={OLD}\n", "6.1.0-50-amd64"),
        ("gone", "", ""),
        ("7", "", ""),
    ],
)
def test_grubs_default_is_the_next_kernel(default: str, state: str, kernel: str) -> None:
    assert boot.grub_kernel(GRUB % default, state) == kernel


def test_without_a_boot_loader_the_newest_kernel_boots_and_without_any_the_running_one(tmp_path: Path) -> None:
    assert boot.boot_kernel(str(tmp_path)) == os.uname().release
    for kernel in ("6.1.0-9-amd64", "6.1.0-57-amd64", "6.1.0-50-amd64"):
        (tmp_path / f"vmlinuz-{kernel}").touch()
    assert boot.boot_kernel(str(tmp_path)) == "6.1.0-57-amd64"
    (tmp_path / "grub").mkdir()
    (tmp_path / "grub/grub.cfg").write_text(GRUB % "1>1")
    assert boot.boot_kernel(str(tmp_path)) == "6.1.0-50-amd64"
    (tmp_path / "vmlinuz-6.1.0-50-amd64").unlink()  # GRUB's menu is older than the folder
    assert boot.boot_kernel(str(tmp_path)) == "6.1.0-57-amd64"


# ------------------------------------------------------------------------------------------------ initramfs


def cpio(files: dict[str, bytes], folder: Path) -> bytes:
    """A newc archive as the real cpio writes it."""
    if shutil.which("cpio") is None:
        return newc(files)
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    names = subprocess.run(["find", "."], cwd=folder, capture_output=True, check=True).stdout
    return subprocess.run(["cpio", "-o", "-H", "newc"], cwd=folder, input=names, capture_output=True, check=True).stdout


def newc(files: dict[str, bytes]) -> bytes:
    out = b""
    for name, data in {**files, "TRAILER!!!": b""}.items():
        fields = [1, 0o100644, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0]
        head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
        out += head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4)
    return out + b"\0" * (-len(out) % 512)


def zstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-q"], input=data, stdout=subprocess.PIPE, check=True).stdout


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "none": bytes, "gzip": gzip.compress, "xz": lzma.compress, "bzip2": bz2.compress, "zstd": zstd
}  # fmt: skip


def module(version: str) -> bytes:
    return b"\x7fELF" + b"x" * 5000 + b"\0license=NVIDIA\0srcversion=AB12\0version=" + version.encode() + b"\0name=x\0"


@pytest.mark.case("mixed-module-set-nvidia-vs-modeset")
@pytest.mark.parametrize("packer", PACKERS)
def test_modules_inside_an_initramfs_are_seen_behind_the_microcode(packer: str, tmp_path: Path) -> None:
    if packer == "zstd" and shutil.which("zstd") is None:
        pytest.skip("zstd is not installed")
    inside = "usr/lib/modules/6.1/updates/dkms"
    files = {
        "init": b"#!/bin/sh\n" * 1000,
        f"{inside}/nvidia-current.ko": module("570.172.08"),
        f"{inside}/nvidia-current-modeset.ko.xz": lzma.compress(module("390.87")),
    }
    microcode = newc({"kernel/x86/microcode/GenuineIntel.bin": b"m" * 777})
    image = tmp_path / "initrd.img-6.1"
    image.write_bytes(microcode + b"\0" * 1024 + PACKERS[packer](cpio(files, tmp_path / "tree")))
    found = boot.initramfs("6.1", str(tmp_path))
    assert found["why"] == "" and found["file"] == str(image)
    assert {name: row["version"] for name, row in found["modules"].items()} == {
        "nvidia": "570.172.08",
        "nvidia_modeset": "390.87",
    }


def test_an_old_module_in_the_initramfs_stands_against_the_reboot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case: mixed-module-set-nvidia-vs-modeset."""
    good = {"nvidia": {"version": "570.172.08", "file": "/lib/nvidia.ko"}}
    image = {"file": "/boot/initrd.img-6.1", "modules": {"nvidia_modeset": {"version": "390.87", "file": "usr/m.ko"}}}
    monkeypatch.setattr(driver, "modules_on_disk", lambda _kernel: good)
    monkeypatch.setattr(driver, "initramfs", lambda _kernel: image)
    why = driver.boot_problem("570.172.08", "6.1")
    assert why.startswith("/boot/initrd.img-6.1 still has nvidia_modeset 390.87 (usr/m.ko)") and "-k 6.1" in why
    image["modules"] = good
    assert driver.boot_problem("570.172.08", "6.1") == ""


@pytest.mark.parametrize(
    "content", [b"", b"what is this", newc({"a": b"b"})[:90], gzip.compress(b"no archive at all" * 20, mtime=0)]
)
def test_a_strange_initramfs_is_said_not_raised(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "initrd.img-6.1").write_bytes(content)
    found = boot.initramfs("6.1", str(tmp_path))
    assert found["modules"] == {} and ("could not be read" in found["why"] or not content)
    assert boot.initramfs("6.2", str(tmp_path)) == {"file": "", "modules": {}, "why": ""}


# ----------------------------------------------------------------------------------------------------- DKMS


def tree_of(tmp_path: Path) -> Path:
    tree = tmp_path / "dkms"
    source = tmp_path / "src/nvidia-570"
    source.mkdir(parents=True)
    (source / "dkms.conf").touch()
    for version in ("nvidia/570", "nvidia/390.48", "nvidia/original_module"):
        (tree / version).mkdir(parents=True)
    (tree / "nvidia/570/source").symlink_to(source)
    (tree / "nvidia/390.48/source").symlink_to("/usr/src/nvidia-390.48")
    (tree / "nvidia/kernel-6.1-x86_64").symlink_to("570/6.1/x86_64")
    return tree


@pytest.mark.case("stale-dkms-tree-blocks-every-rebuild")
def test_what_a_removed_module_left_is_found_set_aside_and_put_back(tmp_path: Path) -> None:
    tree, kept = tree_of(tmp_path), tmp_path / "state"
    assert dkms.leftovers(str(tree)) == ["nvidia/390.48"]
    assert dkms.set_aside(str(kept), str(tree)) == ["nvidia/390.48"] == dkms.put_back(str(kept), str(tree))
    assert os.readlink(tree / "nvidia/390.48/source") == "/usr/src/nvidia-390.48"
    assert dkms.set_aside(str(kept), str(tree)) and dkms.leftovers(str(tree)) == []
    assert dkms.set_aside(str(kept), str(tree)) == []
    (tree / "nvidia/390.48").mkdir()
    assert dkms.put_back(str(kept), str(tree)) == []  # never over what is there


def test_the_first_error_of_a_build_is_quoted(tmp_path: Path) -> None:
    log = tmp_path / "nvidia-current/570.1/build/make.log"
    log.parent.mkdir(parents=True)
    log.write_text("make -C x\n/b/nv.c:3:5: error: implicit declaration of 'f'\nmake[2]: *** [nv.o] Error 1\n")
    assert dkms.build_error("570.1", str(tmp_path)) == f"{log}: /b/nv.c:3:5: error: implicit declaration of 'f'"
    assert dkms.build_error("570.2", str(tmp_path)) == ""
