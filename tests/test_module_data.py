"""Data consistency on a host: checksum lists, locks, half-written files, before and after a change."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import hostcode  # noqa: F401  (puts module_utils on Ansible's path)
import pytest
from ansible.module_utils import gpuchange_data as data
from ansible.module_utils import gpuchange_hashing as hashing
from ansible.module_utils import gpuchange_leftovers as leftovers
from ansible.module_utils import gpuchange_manifest_stream as stream
from ansible.module_utils import gpuchange_sums as sums
from checkpoints import sharded
from waiting import eventually

from gpuchange.checks import consistency


@pytest.fixture
def top(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def make(top: Path, name: str = "m", **more: Any) -> dict[str, Any]:
    job = {"roots": [[str(top), str(top)]], "out": str(top.parent / name), "threads": 2, "inspect": True, **more}
    return data.run_job(job)


def findings(top: Path, **more: Any) -> list[str]:
    return [line.replace(f"{top}/", "") for line in make(top, **more)["data"]["findings"]["kept"]]


# ------------------------------------------------------------------------------------------- checksum lists


@pytest.mark.parametrize("tool", ["md5sum", "sha1sum", "sha256sum", "sha512sum"])
@pytest.mark.parametrize("tag", [(), ("--tag",)])
def test_lists_of_the_usual_tools_are_read_and_held_against_the_files(top: Path, tool: str, tag: tuple[str]) -> None:
    for name in ("a", "b c", "new\nline\\", "sub"):
        (top / name).write_text(name)
    said = subprocess.run([tool, *tag, "--", *sorted(os.listdir(top))], cwd=top, capture_output=True, check=True)
    (top / "SUMS").write_bytes(said.stdout)
    found = make(top, sums=[{"file": str(top / "SUMS"), "below": None}])["data"]
    assert found["sums"][0]["listed"] == found["sums"][0]["equal"] == 4 and found["findings"]["count"] == 0
    (top / "b c").write_text("B C")
    (top / "sub").unlink()
    (top / "a").unlink()
    (top / "a").mkdir()
    lines = findings(top, sums=[{"file": str(top / "SUMS"), "below": None}])
    assert lines[0] == "SUMS: a is listed and is a dir"
    assert lines[1].startswith("SUMS: b c is not as listed: ") and lines[2] == "SUMS: sub is listed and is not there"
    assert len(lines) == 3


def test_md5_and_sha256_come_from_one_read(top: Path) -> None:
    (top / "a").write_bytes(b"alpha")
    (top / "MD5SUMS").write_text(f"{hashlib.md5(b'alpha').hexdigest()}  ./a\n")
    os.utime(top / "a", (1, 1))
    first = make(top, "one", sums=[{"file": str(top / "MD5SUMS")}])
    assert first["read_bytes"] == first["bytes"]
    entry = json.loads((top.parent / "one.jsonl").read_text().splitlines()[2])
    assert entry["md5"] == hashlib.md5(b"alpha").hexdigest() and entry["sha256"] == hashlib.sha256(b"alpha").hexdigest()


def test_what_was_hashed_is_not_hashed_again_but_another_algorithm_is(top: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(hashing, "YOUNG_NS", 0)
    (top / "a").write_bytes(b"alpha")
    (top.parent / "SUMS").write_text(f"{hashlib.md5(b'alpha').hexdigest()}  a\n")
    listed = [{"file": str(top.parent / "SUMS"), "below": str(top)}]
    make(top, "one")
    assert make(top, "two", previous=[str(top.parent / "one.jsonl")], sums=listed)["read_files"] == 1
    assert make(top, "three", previous=[str(top.parent / "two.jsonl")], sums=listed)["read_files"] == 0


def test_a_list_that_checks_nothing_is_no_proof(top: Path) -> None:
    (top / "a").write_text("x")
    (top / "SUMS").write_text("# nothing\n\n")
    assert findings(top, sums=[{"file": str(top / "SUMS")}]) == ["SUMS: lists nothing"]
    (top / "SUMS").write_text(f"{'0' * 32}  /etc/passwd\nhello\n{'0' * 33}  a\n")
    lines = findings(top, sums=[{"file": str(top / "SUMS")}])
    assert lines == [
        "SUMS: has 2 lines that are no checksums, the first is line 2",
        "SUMS: lists 1 names outside of record.paths, or excluded: not checked, the first is /etc/passwd",
    ]
    assert findings(top, sums=[{"file": "/nowhere/SUMS"}]) == [
        "/nowhere/SUMS: cannot be read: No such file or directory"
    ]


def test_names_that_are_links_are_checked_as_what_they_lead_to(top: Path) -> None:
    """A model cache: snapshots are links to blobs."""
    (top / "blobs").mkdir()
    (top / "snapshot").mkdir()
    (top / "blobs/abc").write_bytes(b"weights")
    (top / "snapshot/model.bin").symlink_to("../blobs/abc")
    (top / "snapshot/SUMS").write_text(f"{hashlib.md5(b'weights').hexdigest()} *model.bin\n")
    assert make(top, sums=[{"file": str(top / "snapshot/SUMS")}])["data"]["sums"][0]["equal"] == 1


def test_a_long_list_is_sorted_in_bounded_memory(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "PIECE", 1000)
    lines = [f"{number:032x}  {'d' * 60}/{number % 97}/{number}\n" for number in range(20_000)]
    (top / "SUMS").write_text("".join(lines))
    job = {"roots": [[str(top), str(top)]], "sums": [{"file": str(top / "SUMS")}]}
    tracemalloc.start()
    sums.prepare(job, str(top.parent / "listed"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    rows = [json.loads(line) for line in (top.parent / "listed").read_text().splitlines()]
    keys = [stream.key_of(stream.to_bytes(row["path"])) for row in rows]
    assert len(rows) == 20_000 and keys == sorted(keys) and peak < 8 * 1024 * 1024
    assert sorted(os.listdir(top.parent)) == ["listed", "models"]


# ------------------------------------------------------------------------------------------- leftovers


def test_names_of_leftovers_and_of_what_only_looks_like_one() -> None:
    cases = {
        "x.lock": "lock", "model.incomplete": "half-written", ".nfs000000000012ab4500000001": "half-written",
        ".model.bin.aB3xYz": "half-written", "a.tmp": "half-written", ".metadata.tmp": "half-written",
        "poetry.lock": "", ".bashrc.backup": "", ".model.sha256": "", "model.bin": "", "lockstep": "",
        ".app.123456": "",
    }  # fmt: skip
    assert {name: leftovers.kind_of(name, "file", 0) for name in cases} == cases
    assert leftovers.kind_of("index.lock", "file", 0, "/srv/repo/.git") == "git lock"
    assert leftovers.kind_of("big.lock", "file", 10**6) == ""
    assert (
        leftovers.kind_of("tmp-checkpoint-500", "dir", 0) == leftovers.kind_of("ckpt.tmp", "dir", 0) == "half-written"
    )


def test_a_lock_is_judged_by_whether_a_live_process_holds_it(top: Path) -> None:
    (top / "repo/.git").mkdir(parents=True)
    for name in ("held.lock", "free.lock", "repo/.git/index.lock", "download.incomplete"):
        (top / name).touch()
    (top / "dead.lock").write_text("4194304\n")
    (top / "mine.lock").write_text(f"{os.getppid()}\n")
    holding = (
        "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, 2); print('x', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", holding, str(top / "held.lock")]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert holder.stdout and holder.stdout.readline()
        found = {Path(item["path"]).name: item for item in make(top)["data"]["leftovers"]["kept"]}
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert {name: item["held"] for name, item in found.items()} == {
        "held.lock": True, "free.lock": False, "index.lock": False, "download.incomplete": False,
        "dead.lock": False, "mine.lock": True,
    }  # fmt: skip
    assert found["held.lock"]["by"].startswith(f"{holder.pid} python")
    assert found["dead.lock"]["kind"] == "lock of a process"
    assert not any(item["held"] for item in make(top)["data"]["leftovers"]["kept"] if "mine" not in item["path"])


# ------------------------------------------------------------------------------------------- before and after


def both(top: Path, change: Any) -> tuple[list[str], list[str]]:
    """(what fails, what is told) after `change`."""
    before = consistency.parse(make(top, "before"))
    change()
    now = consistency.parse(make(top, "after"))
    lines = consistency.judge(before, now)
    return [line for good, line in lines if not good], [line for good, line in lines if good]


def test_what_was_inconsistent_before_does_not_blame_the_change(top: Path) -> None:
    sharded(top / "old", shards=2)
    (top / "old/model-00001-of-00002.safetensors").unlink()
    sharded(top / "new")
    failed, told = both(top, lambda: os.truncate(top / "new/model-00002-of-00003.safetensors", 10))
    assert len(failed) == 2 and all("since the change" in line and "/new/" in line for line in failed)
    already = [line for line in told if "before the change already" in line]
    assert len(already) == 1 and "/old/" in already[0] and "is not there" in already[0]
    failed, _ = both(top, lambda: None)
    assert failed == []


def test_what_a_change_leaves_behind_fails_and_what_lay_there_does_not(top: Path) -> None:
    (top / "old.lock").touch()
    failed, told = both(top, lambda: (top / "model.incomplete").touch())
    assert failed == [f"left behind since the change: {top}/model.incomplete (half-written, nobody holds it)"]
    assert any(line.startswith("lay there before the change") for line in told)


def test_a_lock_whose_holder_ended_meanwhile_fails_unless_the_kernel_freed_it() -> None:
    def state(kind: str, held: bool) -> consistency.Data:
        item = {"path": "/srv/x", "kind": kind, "held": held, "by": "7 git" if held else ""}
        return consistency.Data.model_validate({"leftovers": {"count": 1, "kept": [item]}})

    for kind, good in (("git lock", False), ("lock of a process", False), ("half-written", False), ("lock", True)):
        assert consistency.judge(state(kind, True), state(kind, False))[0][0] is good


def test_more_findings_than_can_be_told_apart_fail_unless_they_are_the_same(monkeypatch: Any, top: Path) -> None:
    monkeypatch.setattr(data, "MOST_FINDINGS", 2)
    for number in range(4):
        (top / f"{number}.safetensors").write_bytes(b"torn")
    assert both(top, lambda: None)[0] == []
    failed, _ = both(top, lambda: (top / "9.safetensors").write_bytes(b"torn"))
    assert failed == ["4 inconsistencies before the change, 5 now: too many to tell which are new"]


# ------------------------------------------------------------------------------------------- going on


def test_a_try_killed_twice_goes_on_from_the_further_of_both(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "YOUNG_NS", 0)
    for number in range(9):
        (top / f"{number}").write_text("x" * 100)
    make(top, "whole")
    lines = (top.parent / "whole.jsonl").read_bytes().splitlines(keepends=True)
    (top.parent / "m.jsonl.torn").write_bytes(b"".join(lines[:9]))
    (top.parent / "m.jsonl.new").write_bytes(b"".join(lines[:3]) + lines[3][:20])
    assert make(top, "m")["read_files"] == 1


def test_each_hash_is_kept_as_soon_as_it_is_made(top: Path) -> None:
    """A kill must not cost the hours that went into files that are through."""
    (top / "1").write_bytes(b"one")
    fifo = top.parent / "wait"
    os.mkfifo(fifo)
    (top / "2").write_bytes(b"two")
    program = (
        "import json, os, sys; sys.path.insert(0, os.path.dirname(sys.argv[1])); import gpuchange_hashing as h\n"
        "real = h._digest\n"
        "def slow(handle, how):\n"
        "    if os.pread(handle, 3, 0) == b'two': print('x', flush=True); open(sys.argv[3]).read()\n"
        "    return real(handle, how)\n"
        "h._digest = slow; h.run_job(json.load(open(sys.argv[2])))\n"
    )
    job = top.parent / "job.json"
    job.write_text(json.dumps({"roots": [[str(top), str(top)]], "out": str(top.parent / "m"), "threads": 1}))
    command = [sys.executable, "-c", program, hashing.__file__, str(job), str(fifo)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        eventually(lambda: str(top / "1") in written(top.parent / "m.jsonl.new"))  # while "2" is still being read
        process.kill()


def written(manifest: Path) -> list[str]:
    """The names in a manifest that is still being made."""
    return [json.loads(line)["path"] for line in manifest.read_text().splitlines(True) if line.endswith("\n")]


def test_progress_moves_within_one_large_file(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "TELL_S", 0.01)
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(hashing, "replace_text", lambda path, text: told.append(json.loads(text)))
    with open(top / "large", "wb") as file:
        file.truncate(200 * 1024 * 1024)
    hashing.run_job({"roots": [[str(top), str(top)]], "out": str(top.parent / "m"), "threads": 1})
    seen = sorted({line["bytes"] for line in told})
    assert len([size for size in seen if 0 < size < 200 * 1024 * 1024]) >= 2 and max(line["rate"] for line in told) > 0


def test_hundreds_of_cores_do_not_mean_hundreds_of_buffers(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 256)
    job: dict[str, Any] = {"roots": [], "out": "x"}
    assert hashing.Maker(job, io.BytesIO(), io.BytesIO()).threads == hashing.MOST_THREADS
    many = hashing.Maker({**job, "threads": 64}, io.BytesIO(), io.BytesIO())
    assert min(hashing.CHUNK, hashing.BUFFERS // many.threads) * many.threads <= hashing.BUFFERS
