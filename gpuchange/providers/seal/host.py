"""seal/host: record the drained host once more, as what a rollback must equal. Undo proves that it does."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gpuchange.checks import card_settings, consistency, gpu_function, identity, snapshot
from gpuchange.checks import driver as driver_of
from gpuchange.checks import manifest as manifests
from gpuchange.checks.snapshot import mapping
from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.facts import RECORD, SEAL, FactsReport, base_args, card_goal, evidence, manifest_args, section
from gpuchange.providers.types import Duration
from gpuchange.reports import Verdict, by_state

BACKUP = "backup/rsync"
LOOK_AGAIN_S = 10.0
SETTLING = frozenset({"services", "cards", "nvidia-smi", "modules loaded"})
"""Parts that may still be on their way shortly after a boot."""


class SealParams(Params):
    """The last record before the change."""

    settle: Duration = Field(
        60, description="How long files may still change, or services still start, before it fails."
    )


def args(view: HostView, mode: Mode) -> dict[str, Any]:
    base = {**base_args(view), "function": True}
    if view.direction == "do" and mode != "undo":
        return {**base, "manifest": manifest_args(view, "seal"), "backup": _backup(view)}
    kept = manifests.parse(evidence(view, SEAL).get("manifest"))
    manifest = manifest_args(view, "prove", "seal", kept.jsonl_sha256) if kept else None
    return {**base, "manifest": manifest, "card_settings": card_goal(view)}


def _backup(view: HostView) -> dict[str, Any] | None:
    """The rsync backup's parameters, when there is a set from before the drain to go on from."""
    chosen = view.plan.get("backup")
    listed = [mapping(row) for row in chosen] if isinstance(chosen, list | tuple) else []
    found = next((row for row in listed if row.get("provider") == "rsync"), None)
    return found if evidence(view, BACKUP) else None


def judge(view: HostView, report: FactsReport) -> Verdict:
    if report.state != "done":
        return by_state(report)
    problems = [f"{name} could not be recorded: {why}" for name, why in sorted(report.errors.items())]
    problems += identity.moved(evidence(view, RECORD).get("facts") or {}, report.facts)
    manifest = manifests.parse(report.manifest)
    if manifest and manifest.busy and view.waited < view.params.get("settle", 60):
        return Verdict.again(LOOK_AGAIN_S, manifests.troubles(manifest)[-1])
    problems += manifests.troubles(manifest) if manifest else ()
    problems += _new_inconsistencies(view, report)
    data = consistency.parse(report.manifest)
    stopping = consistency.stopping(data, str(section(view, "record").get("inspect")))
    problems += [stopping] if stopping else []
    if report.backup and report.backup.get("in_flux"):
        problems.append(f"final backup: {report.backup['in_flux']} names still changed while they were copied")
    said = [manifests.sentence(manifest)] if manifest else []
    said += [_saved(report.backup)] if report.backup else []
    findings = (*said, *consistency.told(data), *_moved_since_record(view, report), *problems)
    return Verdict.reject("; ".join(problems), findings) if problems else Verdict.accept(findings=findings)


def _saved(made: dict[str, Any]) -> str:
    return f"final backup {made.get('path')}: {made.get('checked')} of {made.get('expected')} equal"


def _new_inconsistencies(view: HostView, report: FactsReport) -> list[str]:
    """A driver replaced behind our back since record would make this a rollback target that cannot be reached."""
    before = snapshot.parse(evidence(view, RECORD).get("facts") or {})
    known = driver_of.inconsistencies(before.driver)
    history = str(report.facts.get("apt_history") or "")
    now = driver_of.inconsistencies(report.picture.driver, history)
    return [] if known else [f"baseline inconsistent: {line}" for line in now]


def _moved_since_record(view: HostView, report: FactsReport) -> list[str]:
    before = evidence(view, RECORD).get("facts")
    if not before:
        return []
    return [f"since record: {line}" for line in snapshot.compare(before, report.facts) if not line.equal]


def judge_undo(view: HostView, report: FactsReport) -> Verdict:
    """The proof. Unequal is a rollback that failed: the host stays drained."""
    if report.state != "done":
        return by_state(report)
    seal = evidence(view, SEAL)
    if not seal:
        return Verdict.accept("nothing was sealed, so nothing had been changed")
    lines = snapshot.compare(seal.get("facts") or {}, report.facts)
    said = [*card_settings.restored(report.restored), *(str(line) for line in lines)]
    failed = [str(line) for line in lines if not line.equal]
    if failed and all(line.what in SETTLING for line in lines if not line.equal) and _may_settle(view):
        return Verdict.again(LOOK_AGAIN_S, "; ".join(failed))
    for good, sentence in (*_identity(seal, report), *_files(seal, report), *_function(seal, report), *_looks(report)):
        said.append(sentence)
        failed += [] if good else [sentence]
    if failed:
        return Verdict.reject("not as sealed: " + "; ".join(failed), tuple(said))
    return Verdict.accept("equals the seal", tuple(said))


def _may_settle(view: HostView) -> bool:
    return view.waited < float(view.params.get("settle", 60))


def _identity(seal: Any, report: FactsReport) -> list[tuple[bool, str]]:
    found = identity.moved(seal.get("facts") or {}, report.facts)
    return [(False, line) for line in found] or [(True, "machine: the same machine-id")]


def _files(seal: Any, report: FactsReport) -> list[tuple[bool, str]]:
    if not manifests.parse(seal.get("manifest")):
        return []
    now = manifests.parse(report.manifest)
    return [manifests.proof(now)] if now else [(False, "manifest: not made, so nothing is proved")]


def _function(seal: Any, report: FactsReport) -> list[tuple[bool, str]]:
    """The cards must work if they did when sealed."""
    before = seal.get("function")
    if not before:
        return []
    sealed = snapshot.parse(seal.get("facts") or {}).cards
    cards = gpu_function.expected(sealed, [card.uuid for card in sealed if card.uuid])
    if gpu_function.judge_function(before, cards).outcome != "accept":
        return [(True, "GPU function: did not work when sealed either")]
    now = gpu_function.judge_function(report.function or {}, cards)
    return [(now.outcome == "accept", f"GPU function: {now.why}")]


def _looks(report: FactsReport) -> list[tuple[bool, str]]:
    return [(False, f"{name} could not be looked at: {why}") for name, why in sorted(report.errors.items())]


PROVIDER = Provider(
    phase="seal",
    name="host",
    does="Record the drained host: this is what a rollback must equal. Undo: prove that it does.",
    params=SealParams,
    report=FactsReport,
    root_for="to read every file below record.paths, and to run as a unit",
    args=args,
    judge=judge,
    judge_undo=judge_undo,
    estimate_s=6.0,
)
