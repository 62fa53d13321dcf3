"""Ansible's own command line tools, asked for data: same interpreter, UTF-8 locale, bounded time, errors in words."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from gpuchange.errors import InventoryError

TIMEOUT_S = 180.0
_FORCED = {
    "LC_ALL": "C.UTF-8",  # Ansible refuses to start elsewhere; what is parsed must not be translated
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "ANSIBLE_NOCOLOR": "1",
    "ANSIBLE_FORCE_COLOR": "0",
    "ANSIBLE_VERBOSITY": "0",
    "ANSIBLE_DEBUG": "0",
    "ANSIBLE_DEPRECATION_WARNINGS": "0",
    "ANSIBLE_HOST_PATTERN_MISMATCH": "warning",
    "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "1",  # otherwise an unreadable inventory is an empty one, exit 0
    "ANSIBLE_LOAD_CALLBACK_PLUGINS": "0",
}


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of Ansible's tools: `env` (default: our own) with locale and output settled."""
    return {**(os.environ if env is None else env), **_FORCED}


def ask(
    tool: str, arguments: Sequence[str], *, env: Mapping[str, str] | None = None, terminal: bool = False
) -> tuple[str, str]:
    """Run `ansible <tool>` (adhoc, inventory, config …) and return its standard output and error.

    `terminal`: it may ask the operator for a vault password. Raises InventoryError if it fails or takes too long.
    """
    command = [sys.executable, "-m", "ansible", tool, *arguments]
    return run(command, what=f"ansible {tool}", env=environment(env), terminal=terminal)


def run(
    command: Sequence[str], *, what: str, env: Mapping[str, str], terminal: bool = False, timeout: float = TIMEOUT_S
) -> tuple[str, str]:
    """Run `command` to its end and return its standard output and error. Raises InventoryError."""
    try:
        process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=None if terminal else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=not terminal,
        )
    except (OSError, ValueError) as error:
        raise InventoryError(f"{what} cannot be started", why=str(error)) from None
    with process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException as error:
            _end(process, group=not terminal)
            if isinstance(error, subprocess.TimeoutExpired):
                remedy = "run it by hand to see what it waits for"
                raise InventoryError(f"{what} gave no answer within {timeout:.0f} s", remedy=remedy) from None
            raise
    if process.returncode != 0:
        raise InventoryError(f"{what} failed", why=said(err) or f"exit code {process.returncode}", remedy=_remedy(err))
    return out, err


def _end(process: subprocess.Popen[str], *, group: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        if group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def said(stderr: str, most: int = 400) -> str:
    """What Ansible complained about, in one line: no excerpt of the file, which may hold secrets."""
    kept = re.findall(r"^\[?(?:ERROR|WARNING)[\]!]?:? *(.+)$", stderr, re.MULTILINE)
    lines = kept or stderr.strip().splitlines()[-1:]
    return "; ".join(dict.fromkeys(line.strip() for line in lines))[:most]


def _remedy(stderr: str) -> str:
    hints = {
        "no vault secrets": "give the vault password: --vault-id NAME@FILE, or NAME@prompt",
        "Decryption failed": "the vault password is wrong: check --vault-id",
        "parse inventory": "check it with: ansible-inventory --list -i INVENTORY",
        "no hosts to target": "check --limit and the hosts of the plan",
    }
    return next(
        (hint for words, hint in hints.items() if words in stderr), "run the same with ansible-inventory --list"
    )
