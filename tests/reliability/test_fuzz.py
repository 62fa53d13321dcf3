"""Fuzz of every parser of what hosts say, and of plans: only our own exceptions, in bounded time."""

from __future__ import annotations

import io
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hostcode
from ansible.module_utils import (
    gpuchange_apt_choice,
    gpuchange_apt_private,
    gpuchange_checkpoints,
    gpuchange_connections,
    gpuchange_driver,
    gpuchange_facts_gpu,
    gpuchange_facts_host,
    gpuchange_gpu_users,
    gpuchange_haproxy_api,
    gpuchange_json_stream,
    gpuchange_leftovers,
    gpuchange_packages,
    gpuchange_pickle_look,
    gpuchange_sums,
)
from checkpoints import distributed

from gpuchange import playchild
from gpuchange.checks import (
    card_settings,
    cards,
    consistency,
    cuda,
    kernel_log,
    readiness,
    slots,
    smi_text,
    snapshot,
    soak,
)
from gpuchange.cli import words
from gpuchange.errors import GpuchangeError
from gpuchange.judging import Situation, judge
from gpuchange.plan import loads
from gpuchange.providers import PROVIDERS
from gpuchange.providers.contract import HostView
from gpuchange.reports import Reported
from reliability.figures import Effort, Figures, Row
from reliability.material import CASES

ROW = Row(
    "Whatever a host or a plan says, no parser and no judge breaks on it, or takes long",
    peer="no figure known",
)
assert hostcode  # puts module_utils on the path

Parser = Callable[[Any], object]


def said_by(text: str) -> dict[str, Any]:
    return {"rc": 0, "out": text, "err": text[:100], "hung": False, "cut": False, "seconds": 1.0}


def _drained(found: object) -> object:
    return list(found) if isinstance(found, Iterator) else found


def as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def refusing_words(parser: Callable[[bytes], object]) -> Callable[[str], object]:
    """A parser that refuses with a ValueError or Broken, in words: that is its own way to say what is wrong."""

    def parse(text: str) -> object:
        try:
            return _drained(parser(as_bytes(text)))
        except (ValueError, gpuchange_checkpoints.Broken) as error:
            return str(error)

    return parse


def in_a_file(reader: Callable[[int, int], object]) -> Callable[[bytes], object]:
    def parse(content: bytes) -> object:
        with tempfile.TemporaryFile() as file:
            file.write(content)
            file.flush()
            return reader(file.fileno(), len(content))

    return parse


def headed(text: bytes) -> bytes:
    """A header with the length in front that a safetensors file has."""
    return len(text).to_bytes(8, "little") + text


TEXT: dict[str, Callable[[str], object]] = {
    "nvidia-smi -q -x": lambda text: cards.parse(said_by(text)),
    "nvidia-smi's complaint": lambda text: cards.parse({"rc": 9, "out": text, "err": text}),
    "nvidia-smi, one dead": lambda text: cards.parse({"rc": 255, "out": text, "each": {"0000:1b:00.0": said_by(text)}}),
    "nvidia-smi CSV": lambda text: soak.readings(said_by(text)),
    "nvidia-smi's words": lambda text: (smi_text.value(text), smi_text.number(text), smi_text.sickness(text)),
    "nvidia-smi -L": smi_text.listing,
    "nvidia-smi mig -lgi": smi_text.gpu_instances,
    "nvidia-smi, the table": smi_text.table,
    "header": lambda text: gpuchange_facts_gpu.defines(text, "CUDNN_"),
    "PCI address": slots.bus_id,
    "kernel log": lambda text: kernel_log.bad(kernel_log.parse(text), frozenset({79})),
    "/proc/driver/nvidia/version": lambda text: (
        gpuchange_driver.parse_proc_version(text), gpuchange_driver.is_open(text)
    ),
    "modinfo": gpuchange_driver.parse_modinfo,
    "dpkg-query": lambda text: gpuchange_packages.parse_installed(text, "amd64"),
    "apt-cache policy": gpuchange_packages.parse_policy,
    "apt-cache show": lambda text: gpuchange_apt_choice.parse_show(text),
    "apt-get -s": gpuchange_apt_private.parse_simulation,
    "apt-get errors": gpuchange_apt_private.unreadable,
    "/proc/PID/cgroup": gpuchange_gpu_users.unit_of,
    "systemctl show": lambda text: gpuchange_facts_host._unit(text),
    "mountinfo escapes": gpuchange_facts_host._unescape,
    "haproxy show stat": gpuchange_haproxy_api._stat_rows,
    "haproxy show servers state": gpuchange_haproxy_api._state_rows,
    "address:port": refusing_words(lambda raw: gpuchange_connections.endpoint(raw.decode("utf-8", "surrogatepass"))),
    "plan": lambda text: loads(text.encode("utf-8", "surrogatepass"), "plan.yaml"),
    "checksum list": refusing_words(lambda text: [gpuchange_sums.parse_line(line) for line in text.splitlines()]),
    "name of a leftover": lambda text: gpuchange_leftovers.kind_of(text[-80:], "file", 0, text[:80]),
    "JSON as a stream": refusing_words(lambda text: gpuchange_json_stream.scalars(io.BytesIO(text).read)),
    "safetensors": refusing_words(lambda text: in_a_file(gpuchange_checkpoints.safetensors)(headed(text))),
    "shard index": refusing_words(in_a_file(gpuchange_checkpoints._index)),
    "torch archive": refusing_words(in_a_file(gpuchange_checkpoints.archive)),
    "sentence for people": lambda text: words.clean(text),
}  # fmt: skip
"""Name → parser of text from a host (or a plan)."""


def provider_parser(provider: Any, direction: str) -> Parser:
    """A report of this provider, through model, judge and preview, as the engine does it."""

    def parse(body: Any) -> object:
        fields = body if isinstance(body, dict) else {"state": "done", "facts": body}
        fields = {"state": "done", **fields}
        step = f"{provider.phase}/{provider.name}"
        params = PARAMS[step]
        others = {
            "record/host": fields,
            "seal/host": fields,
            "preflight/host": fields,
            "baseline/gpu": fields,
            step: fields,
        }
        view = HostView(
            "gpu1", {"stack": {"driver": "570"}}, params, first=others, last=others, own=fields, direction=direction
        )  # type: ignore[arg-type]
        outcome = judge(Situation(provider, view, "apply"), Reported("gpu1", fields))
        if "this is a defect" in str(outcome.data.get("why")):
            raise AssertionError(outcome.data["why"])
        return outcome

    return parse


def _params() -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for path in sorted((CASES / "plan_good").glob("*.yaml")):
        plan = loads(path.read_bytes(), str(path))
        for provider in PROVIDERS:
            for chosen in plan.chosen(provider.phase):
                if chosen.provider is provider:
                    found.setdefault(f"{provider.phase}/{provider.name}", chosen.params)
    for provider in PROVIDERS:
        step = f"{provider.phase}/{provider.name}"
        if step not in found:
            found[step] = provider.params().model_dump(mode="json", by_alias=True)
    return found


PARAMS = _params()


def result_parser(data: Any) -> object:
    """What a module returned, in an event of ansible-runner."""
    result = data if isinstance(data, dict) else {"report": data, "results": data}
    event = {"task": "report", "host": "a", "res": result}
    return [
        playchild.evidence({"event": kind, "event_data": event})
        for kind in ("runner_on_ok", "runner_on_failed", "runner_on_unreachable")
    ]


def facts_parser(facts: Any) -> object:
    facts = facts if isinstance(facts, dict) else {"smi": facts}
    picture = snapshot.parse(facts)
    objections = readiness.objections(facts, {}, picture, readiness.Wish(driver="570", cuda="12.8"))
    settings = card_settings.compare(picture.cards, snapshot.parse({**facts, "smi": {}}).cards)
    goal = card_settings.goal(picture.cards), card_settings.restored(snapshot.rows(facts.get("pci")))
    said = (settings, goal, card_settings.sentences(picture.cards), picture.cuda.sentence(), picture.cudnn.sentence())
    return objections, said, snapshot.compare(facts, {}), snapshot.summary(picture)


DATA: dict[str, Parser] = {
    **{f"{p.phase}/{p.name} {way}": provider_parser(p, way) for p in PROVIDERS for way in ("do", "undo")},
    "facts": facts_parser,
    "a module's result": result_parser,
    "results of a loop": lambda data: result_parser({"results": [data, {"report": data}]}),
    "CUDA": cuda.parse_cuda,
    "cuDNN": lambda data: cuda.parse_cudnn(data, {}),
    "nvidia-smi": lambda data: cards.parse(data if isinstance(data, dict) else {}),
    "data before and after": lambda data: consistency.judge(consistency.parse({"data": data}), consistency.parse(data)),
}
"""Name → parser of JSON data from a host."""

OWN = (GpuchangeError, gpuchange_haproxy_api.HaproxyError)
STRINGS = (
    "", "\x00", "\x1b[2J", "-1", "nan", "1e999", "9" * 5000, "[N/A]", "GPU-", "\ud800", "é" * 9, "0x", "{", "<a>", "%s",
)  # fmt: skip
VALUES = (
    None, True, -1, 0, 1e308, float("nan"), float("inf"), [], {}, "", 10**30, [[[]]], {"": None}, [None], "1", "\n",
)  # fmt: skip


def recorded() -> tuple[list[str], list[Any]]:
    """Texts and data of all recorded cases."""
    data: list[Any] = [json.loads(path.read_text()) for path in sorted(CASES.rglob("*.json"))]
    texts = [text for item in data for text in strings(item) if len(text) > 30]
    texts += [path.read_text().partition("\n-----\n")[2] for path in sorted((CASES / "recorded").glob("*.txt"))]
    texts += [
        path.read_text(errors="replace") for path in sorted(CASES.rglob("*.yaml")) if path.stat().st_size < 20_000
    ]
    return sorted(set(texts)), [part for item in data for part in parts(item)]


def strings(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    for item in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from strings(item)


def parts(data: Any) -> Iterator[Any]:
    """A case and the larger objects in it."""
    if isinstance(data, dict) and len(data) > 1:
        yield data
        for item in data.values():
            yield from parts(item)


def spoilt_text(draw: random.Random, texts: list[str]) -> str:
    """A recorded text with bytes flipped, cut, doubled or exchanged for others."""
    text = draw.choice(texts)[:20_000]
    for _ in range(draw.randint(1, 6)):
        at, length = draw.randint(0, len(text)), draw.choice((0, 1, 1, 3, 20))
        new = draw.choice((draw.choice(STRINGS), chr(draw.randint(0, 0x2FF)), text[at : at + 40] * draw.randint(0, 3)))
        text = text[:at] + new + text[at + length :]
    return text


def spoilt(draw: random.Random, data: Any, depth: int = 0) -> Any:
    """Recorded data with values exchanged, dropped, spoilt or moved."""
    if draw.random() < 0.04 + 0.02 * depth:
        return draw.choice(VALUES)
    if isinstance(data, dict):
        kept = {key: spoilt(draw, value, depth + 1) for key, value in data.items() if draw.random() > 0.03}
        return {**kept, draw.choice(STRINGS): draw.choice(VALUES)} if draw.random() < 0.05 else kept
    if isinstance(data, list):
        return [spoilt(draw, item, depth + 1) for item in data if draw.random() > 0.05]
    if isinstance(data, str) and data and draw.random() < 0.15:
        return spoilt_text(draw, [data])
    return data


def tried(name: str, parser: Callable[[Any], object], given: Any, figures: Figures) -> None:
    """One input: only our own exceptions, within 2 s."""
    began = time.process_time()
    figures.tried += 1
    try:
        _drained(parser(given))
    except OWN:
        figures.count(refused=1)
    except Exception as error:
        figures.broken.append(f"{name}: {type(error).__name__}: {str(error)[:200]} on {str(given)[:300]!r}")
    if time.process_time() - began > 2:
        figures.broken.append(f"{name}: {time.process_time() - began:.1f} s on {str(given)[:200]!r}")


def test_no_parser_of_text_breaks(effort: Effort, figures: Figures) -> None:
    draw, (texts, _) = random.Random(effort.seed), recorded()
    names = list(TEXT)
    for number in range(effort.of(full=140_000, short=12_000)):
        name = names[number % len(names)]
        tried(name, TEXT[name], spoilt_text(draw, texts), figures)


def test_no_judge_breaks(effort: Effort, figures: Figures) -> None:
    draw, (_, data) = random.Random(effort.seed), recorded()
    names = list(DATA)
    for number in range(effort.of(full=70_000, short=8_000)):
        name = names[number % len(names)]
        tried(name, DATA[name], spoilt(draw, draw.choice(data)), figures)


def test_no_pickle_breaks_what_looks_into_it(effort: Effort, figures: Figures, tmp_path: Path) -> None:
    """Real checkpoints' metadata with bytes flipped, cut, doubled or exchanged, of every protocol."""
    draw = random.Random(effort.seed)
    whole = [distributed(tmp_path / str(protocol), protocol=protocol).read_bytes() for protocol in range(2, 6)]

    def follow(content: bytes) -> object:
        try:
            return list(gpuchange_pickle_look.states(io.BytesIO(content), gpuchange_checkpoints.STORED))
        except ValueError as error:
            return str(error)

    for _ in range(effort.of(full=20_000, short=1_500)):
        content = bytearray(draw.choice(whole))
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(content))
            content[at : at + draw.choice((0, 1, 1, 9))] = draw.randbytes(draw.choice((0, 1, 1, 9)))
        tried("pickle", follow, bytes(content), figures)


def slow_shapes() -> Iterator[str]:
    for unit in (
        "a",
        " ",
        "\n",
        "0",
        "(",
        "<",
        "GPU ",
        "NVRM: Xid ",
        "a:",
        "_",
        "-",
        ",",
        "<gpu>",
        "\x1b[",
        "Inst x [",
        "ii  x ",
    ):
        yield unit * (200_000 // len(unit))


def test_large_and_monotonous_text_takes_no_long_time(effort: Effort, figures: Figures) -> None:
    shapes = list(slow_shapes())
    for number, (name, parser) in enumerate(TEXT.items()):
        for text in shapes if effort.full else (shapes[number % len(shapes)], shapes[(number + 7) % len(shapes)]):
            tried(name, parser, text, figures)


def busy(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_this_test_can_fail() -> None:
    seen = Figures()
    tried("broken", lambda _: [][1], "x", seen)
    tried("slow", lambda _: busy(2.1), "x", seen)
    assert len(seen.broken) == 2
