"""The verb compat: which parts of a GPU stack go together, answered offline from the published tables."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any

import click

from gpuchange.cli import words
from gpuchange.cli.settings import common, current
from gpuchange.errors import BeforeChangeError, NeedsOperator, UsageError

if TYPE_CHECKING:
    from gpuchange.compat.model import Answer, Question
    from gpuchange.compat.resolver import Open

CODES = {"fits": 0, "refused": BeforeChangeError.exit_code, "unknown": NeedsOperator.exit_code}
WORDS = {"fits": "fits", "note": "note", "warning": "warning", "unknown": "not in the tables", "refused": "REFUSED"}
VERSIONS = ("driver", "cuda", "cudnn", "pytorch", "tensorflow", "fabric_manager", "libraries", "kernel")
OPEN = ("driver", "cudnn")


@click.command()
@click.option("--gpu", multiple=True, metavar="CARD", help="A card: name (H100), PCI id (10de:2330), capability (9.0).")
@click.option("--driver", metavar="VERSION", help="Driver; auto: the newest in the tables that fits.")
@click.option("--module", type=click.Choice(["open", "proprietary"]), help="Flavour of the kernel module.")
@click.option("--cuda", metavar="VERSION", help="CUDA toolkit.")
@click.option("--cudnn", metavar="VERSION", help="cuDNN; auto: the newest in the tables that fits.")
@click.option("--pytorch", metavar="VERSION", help="PyTorch; with its build, if it matters: 2.9.0+cu128.")
@click.option("--tensorflow", metavar="VERSION", help="TensorFlow.")
@click.option("--fabric-manager", metavar="VERSION", help="Fabric manager.")
@click.option("--libraries", metavar="VERSION", help="The driver's userspace libraries.")
@click.option("--nvswitch/--no-nvswitch", default=None, help="Whether the host has NVSwitches.")
@click.option("--machine", type=click.Choice(["x86_64", "aarch64"]), default="x86_64", help="Processor.")
@click.option("--kernel", metavar="VERSION", help="Kernel: uname -r.")
@click.option("--distribution", metavar="NAME", help="Distribution, for the record.")
@click.option("--secure-boot/--no-secure-boot", default=None, help="Whether Secure Boot is on.")
@click.option("--cuda-compat", is_flag=True, help="The host has the CUDA forward compatibility package.")
@click.option("--date", "today", metavar="YYYY-MM-DD", help="The day that ends of life are held against; today.")
@common
def compat(gpu: tuple[str, ...], today: str | None, **parts: Any) -> int:
    """Say which of these parts go together, from the published tables; needs no host and no network.

    Exit 0: they fit. Exit 1: a table rules them out. Exit 5: the tables do not say.
    """
    from gpuchange.compat.model import Question
    from gpuchange.compat.resolver import answer
    from gpuchange.compat.tables import find_card

    if not gpu and not any(parts[name] for name in VERSIONS):
        raise UsageError("nothing to look at", remedy="gpuchange compat --gpu H100 --driver 580.95.05 --cuda 13.0")
    for name in VERSIONS:
        _check(name, parts[name])
    given = {name: value for name, value in parts.items() if value is not None}
    question = Question(_day(today), tuple(find_card(card) for card in gpu), **given)
    question = _complete(question)
    _tell(question, answer(question), [name for name in OPEN if given.get(name) == "auto"])
    return CODES[answer(question).verdict]


def _check(name: str, value: str | None) -> None:
    from gpuchange.compat.versions import parts

    flag = "--" + name.replace("_", "-")
    if value is None or (value == "auto" and name in OPEN):
        return
    if not parts(value):
        raise UsageError(f"{flag} {value} is not a version", remedy=f"write numbers: {flag} 12.8")
    if name == "cuda" and len(parts(value)) < 2:
        raise UsageError(f"{flag} {value} names no release", remedy=f"write for example {flag} {value}.0")


def _day(text: str | None) -> date:
    try:
        return date.fromisoformat(text) if text else datetime.now(UTC).date()
    except ValueError:
        raise UsageError(f"--date {text} is not a date", remedy="write it as 2026-11-30") from None


def _complete(question: Question) -> Question:
    """The question with what was left open put in: first the driver, then the cuDNN that goes with it."""
    wish = question
    question = replace(question, driver=_given(wish.driver), cudnn=_given(wish.cudnn))
    if wish.driver == "auto":
        question = replace(question, driver=_newest(question, "driver"))
    if wish.cudnn == "auto":
        question = replace(question, cudnn=_newest(question, "cudnn"))
    return question


def _given(version: str) -> str:
    return "" if version == "auto" else version


def _newest(question: Question, part: Open) -> str:
    from gpuchange.compat.resolver import newest, published

    found = newest(question, part, published(part))
    if not found:
        raise BeforeChangeError(
            f"no {part} in the tables is known to fit",
            why=f"each of the {len(published(part))} that they have is refused, or the tables do not say",
            remedy=f"name one to see why: --{part} VERSION",
        )
    return found


def _tell(question: Question, found: Answer, completed: list[str]) -> None:
    chosen = {name: str(getattr(question, name)) for name in completed}
    if current().json:
        for row in found.findings:
            fields = {"rule": row.rule, "outcome": row.outcome, "says": row.says}
            words.say(json.dumps({"type": "finding", **fields, "remedy": row.remedy, "source": row.source}))
        last = {"verdict": found.verdict, "chosen": chosen, "exit_code": CODES[found.verdict]}
        words.say(json.dumps({"type": "compat", **last}))
        return
    for name, version in chosen.items():
        words.say(f"{name} auto: {version}")
    words.say(
        words.table(("RULE", "WORD", "SAYS"), [(row.rule, WORDS[row.outcome], row.says) for row in found.findings])
    )
    for row in (*found.of("refused"), *found.of("unknown"), *found.of("warning")):
        words.say(f"\n{WORDS[row.outcome]}: {words.clean(row.says)} ({row.rule})")
        if row.remedy:
            words.say(f"  next:   {words.clean(row.remedy)}")
        words.say(f"  source: {words.clean(row.source)}")
    words.say(f"\n{_verdict(found)}")


def _verdict(found: Answer) -> str:
    refused, unknown = len(found.of("refused")), len(found.of("unknown"))
    if refused:
        return f"refused by {refused} rule(s)"
    if unknown:
        return f"not in the tables: {unknown} question(s) stay open, nothing is refused"
    return "fits"
