"""The base of every host module: owner marker, atomic files, commands."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import hostcode
import pytest
from ansible.module_utils import gpuchange_host as host
from hostcode import OWNER, call


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host, "ROOT", str(tmp_path))
    return tmp_path


def marker_of(root: Path) -> dict[str, Any]:
    return dict(json.loads((root / "owner.json").read_text()))


def own(**changes: Any) -> dict[str, Any] | None:
    """Take the marker; None when taken, else the refusal."""
    hostcode.set_arguments(mode="apply", owner=dict(OWNER, **changes))
    module = host.open_module()
    refused: list[dict[str, Any]] = []

    def fail_json(msg: str, **fields: Any) -> None:
        refused.append(dict(fields["refused"], msg=msg))
        raise SystemExit(1)

    module.fail_json = fail_json
    try:
        with host.owned(module, wait_s=0.2):
            return None
    except SystemExit:
        return refused[0]


def test_marker_is_private_and_tells_why(root: Path) -> None:
    assert own(reason="CUDA 12.8", ticket="OPS-7") is None
    marker = marker_of(root)
    assert (marker["change"], marker["fence"], marker["reason"], marker["ticket"]) == ("c1", 1, "CUDA 12.8", "OPS-7")
    assert (root / "owner.json").stat().st_mode & 0o777 == 0o600


def test_same_controller_may_come_again_and_a_higher_fence_takes_over(root: Path) -> None:
    assert own() is None
    assert own() is None
    assert own(controller="k2", fence=2) is None
    assert marker_of(root)["controller"] == "k2"


@pytest.mark.parametrize(
    ("later", "kind"),
    [({"fence": 1, "controller": "k2"}, "stale"), ({"fence": 0}, "stale"), ({"change": "c2", "fence": 9}, "locked")],
)
def test_refused(root: Path, later: dict[str, Any], kind: str) -> None:
    assert own() is None
    before = (root / "owner.json").read_bytes()
    refused = own(**later)
    assert refused is not None and refused["kind"] == kind and refused["by"]["change"] == "c1"
    assert (root / "owner.json").read_bytes() == before


def test_damaged_marker_locks(root: Path) -> None:
    (root / "owner.json").write_text("{half")
    refused = own()
    assert refused is not None and refused["kind"] == "locked" and "damaged" in refused["by"]


def test_lock_held_by_another_call_is_refused_in_bounded_time(root: Path) -> None:
    import fcntl

    with open(root / "lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        refused = own()
    assert refused is not None and refused["kind"] == "locked"
    assert not (root / "owner.json").exists()


def test_release_is_ours_only_and_twice_is_once(root: Path) -> None:
    assert own() is None
    other = dict(OWNER, change="c2")
    assert call("gpuchange_owner", mode="apply", owner=other)["refused"]["kind"] == "locked"
    assert call("gpuchange_owner", mode="probe", owner=OWNER)["report"]["state"] == "not_done"
    assert call("gpuchange_owner", mode="apply", owner=OWNER)["report"]["released"] is True
    assert call("gpuchange_owner", mode="apply", owner=OWNER)["report"]["released"] is False
    assert call("gpuchange_owner", mode="probe", owner=OWNER)["report"]["state"] == "done"


UNLOCKER = dict(OWNER, change="unlock-1", controller="k9", fence=0)


def unlock(fence: int, change: str = "c1") -> dict[str, Any]:
    return call("gpuchange_owner", mode="apply", owner=UNLOCKER, args={"expect": {"change": change, "fence": fence}})


def test_unlock_shuts_the_stopped_controller_out_and_lets_the_next_one_in(root: Path) -> None:
    assert own(fence=2) is None
    assert unlock(2)["report"]["released"] is True
    assert not (root / "owner.json").exists()
    back = own(fence=2)
    assert back is not None and back["kind"] == "released" and "up to fence 2" in back["msg"]
    assert own(fence=1) is not None
    assert own(fence=3, controller="k2") is None, "a controller that took the change over afterwards knows of it"


def test_unlock_with_an_older_fence_is_refused(root: Path) -> None:
    assert own(fence=2) is None
    assert unlock(1)["refused"]["kind"] == "stale"
    assert marker_of(root)["fence"] == 2 and not (root / "released.json").exists()


def test_unlock_shuts_out_also_where_no_marker_is_yet(root: Path) -> None:
    assert unlock(1)["report"]["released"] is False
    refused = own()
    assert refused is not None and refused["kind"] == "released"
    assert own(change="c2") is None
    unlock(4)
    unlock(3)
    assert host.read_released()["c1"]["fence"] == 4


def test_unlock_leaves_other_changes_alone(root: Path) -> None:
    assert own(change="c2") is None
    assert unlock(1)["report"]["released"] is False
    assert marker_of(root)["change"] == "c2"


def test_what_another_change_took_since_is_closed_to_every_controller_of_the_first(root: Path) -> None:
    assert own() is None
    unlock(1)
    assert own(change="c2", fence=7) is None
    call("gpuchange_owner", mode="apply", owner=dict(OWNER, change="c2", fence=7))
    refused = own(fence=9)
    assert refused is not None and refused["kind"] == "released" and "taken by c2 since" in refused["msg"]
    assert own(change="c2", fence=7) is None


def test_a_probe_is_told_too_without_taking_anything(root: Path) -> None:
    unlock(1)
    assert host.shut_out(OWNER)[0] == "released" and host.shut_out(dict(OWNER, fence=2)) == ("", {})
    assert not (root / "owner.json").exists()


@pytest.mark.parametrize("text", ["{half", "[]", '{"c1": {}}', '{"c1": {"fence": "x", "taken": {}}}'])
def test_damaged_memory_of_unlocks_lets_nobody_in(root: Path, text: str) -> None:
    (root / "released.json").write_text(text)
    refused = own()
    assert refused is not None and refused["kind"] == "locked" and "damaged" in refused["by"]


def test_a_crash_inside_unlock_shuts_out_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert own() is None

    def crash(_path: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(os, "unlink", crash)
        unlock(1)
    assert (refused := own()) is not None and refused["kind"] == "released"
    assert unlock(1)["report"]["released"] is True


def test_unlock_is_refused_while_work_of_that_change_runs(root: Path) -> None:
    from ansible.module_utils import gpuchange_unit as unit

    assert own() is None
    folder = root / "c1"
    folder.mkdir(exist_ok=True)
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    me = {"boot_id": host.boot_id(), "pid": os.getpid(), "start_time": stat[19]}
    (folder / "stack-do-packages-g2.spec").write_text("{}")
    (folder / "stack-do-packages-g2.begun").write_text(json.dumps(me))
    with pytest.MonkeyPatch.context() as here:
        here.setattr(unit, "ROOT", str(root))
        refused = unlock(1)
        assert refused["refused"]["kind"] == "working" and "stack-do-packages-g2" in refused["msg"]
        assert own() is None and not (root / "released.json").exists()
        (folder / "stack-do-packages-g2.json").write_text('{"rc": 0}')
        assert unlock(1)["report"]["released"] is True


def test_the_marker_says_who_where_and_since_when(root: Path) -> None:
    assert own(boot="b-1", user="ann as root") is None
    marker = marker_of(root)
    assert (marker["boot"], marker["user"]) == ("b-1", "ann as root") and marker["since"].endswith("Z")


def test_change_id_cannot_leave_the_state_directory() -> None:
    out = call("gpuchange_owner", mode="probe", owner=dict(OWNER, change="../etc"))
    assert out["failed"] and "not a change id" in out["msg"]


def test_save_once_keeps_the_first(root: Path) -> None:
    path = str(root / "c1" / "found.json")
    assert host.save_once(path, {"state": "ready"}) == {"state": "ready"}
    assert host.save_once(path, {"state": "maint"}) == {"state": "ready"}
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.listdir(root / "c1") == ["found.json"]


def test_read_json_names_the_damaged_file(root: Path) -> None:
    (root / "x.json").write_text("{")
    with pytest.raises(ValueError, match=r"x\.json is damaged"):
        host.read_json(str(root / "x.json"))
    assert host.read_json(str(root / "none.json"), {}) == {}


def test_run_is_bounded_in_time_and_output_and_speaks_english() -> None:
    assert host.run(["no-such-program-here"])[0] == 127
    rc, _, err = host.run(["sleep", "30"], timeout=0.2)
    assert rc == 124 and "no end within 0.2 s" in err
    rc, out, _ = host.run(["seq", "1", "100000"], limit=1000)
    assert rc == 0 and len(out) < 1100 and out.startswith("1\n") and out.endswith("100000\n")
    assert host.run(["sh", "-c", "echo $LC_ALL"])[1] == "C.UTF-8\n"
    assert host.run(["cat"], data="hello")[1] == "hello"
