"""Ansible's flags, with Ansible's meaning, and what they become for the engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpuchange import clear_secrets
from gpuchange.errors import UsageError

if TYPE_CHECKING:
    from gpuchange.change import Connection

Command = TypeVar("Command", bound=Callable[..., Any])

_FLAGS = (
    click.option("-i", "--inventory", multiple=True, metavar="SOURCE", help="Inventory file, directory or host list."),
    click.option("-l", "--limit", metavar="PATTERN", help="Only the hosts of the plan that match."),
    click.option("-e", "--extra-vars", multiple=True, metavar="K=V|@FILE", help="Connection variables for Ansible."),
    click.option("-u", "--user", metavar="NAME", help="Log in as this user."),
    click.option("-b", "--become", is_flag=True, help="Become root on the hosts."),
    click.option("-K", "--ask-become-pass", is_flag=True, help="Ask for the become password."),
    click.option("--private-key", "--key-file", metavar="FILE", help="SSH key to log in with."),
    click.option("-f", "--forks", type=click.IntRange(1, 500), default=25, show_default=True, help="Hosts at once."),
    click.option("-v", "--verbose", count=True, help="More of Ansible's words (-vvv: connection details)."),
    click.option("--vault-id", multiple=True, metavar="[LABEL@]FILE", help="Vault password file or script."),
    click.option("--vault-password-file", multiple=True, metavar="FILE", help="Vault password file or script."),
    click.option("--accept-new-host-keys", is_flag=True, help="Trust hosts that were never seen before."),
)


def ansible_flags(command: Command) -> Command:
    """Adds the flags; their values are turned into a Connection by `connection(**flags)`."""
    for option in reversed(_FLAGS):
        command = option(command)
    return command


def connection(**flags: Any) -> Connection:
    """The Connection for the flags given. Raises UsageError where a flag cannot be honoured."""
    from gpuchange.change import Connection

    return Connection(
        inventory=tuple(flags["inventory"]),
        limit=flags["limit"],
        user=flags["user"],
        become=flags["become"],
        become_password=_become_password() if flags["ask_become_pass"] else None,
        private_key=_file(flags["private_key"], "--private-key"),
        vault_ids=tuple(_vault(item) for item in (*flags["vault_id"], *flags["vault_password_file"])),
        extra_vars=tuple(_extra(item) for item in flags["extra_vars"]),
        forks=flags["forks"],
        verbosity=flags["verbose"],
        accept_new_host_keys=flags["accept_new_host_keys"],
        accept_irreversible=tuple(flags.get("accept_irreversible", ())),
    )


def _become_password() -> str:
    if not os.isatty(0):
        raise UsageError(
            "-K asks for a password, and there is no terminal to ask on",
            remedy="keep ansible_become_password in an encrypted vars file and pass --vault-id",
        )
    return str(click.prompt("BECOME password", hide_input=True, err=True))


def _file(path: str | None, flag: str) -> str | None:
    if path is None:
        return None
    full = os.path.abspath(os.path.expanduser(path))
    if not os.access(full, os.R_OK):
        raise UsageError(f"{flag} cannot be read", where=full, remedy=f"give {flag} a file that you may read")
    return full


def _extra(item: str) -> str:
    """An -e value as a play can use it, which runs in another directory. Raises UsageError for a secret in clear."""
    if item.startswith("@"):
        return f"@{_file(item[1:], '--extra-vars')}"
    what = clear_secrets.in_text(item)
    if what:
        raise UsageError(
            f"-e gives a secret in clear: {what}",
            why="everybody on this machine sees a command line",
            remedy="keep it in a file, encrypted with ansible-vault: -e @FILE --vault-id NAME@PASSWORDFILE; or use -K",
        )
    return item


def _vault(item: str) -> str:
    label, _, source = item.rpartition("@")
    if source in ("prompt", "prompt_ask_vault_pass"):
        raise UsageError(
            f"--vault-id {item}: a vault password cannot be asked for",
            why="a change may have to be resumed when nobody is there to type it",
            remedy="pass a password file or script: --vault-id LABEL@FILE",
        )
    path = _file(source, "--vault-id")
    return f"{label}@{path}" if label else str(path)
