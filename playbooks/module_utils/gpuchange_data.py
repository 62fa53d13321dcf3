"""The hash manifest of directory trees and, in one pass over it, whether the data in them is consistent.

Usage: gpuchange_data.py JOB.json, as gpuchange_hashing.py, and with
  sums     [{file, below}]: checksum files that others made; their names are relative to `below`, or to where they lie
  inspect  look into checkpoints, and for locks and half-written files
The summary (<out>.summary.json) then has `data`: {sums, checkpoints, findings, leftovers}. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from typing import Any, Dict, List

try:
    from ansible.module_utils import gpuchange_checkpoints as checkpoints
    from ansible.module_utils import gpuchange_hashing as hashing
    from ansible.module_utils import gpuchange_leftovers as leftovers
    from ansible.module_utils import gpuchange_manifest_stream as stream
    from ansible.module_utils import gpuchange_sums as sums
except ImportError:  # a program now: its copies lie beside it
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import gpuchange_checkpoints as checkpoints  # type: ignore[import-not-found,no-redef]
    import gpuchange_hashing as hashing  # type: ignore[import-not-found,no-redef]
    import gpuchange_leftovers as leftovers  # type: ignore[import-not-found,no-redef]
    import gpuchange_manifest_stream as stream  # type: ignore[import-not-found,no-redef]
    import gpuchange_sums as sums  # type: ignore[import-not-found,no-redef]

MOST_FINDINGS = 200
MOST_LEFTOVERS = 200
LONGEST = 300


class Findings:
    """Sentences: the first of them, how many there were, and a digest over all."""

    def __init__(self) -> None:
        self.count, self.kept, self.whole = 0, [], hashlib.sha256()  # type: ignore[var-annotated]

    def add(self, sentence: str) -> None:
        self.count += 1
        self.whole.update(sentence.encode("utf-8", "backslashreplace") + b"\n")
        if len(self.kept) < MOST_FINDINGS:
            self.kept.append(sentence[:LONGEST])

    def report(self) -> Dict[str, Any]:
        return {"count": self.count, "kept": self.kept, "digest": self.whole.hexdigest()}


def run_job(job: Dict[str, Any]) -> Dict[str, Any]:
    """The manifest's summary, with what was found in the data. Raises OSError, ValueError as the manifest does."""
    listed = job["out"] + ".listed"
    listings = sums.prepare(job, listed) if job.get("sums") else []
    summary = hashing.run_job(dict(job, listed=listed) if listings else job)
    findings = Findings()
    data: Dict[str, Any] = {}
    if listings:
        for file, said in sums.problems(listings, listed, job["out"] + ".jsonl"):
            findings.add(checkpoints.printed("%s: %s" % (file, said)))
        data["sums"] = [{"file": each.file, **each.counts} for each in listings]
        with contextlib.suppress(FileNotFoundError):
            os.unlink(listed)
    if job.get("inspect"):
        data.update(inspected(job, findings))
    return dict(summary, data=dict(data, findings=findings.report())) if data else summary


def inspected(job: Dict[str, Any], findings: Findings) -> Dict[str, Any]:
    """Follow the manifest once: its order is the tree's."""
    inspector = checkpoints.Inspector(checkpoints.Tree([root for root, _ in job["roots"]]))
    left = leftovers.Leftovers()
    reader = stream.Reader(job["out"] + ".jsonl")
    while reader.key is not None:
        path, kind = reader.entry["path"], reader.entry.get("kind", "")
        left.see(path, kind, int(reader.entry.get("size") or 0))
        if kind in ("file", "link"):
            for problem in inspector.problems(path):
                findings.add(problem)
        reader.step()
    reader.close()
    return {"checkpoints": inspector.counts, "leftovers": {"count": left.count, "kept": shown(left.judge())}}


def shown(items: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """What nobody holds first: that is what somebody has to look at."""
    ordered = sorted(items, key=lambda item: bool(item["held"]))[:MOST_LEFTOVERS]
    return [dict(item, path=checkpoints.printed(item["path"])[:LONGEST], by=item["by"][:80]) for item in ordered]


if __name__ == "__main__":
    sys.exit(hashing.program(sys.argv[1], run_job))
