"""Backup sets with the real tar: proved by reading the archive back; half archives and torn files are no backup."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostcode
import pytest
from ansible.module_utils import gpuchange_backup_look as looking
from ansible.module_utils import gpuchange_backup_unit as backup_unit
from ansible.module_utils import gpuchange_host as host
from ansible.module_utils import gpuchange_tar as backup
from ansible.module_utils import gpuchange_unit as unit
from hostcode import OWNER

pytestmark = pytest.mark.skipif(shutil.which("zstd") is None, reason="zstd is not installed")
STEP = {"phase": "backup", "provider": "tar", "direction": "do"}
NAMES = 15  # of the source, its top included, its socket not


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Data as hosts have it, and names that a command line would take for something else."""
    top = tmp_path / "srv"
    (top / "empty").mkdir(parents=True)
    (top / "one").write_bytes(os.urandom(100_000))
    os.link(top / "one", top / "same")
    os.link(top / "one", top / "zz")
    with open(top / "hole", "wb") as file:
        file.truncate(64 * 1024 * 1024)
        file.seek(32 * 1024 * 1024)
        file.write(b"data between holes")
    (top / "Gerät *[x]").write_text("Umlaut")
    (top / "two\nlines").write_text("newline")
    (top / "--checkpoint-action=exec=false").write_text("dash")
    Path(os.fsdecode(bytes(top) + b"/\xff\\n")).write_text("no UTF-8")
    (top / ("long" * 60)).write_text("long")
    (top / "out").symlink_to("/etc/shadow")
    (top / "dangling").symlink_to("nowhere")
    (top / "script").write_text("#!/bin/sh\n")
    (top / "script").chmod(0o4755)
    os.setxattr(top / "script", "user.origin", b"\x00\xffhub")
    os.mkfifo(top / "fifo")
    (tmp_path / "backup").mkdir()
    return top


def job(source: Path, name: str = "c1.tar", **more: Any) -> dict[str, Any]:
    to = source.parent / "backup"
    return {"paths": [str(source)], "to": str(to), "name": name, "work": str(source.parent / "work"), **more}


def make(source: Path, name: str = "c1.tar", **more: Any) -> dict[str, Any]:
    return backup.make_set(job(source, name, **more))


def sets(source: Path) -> list[str]:
    return sorted(os.listdir(source.parent / "backup"))


def folder(source: Path) -> Path:
    return source.parent / "backup/c1.tar"


@pytest.mark.parametrize(
    ("compression", "archive"), [("none", "archive.tar"), ("gzip", "archive.tar.gz"), ("zstd", "archive.tar.zst")]
)
def test_a_set_equals_its_source_and_can_be_restored_by_tar_alone(
    source: Path, compression: str, archive: str, tmp_path: Path
) -> None:
    made = make(source, compression=compression)
    assert (made["checked"], made["expected"], made["in_flux"], made["archive"]) == (NAMES, NAMES, 0, archive)
    assert made["restored"] == 7 and made["replaces"] == "" and made["changed"] == []
    assert (folder(source) / archive).stat().st_size < 2 * 1024 * 1024
    check = subprocess.run(["sha256sum", "--check", "--quiet", "archive.sha256"], cwd=folder(source), check=False)
    assert check.returncode == 0
    (tmp_path / "back").mkdir()
    restore = ["tar", "-xpf", str(folder(source) / archive), "--xattrs", "--xattrs-include=*", "-C", f"{tmp_path}/back"]
    subprocess.run(restore, check=True)
    copy = Path(f"{tmp_path}/back{source}")
    assert sorted(os.listdir(bytes(copy))) == sorted(os.listdir(bytes(source)))
    assert (copy / "one").stat().st_nlink == 3 and os.readlink(copy / "out") == "/etc/shadow"
    assert (copy / "hole").stat().st_blocks * 512 < 1024 * 1024
    assert (copy / "hole").read_bytes() == (source / "hole").read_bytes()
    assert stat.S_IMODE((copy / "script").stat().st_mode) == 0o4755
    assert os.getxattr(copy / "script", "user.origin") == b"\x00\xffhub"
    sums = subprocess.run(["sha256sum", "--check", "--quiet", str(folder(source) / "manifest.sha256")], check=False)
    assert sums.returncode == 0  # the source still is what the archive holds


def test_excluded_paths_stay_out_even_with_wildcards_in_their_names(source: Path) -> None:
    (source / "Gerät yx").write_text("stays")
    make(source, exclude=[str(source / "Gerät *[x]"), str(source / "empty")])
    listed = subprocess.run(["tar", "-tf", folder(source) / "archive.tar", "--quoting-style=literal"],
                            capture_output=True, text=True, errors="replace", check=True).stdout  # fmt: skip
    assert "Gerät yx" in listed and "Gerät *" not in listed and "empty" not in listed


def test_of_large_files_only_the_smallest_is_restored_if_there_is_room(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup.reading, "SAMPLE_BYTES", 16)
    monkeypatch.setattr(backup.reading, "SAMPLE", 16)
    made = make(source, exclude=[str(source / name) for name in os.listdir(source) if name not in ("one", "hole")])
    assert (made["restored"], made["expected"]) == (1, 3)


def test_a_socket_is_left_out_and_said(source: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(source / "sock"))
        made = make(source)
    assert (made["sockets"], made["expected"]) == (1, NAMES)


# ------------------------------------------------------------------------------------------- files that change


def between(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> list[int]:
    """`act(pass)` after tar has read, before the source is hashed."""
    real, passes = backup.write, []

    def writing(*given: Any) -> Any:
        result = real(*given)
        passes.append(len(passes) + 1)
        time.sleep(0.01)  # another modification time
        act(passes[-1])
        return result

    monkeypatch.setattr(backup, "write", writing)
    return passes


def append(path: Path) -> None:
    with open(path, "a") as file:
        file.write("line")


def test_a_file_that_is_written_meanwhile_is_archived_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = between(monkeypatch, lambda number: append(source / "log") if number < 2 else None)
    assert make(source)["in_flux"] == 0 and passes == [1, 2]


def test_what_is_always_written_is_no_backup_and_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = between(monkeypatch, lambda _: append(source / "script"))
    said = rf"^changed during backup: {source}/script \(required\): backup not usable without snapshot"
    with pytest.raises(looking.Refused, match=said):
        make(source)
    assert passes == [1, 2, 3] and sets(source) == []


def test_what_may_change_is_told_and_the_rest_still_required(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = between(monkeypatch, lambda _: append(source / "script"))
    made = make(source, may_change=[str(source / "script")])
    assert made["in_flux_names"] == [str(source / "script")] and passes == [1]
    between(monkeypatch, lambda _: append(source / "one"))
    with pytest.raises(looking.Refused, match=r"changed during backup: .*/one"):
        make(source, "c2.tar", may_change=[str(source / "script")])


def test_tars_own_word_that_a_file_changed_is_kept(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real tar reads a file that grows under it."""
    grower = subprocess.Popen(["sh", "-c", f"exec >> {source}/grows; while :; do echo line; sleep 0.01; done"])
    try:
        with open(source / "grows", "ab") as file:
            file.write(os.urandom(64 * 1024 * 1024))
        with pytest.raises(looking.Refused, match=r"changed during backup: .*/grows \(required\)"):
            make(source)
    finally:
        grower.kill()
        grower.wait()
    made = make(source)
    assert made["in_flux"] == 0


# ------------------------------------------------------------------------------------------- how tar may end


def a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    bin_ = tmp_path / "bin"
    bin_.mkdir(exist_ok=True)
    (bin_ / name).write_text(f"#!/bin/sh\n{script}\n")
    (bin_ / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (
            "echo 'tar: srv/x: Cannot open: Permission denied' >&2; exit 2",
            r"tar ended with 2 \(fatal error\): tar: srv/x",
        ),
        ("kill -9 $$", r"tar ended with -9 \(ended by signal 9\)"),
        ("echo 'tar: strange' >&2; exit 1", "tar ended with 1, and named no file"),
    ],
)
def test_tars_exit_codes_are_told_apart(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str
) -> None:
    a_program(tmp_path, monkeypatch, "tar", script)
    with pytest.raises(looking.Refused, match=says):
        make(source)
    assert sets(source) == []


def test_exit_1_names_what_changed_and_the_archive_is_judged_by_its_content(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = "tar: srv/a\\nb: file changed as we read it"
    a_program(tmp_path, monkeypatch, "tar", f"/usr/bin/tar \"$@\" && {{ printf '%s\\n' '{says}' >&2; exit 1; }}")
    monkeypatch.setattr(backup.reading, "restored", lambda *_: 0)  # that is tar, too
    assert make(source)["changed"] == ["/srv/a\\nb"]


def test_a_packer_that_fails_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_program(tmp_path, monkeypatch, "zstd", "echo 'zstd: no memory' >&2; exit 3")
    with pytest.raises(looking.Refused, match="zstd ended with 3: zstd: no memory"):
        make(source, compression="zstd")


def test_a_file_that_cannot_be_read_is_fatal(source: Path) -> None:
    """Real: a directory entry of /proc that gives EIO as root."""
    if os.geteuid() or subprocess.run(["mount", "--bind", "/proc/1/mem", source / "script"], check=False).returncode:
        pytest.skip("needs root and mount")
    try:
        with pytest.raises(looking.Refused, match=r"tar ended with 2 \(fatal error\): .*script"):
            make(source)
    finally:
        subprocess.run(["umount", source / "script"], check=True)
    assert sets(source) == []


# ------------------------------------------------------------------------------------------- damage


def flip(path: Path, at: int) -> None:
    """The same size and time as before."""
    times = path.stat()
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_an_archive_damaged_on_its_way_to_the_disk_is_no_backup(
    source: Path, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    name = backup.archive_name({"compression": compression})
    between(monkeypatch, lambda _: flip(folder(source).with_suffix(".tar.partial") / name, 20_000))
    with pytest.raises(looking.Refused, match=r"hash differs: written \w{16}, read back|cannot be read back"):
        make(source, compression=compression)
    assert sets(source) == []


def test_a_file_that_tar_archived_wrongly_is_found_by_the_sources_hash(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies between the source and the archive's own hash: its sha256 is right, its content is not."""
    a_program(tmp_path, monkeypatch, "tar", '/usr/bin/tar "$@" | sed s,#!/bin/sh,#!/bin/SH,')
    with pytest.raises(looking.Refused, match=r"hash differs: source \w{16}, copy \w{16} \(.*/script\)"):
        make(source)


def test_an_archive_cut_short_is_found(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_program(tmp_path, monkeypatch, "tar", '/usr/bin/tar "$@" | head -c 60000')
    with pytest.raises(looking.Refused, match="cannot be read back"):
        make(source)


def test_a_restored_sample_that_differs_is_no_backup(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = backup.reading._extract

    def extract(path: str, compression: str, sample: list[dict[str, Any]], scratch: str) -> None:
        real(path, compression, sample, scratch)
        flip(Path(scratch + "/tree" + sample[0]["path"]), 0)

    monkeypatch.setattr(backup.reading, "_extract", extract)
    with pytest.raises(looking.Refused, match="restored for a test, hash differs: source"):
        make(source)
    assert sets(source) == []


def test_attributes_that_tar_did_not_keep_are_found(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "TAR", [word for word in backup.TAR if word != "--xattrs"])
    with pytest.raises(looking.Refused, match=r"extended attributes or ACLs differ: .*/script"):
        make(source)


def test_an_archive_damaged_afterwards_is_found_and_made_anew(source: Path) -> None:
    first = make(source)
    assert make(source) == first  # read again, and good
    flip(folder(source) / "archive.tar", 20_000)
    again = make(source)
    assert again["replaces"].startswith("hash differs: proved ") and again["began"] > first["began"]
    assert make(source) == again and sets(source) == ["c1.tar"]
    (folder(source) / "archive.tar").unlink()
    assert "cannot be found" in make(source)["replaces"]


def test_half_an_archive_is_no_set_and_the_next_try_takes_it_away(source: Path) -> None:
    partial = source.parent / "backup/c1.tar.partial"
    partial.mkdir()
    (partial / "archive.tar").write_bytes(b"half")
    assert looking.last_set(str(source.parent / "backup"), "c9.tar", "tar") is None
    assert make(source)["in_flux"] == 0 and sets(source) == ["c1.tar"]


# ------------------------------------------------------------------------------------------- what is looked at first


def test_room_is_looked_at_before_anything_is_written(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_frsize, f_files, f_favail = 10, 4096, 0, 0

    monkeypatch.setattr(backup.os, "statvfs", lambda _path: Full)
    with pytest.raises(looking.Refused, match=r"needs \d+ MiB with these options .*, 0 MiB free"):
        make(source)
    assert sets(source) == []


@pytest.mark.parametrize("change", [{"to": ""}, {"to": "/"}, {"to": "backup"}, {"paths": [""]}, {"paths": []}])
def test_no_command_line_gets_an_empty_path(
    source: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup.subprocess, "Popen", lambda *_, **__: pytest.fail("a program was started"))
    with pytest.raises(looking.Refused):
        backup.make_set({**job(source), **change})


def test_places_that_make_no_sense_are_refused(source: Path) -> None:
    for change, says in (
        ({"to": str(source / "empty")}, "lies inside"),
        ({"exclude": [str(source.parent)]}, "is excluded by"),
        ({"paths": [str(source), str(source / "empty")]}, "would be kept twice"),
        ({"to": "/nowhere/at/all"}, "no directory"),
    ):
        with pytest.raises(looking.Refused, match=says):
            backup.make_set({**job(source), **change})


def test_an_emptied_source_is_refused_and_the_last_archive_untouched(source: Path) -> None:
    made = make(source)
    shutil.rmtree(source)
    source.mkdir()
    with pytest.raises(looking.Refused, match=f"is empty, the last backup holds {NAMES - 1} files"):
        make(source, "c2.tar")
    assert sets(source) == ["c1.tar"] and not backup.damaged(made, str(folder(source)))


def test_sets_of_tar_and_rsync_may_lie_side_by_side(source: Path) -> None:
    make(source)
    assert looking.last_set(str(source.parent / "backup"), "c9", "rsync") is None
    assert looking.last_set(str(source.parent / "backup"), "c9.tar", "tar")


# ------------------------------------------------------------------------------------------- the module


def call(source: Path, mode: str, monkeypatch: pytest.MonkeyPatch, **args: Any) -> dict[str, Any]:
    for where in (host, unit):
        monkeypatch.setattr(where, "ROOT", str(source.parent / "state"))
    monkeypatch.setattr(unit, "_has_systemd", lambda: False)
    given = {"paths": [str(source)], "to": str(source.parent / "backup"), **args}
    return dict(hostcode.call("gpuchange_tar", mode=mode, owner=OWNER, args=given, step=STEP)["report"])


def test_the_module_makes_a_set_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(source, "probe", monkeypatch)["state"] == "not_done"
    first = call(source, "apply", monkeypatch, compression="zstd")
    assert (first["state"], first["changed"], first["set"]["checked"]) == ("done", True, NAMES), first
    again = call(source, "apply", monkeypatch, compression="zstd")
    assert (again["state"], again["changed"], again["set"]) == ("done", False, first["set"])
    assert call(source, "probe", monkeypatch)["state"] == "done"
    assert call(source, "undo", monkeypatch)["state"] == "done" and (folder(source) / "archive.tar.zst").exists()
    append(folder(source) / "archive.tar.zst")
    probed = call(source, "probe", monkeypatch)
    assert probed["state"] == "not_done" and "was written to since it was proved" in probed["why"]
    assert call(source, "apply", monkeypatch)["changed"] is True
    assert json.loads((folder(source) / "set.json").read_text())["replaces"]


def test_a_missing_program_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup_unit, "is_executable", lambda name: name != "zstd")
    said = call(source, "apply", monkeypatch, compression="zstd")
    assert (said["state"], said["why"]) == ("not_done", "zstd is not installed on this host")
