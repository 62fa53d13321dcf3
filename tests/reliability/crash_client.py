"""Talks to crash_server.py: one process with the product loaded, in a process namespace of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reliability.crash_fork import PAD

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PLAYBOOK = HERE / "standin" / "crash_playbook.py"
NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
"""So that the product's own search for orphans reads a short list of processes."""


def make_home(folder: Path) -> Path:
    """A virtual environment made of symlinks, with our ansible-playbook in it. Returns its interpreter.

    A play takes ansible-playbook from the directory of the interpreter that runs gpuchange.
    """
    scripts, base = folder / "bin", Path(os.path.realpath(sys.executable))
    scripts.mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    (scripts / "python").symlink_to(base)
    playbook = scripts / "ansible-playbook"
    playbook.write_text(f"#!{base} -ISs\n{PLAYBOOK.read_text()}")
    playbook.chmod(0o755)
    return scripts / "python"


class Client:
    """One server; ask it one thing at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def calm(self, script: str) -> dict[str, Any]:
        """The undisturbed change: its outcome, and `points`, for each of its stages a list of [system call, number]."""
        return self.ask(what="calm", script=script)

    def ask(self, **job: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the crash server ended"
        answer: dict[str, Any] = json.loads(line)
        assert "error" not in answer, f"{job}\n{answer['error']}"
        return answer


@contextlib.contextmanager
def serving(folder: Path, *, real: bool = False) -> Iterator[Client]:
    """A server at work in `folder`; `real`: its plays go through the real ansible-runner."""
    python = make_home(folder / "home")
    paths = [*([] if real else [HERE / "standin"]), ROOT, ROOT / "tests", sysconfig.get_path("purelib")]
    environment = {
        "PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "PYTHONPATH": ":".join(map(str, paths)), "HOME": str(folder),
        **dict([PAD.split("=")]),
    }  # fmt: skip
    command = [*NAMESPACE, str(python), str(HERE / "crash_server.py"), str(folder)]
    with open(folder / "errors.txt", "wb") as errors:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        yield Client(process)
    finally:
        assert process.stdin and process.stdout
        process.stdin.close()
        process.wait(60)
        process.stdout.close()
