"""A command line on a terminal, at which somebody types a password when it asks for one."""

from __future__ import annotations

import os
import pty
import subprocess
import threading
from collections.abc import Mapping, Sequence

from changes import CLI, Operator


class Typed:
    """Runs in a session of its own. `text` is what it wrote so far; `process` may be sent signals."""

    def __init__(
        self, operator: Operator, args: Sequence[str], answer: str, env: Mapping[str, str] | None = None
    ) -> None:
        self.text, self.answer = "", answer
        self._controller, terminal = pty.openpty()
        streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
        self.process = subprocess.Popen(
            [*CLI, *args], env={**operator.environment, **(env or {})}, start_new_session=True, **streams
        )
        os.close(terminal)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self._controller, 65536).decode(errors="replace")
            except OSError:  # the other side is closed
                return
            self.text += chunk
            if "BECOME password" in chunk:
                os.write(self._controller, self.answer.encode() + b"\n")

    def end(self, timeout: float = 300) -> tuple[int, str]:
        """(exit code, everything it wrote) once it has ended."""
        code = self.process.wait(timeout)
        self._reader.join(10)
        os.close(self._controller)
        return code, self.text
