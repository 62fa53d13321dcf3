"""Secrets where no host is needed: refused in clear in plans, inventories and arguments; left in no file of a play."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_player import build, request

from gpuchange import clear_secrets, player
from gpuchange.cli.flags import connection
from gpuchange.errors import GpuchangeError, InventoryError, PlanError, UsageError
from gpuchange.frozen import freeze
from gpuchange.plan import load, loads
from gpuchange.reports import Failed, Reported
from reliability.figures import Effort, Figures, Row
from reliability.material import GOOD, as_text, evidence, put, text_positions

ROW = Row(
    "A secret in clear is refused before anything is kept, and a password that was typed lies in no file",
    peer="ansible-runner: extra variables and the whole environment are written to files below its directory",
    source="ansible-runner 2.4.3 env/extravars, artifacts/*/command",
)
CANARY = "kanarie-5d1f80c2"
CLEAR = {
    "a URL": f"https://ops:{CANARY}@images.example/x",
    "an assignment": f"password={CANARY}",
    "a mapping in text": f"bmc_password: {CANARY}",
    "a header": f"Authorization: Bearer {CANARY}",
    "a GitHub token": "ghp_" + CANARY.replace("-", "x") * 2,
    "a key": f"-----BEGIN OPENSSH PRIVATE KEY-----\n{CANARY}",
    "an option": f"--api-key={CANARY}",
    "a variable": f"MYSQL_PWD={CANARY}",
}
REFERENCES = ("--password-file=/etc/gpuchange/pw", "token=$TOKEN", "https://images.example/x", "--token=@/etc/token")


def refused(text: str) -> PlanError | None:
    try:
        loads(text, "plan.yaml")
    except PlanError as error:
        return error
    return None


def test_a_secret_in_clear_is_refused_wherever_it_stands_and_not_repeated(effort: Effort, figures: Figures) -> None:
    for number, path in enumerate(GOOD):
        data = as_text(path)
        for at, place in enumerate(text_positions(data)):
            every = list(CLEAR.items())
            for what, secret in every if effort.full else [every[(number + at) % len(every)]]:
                error = refused(put(data, place, secret))
                said = str(error)
                figures.tried += 1
                if error is None or CANARY in said or "secret in clear" not in said:
                    figures.broken.append(f"{path.stem} {place} {what}: {said}")
                elif not error.remedy or not error.where.startswith("plan.yaml:"):
                    figures.broken.append(f"{path.stem} {place} {what}: no position or remedy: {said}")


def test_a_key_that_asks_for_a_secret_is_refused_with_its_line() -> None:
    error = refused(GOOD[0].read_text() + f"\nbmc_password: {CANARY}\n")
    assert error and CANARY not in str(error)
    assert "bmc_password holds a secret in clear" in str(error) and "ansible-vault" in error.remedy
    assert error.where.count(":") == 2


def test_references_and_ordinary_words_pass() -> None:
    for words in (*REFERENCES, "first pass: gpu1", "token bucket for the new models", "Basic functionality"):
        assert clear_secrets.in_text(words) == "", words
    for path in GOOD:
        load(path)


INVENTORIES = {
    "hosts.ini": "[gpu]\ngpu1 ansible_host=::1 ansible_become_password={}\n",
    "hosts.yaml": "all:\n  hosts:\n    gpu1:\n      ansible_password: {}\n",
    "group_vars/all.yml": "bmc_token: {}\n",
    "host_vars/gpu1.yml": 'api_key: "{}"\n',
    "hosts.sh": "#!/bin/sh\necho '"
    '{{"gpu": {{"hosts": ["gpu1"], "vars": {{"db_password": "{}"}}}}, "_meta": {{}}}}'
    "'\n",
}
BY_REFERENCE = (
    "\"{{ lookup('file', '/etc/gpuchange/pw') }}\"",
    '"{{ vault_pw }}"',
    "!vault |\n  $ANSIBLE_VAULT;1.1\n  6",
)


def site(root: Path, name: str, value: str) -> str:
    """An inventory below `root` that holds `value` in its file `name`; returns the -i argument."""
    path = root / name
    path.parent.mkdir(parents=True)
    path.write_text(INVENTORIES[name].format(value))
    path.chmod(0o755 if name.endswith(".sh") else 0o644)
    if "_vars/" in name:
        (root / "hosts").write_text("gpu1\n")
        return str(root / "hosts")
    return str(path)


@pytest.mark.parametrize("name", INVENTORIES)
def test_an_inventory_with_secrets_in_clear_is_not_kept(name: str, tmp_path: Path, figures: Figures) -> None:
    source = site(tmp_path / "site", name, CANARY)
    with pytest.raises(InventoryError) as caught:
        freeze([source], tmp_path / "kept")
    figures.tried += 1
    if CANARY in str(caught.value) or not caught.value.remedy:
        figures.broken.append(str(caught.value))
    if any(CANARY in path.read_text() for path in (tmp_path / "kept").rglob("*") if path.is_file()):
        figures.broken.append(f"{name}: the canary was kept")


@pytest.mark.parametrize("value", BY_REFERENCE)
def test_an_inventory_that_refers_to_secrets_is_kept(value: str, tmp_path: Path) -> None:
    freeze([site(tmp_path / "site", "group_vars/all.yml", value)], tmp_path / "kept")


FLAGS = {"inventory": (), "limit": None, "user": None, "become": False, "ask_become_pass": False, "private_key": None}
FLAGS |= {"vault_id": (), "vault_password_file": (), "forks": 1, "verbose": 0, "accept_new_host_keys": False}


@pytest.mark.parametrize(
    "item", [f"ansible_become_password={CANARY}", json.dumps({"bmc_password": CANARY})], ids=["K=V", "JSON"]
)
def test_a_secret_on_the_command_line_is_refused(item: str, figures: Figures) -> None:
    with pytest.raises(UsageError) as caught:
        connection(**FLAGS, extra_vars=(item,))
    figures.tried += 1
    if CANARY in str(caught.value):
        figures.broken.append(str(caught.value))


# -- a play with a become password ------------------------------------------------------------------------------------

BECOME = """- name: wait
  ansible.builtin.wait_for: {path: "{{ gpuchange_args.go }}", timeout: 60, sleep: 1}
- name: report
  gc_echo:
    args: {state: done, said: "{{ gpuchange_args.echo }}"}
"""
FAILING = '- name: report\n  gc_echo:\n    args: {fail: "{{ gpuchange_args.echo }}"}\n'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("content"), {"become": BECOME, "refusing": FAILING})


def readable(root: Path) -> Iterator[tuple[str, bytes]]:
    """Regular files below `root`: (name, content). A pipe holds nothing."""
    for path in root.rglob("*"):
        try:
            if path.is_file():
                yield str(path), path.read_bytes()
        except OSError:
            continue


def of_processes(attempt: str) -> Iterator[tuple[str, bytes]]:
    """Arguments and environments of every process of a play."""
    for pid in player.carriers(attempt):
        for name in ("cmdline", "environ"):
            try:
                yield f"/proc/{pid}/{name}", Path(f"/proc/{pid}/{name}").read_bytes()
            except OSError:
                continue


def in_passing(path: Path, private: Path) -> bool:
    """Whether `path` is the arguments of the play (where this test itself put the words that the host repeats), or an
    event on its way from Ansible to ansible-runner, which takes it away when it has read it."""
    spool = private / "artifacts" / "play" / "job_events"
    return path == private / "env" / "extravars" or (path.parent == spool and path.name.endswith("-partial.json"))


@pytest.mark.parametrize("tasks", ["become", "refusing"])
@pytest.mark.parametrize("verbosity", [0, 3])
def test_a_typed_password_lies_in_no_file_argument_or_environment(
    place: Path, tmp_path: Path, tasks: str, verbosity: int, figures: Figures
) -> None:
    """While a play runs and after it; also where the host repeats it.

    What a host repeats passes, as all that hosts say does, through ansible-runner's spool on a RAM disk (`in_passing`).
    """
    go = tmp_path / "go"
    args = {"a": {"go": str(go), "echo": f"your password is {CANARY}"}}
    asked = replace(request(place, tasks, {"a": {}}), become_password=CANARY, verbosity=verbosity, host_args=args)
    assert CANARY not in repr(replace(asked, host_args={}))
    play = player.Play(asked, tmp_path / "artifacts")
    seen: list[str] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            sinks = [*of_processes(asked.attempt), *readable(play.private), *readable(tmp_path / "artifacts")]
            holding = [Path(name) for name, data in sinks if CANARY.encode() in data]
            seen.extend(str(path) for path in holding if not in_passing(path, play.private))
            figures.count(looks=len(sinks))
            go.touch()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        found = evidence(play)
    finally:
        over.set()
        looking.join()
    figures.tried += 1
    assert player.runtime_root() in play.private.parents and not play.private.exists()
    left = [name for name, data in readable(tmp_path / "artifacts") if CANARY.encode() in data]
    if seen or left or CANARY in repr(found):
        figures.broken.append(f"{tasks}: during {set(seen)}, after {left}, evidence {found}")
    assert isinstance(found[0], Reported if tasks == "become" else Failed)


SUDO = """#!/bin/sh
while [ $# -gt 0 ]; do
    case $1 in -p) prompt=$2; shift 2;; -u) shift 2;; -*) shift;; *) break;; esac
done
printf %s "$prompt" >&2
read -r given
[ "$given" = {} ] || exit 1
exec "$@"
"""


def test_ansible_reads_the_password_from_the_pipe(place: Path, tmp_path: Path) -> None:
    """A sudo that wants this very password lets the play through, another one does not."""
    sudo = tmp_path / "sudo"
    sudo.write_text(SUDO.format(CANARY))
    sudo.chmod(0o755)
    place_vars = f"all: {{vars: {{ansible_become: true, ansible_become_user: daemon, ansible_become_exe: {sudo}}}}}\n"
    (tmp_path / "become.yaml").write_text(place_vars)
    asked = replace(
        request(place, "apply", {"a": {}}),
        inventory=(str(place / "inventory.yaml"), str(tmp_path / "become.yaml")),
        become_password=CANARY,
    )
    assert isinstance(evidence(player.Play(asked, tmp_path / "artifacts"))[0], Reported)
    refused_ = replace(asked, attempt=asked.attempt + "x", become_password="another")
    assert isinstance(evidence(player.Play(refused_, tmp_path / "artifacts"))[0], Failed)


# -- files ------------------------------------------------------------------------------------------------------------

MAKE = """
import os, sys
from pathlib import Path
os.umask(int(sys.argv[3], 8))
from gpuchange import change, player
from gpuchange.journal import Journal
from gpuchange.states import Event, Kind
home = change.create(Path(sys.argv[1]), Path(sys.argv[2]), change.Connection())
opened = change.Change.open(home)
opened.journal.append([Event(Kind.NOTE, data={"text": "x"})])
print(home, player.runtime_root())
opened.journal.close()
"""


@pytest.mark.parametrize("umask", ["000", "022", "077", "277"])
def test_files_are_the_owners_only_whatever_the_umask(umask: str, tmp_path: Path, figures: Figures) -> None:
    (tmp_path / "hosts").write_text("gpu1 ansible_connection=local\n")
    plan = "version: 1\nname: x\nreason: y\nhosts: [gpu1]\ninventory: hosts\n" + _rest()
    (tmp_path / "plan.yaml").write_text(plan)
    done = subprocess.run(
        [sys.executable, "-c", MAKE, str(tmp_path / "state"), str(tmp_path / "plan.yaml"), umask],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(Path(player.__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    home, runtime = map(Path, done.stdout.split())
    for path in (tmp_path / "state", *(tmp_path / "state").rglob("*"), runtime):
        figures.tried += 1
        if path.stat().st_mode & 0o077:
            figures.broken.append(f"umask {umask}: {path.relative_to(home.parent)} has {path.stat().st_mode & 0o777:o}")


def _rest() -> str:
    return "".join(
        f"{key}: {json.dumps(value)}\n"
        for key, value in as_text(GOOD[0]).items()  # type: ignore[attr-defined]
        if key not in ("version", "name", "reason", "hosts", "inventory")
    )


@pytest.mark.parametrize("sticky", [0, 0o1000])
@pytest.mark.parametrize("what", ["plan directory", "plan file", "state directory", "inventory file"])
def test_what_everybody_may_write_is_refused(what: str, sticky: int, tmp_path: Path, figures: Figures) -> None:
    from gpuchange.change import Connection, create

    own = tmp_path / "own"
    own.mkdir()
    (own / "hosts").write_text("gpu1 ansible_connection=local\n")
    (own / "plan.yaml").write_text("version: 1\nname: x\nreason: y\nhosts: [gpu1]\n" + _rest())
    (tmp_path / "state").mkdir(mode=0o700)
    places = {"plan directory": own, "plan file": own / "plan.yaml", "inventory file": own / "hosts"}
    place = places.get(what, tmp_path / "state")
    place.chmod(0o666 if place.is_file() else 0o777 | sticky)
    with pytest.raises(GpuchangeError) as caught:
        create(tmp_path / "state", own / "plan.yaml", Connection(inventory=(str(own / "hosts"),)))
    figures.tried += 1
    if "everybody may write" not in str(caught.value) or caught.value.exit_code != 64 or not caught.value.remedy:
        figures.broken.append(f"{what}: {caught.value}")
    assert not list((tmp_path / "state").iterdir())


def test_this_test_can_fail(effort: Effort) -> None:
    """A value that no rule knows passes: the canaries above are found by what they look like."""
    assert clear_secrets.in_text(CANARY) == "" and effort.seed is not None
