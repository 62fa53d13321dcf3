"""House rules that no tool checks: sizes, what roles must have and must not say, paths, and what the manual knows."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from gpuchange.cli.verbs import EXIT_CODES, VERBS
from gpuchange.errors import WORST_FIRST
from gpuchange.providers import PROVIDERS

ROOT = Path(__file__).resolve().parents[1]
ROLES = ROOT / "playbooks" / "roles"
FORBIDDEN = (
    *("run_once", "serial", "any_errors_fatal", "set_stats"),  # tie hosts together
    *("async", "poll", "check_mode", "ignore_unreachable", "ignore_errors"),  # hide what a host did, or did not
)
MAX_FILE, MAX_FUNCTION = 400, 40
TASK_FILES = ("probe", "apply", "undo")


def kept() -> list[Path]:
    """The files of the repository, those not yet committed included."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in listed if (ROOT / name).is_file()]


def python_files() -> list[Path]:
    return [path for path in kept() if path.suffix == ".py"]


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def test_no_file_is_too_long() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in python_files()}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE} == {}


def test_no_function_is_too_long() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {name} has {lines} lines"
        for path in python_files()
        for name, lines in functions(path)
        if lines > MAX_FUNCTION
    ]
    assert long == []


@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda provider: provider.role)
@pytest.mark.parametrize("tasks", TASK_FILES)
def test_each_provider_has_its_role_and_every_way_ends_in_a_report(provider, tasks) -> None:
    listed = yaml.safe_load((ROLES / provider.role / "tasks" / f"{tasks}.yml").read_text())
    assert listed[-1]["name"] == "report"


def test_every_role_belongs_to_a_provider() -> None:
    known = {provider.role for provider in PROVIDERS} | {"owner_marker"}
    assert {path.name for path in ROLES.iterdir() if path.is_dir()} <= known


@pytest.mark.case("async-job-file-vanishes", "check-mode-takes-the-other-branch", "unreachable-counted-as-success")
def test_playbooks_never_tie_hosts_together_and_hide_no_outcome() -> None:
    pattern = re.compile(rf"\b({'|'.join(FORBIDDEN)})\b")
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in sorted((ROOT / "playbooks").rglob("*.yml"))
        for match in [pattern.search(path.read_text())]
        if match
    ]
    assert found == []


def test_the_play_has_only_known_keys() -> None:
    (play,) = yaml.safe_load((ROOT / "playbooks" / "phase.yml").read_text())
    assert set(play) <= {"name", "hosts", "gather_facts", "strategy", "vars", "tasks"}
    assert play["strategy"] == "free"
    assert play["gather_facts"] is False


def test_no_path_of_the_machine_it_was_written_on() -> None:
    places = "|".join(("/wo" + "rk/", "/tmp/ve" + "nv", r"/root/\.py" + "env", "/home/[a-z]"))
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in kept()
        if path.suffix not in (".png", ".whl")
        for match in [re.search(places, path.read_text(errors="replace"))]
        if match
    ]
    assert found == []


@pytest.mark.parametrize("path", sorted((ROOT / "playbooks").rglob("*.py")), ids=lambda path: path.name)
def test_what_runs_on_hosts_is_python_3_8(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 8))
    assert "from __future__ import annotations" in path.read_text()


def prose() -> str:
    return "\n".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])


@pytest.mark.parametrize("verb", VERBS)
def test_the_manual_knows_each_verb(verb: str) -> None:
    assert f"gpuchange {verb}" in prose()


@pytest.mark.parametrize("code", [code for code, _ in EXIT_CODES])
def test_the_readme_knows_each_exit_code(code: int) -> None:
    assert f"| {code} |" in (ROOT / "README.md").read_text()


def test_help_readme_and_manual_agree_on_exit_codes() -> None:
    readme, manual = ((ROOT / path).read_text().replace("`", "") for path in ("README.md", "docs/exit-codes.md"))
    for code, text in EXIT_CODES:
        meaning = text.replace("gpuchange status shows which", "").rstrip(": ")
        assert f"| {code} | {text} |" in readme
        assert code > 100 or f"| {code} | {meaning}" in manual
    order = f"the first of {', '.join(map(str, WORST_FIRST))} counts"
    assert order in readme and order in manual


def test_the_plan_reference_is_as_the_schema_says() -> None:
    import runpy

    made = runpy.run_path(str(ROOT / "docs/reference.py"))["plan_reference"]()
    kept = (ROOT / "docs/plan-reference.md").read_text(encoding="utf-8")
    assert kept == made, "write it anew: python docs/reference.py"


def test_readme_and_manual_name_every_page() -> None:
    readme, index = (ROOT / "README.md").read_text(), (ROOT / "docs/index.md").read_text()
    for page in (path.name for path in (ROOT / "docs").glob("*.md") if path.name != "index.md"):
        assert f"(docs/{page})" in readme and f"({page})" in index, page


def test_architecture_names_every_module() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.splitlines()) <= 150
    assert not [path.name for path in (ROOT / "gpuchange").glob("[a-z]*.py") if path.name not in text]
