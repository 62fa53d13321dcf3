"""The command line: verbs, and every sentence that an operator reads.

Only `main` is public. Verbs load when they are called, so that `--help` and `status` stay fast (see verbs.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gpuchange.cli import failing, words


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; prints errors, never a traceback."""
    from gpuchange.cli.verbs import group

    words.prepare_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = group.main(arguments, prog_name="gpuchange", standalone_mode=False)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        return failing.told(error, arguments)
    return code if isinstance(code, int) else 0
