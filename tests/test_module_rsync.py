"""Backup sets with the real rsync: proved by reading back, never at the cost of an earlier set."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hostcode
import pytest
from ansible.module_utils import gpuchange_backup as backup
from ansible.module_utils import gpuchange_backup_look as looking
from ansible.module_utils import gpuchange_hashing as hashing
from ansible.module_utils import gpuchange_host as host
from ansible.module_utils import gpuchange_unit as unit
from hostcode import OWNER

pytestmark = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")
STEP = {"phase": "backup", "provider": "rsync", "direction": "do"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Data as hosts have it: hard links, a hole, an umlaut, links out and dangling, modes, a FIFO, an empty folder."""
    top = tmp_path / "srv"
    (top / "empty").mkdir(parents=True)
    (top / "one").write_bytes(os.urandom(100_000))
    os.link(top / "one", top / "same")
    os.link(top / "one", top / "again")
    with open(top / "hole", "wb") as file:
        file.truncate(64 * 1024 * 1024)
    (top / "Gerät *[x]").write_text("Umlaut")
    (top / "out").symlink_to("/etc/shadow")
    (top / "dangling").symlink_to("nowhere")
    (top / "script").write_text("#!/bin/sh\n")
    (top / "script").chmod(0o4755)
    os.mkfifo(top / "fifo")
    (tmp_path / "backup").mkdir()
    return top


def job(source: Path, name: str = "c1", **more: Any) -> dict[str, Any]:
    to = source.parent / "backup"
    return {"paths": [str(source)], "to": str(to), "name": name, "work": str(source.parent / "work"), **more}


def make(source: Path, name: str = "c1", **more: Any) -> dict[str, Any]:
    return backup.make_set(job(source, name, **more))


def tree(source: Path, name: str = "c1") -> Path:
    return Path(f"{source.parent}/backup/{name}/tree{source}")


@pytest.mark.case("locale-changes-the-output")
def test_a_set_equals_its_source_and_says_so(source: Path) -> None:
    made = make(source)
    assert (made["checked"], made["expected"], made["in_flux"]) == (11, 11, 0)
    copy = tree(source)
    assert (copy / "one").stat().st_nlink == 3
    assert (copy / "hole").stat().st_blocks * 512 < 1024 * 1024
    assert os.readlink(copy / "out") == "/etc/shadow"
    assert stat.S_IMODE((copy / "script").stat().st_mode) == 0o4755
    check = ["sha256sum", "--check", "--quiet", "--strict", str(source.parent / "backup/c1/manifest.sha256")]
    assert subprocess.run(check, check=False).returncode == 0
    assert json.loads((source.parent / "backup/c1/set.json").read_text())["content"] == made["content"]


def test_the_next_set_links_what_did_not_change_and_leaves_the_last_alone(source: Path) -> None:
    make(source)
    before = (tree(source) / "script").stat().st_mtime_ns
    (source / "script").write_text("#!/bin/bash\n")
    (source / "dangling").unlink()
    made = make(source, "c2")
    assert made["linked_to"].endswith("/c1") and made["needed"] < 64 * 1024
    assert (tree(source, "c2") / "one").stat().st_ino == (tree(source) / "one").stat().st_ino
    assert (tree(source) / "script").read_text() == "#!/bin/sh\n" and (
        tree(source) / "script"
    ).stat().st_mtime_ns == before
    assert (tree(source) / "dangling").is_symlink() and not (tree(source, "c2") / "dangling").is_symlink()


def test_excluded_paths_stay_out_even_with_wildcards_in_their_names(source: Path) -> None:
    (source / "Gerät yx").write_text("stays")
    make(source, exclude=[str(source / "Gerät *[x]"), str(source / "empty")])
    assert sorted(path.name for path in tree(source).iterdir() if path.name[0] in "Ge") == ["Gerät yx"]


def test_an_emptied_source_is_refused_and_the_last_set_untouched(source: Path) -> None:
    make(source)
    shutil.rmtree(source)
    source.mkdir()
    with pytest.raises(looking.Refused, match="is empty, the last backup holds 10 files"):
        make(source, "c2")
    assert (tree(source) / "one").exists() and sorted(os.listdir(source.parent / "backup")) == ["c1"]


def test_a_source_that_is_no_longer_mounted_is_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(source)
    elsewhere = {"mount": "/data", "type": "ext4", "source": "/dev/sdb1"}
    described = source.parent / "backup/c1/set.json"
    content = json.loads(described.read_text())
    content["filesystems"][str(source)] = elsewhere
    described.write_text(json.dumps(content))
    with pytest.raises(
        looking.Refused, match=r"is not mounted \(expected /dev/sdb1 on /data\).*earlier backups untouched"
    ):
        make(source, "c2")


def test_another_disk_at_the_same_place_is_refused(source: Path) -> None:
    make(source)
    described = source.parent / "backup/c1/set.json"
    content = json.loads(described.read_text())
    content["filesystems"][str(source)].update(uuid="AAAA")
    described.write_text(json.dumps(content))
    with pytest.raises(looking.Refused, match=r"is another filesystem \(expected UUID AAAA, found .*untouched"):
        make(source, "c2")


def test_a_large_shrink_stops_until_the_plan_allows_it(source: Path) -> None:
    make(source)
    (source / "hole").unlink()
    with pytest.raises(looking.Refused, match="allow_shrink"):
        make(source, "c2")
    assert make(source, "c2", allow_shrink=100)["files"] == 7


def test_space_is_counted_in_blocks_of_unique_files(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = looking.estimate([str(source)], [], None)
    assert 100_000 <= wanted["need"] < 1024 * 1024  # neither three times `one`, nor the hole

    class Full:
        f_bavail, f_frsize, f_files, f_favail = 10, 4096, 0, 0

    monkeypatch.setattr(backup.os, "statvfs", lambda _path: Full)
    with pytest.raises(looking.Refused, match=r"needs 0 MiB with these options .*, 0 MiB free"):
        make(source)
    assert os.listdir(source.parent / "backup") == []


def test_a_destination_without_holes_and_links_needs_room_for_all_of_them(source: Path) -> None:
    wanted = looking.estimate([str(source)], [], None, plain=True)
    assert wanted["need"] > 64 * 1024 * 1024 + 300_000


@contextmanager
def spoilt(source: Path, spoil: Callable[[Path], None]) -> Iterator[None]:
    """Whatever lies between rsync and the disk: what was copied is damaged on its way, each time."""
    real = backup.copy

    def copy(*given: Any) -> bool:
        result = real(*given)
        spoil(Path(f"{given[1]}/tree{source}"))
        return bool(result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backup, "copy", copy)
        yield


def test_a_copy_cut_short_every_time_is_damage_not_a_file_in_flux(source: Path) -> None:
    damage = spoilt(source, lambda tree: os.truncate(tree / "one", 4096))
    with damage, pytest.raises(looking.Refused, match="hash differs: source"):
        make(source)
    assert os.listdir(source.parent / "backup") == ["c1.partial"]


def test_a_name_that_never_reaches_the_copy_is_damage(source: Path) -> None:
    damage = spoilt(source, lambda tree: (tree / "script").unlink())
    said = r"not in the copy, though its source did not change: .*/script"
    with damage, pytest.raises(looking.Refused, match=said):
        make(source)


def flip_first_bit(path: Path) -> None:
    """The same size and time as before."""
    times = path.stat()
    with open(path, "r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_flipped_byte_in_the_copy_is_found_though_size_and_time_agree(source: Path) -> None:
    damage = spoilt(source, lambda tree: flip_first_bit(tree / "one"))
    with damage, pytest.raises(looking.Refused, match=r"hash differs: source \w{16}, copy \w{16} \(.*/again\)"):
        make(source)
    assert os.listdir(source.parent / "backup") == ["c1.partial"]
    assert make(source)["in_flux"] == 0  # the bad copy was taken away: rsync would have taken it for good


def test_a_file_that_is_written_meanwhile_is_copied_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, passes = backup.copy, []

    def writing(*given: Any) -> bool:
        result = real(*given)
        passes.append(1)
        if len(passes) < 2:
            (source / "log").write_text("line")
        return result

    monkeypatch.setattr(backup, "copy", writing)
    assert make(source)["in_flux"] == 0 and len(passes) == 2
    assert (tree(source) / "log").read_text() == "line"


def test_a_change_of_the_same_size_within_the_same_second_is_copied(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, passes = backup.copy, []

    def writing(*given: Any) -> bool:
        result = real(*given)
        passes.append(1)
        if len(passes) < 2:
            now = (source / "script").stat().st_mtime_ns
            (source / "script").write_text("#!/bin/SH\n")
            os.utime(source / "script", ns=(now, now + 1000))
        return result

    monkeypatch.setattr(backup, "copy", writing)
    assert make(source)["in_flux"] == 0
    assert (tree(source) / "script").read_text() == "#!/bin/SH\n"


def test_what_is_always_written_is_counted_not_hidden(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = backup.copy

    def writing(*given: Any) -> bool:
        result = real(*given)
        time.sleep(0.01)  # another modification time
        with open(source / "log", "a") as file:
            file.write("line")
        return result

    monkeypatch.setattr(backup, "copy", writing)
    made = make(source)
    assert made["in_flux"] >= 1 and str(source / "log") in made["in_flux_names"]


def test_an_interrupted_set_is_no_set_and_is_finished_later(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "prove", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make(source)
    monkeypatch.undo()
    (source / "dangling").unlink()  # what the first try had copied and is gone does not stay
    assert looking.last_set(str(source.parent / "backup"), "c9") is None
    make(source)
    assert not (tree(source) / "dangling").is_symlink()


def test_a_source_that_is_a_link_is_not_compared_with_itself(source: Path) -> None:
    link = source.parent / "link"
    link.symlink_to(source)
    made = backup.make_set({**job(source), "paths": [str(link)]})
    assert made["paths"] == [str(source)] and (tree(source) / "one").is_file()


@pytest.mark.parametrize(
    ("code", "says"), [(23, "some files could not be copied"), (12, "protocol stream"), (-9, "signal 9")]
)
def test_rsyncs_exit_codes_are_told_apart(source: Path, monkeypatch: pytest.MonkeyPatch, code: int, says: str) -> None:
    ended = subprocess.CompletedProcess([], code, b"", b"rsync: error text\nmore")
    (source.parent / "p").mkdir()
    monkeypatch.setattr(backup.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(looking.Refused, match=f"{code}.*{says}.*rsync: error text"):
        backup.copy(job(source), str(source.parent / "p"), None)


def test_vanished_files_are_normal_and_a_full_disk_frees_what_it_took(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = source.parent / "p"
    (partial / "tree").mkdir(parents=True)
    ended = subprocess.CompletedProcess([], 24, b"", b"")
    monkeypatch.setattr(backup.subprocess, "run", lambda *_, **__: ended)
    assert backup.copy(job(source), str(partial), None) is True
    ended.returncode, ended.stderr = 11, b"rsync: write failed: No space left on device (28)"
    with pytest.raises(looking.Refused, match="No space left"):
        backup.copy(job(source), str(partial), None)
    assert not partial.exists()


@pytest.mark.case("empty-destination-becomes-root")
@pytest.mark.parametrize("change", [{"to": ""}, {"to": "/"}, {"to": "backup"}, {"paths": [""]}, {"paths": []}])
def test_no_command_line_gets_an_empty_path(
    source: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the plan's own check: whoever calls the module, an empty path reaches no program."""
    monkeypatch.setattr(backup.subprocess, "run", lambda *_, **__: pytest.fail("a program was started"))
    with pytest.raises(looking.Refused):
        backup.make_set({**job(source), **change})


@pytest.mark.parametrize(
    ("change", "says"), [({"to": "/nowhere/at/all"}, "no directory"), ({"paths": ["/nowhere"]}, "source /nowhere")]
)
def test_what_is_not_there_is_named(source: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(looking.Refused, match=says):
        backup.make_set({**job(source), **change})


def test_a_target_inside_its_source_is_refused(source: Path) -> None:
    with pytest.raises(looking.Refused, match="lies inside"):
        backup.make_set({**job(source), "to": str(source / "empty")})


def test_the_final_pass_reads_back_only_what_is_not_linked(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "YOUNG_NS", 0)
    make(source)
    (source / "script").write_text("#!/bin/bash\n")
    read: list[str] = []
    real = hashing.hash_handle
    monkeypatch.setattr(hashing, "hash_handle", lambda *given: read.append(given[1]["path"]) or real(*given))
    made = make(source, "c1.seal", final=True, previous=[])
    assert [path for path in read if path.endswith("script")] == [str(source / "script")] * 2  # source and copy
    assert len(read) == 2 and made["checked"] == made["expected"] == 11
    assert (tree(source) / "script").read_text() == "#!/bin/sh\n"


def test_sealing_again_replaces_the_final_set(source: Path) -> None:
    for name in ("c1", "c1.seal"):
        make(source, name, final=name.endswith("seal"))
    (source / "script").write_text("#!/bin/bash\n")
    make(source, "c1.seal", final=True)
    assert sorted(os.listdir(source.parent / "backup")) == ["c1", "c1.seal"]
    assert (tree(source, "c1.seal") / "script").read_text() == "#!/bin/bash\n"


# ------------------------------------------------------------------------------------------- the module


def call(source: Path, mode: str, monkeypatch: pytest.MonkeyPatch, **args: Any) -> dict[str, Any]:
    for where in (host, unit):
        monkeypatch.setattr(where, "ROOT", str(source.parent / "state"))
    monkeypatch.setattr(unit, "_has_systemd", lambda: False)
    given = {"paths": [str(source)], "to": str(source.parent / "backup"), **args}
    return dict(hostcode.call("gpuchange_rsync", mode=mode, owner=OWNER, args=given, step=STEP)["report"])


def test_the_module_makes_a_set_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(source, "probe", monkeypatch)["state"] == "not_done"
    first = call(source, "apply", monkeypatch)
    assert (first["state"], first["changed"], first["set"]["checked"]) == ("done", True, 11)
    again = call(source, "apply", monkeypatch)
    assert (again["state"], again["changed"], again["set"]) == ("done", False, first["set"])
    assert call(source, "probe", monkeypatch)["state"] == "done"
    assert call(source, "undo", monkeypatch)["state"] == "done" and tree(source).exists()


def test_the_seal_makes_the_final_set_before_it_looks(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call(source, "apply", monkeypatch)
    backup_args = {"paths": [str(source)], "to": str(source.parent / "backup")}
    step = {"phase": "seal", "provider": "host", "direction": "do"}
    wanted = {"name": "seal", "paths": [str(source)], "previous": ["record"]}
    args = {"backup": backup_args, "manifest": wanted}
    report = hostcode.call("gpuchange_facts", mode="apply", owner=OWNER, args=args, step=step)["report"]
    assert (report["state"], report["backup"]["in_flux"]) == ("done", 0)
    assert report["backup"]["path"].endswith("/c1.seal") and report["manifest"]["files"] == 6
    shutil.rmtree(source.parent / "backup")
    failed = hostcode.call("gpuchange_facts", mode="apply", owner=OWNER, args=args, step=step)["report"]
    assert failed["state"] == "not_done" and failed["why"].startswith("final backup: ")


def test_a_failed_try_says_why_and_may_be_repeated(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = call(source, "apply", monkeypatch, to=str(source.parent / "later"))
    assert failed["state"] == "not_done" and "is no directory" in failed["why"]
    (source.parent / "later").mkdir()
    assert call(source, "apply", monkeypatch, to=str(source.parent / "later"))["state"] == "done"


def test_the_copy_is_read_from_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dropped: list[int] = []
    monkeypatch.setattr(hashing, "_drop", dropped.append)
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "x").write_text("x")
    hashing.run_job({"roots": [[str(tmp_path / "top")] * 2], "out": str(tmp_path / "m"), "drop_cache": True})
    assert len(dropped) == 2
