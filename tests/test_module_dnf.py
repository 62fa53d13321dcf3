"""The dnf modules: choice of RPMs, version locks, the walk; and dnf's own library on a real repository, where it is."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import hostcode
import pytest
from ansible.module_utils import gpuchange_dnf_call as call
from ansible.module_utils import gpuchange_dnf_walk as walking
from ansible.module_utils import gpuchange_host as host
from ansible.module_utils import gpuchange_rpm as rpm
from ansible.module_utils import gpuchange_rpm_keep as keeping
from ansible.module_utils import gpuchange_stack as apt_stack
from ansible.module_utils import gpuchange_unit as unit
from ansible.module_utils import gpuchange_upgrades as upgrades
from ansible.module_utils.gpuchange_dnf_choice import Offer, choose, matches
from hostcode import OWNER, PLAYBOOKS

from gpuchange.checks.compatibility import flavour_of
from gpuchange.checks.driver import library_version
from gpuchange.lab import rpms
from gpuchange.plan import loads
from gpuchange.providers.contract import HostView
from gpuchange.providers.preflight import dnf as preflight
from gpuchange.providers.stack import dnf as stack

OLD, NEW = "550.54.15", "570.172.08"
DRIVER = (
    "cuda-drivers",
    "nvidia-driver-cuda",
    "nvidia-driver-cuda-libs",
    "kmod-nvidia-latest-dkms",
    "nvidia-kmod-common",
)
TOOLKIT = ("nvidia-container-toolkit", "nvidia-container-toolkit-base")


def evr(version: str) -> str:
    return f"3:{version}-1.el9"


def offer(*more: tuple[str, str]) -> Offer:
    rows = [(name, evr(version)) for name in DRIVER for version in (OLD, NEW)]
    rows += [(name, f"{version}-1") for name in TOOLKIT for version in ("1.16.2", "1.17.8")]
    found: Offer = {}
    for name, version in [*rows, *more]:
        found.setdefault(name, {})[version] = {}
    return found


INSTALLED = {**{name: evr(OLD) for name in DRIVER}, **{name: "1.16.2-1" for name in TOOLKIT}, "dkms": "3.0.13-1.el9"}


@pytest.mark.parametrize(
    ("wanted", "version", "is_meant"),
    [
        (NEW, evr(NEW), True),
        (evr(NEW), evr(NEW), True),
        ("570.172", evr(NEW), True),
        ("570.17", evr(NEW), False),
        ("2.25.1", "2.25.1-1+cuda12.8", True),
        ("12.8.1", "12.8.10-1", False),
    ],
)
def test_versions_are_matched_by_their_parts(wanted: str, version: str, is_meant: bool) -> None:
    assert matches(wanted, version) is is_meant


def test_the_shape_of_the_host_is_carried_over_and_nothing_else_moves() -> None:
    choice = choose({"driver": NEW}, offer(), INSTALLED)
    assert choice.problems == [] and choice.install == {name: evr(NEW) for name in DRIVER}
    assert choice.mains == {"driver": "cuda-drivers"}
    toolkit = choose({"container_toolkit": "1.17.8"}, offer(), INSTALLED)
    assert toolkit.install == {name: "1.17.8-1" for name in TOOLKIT} and not toolkit.problems


def test_a_host_without_a_driver_gets_the_metapackage() -> None:
    assert choose({"driver": NEW}, offer(), {}).install == {"cuda-drivers": evr(NEW)}
    libraries = offer(
        ("libcudnn9-cuda-12", "9.8.0.87-1"), ("libnccl", "2.25.1-1+cuda12.8"), ("cuda-toolkit-12-8", "12.8.1-1")
    )
    choice = choose({"cuda": "12.8.1", "cudnn": "9.8.0", "nccl": "2.25.1"}, libraries, {})
    assert choice.mains == {"cuda": "cuda-toolkit-12-8", "cudnn": "libcudnn9-cuda-12", "nccl": "libnccl"}


def test_what_cannot_be_had_or_meant_is_named() -> None:
    missing = choose({"driver": "570.999.1"}, offer(), INSTALLED)
    assert (
        f"cuda-drivers 570.999.1 is not offered by the host's repositories; offered: {evr(OLD)}" in missing.problems[0]
    )
    twice = choose({"driver": NEW}, offer(("cuda-drivers", f"3:{NEW}-2.el9")), {})
    assert "is ambiguous: " in twice.problems[0]
    mixed = choose({"driver": NEW}, offer(), {**INSTALLED, "nvidia-driver-cuda": evr(NEW)})
    assert "is a mix of versions" in mixed.problems[0]
    assert 'write the version, for example "12.8.1"' in choose({"cuda": "12"}, offer(), {}).problems[0]


def test_rpms_own_list_duplicates_and_foreign_ones() -> None:
    text = (
        f"cuda-drivers\tx86_64\t3\t{NEW}-1.el9\ncuda-drivers\tx86_64\t3\t{OLD}-1.el9\nbash\tx86_64\t0\t5.1-1\n"
        "nvidia-driver-libs\ti686\t3\t550.54.15-1.el9\ngpg-pubkey\t(none)\t0\tabc-1\nkernel-core\tx86_64\t0\t1-1\n"
        "kernel-core\tx86_64\t0\t2-1\n"
    )
    rows = rpm.parse_installed(text, "x86_64")
    assert rows["cuda-drivers"]["status"] == "duplicate" and rows["bash"]["version"] == "5.1-1"
    assert rows["nvidia-driver-libs.i686"]["version"] == evr(OLD) and "gpg-pubkey" not in rows
    assert rows["kernel-core"]["status"] == "installed", "several kernels are no accident"
    assert apt_stack.Target({"cuda-drivers": evr(NEW)}, [], NEW, {}).remaining(rows), "there twice is not as wanted"


def test_version_locks_move_with_their_packages_only() -> None:
    text = f"# by hand\nnvidia-driver-cuda-3:{OLD}-1.el9.*\nbash-0:5.1-1.*\n!old-0:1-1.*\n"
    assert set(rpm.locks(text)) == {"nvidia-driver-cuda", "bash", "old"}
    moved = rpm.locks_moved(text, {"nvidia-driver-cuda": evr(NEW), "dkms": "3-1"})
    assert moved == text.replace(f"3:{OLD}", f"3:{NEW}") and rpm.locks_moved("", {"x": "1-1"}) == ""


def test_rpms_stand_beside_what_dpkg_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = {"packages": {"dkms": "3"}, "broken": {}, "sources": {}, "holds": ["a"], "others": {"count": 1}}
    monkeypatch.setattr(rpm, "has_dnf", lambda: False)
    assert rpm.with_rpms(snapshot) is snapshot
    monkeypatch.setattr(rpm, "has_dnf", lambda: True)
    monkeypatch.setattr(rpm, "lock_text", lambda: "bash-0:5.1-1.*\n")
    rows = rpm.parse_installed(f"cuda-drivers\tx86_64\t3\t{NEW}-1\nbash\tx86_64\t0\t5.1-1\n", "x86_64")
    monkeypatch.setattr(rpm, "installed", lambda: rows)
    merged = rpm.with_rpms(snapshot)
    assert merged["packages"] == {"cuda-drivers": f"3:{NEW}-1", "dkms": "3"} and merged["holds"] == [
        "a",
        "bash-0:5.1-1.*",
    ]


def test_the_checks_know_rpms_names() -> None:
    assert library_version({"nvidia-driver-cuda-libs": evr(NEW)}) == NEW
    assert flavour_of(["kmod-nvidia-open-dkms"]) == "open" and flavour_of(["kmod-nvidia-latest-dkms"]) == "proprietary"


def test_automatic_upgrades_of_dnf_are_set_aside_and_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "automatic.conf"
    monkeypatch.setattr(upgrades, "BLOCK_FILE", str(tmp_path / "no-apt" / "x"))
    monkeypatch.setattr(upgrades, "DNF_FILE", str(file))
    monkeypatch.setattr(upgrades, "DNF_ASIDE", str(file) + ".gpuchange")
    assert upgrades.blocked() and not upgrades.block() and not upgrades.give_back()
    file.write_text("[commands]\napply_updates = yes\n")
    assert upgrades.block() and upgrades.blocked() and not upgrades.block()
    assert "excludepkgs = *" in file.read_text()
    assert upgrades.give_back() and file.read_text() == "[commands]\napply_updates = yes\n"
    assert [path.name for path in tmp_path.iterdir()] == ["automatic.conf"] and not upgrades.give_back()
    (tmp_path / "automatic.conf.gpuchange").hardlink_to(file)  # killed between the two steps of blocking
    assert upgrades.give_back() and [path.name for path in tmp_path.iterdir()] == ["automatic.conf"]


def test_what_is_no_answer_of_dnf_is_said_so() -> None:
    assert call.answer_of('noise\n{"moves": []}\n') == {"moves": []}
    assert "Traceback: no module" in call.answer_of("", "Traceback: no module dnf")["error"]


# ------------------------------------------------------------------------------------------------- the walk


@pytest.fixture
def walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A walk forward; its units are played by `states`, packages by `rows`."""
    for where in (host, unit):
        monkeypatch.setattr(where, "ROOT", str(tmp_path))
    hostcode.set_arguments(mode="apply", owner=OWNER, step={"phase": "stack", "provider": "dnf", "direction": "do"})
    target = apt_stack.Target({"cuda-drivers": evr(NEW)}, [], NEW, {})
    before = {"versions": {"cuda-drivers": evr(OLD)}, "auto": [], "locks": ""}
    made = walking.DnfWalk(host.open_module(), target, before)
    made.states, made.version = {}, evr(OLD)

    def play(step: str) -> None:
        made.states[step], made.version = "finished", evr(NEW)

    row = {"name": "cuda-drivers", "arch": "x86_64", "status": "installed"}
    monkeypatch.setattr(walking, "installed", lambda: {"cuda-drivers": {**row, "version": made.version}})
    monkeypatch.setattr(walking, "lock_text", lambda: "")
    monkeypatch.setattr(made, "_state", lambda step: made.states.get(step, "absent"))
    monkeypatch.setattr(made, "_unit", play)
    monkeypatch.setattr(made, "_await_other_direction", lambda: None)

    def end(state: str, why: str = "", **_more: Any) -> None:
        raise SystemExit(f"{state}: {why}")

    monkeypatch.setattr(made, "end", end)
    return made


def test_one_transaction_and_none_where_all_is_as_wanted(walk: Any) -> None:
    walk.packages()
    assert walk.states == {"install": "finished"}
    walk.packages()
    assert walk.repaired == []


def test_a_transaction_that_was_cut_off_is_completed_once(walk: Any) -> None:
    walk.states, walk.version = {"install": "lost"}, evr(NEW)
    walk.packages()
    assert walk.states == {"install": "lost", "complete": "finished"} and len(walk.repaired) == 1
    walk.states = {"install": "lost", "complete": "lost"}
    with pytest.raises(SystemExit, match="unknown: the package transaction was broken off twice"):
        walk.packages()


def test_another_package_operation_is_waited_for(walk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walking, "working", lambda: "dnf upgrade (pid 4711)")
    with pytest.raises(SystemExit, match=r"running: another package operation is active.*dnf upgrade \(pid 4711\)"):
        walk._await_others()


# ------------------------------------------------------------------------------- dnf itself, where it is there

HAS_DNF = (
    all(shutil.which(tool) for tool in ("dnf", "rpm", *rpms.TOOLS))
    and subprocess.run([call.interpreter(), "-c", "import dnf"], capture_output=True, check=False).returncode == 0
)
real = pytest.mark.skipif(not HAS_DNF, reason="dnf, rpmbuild or createrepo_c is not installed here")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real repository of three packages: the metapackage needs another one at its own version."""
    folder = tmp_path_factory.mktemp("rpms")
    made = folder / "repo"
    made.mkdir()
    rows = [rpms.BASE, *(rpms.Rpm("nvidia-driver-cuda", version, epoch=3) for version in (OLD, NEW))]
    rows += [rpms.Rpm("cuda-drivers", version, epoch=3, needs=("nvidia-driver-cuda",)) for version in (OLD, NEW)]
    for row in rows:
        rpms.build(row, folder, made, folder)
    subprocess.run(["createrepo_c", "-q", made], check=True)
    return made


def asked(repository: Path, tmp_path: Path, **job: Any) -> dict[str, Any]:
    """One job of dnf's script against an empty system whose only repository is ours."""
    root = tmp_path / "root"
    (root / "etc/yum.repos.d").mkdir(parents=True, exist_ok=True)
    (root / "etc/yum.repos.d/ours.repo").write_text(rpms.sources(f"file://{repository}"))
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"cache": str(tmp_path / "cache"), "root": str(root), **job}))
    script = PLAYBOOKS / "module_utils" / "gpuchange_dnf_unit.py"
    done = subprocess.run([call.interpreter(), "-I", script, path], capture_output=True, text=True, check=False)
    return call.answer_of(done.stdout, done.stderr)


@real
def test_dnf_offers_and_simulates_exactly_what_would_move(repository: Path, tmp_path: Path) -> None:
    said = asked(repository, tmp_path, do="offer", prefixes=["cuda"])
    assert {row["version"] for row in said["packages"]} == {f"3:{OLD}-1.lab", f"3:{NEW}-1.lab"}
    wanted = {"cuda-drivers": f"3:{OLD}-1.lab", "lab-base": "12-1.lab"}
    moves = asked(repository, tmp_path, do="simulate", install=wanted, remove=[])["moves"]
    assert {"name": "nvidia-driver-cuda", "from": "", "to": f"3:{OLD}-1.lab"} in moves and len(moves) == 3
    alone = asked(repository, tmp_path, do="simulate", install=wanted, remove=[], files=[])
    assert alone["error"] == f"cuda-drivers 3:{OLD}-1.lab is not offered"
    dark = asked(tmp_path / "nowhere", tmp_path / "dark", do="offer", prefixes=["cuda"])
    assert "Failed to download metadata for repo 'cuda-lab'" in dark["error"]


@real
def test_rpms_are_kept_and_proven(repository: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    fetch = {"do": "fetch", "store": str(store), "cache": str(tmp_path / "cache"), "answer": str(tmp_path / "answer")}
    (tmp_path / "etc/yum.repos.d").mkdir(parents=True)
    (tmp_path / "etc/yum.repos.d/ours.repo").write_text(rpms.sources(f"file://{repository}"))
    job = {
        "store": str(store),
        "wanted": [["cuda-drivers", f"3:{NEW}-1.lab"], ["cuda-drivers", "3:1-1"], ["lab-base", "12-1.lab"]],
        "cached": {"lab-base=12-1.lab": str(repository / "lab-base-12-1.lab.rpm")},
        "python": call.interpreter(),
        "script": str(PLAYBOOKS / "module_utils" / "gpuchange_dnf_unit.py"),
        "fetch": {**fetch, "root": str(tmp_path)},
    }
    (tmp_path / "job").write_text(json.dumps(job))
    for _ in range(2):  # a second collection keeps what is there
        assert keeping.main(str(tmp_path / "job")) == 0
        manifest = json.loads((store / "manifest.json").read_text())
        assert set(manifest["files"]) == {f"cuda-drivers=3:{NEW}-1.lab", "lab-base=12-1.lab"}
        assert manifest["missing"] == ["cuda-drivers=3:1-1"] and manifest["unsigned"] == []
    torn = tmp_path / "torn.rpm"
    torn.write_bytes((repository / "lab-base-12-1.lab.rpm").read_bytes()[:-20])
    assert keeping.adopt(str(store), str(torn), "test") == {}


# ------------------------------------------------------------------------------------------- the controller


def test_a_dnf_stack_brings_its_own_preflight_and_store() -> None:
    text = f'version: 1\nname: n\nreason: "r"\nhosts: [h]\nstack: {{provider: dnf, driver: "{NEW}"}}\n'
    plan = loads(text, "plan.yaml")
    assert [row.provider.name for row in plan.chosen("backup")] == ["dnf"]
    assert [row.provider.name for row in plan.chosen("preflight")] == ["host", "dnf"]
    assert preflight.args(HostView("h", plan.data, {}), "apply") == {"wanted": {"driver": NEW}}


def test_what_is_not_as_the_transaction_says_is_refused() -> None:
    body = {"transaction": {"install": {"cuda-drivers": evr(NEW)}, "driver": NEW}, "before": {"driver": OLD}}
    view = HostView("gpu1", {}, {}, last={stack.PREFLIGHT: {**body, "after": {"driver": NEW}, "reboot_needed": True}})
    good = {"state": "done", "installed": {"cuda-drivers": evr(NEW)}, "driver": {"loaded": NEW}}
    assert stack.judge(view, stack.DnfStackReport.model_validate(good)).outcome == "accept"
    bad = stack.judge(view, stack.DnfStackReport.model_validate({**good, "installed": {}}))
    assert bad.outcome == "reject" and f"cuda-drivers is absent, not {evr(NEW)}" in bad.why
    assert stack.preview(view, stack.DnfStackReport(state="unknown"))[0] == f"driver {OLD} → {NEW} (upgrade)"
