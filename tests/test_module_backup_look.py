"""What is looked at before a backup set is made."""

from __future__ import annotations

import os
from pathlib import Path

import hostcode  # noqa: F401  (puts module_utils on Ansible's path)
from ansible.module_utils import gpuchange_backup_look as looking


def test_what_fstab_mounts_and_is_not_mounted_is_refused_before_the_first_set(tmp_path: Path) -> None:
    table = tmp_path / "fstab"
    table.write_text(
        f"# {tmp_path}/x x x x\nUUID=A {tmp_path}/data ext4 defaults 0 2\n/dev/b {tmp_path}/off ext4 noauto 0 2\n"
    )
    assert looking.unmounted(f"{tmp_path}/data/models", str(table)) == f"{tmp_path}/data"
    assert (
        looking.unmounted(f"{tmp_path}/off", str(table)) == "" == looking.unmounted(f"{tmp_path}/database", str(table))
    )


def test_compression_is_no_hole(tmp_path: Path) -> None:
    """Fewer blocks than bytes, yet all of it data: a copy elsewhere needs the whole size."""
    path = tmp_path / "squeezed"
    path.write_bytes(os.urandom(200_000))
    real = path.stat()
    squeezed = type("Status", (), {"st_blocks": 1, "st_size": real.st_size, "st_mode": real.st_mode})()
    assert looking.data_bytes(str(path), squeezed) == 200_000
