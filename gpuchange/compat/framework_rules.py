"""Rules about PyTorch and TensorFlow: which CUDA they are built with, and what that asks of driver and cards."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpuchange.compat.model import Question, Said
from gpuchange.compat.tables import Card, Row, covers, floor_row, full_row, rows, source_of
from gpuchange.compat.versions import compare, parts, release

CARRIES = "the wheel carries its own CUDA and cuDNN: the host needs only the driver"


def torch_build(pytorch: str) -> str:
    """The CUDA release that a version names: 2.9.0+cu128 → 12.8; "" when it names none."""
    found = re.search(r"\+cu(\d{2,3})(\d)$", pytorch)
    return f"{found[1]}.{found[2]}" if found else ""


def builds(pytorch: str) -> dict[str, str]:
    """{CUDA release: where it is published} of the builds of this PyTorch release."""
    plain = pytorch.partition("+")[0]
    found: dict[str, str] = {}
    for row in rows("pytorch"):
        if parts(plain)[:2] == parts(row["torch"]):
            found |= {build["cuda"]: source_of("pytorch") for build in (*row["stable"], *row["experimental"])}
    wheels = [row for row in rows("pytorch_wheels") if parts(row["torch"])[: len(parts(plain))] == parts(plain)]
    for row in wheels:
        found |= {cuda: found.get(cuda, source_of("pytorch_wheels")) for cuda in row["cuda"]}
    return found


def pytorch_known(q: Question) -> Iterator[Said]:
    if not q.pytorch:
        return
    found, named = builds(q.pytorch), torch_build(q.pytorch)
    plain = q.pytorch.partition("+")[0]
    if not found:
        yield Said("unknown", f"PyTorch {plain} is not in the tables", "check PyTorch's release matrix")
    elif named and named not in found:
        words = f"PyTorch {plain} is not published for CUDA {named}, only for {', '.join(sorted(found, key=parts))}"
        yield Said("refused", words, "take one of these builds")
    else:
        shown = named or ", ".join(sorted(found, key=parts))
        yield Said("fits", f"PyTorch {plain} is published for CUDA {shown}; {CARRIES}")


def _chosen(q: Question) -> list[str]:
    """The builds in question: the one that is named, or all of the release."""
    found, named = builds(q.pytorch), torch_build(q.pytorch)
    return [cuda for cuda in sorted(found, key=parts) if not named or cuda == named]


def _drives(q: Question, cuda: str) -> bool:
    found = floor_row(cuda)
    return found is None or compare(q.driver, found[0]) >= 0


def pytorch_driver(q: Question) -> Iterator[Said]:
    chosen = _chosen(q) if q.pytorch and q.driver else []
    if not chosen:
        return
    fitting = [cuda for cuda in chosen if _drives(q, cuda)]
    if fitting:
        yield Said("fits", f"driver {q.driver} runs the CUDA {', '.join(fitting)} builds of PyTorch {q.pytorch}")
        return
    floor = min((found[0] for cuda in chosen if (found := floor_row(cuda))), key=parts)
    words = f"no build of PyTorch {q.pytorch} (CUDA {', '.join(chosen)}) runs on driver {q.driver}"
    yield Said("refused", words, f"take driver {floor} or newer", source_of("cuda_driver_floor"))


def pytorch_card(q: Question) -> Iterator[Said]:
    chosen = _chosen(q) if q.pytorch else []
    for card in q.cards if chosen else ():
        fitting = [cuda for cuda in chosen if _wheel_runs(q, cuda, card)]
        if not card.architecture:
            continue
        if fitting:
            yield Said("fits", f"PyTorch {q.pytorch} for CUDA {', '.join(fitting)} has code for {card}")
        else:
            words = f"PyTorch {q.pytorch} for CUDA {', '.join(chosen)} has no code for {card}"
            yield Said("refused", words, "take a build or a release that has", _card_source(q))


def _wheel_runs(q: Question, cuda: str, card: Card) -> bool:
    """By the wheel's own list of cards where one is published, else by what its CUDA can make code for."""
    listed = _wheel_row(q, cuda)
    key, arch = parts(card.cc), card.architecture
    if listed:
        return any(_forward(parts(cc), key, listed["ptx"] and cc == listed["cc"][-1]) for cc in listed["cc"])
    if arch is None:
        return False
    last = arch["last_cuda"]
    dropped = bool(last) and parts(cuda) > parts(last.replace("x", "999"))
    return not dropped and parts(cuda) >= parts(arch["first_cuda"])


def _forward(built: tuple[int, ...], card: tuple[int, ...], ptx: bool) -> bool:
    """Binaries run forward within their major; what carries PTX also on every newer card."""
    return built <= card and (ptx or built[0] == card[0])


def _wheel_row(q: Question, cuda: str) -> Row | None:
    torch = ".".join(q.pytorch.partition("+")[0].split(".")[:2])
    fitting = (row for row in rows("pytorch_arches") if torch in row["torch"] and row["machine"] == q.machine)
    return next((row for row in fitting if row["cuda"] == cuda), None)


def _card_source(q: Question) -> str:
    listed = any(_wheel_row(q, cuda) for cuda in _chosen(q))
    return source_of("pytorch_arches" if listed else "architectures")


def pytorch_pair(q: Question) -> Iterator[Said]:
    """Driver and cards may each be served by some build, and still by no one build together."""
    chosen = _chosen(q) if q.pytorch and q.driver else []
    cards = [card for card in q.cards if card.architecture]
    by_driver = {cuda for cuda in chosen if _drives(q, cuda)}
    by_card = [{cuda for cuda in chosen if _wheel_runs(q, cuda, card)} for card in cards]
    if by_driver and by_card and all(by_card) and not by_driver.intersection(*by_card):
        words = f"no one build of PyTorch {q.pytorch} serves both driver {q.driver} and these cards"
        yield Said("refused", words, "take a newer driver, or another release")


# ------------------------------------------------------------------------------------------- TensorFlow


def _tensorflow(q: Question) -> Row | None:
    key = parts(q.tensorflow)[:2]
    return next((row for row in rows("tensorflow") if key and parts(row["tensorflow"])[:2] == key), None)


def tensorflow_known(q: Question) -> Iterator[Said]:
    row = _tensorflow(q)
    if row:
        yield Said("fits", f"TensorFlow {q.tensorflow} is tested with CUDA {row['cuda']} and cuDNN {row['cudnn']}")
    elif q.tensorflow:
        yield Said("unknown", f"TensorFlow {q.tensorflow} is not in the tables", "check TensorFlow's install page")


def tensorflow_cuda(q: Question) -> Iterator[Said]:
    """It links to the host's CUDA: since 11 one major is one library name, before that each release had its own."""
    row = _tensorflow(q)
    if not (row and q.cuda):
        return
    tested, words = str(row["cuda"]), f"TensorFlow {q.tensorflow} is built with CUDA {row['cuda']}"
    same = covers(tested.partition(".")[0], q.cuda) if parts(tested) >= (11,) else covers(tested, q.cuda)
    if not same:
        yield Said("refused", f"{words}, not {q.cuda}", f"take CUDA {tested}, or the release built with {q.cuda}")
    elif covers(tested, q.cuda):
        yield Said("fits", words)
    else:
        yield Said("warning", f"{words}; with {q.cuda} it is not tested")


def tensorflow_cudnn(q: Question) -> Iterator[Said]:
    """At start it asks for a cuDNN of the same major and at least the minor that it was built with."""
    row = _tensorflow(q)
    if not (row and q.cudnn):
        return
    built, words = str(row["cudnn"]), f"TensorFlow {q.tensorflow} is built with cuDNN {row['cudnn']}"
    if parts(built)[0] != parts(q.cudnn)[0] or compare(q.cudnn, built) < 0:
        yield Said(
            "refused", f"{words} and does not take {q.cudnn}", f"take cuDNN {built} or a newer {parts(built)[0]}.x"
        )
    else:
        yield Said("fits", f"{words}: {q.cudnn} serves")


def tensorflow_driver(q: Question) -> Iterator[Said]:
    row = _tensorflow(q)
    found = floor_row(release(row["cuda"]) if "." in row["cuda"] else row["cuda"]) if row and q.driver else None
    if not (row and found):
        return
    words = f"TensorFlow {q.tensorflow} (CUDA {row['cuda']}) needs driver {found[0]} or newer"
    if compare(q.driver, found[0]) < 0:
        yield Said("refused", f"{words}, not {q.driver}", f"take driver {found[0]}", source_of(found[2], found[1]))
    else:
        yield Said("fits", words)


def tensorflow_card(q: Question) -> Iterator[Said]:
    row = _tensorflow(q)
    for card in q.cards if row and full_row(row["cuda"]) else ():
        arch = card.architecture
        if not (row and arch):
            continue
        words = f"TensorFlow {q.tensorflow} is built with CUDA {row['cuda']}, which"
        if arch["last_cuda"] and parts(row["cuda"]) > parts(arch["last_cuda"].replace("x", "999")):
            yield Said("refused", f"{words} has dropped {card}", f"take a release built with CUDA {arch['last_cuda']}")
        elif parts(row["cuda"]) < parts(arch["first_cuda"]):
            yield Said("warning", f"{words} is older than {card}: its code must be compiled at each start, if it can")
        else:
            yield Said("fits", f"{words} knows {card}")
