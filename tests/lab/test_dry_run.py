"""A dry run reads the real hosts, says what would happen, and leaves them as they are."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from changes import NEW_DRIVER, OLD_DRIVER, ROOT, Operator, differences, fingerprints, ledger, owner_marker, servers

from gpuchange.lab import Lab

Tree = dict[str, tuple[int, ...]]
MANUAL = ROOT / "docs" / "dry-run.md"


def tree(root: Path) -> Tree:
    """Every file, directory and link below `root`: kind and mode, owner, inode, size, times of content and inode."""
    return {path: _stamp(path, root) for path in _walk(root)}


def _walk(root: Path) -> Iterator[str]:
    for folder, names, files in os.walk(root):
        for name in [*names, *files]:
            yield os.path.relpath(os.path.join(folder, name), root)


def _stamp(path: str, root: Path) -> tuple[int, ...]:
    try:
        found = os.lstat(root / path)
    except FileNotFoundError:  # gone since it was listed
        return ()
    return (
        *(found.st_mode, found.st_uid, found.st_gid, found.st_ino),
        *(found.st_size, found.st_mtime_ns, found.st_ctime_ns),
    )


def documented() -> list[re.Pattern[str]]:
    """The paths that the manual says may change: the table rows that begin with a path."""
    rows = re.findall(r"^\| `/([^`]+)` \|", MANUAL.read_text(), re.MULTILINE)
    assert rows, f"{MANUAL} lists nothing"
    return [re.compile(re.escape(row.rstrip("/")).replace(r"\*", "[^/]*") + "(/.*)?") for row in rows]


def changed(before: Tree, after: Tree) -> list[str]:
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


@pytest.mark.timeout(1500)
def test_a_dry_run_says_what_would_happen_and_changes_nothing(fresh_hosts: Lab, tmp_path: Path) -> None:
    operator, lab = Operator(fresh_hosts, tmp_path), fresh_hosts
    plan = operator.plan()
    operator.run("plan", plan, timeout=500).ended(0)  # what the first login of all leaves behind is not ours to count
    looks, ledgers = fingerprints(lab), [ledger(host) for host in lab.gpu_hosts]
    before = {host.name: tree(host.root) for host in lab.hosts}
    said = operator.run("apply", plan, "--dry-run", timeout=500).ended(0)
    after = {host.name: tree(host.root) for host in lab.hosts}
    allowed = documented()
    undocumented = [
        f"{host}: /{path}"
        for host in before
        for path in changed(before[host], after[host])
        if not any(pattern.fullmatch(path) for pattern in allowed)
    ]
    assert undocumented == []
    assert differences(looks, fingerprints(lab)) == ""
    assert servers(lab) == looks["HAProxy"]["servers"]
    assert [ledger(host) for host in lab.gpu_hosts] == ledgers
    assert not any(owner_marker(host) for host in lab.hosts)
    assert not operator.state.exists(), "a dry run is not a change"
    assert_previewed(said.out, [host.name for host in lab.gpu_hosts])


def assert_previewed(text: str, hosts: list[str]) -> None:
    """What the preview must say of the hosts; alike ones share a paragraph."""
    part = text.partition(f"\n{', '.join(hosts)}\n")[2].partition("\n\n")[0]
    assert re.search(rf"~ driver +{re.escape(OLD_DRIVER)} → {re.escape(NEW_DRIVER)}", part), text
    assert re.search(r"~ cuda +12\.4\S* → 12\.8\.1", part), text
    assert re.search(r"~ cudnn +9\.1\S* → 9\.8\.0", part), text
    assert re.search(r"out of service for about .*\((estimate|as in earlier changes)\)", part), text
    assert "reversible: yes" in part, text
    assert "point of no return" not in part, text


@pytest.mark.timeout(300)
def test_what_a_dry_run_sees_is_there_for_programs(lab: Lab, tmp_path: Path) -> None:
    operator = Operator(lab, tmp_path)
    plan = operator.plan(hosts=["gpu3"])
    said = operator.run("plan", plan, "--json", "--detailed-exitcode", timeout=500).ended(2)
    first, *lines = [json.loads(line) for line in said.out.splitlines()]
    assert first["type"] == "version" and first["format"]
    preview = next(line for line in lines if line["type"] == "preview")
    assert preview["to_change"] == ["gpu3"]
