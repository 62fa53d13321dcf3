"""The hash manifest: what is recorded, what is read again, what is told apart, and how much memory it takes."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import hostcode  # noqa: F401  (puts module_utils on Ansible's path)
import pytest
from ansible.module_utils import gpuchange_hashing as hashing
from ansible.module_utils import gpuchange_manifest_stream as stream

OLD = 1_600_000_000


def old(path: Path) -> None:
    os.utime(path, (OLD, OLD), follow_symlinks=False)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files, an empty one, a link out, a link loop, a FIFO, a socket, and names that are no UTF-8 or hold a newline."""
    monkeypatch.setattr(hashing, "YOUNG_NS", 0)
    top = tmp_path / "tree"
    (top / "sub").mkdir(parents=True)
    (top / "a").write_bytes(b"alpha")
    (top / "empty").write_bytes(b"")
    (top / "sub" / "big").write_bytes(os.urandom(3 * 1024 * 1024 + 17))
    (top / "out").symlink_to("/etc/shadow")
    (top / "loop").symlink_to("loop")
    os.mkfifo(top / "fifo")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(top / "socket"))
    (top / "new\nline\\").write_bytes(b"newline")
    (Path(os.fsdecode(os.fsencode(top) + b"/\xff\xfe"))).write_bytes(b"no utf-8")
    return top


def make(top: Path, name: str, **more: Any) -> dict[str, Any]:
    out = str(top.parent / name)
    return hashing.run_job({"roots": [[str(top), str(top)]], "out": out, "threads": 2, **more})


def entries(top: Path, name: str) -> dict[str, dict[str, Any]]:
    lines = (top.parent / f"{name}.jsonl").read_text().splitlines()
    found = {entry["path"]: entry for entry in map(json.loads, lines)}
    assert len(found) == len(lines)
    return {path[len(str(top)) + 1 :]: entry for path, entry in found.items()}


@pytest.mark.case("locale-changes-the-output")
def test_every_kind_is_recorded_as_what_it_is(tree: Path) -> None:
    summary = make(tree, "m")
    found = entries(tree, "m")
    kinds = {name: entry["kind"] for name, entry in found.items()}
    assert kinds == {
        "": "dir", "sub": "dir", "a": "file", "empty": "file", "sub/big": "file", "out": "link", "loop": "link",
        "fifo": "fifo", "socket": "socket", "new\nline\\": "file", "\udcff\udcfe": "file",
    }  # fmt: skip
    assert found["a"]["sha256"] == hashlib.sha256(b"alpha").hexdigest()
    assert found["out"]["target"] == "/etc/shadow" and "sha256" not in found["out"]
    assert found["sub/big"]["sha256"] == hashlib.sha256((tree / "sub/big").read_bytes()).hexdigest()
    assert (summary["files"], summary["links"], summary["others"], summary["unreadable"]) == (5, 2, 2, 0)


def test_sha256sum_reads_it(tree: Path) -> None:
    make(tree, "m")
    command = ["sha256sum", "--check", "--quiet", "--strict", str(tree.parent / "m.sha256")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    (tree / "a").write_bytes(b"beta!")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and f"{tree}/a: FAILED" in done.stdout


def test_the_order_allows_streaming(tree: Path) -> None:
    for name in ("b.c", "b", "b!", "bb"):
        (tree / name).mkdir()
        (tree / name / "x").write_text(name)
    make(tree, "m")
    lines = [json.loads(line) for line in (tree.parent / "m.jsonl").read_bytes().splitlines()]
    keys = [stream.key_of(stream.to_bytes(entry["path"])) for entry in lines]
    assert keys == sorted(keys)


def test_only_what_moved_is_read_again(tree: Path) -> None:
    first = make(tree, "one")
    same = make(tree, "two", previous=[str(tree.parent / "one.jsonl")])
    assert (first["read_files"], same["read_files"]) == (5, 0)
    assert same["content"] == first["content"] and same["metadata"] == first["metadata"]
    (tree / "a").write_bytes(b"ALPHA")  # same size
    moved = make(tree, "three", previous=[str(tree.parent / "one.jsonl")])
    assert moved["read_files"] == 1 and moved["content"] != first["content"]


def test_a_change_with_forged_times_is_seen_by_ctime(tree: Path) -> None:
    old(tree / "a")
    make(tree, "one")
    (tree / "a").write_bytes(b"ALPHA")
    old(tree / "a")
    assert make(tree, "two", previous=[str(tree.parent / "one.jsonl")])["read_files"] == 1


def test_a_hash_made_right_after_a_change_is_not_trusted(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "YOUNG_NS", 3600 * 10**9)
    make(tree, "one")
    assert make(tree, "two", previous=[str(tree.parent / "one.jsonl")])["read_files"] == 5


def test_an_interrupted_try_is_continued(tree: Path) -> None:
    make(tree, "one")
    lines = (tree.parent / "one.jsonl").read_bytes()
    (tree.parent / "two.jsonl.new").write_bytes(lines[:-40])  # the power went in the middle of a line
    again = make(tree, "two")
    assert 0 < again["read_files"] < 5
    assert not (tree.parent / "two.jsonl.torn").exists()


def test_each_difference_is_told_apart_and_counted(tree: Path) -> None:
    (tree / "gone").write_text("x")
    (tree / "mode").write_text("x")
    (tree / "touched").write_text("x")
    make(tree, "before")
    (tree / "a").write_bytes(b"alphA")
    (tree / "gone").unlink()
    (tree / "extra").write_text("y")
    (tree / "mode").chmod(0o600)
    old(tree / "touched")
    summary = make(tree, "after", compare=str(tree.parent / "before.jsonl"))
    found = summary["compare"]
    names = {kind: sorted(name[len(str(tree)) + 1 :] for name in shown) for kind, shown in found["names"].items()}
    assert names == {
        "mismatch": ["a"],
        "missing": ["gone"],
        "extra": ["extra"],
        "metadata": ["", "mode", "touched"],  # the directory's own time moved with its entries
    }
    assert (found["expected"], found["checked"], found["unreadable"]) == (14, 13, 0)
    assert found["equal"] == 13 - 4


def test_extended_attributes_count_as_metadata(tree: Path) -> None:
    try:
        os.setxattr(tree / "a", "user.origin", b"here")
    except OSError:
        pytest.skip("this filesystem keeps no extended attributes")
    make(tree, "before")
    os.setxattr(tree / "a", "user.origin", b"there")
    found = make(tree, "after", compare=str(tree.parent / "before.jsonl"))["compare"]
    assert found["names"] == {"metadata": [str(tree / "a")]}


def test_a_manifest_that_was_tampered_with_proves_nothing(tree: Path) -> None:
    digest = make(tree, "seal")["jsonl_sha256"]
    path = tree.parent / "seal.jsonl"
    make(tree, "good", compare=str(path), compare_sha256=digest)
    path.write_bytes(path.read_bytes().replace(b'"mode": 420', b'"mode": 384', 1))
    with pytest.raises(ValueError, match="is not the manifest that was recorded"):
        make(tree, "bad", compare=str(path), compare_sha256=digest)


def test_excluded_paths_are_left_out(tree: Path) -> None:
    make(tree, "m", exclude=[str(tree / "sub")])
    assert not any(name.startswith("sub") for name in entries(tree, "m"))


def test_a_copy_is_compared_under_the_names_of_its_source(tree: Path) -> None:
    copy = tree.parent / "copy"
    subprocess.run(["cp", "-a", str(tree), str(copy)], check=True)
    make(tree, "source")
    job = {
        "roots": [[str(copy), str(tree)]],
        "out": str(tree.parent / "back"),
        "compare": str(tree.parent / "source.jsonl"),
    }
    found = hashing.run_job(job)["compare"]
    assert (found["mismatch"], found["missing"], found["extra"]) == (0, 0, 0)


def test_a_file_that_does_not_hold_still_is_busy(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = hashing._digest

    def writing_meanwhile(handle: int, how: hashing.How) -> Any:
        with open(tree / "a", "ab") as file:
            file.write(b"x")
        return real(handle, how)

    monkeypatch.setattr(hashing, "_digest", writing_meanwhile)
    summary = make(tree, "m")
    assert summary["busy"] >= 1 and str(tree / "a") in summary["names"]["busy"]
    assert "sha256" not in entries(tree, "m")["a"]


def test_an_input_output_error_is_its_own_finding(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = hashing._digest

    def failing(handle: int, how: hashing.How) -> Any:
        if os.fstat(handle).st_size == 5:
            raise OSError(5, "Input/output error")
        return real(handle, how)

    monkeypatch.setattr(hashing, "_digest", failing)
    summary = make(tree, "m")
    assert summary["unreadable"] == 1 and summary["names"]["unreadable"] == [f"{tree / 'a'} (EIO)"]
    assert make(tree, "n", compare=str(tree.parent / "m.jsonl"))["compare"]["unreadable"] == 1


def test_a_path_that_is_not_there_fails(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        make(tmp_path / "nowhere", "m")


def test_a_root_that_is_a_link_is_followed(tree: Path) -> None:
    link = tree.parent / "link"
    link.symlink_to(tree)
    summary = make(link, "m", exclude=[str(link / "sub")])
    assert summary["files"] == 4
    assert entries(link, "m")["a"]["sha256"] == hashlib.sha256(b"alpha").hexdigest()


def test_it_runs_as_a_program_away_from_ansible(tree: Path) -> None:
    job = tree.parent / "job.json"
    job.write_text(json.dumps({"roots": [[str(tree), str(tree)]], "out": str(tree.parent / "m")}))
    command = [sys.executable, "-I", hashing.__file__, str(job)]
    assert subprocess.run(command, check=False, env={"LC_ALL": "C"}).returncode == 0
    assert json.loads((tree.parent / "m.summary.json").read_text())["files"] == 5
    job.write_text(json.dumps({"roots": [["/nowhere/at/all", "/x"]], "out": str(tree.parent / "n")}))
    failed = subprocess.run(command, check=False, capture_output=True, text=True)
    assert failed.returncode == 1 and "nowhere" in json.loads(failed.stdout)["failed"]


def test_a_huge_sparse_file_is_read_in_bounded_memory(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    for name in ("one", "two"):
        with open(top / name, "wb") as file:
            file.truncate(300 * 1024 * 1024)
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"roots": [[str(top), str(top)]], "out": str(tmp_path / "m"), "threads": 2}))
    measured = (
        "import runpy, sys; sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit: print(open('/proc/self/status').read())"
    )
    command = [sys.executable, "-c", measured, hashing.__file__, str(job)]
    status = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    assert int(peak) < 64 * 1024  # KiB; rusage would count the parent's memory from before exec
