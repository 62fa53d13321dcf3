"""NVIDIA's .run files: a real self-extracting one read, kept and run; the list of an installed one; the walk."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import hostcode
import pytest
from ansible.module_utils import gpuchange_host as host
from ansible.module_utils import gpuchange_runfile_look as look
from ansible.module_utils import gpuchange_runfile_plan as planned
from ansible.module_utils import gpuchange_runfile_unit as unit_script
from ansible.module_utils import gpuchange_runfile_walk as walking
from ansible.module_utils import gpuchange_unit as unit
from hostcode import OWNER

from gpuchange.lab import runfile
from gpuchange.plan import loads
from gpuchange.providers.contract import HostView
from gpuchange.providers.preflight import runfile as preflight
from gpuchange.providers.stack import runfile as stack

NEW, OLD = "570.172.08", "550.54.15"
INSTALLED = f"""1.0-5505415 ({OLD})
NVIDIA Accelerated Graphics Driver for Linux-x86_64
1: /usr/bin/nvidia-smi
3829108745
0: /usr/lib/x86_64-linux-gnu/libcuda.so.1
libcuda.so.{OLD}
100: /usr/lib/x86_64-linux-gnu/libOpenCL.so.1.0.0
1934829018 100644 0 0
2: /usr/lib/x86_64-linux-gnu/libOpenCL.so.1
libOpenCL.so.1.0.0
0777 0 0
"""
STATE = {"loaded": OLD, "open": False, "kernel": "6.8.0-60", "boot_kernel": "6.8.0-60"}


@pytest.fixture(scope="module")
def installer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-extracting archive of one file; its nvidia-installer notes how it was called, and fails on demand."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "content").mkdir()
    script = folder / "content" / "nvidia-installer"
    script.write_text('#!/bin/sh\nls > "$NOTES"\necho "$@" >> "$NOTES"\nexit "${RC:-0}"\n')
    script.chmod(0o755)
    return runfile.archive(folder / "content", NEW, folder)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_is_read_without_being_run(installer: Path) -> None:
    said = look.head(str(installer))
    assert (said["version"], said["arch"]) == (NEW, "x86_64") and said["kib"] > 0
    assert {"--dkms", "--no-dkms", "--kernel-module-type", "--skip-module-load"} <= set(said["options"])
    assert look.head("/nonexistent")["version"] == ""


@pytest.mark.parametrize(
    ("head", "version"),
    [
        (b'label="NVIDIA Accelerated Graphics Driver for Linux-x86_64 390.48"\n', "390.48"),
        (b'label="NVIDIA Accelerated Graphics Driver"\nversion_string=535.216.03\n', "535.216.03"),
        (b'label="Some game 570.172.08"\n', ""),
        (b"", ""),
    ],
)
def test_the_version_is_the_files_own_word_and_only_of_nvidias(head: bytes, version: str) -> None:
    assert look.parse_head(b"#! /bin/sh\nskip=9\n" + head + b"\n" * 9)["version"] == version


def test_the_plans_file_is_taken_and_every_other_is_named(installer: Path, tmp_path: Path) -> None:
    assert look.file_problem(str(installer), digest(installer), NEW) == ""
    other = "0" * 64
    assert "its sha256 is " in look.file_problem(str(installer), other, NEW)
    assert f"installs driver {NEW}, not {OLD}" in look.file_problem(str(installer), digest(installer), OLD)
    assert "does not exist on this host" in look.file_problem(str(tmp_path / "none.run"), other, NEW)
    text = tmp_path / "plain.run"
    text.write_text("#!/bin/sh\nrm -rf /\n")
    assert "is no NVIDIA driver installer (it says nothing" in look.file_problem(str(text), digest(text), NEW)
    torn = tmp_path / "torn.run"
    torn.write_bytes(installer.read_bytes()[:-10])
    assert "is damaged: Error in checksums" in look.file_problem(str(torn), digest(torn), NEW)


def test_the_list_of_what_is_installed(tmp_path: Path) -> None:
    now = look.parse_installed_log(INSTALLED)
    assert now == {"version": OLD, "paths": ["/usr/bin/nvidia-smi", "/usr/lib/x86_64-linux-gnu/libcuda.so.1"]}
    assert look.parse_installed_log("") == {"version": "", "paths": []}
    assert look.parse_installed_log("390.48\nNVIDIA")["version"] == "390.48"
    assert look.installed_run(str(tmp_path / "none"))["version"] == ""


def test_contents_are_compared_but_for_rebuilt_modules(tmp_path: Path) -> None:
    library, link, module = tmp_path / "lib.so", tmp_path / "lib.so.1", tmp_path / "nvidia.ko.zst"
    library.write_text("one"), link.symlink_to("lib.so"), module.write_text("built")
    paths = [str(path) for path in (library, link, module)]
    before = look.content_digest(paths)
    module.write_text("built anew")
    assert look.content_digest(paths) == before
    library.write_text("two")
    assert look.content_digest(paths) != before
    library.unlink()
    assert look.missing(paths) == [str(library)]


def test_an_earlier_changes_copy_is_found_and_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "ROOT", str(tmp_path))
    store = tmp_path / "c0" / "runfiles"
    store.mkdir(parents=True)
    file = store / "NVIDIA-550.54.15.run"
    file.write_text("kept")
    (store / "manifest.json").write_text(json.dumps({OLD: {"file": file.name, "sha256": digest(file)}}))
    assert look.kept(OLD) == (str(file), digest(file)) and look.kept(NEW) is None
    file.write_text("altered")
    assert look.kept(OLD) is None


# ------------------------------------------------------------------------------------------------- the unit


def keep(store: Path, *rows: tuple[Path, str, str]) -> tuple[int, dict[str, Any]]:
    wanted = [{"file": str(path), "sha256": sha256, "version": version} for path, sha256, version in rows]
    rc = unit_script.keep({"store": str(store), "wanted": wanted})
    return rc, json.loads((store / "manifest.json").read_text())


def test_installers_are_kept_read_back_and_checked(
    installer: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rc, kept = keep(tmp_path, (installer, digest(installer), NEW))
    assert rc == 0 and digest(tmp_path / kept[NEW]["file"]) == digest(installer)
    rc, kept = keep(tmp_path, (tmp_path / "share-is-gone.run", digest(installer), NEW))
    assert rc == 0 and list(kept) == [NEW], "what is kept already is not read again"
    rc, kept = keep(tmp_path, (installer, "0" * 64, OLD))
    assert rc == 1 and kept == {} and "changed: its sha256 is" in capfd.readouterr().out
    rc, kept = keep(tmp_path, (tmp_path / "none.run", "0" * 64, OLD))
    assert rc == 1 and "cannot be kept" in capfd.readouterr().out


def test_one_installer_is_run_and_its_words_are_told(
    installer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    notes, folder = tmp_path / "notes", tmp_path / "unpacked"
    monkeypatch.setenv("NOTES", str(notes))
    (folder / "left").mkdir(parents=True)
    argv = planned.installer_argv(str(installer), "open", False, ["--no-opengl-files"], str(folder), STATE)
    job = {"do": "install", "argv": argv, "folder": str(folder), "unload": False}
    assert unit_script.install(job) == 0 and not folder.exists()
    beside = "--allow-installation-with-running-driver --skip-module-load"
    said = f"--silent --kernel-module-type=open --no-dkms {beside} --no-opengl-files"
    assert notes.read_text().splitlines() == ["nvidia-installer", said]
    log = tmp_path / "nvidia-installer.log"
    log.write_text("-> building\nERROR: Unable to find the kernel source tree.\n")
    monkeypatch.setattr(unit_script, "INSTALLER_LOG", str(log))
    monkeypatch.setenv("RC", "1")
    assert unit_script.install(job) == 1 and "Unable to find the kernel source" in capfd.readouterr().out


def test_an_old_installer_is_asked_for_no_more_than_it_knows(tmp_path: Path) -> None:
    old = tmp_path / "old.run"
    old.write_text('#! /bin/sh\nskip=6\nlabel="NVIDIA 390.48"\necho --dkms --kernel-module-build-directory=X\n\n')
    assert planned.installer_argv(str(old), "open", True, [], "/t", STATE)[2:] == [
        *("--silent", "--tmpdir", "/t", "--kernel-module-build-directory=kernel-open", "--dkms")
    ]
    assert planned.flavour_problem({"module": "open", "file": str(old)}) == ""
    old.write_text('#! /bin/sh\nskip=6\nlabel="NVIDIA 390.48"\n\n\n')
    assert "gives no choice of kernel modules" in planned.flavour_problem({"module": "open", "file": str(old)})


# ------------------------------------------------------------------------------------------------- the walk


@pytest.fixture
def walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A walk back to the old driver, its units played by `states`: {step: state}."""
    for where in (host, unit):
        monkeypatch.setattr(where, "ROOT", str(tmp_path))
    hostcode.set_arguments(
        mode="undo", owner=OWNER, step={"phase": "stack", "provider": "runfile", "direction": "undo"}
    )
    before = {"version": OLD, "digest": "as it was", "dkms": True, "open": False, "driver": OLD}
    change = {"driver": NEW, "module": "open", "dkms": False}
    made = walking.RunfileWalk(host.open_module(), walking.Goal.back(change, before), before, [])
    made.states = {}
    monkeypatch.setattr(made, "_state", lambda step: made.states.get(step, "absent"))
    monkeypatch.setattr(made, "_unit", lambda step: made.states.update({step: "finished"}))
    monkeypatch.setattr(made, "_await_other_direction", lambda: None)
    monkeypatch.setattr(walking, "installed_run", lambda: {"version": OLD, "paths": []})
    monkeypatch.setattr(walking, "library_versions", lambda: {"libcuda": OLD})
    monkeypatch.setattr(walking, "content_digest", lambda _paths: "as it was")

    def end(state: str, why: str = "", **_more: Any) -> None:
        raise SystemExit(f"{state}: {why}")

    monkeypatch.setattr(made, "end", end)
    return made


def test_going_back_takes_the_earlier_ones_shape_not_the_plans(walk: Any) -> None:
    assert (walk.goal.installer, walk.goal.flavour, walk.goal.dkms, walk.driver) == (OLD, "proprietary", True, OLD)


def test_what_is_as_it_was_is_left_alone(walk: Any) -> None:
    walk.files()
    assert walk.states == {}


def test_other_files_of_the_same_version_are_brought_back_once(walk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-done installation of the other direction may leave the old version's list and other files."""
    monkeypatch.setattr(walking, "content_digest", lambda _paths: "otherwise")
    walk.files()
    assert walk.states == {"install": "finished"} and not walk.differs()


def test_an_installer_that_was_cut_off_is_run_again_whatever_it_left(walk: Any) -> None:
    walk.states = {"install": "lost"}
    walk.files()
    assert walk.states == {"install": "lost", "complete": "finished"} and len(walk.repaired) == 1
    walk.states = {"install": "lost", "complete": "lost"}
    with pytest.raises(SystemExit, match="unknown: the installer was broken off twice"):
        walk.files()


def test_a_removed_file_of_the_driver_is_noticed(walk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walking, "installed_run", lambda: {"version": OLD, "paths": ["/usr/bin/none-such"]})
    assert walk.remaining() == ["1 of the driver's files are gone, /usr/bin/none-such first"]


# ------------------------------------------------------------------------------------------- the controller

BODY = {
    "state": "done",
    "before": {"driver": OLD},
    "after": {"driver": NEW},
    "transaction": {"driver": NEW, "installer": {"file": "/mnt/new.run"}, "module": "open"},
    "reboot_needed": True,
}


def view(**more: Any) -> HostView:
    return HostView("gpu1", {"stack": {"driver": NEW, "provider": "runfile"}}, {}, last={stack.PREFLIGHT: BODY}, **more)


def test_a_runfile_stack_brings_its_own_preflight_and_store() -> None:
    text = Path(__file__).with_name("cases").joinpath("plan_good/runfile.yaml").read_text()
    plan = loads(text, "plan.yaml")
    assert [row.provider.name for row in plan.chosen("backup")] == ["runfile"]
    assert [row.provider.name for row in plan.chosen("preflight")] == ["host", "runfile"]
    wanted = preflight.args(HostView("gpu1", plan.data, {}), "apply")["wanted"]
    assert wanted["module"] == "open" and wanted["previous"]["file"].endswith("550.54.15.run") and wanted["dkms"]


def test_every_witness_must_say_the_wanted_version() -> None:
    good = {"state": "done", "installed": NEW, "libraries": {"libcuda": NEW}, "driver": {"loaded": NEW}}
    assert stack.judge(view(), stack.RunfileStackReport.model_validate(good)).outcome == "accept"
    for odd, says in (
        ({"installed": ""}, "installed driver is absent"),
        ({"libraries": {"libcuda": OLD}}, f"libcuda is {OLD}"),
        ({"driver": {"loaded": OLD}}, f"the loaded driver is {OLD}"),
    ):
        verdict = stack.judge(view(), stack.RunfileStackReport.model_validate({**good, **odd}))
        assert verdict.outcome == "reject" and f"{says}, not {NEW}" in verdict.why


def test_no_way_back_is_refused_until_it_is_accepted() -> None:
    report = preflight.RunfilePreflightReport.model_validate({**BODY, "not_obtainable": [f"driver {OLD}"]})
    verdict = preflight.judge(view(), report)
    assert verdict.outcome == "reject" and f"cannot guarantee rollback for driver {OLD}" in verdict.why
    accepted = HostView("gpu1", {"accept_irreversible": ["gpu1"]}, {})
    assert preflight.judge(accepted, report).outcome == "accept"


def test_the_preview_names_the_file_and_the_reboot() -> None:
    lines = stack.preview(view(), stack.RunfileStackReport(state="unknown"))
    assert lines == (f"driver {OLD} → {NEW} (upgrade)", "by /mnt/new.run", "one reboot: the driver changes")


def test_the_archive_is_what_nvidias_is(installer: Path, tmp_path: Path) -> None:
    """The lab's installer answers as NVIDIA's does: --info, --check, --extract-only, and exit code 2 when torn."""
    info = subprocess.run(["sh", installer, "--info"], capture_output=True, text=True, check=True).stdout
    assert f"Identification    : NVIDIA Accelerated Graphics Driver for Linux-x86_64 {NEW}" in info
    target = tmp_path / "out"
    subprocess.run(["sh", installer, "-x", "--target", target], check=True, capture_output=True)
    assert [path.name for path in target.iterdir()] == ["nvidia-installer"]
    torn = tmp_path / "torn.run"
    torn.write_bytes(installer.read_bytes().replace(b"\x1f\x8b\x08", b"\x1f\x8b\x09", 1))
    assert subprocess.run(["sh", torn, "--check"], capture_output=True, check=False).returncode == 2
