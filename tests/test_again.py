"""Commands that are proposed work when they are copied: with the flags that were given, quoted, without secrets."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from gpuchange.change import Connection
from gpuchange.cli import again, failing, flags, unlocking
from gpuchange.cli.settings import common
from gpuchange.cli.verbs import group
from gpuchange.errors import StaleError
from gpuchange.states import Event, Kind

FILLED = {
    "inventory": "in v.yaml", "limit": "gpu*", "extra_vars": "a=b c", "user": "ops", "private_key": "id", "forks": "7",
    "vault_id": "x@f", "vault_password_file": "pw", "verbose": "", "become": "", "ask_become_pass": "",
    "accept_new_host_keys": "", "accept_irreversible": "gpu1", "require_approvals": "2", "allowed_signers": "s",
}  # fmt: skip


def within(argv: list[str], say: Callable[[], str]) -> str:
    """What `say` proposes while the command line `argv` (a verb with Ansible's flags) runs."""
    said: list[str] = []

    @click.command("probe")
    @click.argument("rest", nargs=-1)
    @flags.ansible_flags
    @common
    def probe(**_given: Any) -> None:
        said.append(say())

    top = click.Group("gpuchange", commands={"probe": probe}, params=group.params[:0])
    common(top).main([*argv], standalone_mode=False)
    return said[0]


def test_flags_are_repeated_as_given_and_quoted() -> None:
    argv = ["probe", "-i", "my inventory.yaml", "-i", "b", "-l", "gpu*", "-e", "x=1 2", "-u", "ops", "-bK", "-vv"]
    said = within([*argv, "--vault-id", "a@f", "--state-dir", "/s d"], lambda: again.command("apply", Path("my plan")))
    assert shlex.split(said) == [
        *("gpuchange", "apply", "my plan", "-i", "my inventory.yaml", "-i", "b", "-l", "gpu*", "-e", "x=1 2"),
        *("-u", "ops", "-b", "-K", "--vault-id", "a@f", "--state-dir", "/s d"),
    ]


def test_a_verb_gets_only_flags_that_it_takes() -> None:
    argv = ["probe", "-i", "inv", "-u", "ops", "-b"]
    assert within(argv, lambda: again.command("resume", "c1")) == "gpuchange resume c1 -u ops -b"
    assert within(argv, lambda: again.command("status", "c1")) == "gpuchange status c1"
    assert within(argv, lambda: again.command("apply", "f", bundled=True)) == "gpuchange apply f"


@pytest.mark.parametrize("verb", sorted(again.TAKES))
def test_every_flag_that_is_repeated_is_one_of_the_verb(verb: str) -> None:
    known = {option.name for option in group.get_command(click.Context(group), verb).params}  # type: ignore[union-attr]
    assert set(again.TAKES[verb]) | set(again.BUNDLED.get(verb, ())) <= known
    assert {name for name in known if name in FILLED} - {"verbose"} - set(again.TAKES[verb]) <= {"inventory", "limit"}


def test_the_state_directory_is_repeated_also_when_it_stood_before_the_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    assert within(["--state-dir", "d", "probe"], lambda: again.command("status")).endswith("--state-dir d")
    monkeypatch.setenv("GPUCHANGE_STATE", "/elsewhere")
    assert within(["probe"], lambda: again.command("status")) == "gpuchange status"
    assert within(["--state-dir", "d", "probe"], lambda: again.command("status")).endswith("--state-dir d")


def test_who_looks_later_is_told_the_flags_that_the_change_was_reached_with() -> None:
    reach = Connection(user="ops", become=True, become_password="hidden", extra_vars=("p=2",), vault_ids=("/f",))
    kept = again.to_reach(reach, reviewed=False)
    assert kept == "--user ops --become --vault-id /f --extra-vars p=2 -K"
    assert "--extra-vars" not in again.to_reach(reach, reviewed=True), "a bundle settles -e itself"
    noted = again.noted([Event(Kind.NOTE, data={again.NOTED: kept}), Event(Kind.NOTE, data={"agreed": True})])
    assert within(["probe"], lambda: again.command("resume", "c1", noted=noted)) == f"gpuchange resume c1 {kept}"
    assert within(["probe", "-b"], lambda: again.command("resume", "c1", noted=noted)) == "gpuchange resume c1 -b"
    assert within(["probe"], lambda: again.command("status", "c1", noted=noted)) == "gpuchange status c1"


def test_a_remedy_of_deeper_parts_gets_the_state_directory(capsys: pytest.CaptureFixture[str]) -> None:
    error = StaleError("gone", remedy="gpuchange status c1, gpuchange resume c1")
    failing.told(error, ["status", "--state-dir", "/x"])
    assert "gpuchange --state-dir /x status c1, gpuchange --state-dir /x resume c1" in capsys.readouterr().err
    failing.told(StaleError("gone", remedy="gpuchange status c1"), ["status"])
    assert "next:  gpuchange status c1\n" in capsys.readouterr().err


def test_unlock_names_the_newest_lock_and_every_host_of_each_change() -> None:
    locks = [
        unlocking.Lock(host, server, {"change": change, "fence": fence})
        for host, server, change, fence in (
            ("gpu1", "", "c1", 1), ("lb", "gpu1", "c1", 2), ("gpu2", "", "c2", 4), ("lb", "gpu2", "c2", 3)
        )
    ]  # fmt: skip
    said = within(["probe", "-i", "inv"], lambda: "\n".join(unlocking._openings(locks)))
    assert "gpuchange unlock c1/2 lb gpu1 -i inv" in said or "gpuchange unlock c1/2 gpu1 lb -i inv" in said
    assert "gpuchange unlock c2/4 gpu2 lb -i inv" in said
