"""The command line as an operator meets it: verbs, exit codes, words. Nothing here needs a host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from made_changes import CONTROLLER, CREATED, STEPS, done, ended, make, whole

from gpuchange.cli import main, plot
from gpuchange.cli.verbs import EXIT_CODES, VERBS
from gpuchange.states import Event, Kind


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUCHANGE_STATE", str(tmp_path / "changes"))
    monkeypatch.setenv("NO_COLOR", "1")
    return tmp_path / "changes"


def module(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`python -m gpuchange` in a process of its own."""
    command = [sys.executable, "-m", "gpuchange", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, check=False)


class TestStart:
    def test_help_shows_every_verb_and_exit_code(self) -> None:
        shown = module("--help")
        assert shown.returncode == 0
        for verb in VERBS:
            assert f"\n  {verb} " in shown.stdout
        for code, text in EXIT_CODES:
            assert f"\n  {code}" in shown.stdout
            assert text.split(":")[0] in shown.stdout

    @pytest.mark.parametrize("arguments", [["--help"], ["status"], ["list"]])
    def test_starting_imports_nothing_heavy(self, arguments: list[str], root: Path) -> None:
        make(root, "20261130-120000-a", [CREATED])
        code = "import sys; from gpuchange.cli import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
        shown = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        loaded = {name.partition(".")[0] for name in shown.stderr.split()}
        assert not loaded & {"ansible", "ansible_runner", "paramiko", "pydantic", "rich", "yaml"}

    @pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "lab"])
    def test_each_verb_explains_itself(self, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([verb, "--help"]) == 0
        assert "Usage: gpuchange" in capsys.readouterr().out

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--version"]) == 0
        assert capsys.readouterr().out.startswith("gpuchange ")


class TestUsage:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["aply"], "did you mean apply?"),
            (["apply"], "Missing argument"),
            (["apply", "--no-such"], "No such option"),
            (["apply", "p.yaml", "-f", "0"], "0 is not in the range"),
            (["apply", "p.yaml", "--vault-id", "prod@prompt"], "cannot be asked for"),
            (["apply", "p.yaml", "--private-key", "/no/such"], "cannot be read"),
            (["validate", "/no/such/plan.yaml"], "cannot be read"),
            (["status"], "there is no change yet"),
            (["resolve", "x", "gpu1"], "--retry"),
            (["report", "-o", "x.pdf"], "there is no change yet"),
        ],
    )
    def test_a_wrong_command_line_is_one_error_and_exit_64(
        self, arguments: list[str], says: str, root: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(arguments) == 64
        shown = capsys.readouterr()
        assert says in shown.err
        assert "Traceback" not in shown.err
        assert shown.out == ""

    def test_become_password_needs_a_terminal(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["apply", "p.yaml", "-K"]) == 64
        assert "no terminal" in capsys.readouterr().err

    def test_an_error_is_an_object_with_json(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--json", "status"]) == 64
        said = json.loads(capsys.readouterr().out)
        assert said["type"] == "error"
        assert said["exit_code"] == 64
        assert said["remedy"]

    def test_a_defect_is_one_line_and_a_file(
        self, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr("tempfile.tempdir", None)
        monkeypatch.setattr("gpuchange.cli.changes.directories", lambda _root: 1 / 0)
        assert main(["list"]) == 1
        err = capsys.readouterr().err
        assert "unexpected ZeroDivisionError" in err
        assert "Traceback" not in err
        (written,) = tmp_path.glob("gpuchange-*.txt")
        assert "Traceback" in written.read_text()
        assert written.stat().st_mode & 0o077 == 0

    def test_a_reader_that_goes_away_is_no_error(self, root: Path) -> None:
        shown = subprocess.run(
            f"{sys.executable} -m gpuchange schema | head -1", shell=True, capture_output=True, text=True, check=True
        )
        assert shown.stderr == ""

    def test_ascii_terminals_can_read_every_line(self, root: Path) -> None:
        make(root, "20261130-120000-a", [Event(Kind.CREATED, data={"hosts": [], "plan": "a → b"})])
        shown = module("list", PYTHONIOENCODING="ascii", LC_ALL="C")
        assert shown.returncode == 0
        assert "a -> b" in shown.stdout


class TestReading:
    def test_a_finished_change(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        make(root, "20261130-120000-a", [CREATED, CONTROLLER, *whole("gpu1"), *whole("gpu2"), ended(0)])
        assert main(["status"]) == 0
        out = capsys.readouterr().out
        assert "20261130-120000-a (cuda-12-8): done, 2 host(s)" in out
        assert "out of service since" not in out
        assert main(["--json", "status"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["exit_code"] == 0
        assert {host["stands"] for host in said["hosts"]} == {"done"}

    @pytest.mark.case("crash-leaves-node-out-of-service")
    def test_open_work_is_named(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        events = [CREATED, CONTROLLER, *done("gpu1", *STEPS[:3])]
        make(root, "20261130-120000-a", events)
        assert main(["status"]) == 0
        out = capsys.readouterr().out
        assert "cut short" in out
        assert "gpu1 out of service since" in out
        assert "by this change (seal/host)" in out

    def test_a_held_host_comes_with_its_question(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        held = [
            Event(Kind.STARTED, "gpu1", "stack", "apt", "do", "1"),
            Event(Kind.HELD, "gpu1", "stack", "apt", "do", "1", {"why": "the disk is full"}),
        ]
        make(root, "20261130-120000-a", [CREATED, CONTROLLER, *done("gpu1", *STEPS[:4]), *held, ended(5)])
        assert main(["status"]) == 0
        out = capsys.readouterr().out
        assert "gpu1 stack/apt held: the disk is full" in out
        assert "gpuchange resolve 20261130-120000-a gpu1 --retry" in out

    def test_a_host_rolled_back(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        failed = [
            Event(Kind.STARTED, "gpu1", "stack", "apt", "do", "1"),
            Event(Kind.REJECTED, "gpu1", "stack", "apt", "do", "1", {"why": "no module"}),
            Event(Kind.TURNED, "gpu1", data={"why": "no module"}),
        ]
        back = done("gpu1", ("stack", "apt"), ("seal", "host"), ("drain", "haproxy"), direction="undo")
        make(root, "20261130-120000-a", [CREATED, CONTROLLER, *done("gpu1", *STEPS[:4]), *failed, *back, ended(3)])
        assert main(["status"]) == 0
        out = capsys.readouterr().out
        assert "rolled back" in out
        assert "out of service since" not in out

    def test_words_of_hosts_cannot_drive_the_terminal(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        evil = "\x1b]0;owned\x07\x1b[2Jgone\u202e\r\nsecond [red]line"
        rejected = Event(Kind.REJECTED, "gpu1", "preflight", "host", "do", "1", {"why": evil})
        make(root, "a", [CREATED, CONTROLLER, Event(Kind.STARTED, "gpu1", "preflight", "host", "do", "1"), rejected])
        for verb in (["show"], ["status"], ["report"]):
            assert main(verb) == 0
            out = capsys.readouterr().out
            assert not {"\x1b", "\x07", "\r", "\u202e"} & set(out)
            assert "gone" in out or verb == ["status"]

    def test_list_is_newest_first_and_a_part_of_the_name_is_enough(
        self, root: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name in ("20261130-110000-old-1a2b", "20261130-120000-new-3c4d"):
            make(root, name, [CREATED])
        assert main(["list"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "new" in lines[1]
        assert "not begun" in lines[1]
        assert main(["show", "old"]) == 0
        assert main(["show", "20261130"]) == 64
        assert "fits 2 changes" in capsys.readouterr().err
        assert main(["show", "other"]) == 64

    def test_show_one_host(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        make(root, "a", [CREATED, *done("gpu1", STEPS[0]), *done("gpu2", STEPS[0])])
        assert main(["show", "a", "--host", "gpu2"]) == 0
        out = capsys.readouterr().out
        assert "gpu2 preflight/host done" in out
        assert "gpu1" not in out

    def test_audit_names_head_and_finds_tampering(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        directory = make(root, "a", [CREATED, *whole("gpu1")])
        assert main(["audit", "verify"]) == 0
        assert "the chain is whole" in capsys.readouterr().out
        import sqlite3

        with sqlite3.connect(directory / "journal.db") as database:
            database.execute("DROP TRIGGER events_stay")
            database.execute("UPDATE events SET host = 'gpu2' WHERE seq = 3")
        assert main(["audit", "verify"]) == 8
        assert "row 3" in capsys.readouterr().err


class TestReport:
    @pytest.mark.parametrize("suffix", [".md", ".html", ".json"])
    def test_each_form_names_hosts_and_events(
        self, root: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        proof = Event(Kind.ACCEPTED, "gpu1", "preflight", "host", "do", "1", {"findings": ["packages: equal <b>"]})
        started = Event(Kind.STARTED, "gpu1", "preflight", "host", "do", "1")
        make(root, "a", [CREATED, CONTROLLER, started, proof, ended(5)])
        target = tmp_path / f"report{suffix}"
        assert main(["report", "-o", str(target)]) == 0
        text = target.read_text()
        assert "gpu1" in text
        assert "packages: equal" in text
        assert suffix == ".json" or "<b>" not in text
        assert suffix != ".json" or json.loads(text)["type"] == "report"

    @pytest.mark.parametrize("back", [False, True])
    def test_versions_are_those_of_the_last_look(
        self, root: Path, back: bool, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def looked(phase: str, driver: str, direction: str = "do") -> list[Any]:
            proc = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  x"
            (intent, outcome) = done("gpu1", (phase, "host"), direction=direction)
            return [intent, (outcome, {"state": "done", "facts": {"loaded": {"proc_version": proc}}})]

        forward = [*looked("record", "550.54.15"), *looked("seal", "550.54.15"), *looked("verify", "570.172.08")]
        turned = [Event(Kind.TURNED, "gpu1", data={"why": "ordered"}), *looked("seal", "550.54.15", "undo")]
        make(root, "a", [CREATED, CONTROLLER, *forward, *(turned if back else [])])
        assert main(["report"]) == 0
        out = capsys.readouterr().out
        assert ("550.54.15 → 570.172.08" in out) is not back
        assert "| gpu2 | - |" in out

    def test_speeds_are_drawn_without_a_script_and_what_a_host_says_is_escaped(
        self, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def measured(phase: str, rate: float) -> list[Any]:
            card = {"index": 0, "uuid": "GPU-<script>", "pci": "0000:1b:00.0", "metrics": {"h2d": {"median": rate}}}
            (intent, outcome) = done("gpu1", (phase, "gpu"))
            return [intent, (outcome, {"state": "done", "bench": {"ok": True, "cards": [card]}})]

        steps = [("baseline", "gpu"), ("verify", "gpu")]
        home = make(
            root, "a", [CREATED, CONTROLLER, *measured("baseline", 54.0), *measured("verify", 27.0)], steps=steps
        )
        (home / "frozen").mkdir()
        plan = "version: 1\nname: x\nreason: y\nhosts: [all]\n"
        (home / "frozen" / "plan.yaml").write_text(plan)
        target = tmp_path / "report.html"
        assert main(["report", "-o", str(target)]) == 0
        page = target.read_text()
        svg = page[page.index("<svg") : page.index("</svg>") + 6]
        root_element = ElementTree.fromstring(svg)
        assert len([e for e in root_element.iter() if e.tag.endswith("rect")]) == 2
        assert "<script" not in page and "54 GB/s" in svg and "-50.0%" in svg and plot.FAILED in svg
        assert main(["report"]) == 0
        assert "| 54 GB/s | 27 GB/s | -50.0%, failed |" in capsys.readouterr().out

    def test_an_unknown_form_is_refused(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        make(root, "a", [CREATED])
        assert main(["report", "-o", "x.pdf"]) == 64
        assert ".md, .html or .json" in capsys.readouterr().err


class TestAsking:
    def test_abort_without_a_terminal_needs_yes(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        make(root, "a", [CREATED, CONTROLLER, ended(5)])
        assert main(["abort"]) == 64
        assert "--yes" in capsys.readouterr().err


def test_doctor_knows_this_machine(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "ansible-core" in out
    assert "FAULT" not in out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["schema"], ["validate", "/nonexistent", "--json"]])
def test_a_full_disk_or_a_reader_that_has_gone_is_one_clear_error(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "gpuchange", *arguments]
    with open("/dev/full", "w") as full:
        said = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert said.returncode == 64 and "error: " in said.stderr and "next:" in said.stderr
        assert "Traceback" not in said.stderr and "defect" not in said.stderr
        assert subprocess.run(command, stdout=full, stderr=full, check=False).returncode == 64
    reader, writer = os.pipe()
    os.close(reader)
    gone = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert "Traceback" not in gone.stderr and gone.returncode in (1, 64)
