"""The compatibility resolver: a question in, every rule's word out; and the newest version that fits what is open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from gpuchange.compat import cudnn_rules as cudnn
from gpuchange.compat import driver_rules as driver
from gpuchange.compat import framework_rules as framework
from gpuchange.compat.model import Answer, Finding, Part, Question, Said
from gpuchange.compat.tables import Row, known_branches, rows, source_of, tables
from gpuchange.compat.versions import Key, compare, parts, successor, text_of


@dataclass(frozen=True)
class Rule:
    """One row: its id, the parts that it looks at, the table that it reads, and the pure function that reads it."""

    id: str
    parts: tuple[Part, ...]
    table: str
    says: Callable[[Question], Iterator[Said]]


RULES: tuple[Rule, ...] = (
    Rule("card-known", (), "cards", driver.card_known),
    Rule("driver-known", ("driver",), "driver_branches", driver.driver_known),
    Rule("driver-end-of-life", ("driver",), "driver_branches", driver.driver_end_of_life),
    Rule("card-newer-than-driver", ("driver",), "architectures", driver.card_newer_than_driver),
    Rule("card-dropped-by-driver", ("driver",), "architectures", driver.card_dropped_by_driver),
    Rule("mixed-flavours", ("driver", "module"), "module_flavour", driver.mixed_flavours),
    Rule("module-flavour", ("driver", "module"), "module_flavour", driver.module_flavour),
    Rule("open-module-branch", ("driver", "module"), "module_flavour", driver.open_module_branch),
    Rule("cuda-known", ("cuda",), "toolkit_driver", driver.cuda_known),
    Rule("cuda-driver-floor", ("driver", "cuda"), "cuda_driver_floor", driver.cuda_driver_floor),
    Rule("cuda-driver-full", ("driver", "cuda"), "toolkit_driver", driver.cuda_driver_full),
    Rule("card-newer-than-cuda", ("cuda",), "architectures", driver.card_newer_than_cuda),
    Rule("card-dropped-by-cuda", ("cuda",), "architectures", driver.card_dropped_by_cuda),
    Rule("cuda-codegen", ("cuda",), "codegen", driver.cuda_codegen),
    Rule("cudnn-cuda", ("cudnn", "cuda"), "cudnn", cudnn.cudnn_cuda),
    Rule("cudnn-card", ("cudnn", "cuda"), "cudnn", cudnn.cudnn_card),
    Rule("cudnn-driver", ("cudnn", "cuda", "driver"), "cudnn", cudnn.cudnn_driver),
    Rule("pytorch-build", ("pytorch",), "pytorch", framework.pytorch_known),
    Rule("pytorch-driver", ("pytorch", "driver"), "cuda_driver_floor", framework.pytorch_driver),
    Rule("pytorch-card", ("pytorch",), "pytorch_arches", framework.pytorch_card),
    Rule("pytorch-driver-and-card", ("pytorch", "driver"), "pytorch_arches", framework.pytorch_pair),
    Rule("tensorflow-known", ("tensorflow",), "tensorflow", framework.tensorflow_known),
    Rule("tensorflow-cuda", ("tensorflow", "cuda"), "tensorflow", framework.tensorflow_cuda),
    Rule("tensorflow-cudnn", ("tensorflow", "cudnn"), "tensorflow", framework.tensorflow_cudnn),
    Rule("tensorflow-driver", ("tensorflow", "driver"), "cuda_driver_floor", framework.tensorflow_driver),
    Rule("tensorflow-card", ("tensorflow",), "architectures", framework.tensorflow_card),
    Rule("fabric-manager-equal", ("fabric_manager", "driver"), "exact_match", driver.fabric_manager_equal),
    Rule("libraries-equal", ("libraries", "driver"), "exact_match", driver.libraries_equal),
    Rule("kernel-range", ("kernel",), "kernel", driver.kernel_range),
    Rule("secure-boot", ("module", "driver"), "secure_boot", driver.secure_boot),
)


def answer(question: Question) -> Answer:
    """What every rule says, in the rules' order."""
    return Answer(tuple(_finding(rule, said) for rule in RULES for said in rule.says(question)))


def _finding(rule: Rule, said: Said) -> Finding:
    source = said.source or source_of(rule.table)
    return Finding(rule.id, rule.parts, said.outcome, said.says, said.remedy, source)


# ---------------------------------------------------------------------------------- what was left open

OPEN = "auto"
"""What a plan writes for a version that the resolver shall choose."""

Open = Literal["driver", "cudnn"]
"""driver or cudnn: the parts that may be left open."""

Range = tuple[str, str]
"""(first, end): versions from `first` on and below `end`; "" for no end."""


def fits(question: Question, part: Open, version: str) -> bool:
    """Whether putting `version` in for the open part is known to fit: no rule refuses or doubts more than without.

    Nothing is known to fit a card that the tables do not have.
    """
    return _cards_known(question) and _against(question, part, version) <= _against(question, part, "")


def _cards_known(question: Question) -> bool:
    return all(card.architecture for card in question.cards)


def _against(question: Question, part: Open, version: str) -> Counter[str]:
    """How often each rule that looks at the part refuses or doubts it."""
    filled = replace(question, driver=version) if part == "driver" else replace(question, cudnn=version)
    looking = (rule for rule in RULES if part in rule.parts)
    return Counter(rule.id for rule in looking for said in rule.says(filled) if said.outcome in ("refused", "unknown"))


@cache
def published(part: Open) -> tuple[str, ...]:
    """Every version of the part that the tables name in full."""
    if part == "driver":
        return tuple(dict.fromkeys(row["driver"] for row in rows("toolkit_driver")))
    named = [version for row in rows("cudnn") for version in row["cudnn"] if len(parts(version)) > 2]
    return tuple(dict.fromkeys([*named, *(build["cudnn"] for build in _torch_builds())]))


def newest(question: Question, part: Open, candidates: Iterable[str]) -> str:
    """The newest of the candidates that is known to fit; "" when none is."""
    fitting = [version for version in candidates if parts(version) and fits(question, part, version)]
    return max(fitting, key=parts, default="")


def ranges(question: Question, part: Open) -> tuple[Range, ...]:
    """All versions of the open part that fit, as ranges: for a host that knows its candidates but not the tables.

    No rule compares a version with anything but a number in a table, so that its word can change only there.
    """
    points = marks(part)
    without = _against(question, part, "")
    known = _cards_known(question)
    good = [known and _against(question, part, text_of(point)) <= without for point in points]
    found: list[Range] = []
    for at, point in enumerate(points):
        if good[at] and not (at and good[at - 1]):
            found.append((text_of(point), ""))
        elif not good[at] and at and good[at - 1]:
            found[-1] = (found[-1][0], text_of(point))
    return tuple(found)


@cache
def marks(part: Open) -> tuple[Key, ...]:
    """Every version of the part at which a rule's word may change, in order; the first lies below all others."""
    found = {(0,)} | (_driver_marks() if part == "driver" else _cudnn_marks())
    kept: list[Key] = []
    for key in sorted(found):
        if not kept or compare(text_of(kept[-1]), text_of(key)) != 0:
            kept.append(key)
    return tuple(kept)


def _driver_marks() -> set[Key]:
    named = [
        row[key]
        for table in tables().values()
        for row in table["rows"]
        for key in ("driver", "min_driver")
        if key in row
    ]
    branches = set(known_branches()) | {row["first_branch"] for row in rows("architectures") if row["first_branch"]}
    branches.add(int(tables()["module_flavour"]["first_open_branch"]))
    return {parts(version) for version in named} | {(number + step,) for number in branches for step in (0, 1)}


def _cudnn_marks() -> set[Key]:
    named = [version for row in rows("cudnn") for version in row["cudnn"]]
    named += [row["cudnn"] for row in rows("tensorflow")]
    keys = {parts(version) for version in named} | {parts(build["cudnn"])[:3] for build in _torch_builds()}
    keys |= {(key[0],) for key in keys}
    return keys | {successor(key) for key in keys}


def _torch_builds() -> list[Row]:
    """PyTorch's builds that are published with a cuDNN."""
    return [build for row in rows("pytorch") for build in (*row["stable"], *row["experimental"]) if "cudnn" in build]
