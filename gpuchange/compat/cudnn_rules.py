"""Rules about cuDNN: which CUDA it is built for, which cards it runs on, which driver it asks for.

NVIDIA publishes a matrix for some cuDNN versions only. What a cuDNN supports is a window that moves upwards with its
version: nothing that was dropped comes back, nothing that is new was there before. So a version between two published
matrices fits where both sides allow it, is refused where one side already rules it out, and else is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from gpuchange.compat.model import Question, Said
from gpuchange.compat.tables import Card, Row, covers, cudnn_rows, matrices, row_major, rows, source_of
from gpuchange.compat.versions import Key, compare, parts, release

Window = tuple[Key, Key | None]
"""(lowest, highest) that a matrix supports; None: it names no highest."""

Where = Literal["fits", "refused", "unknown"]


def _supported(row: Row, cuda: str) -> bool:
    return row.get("supported", True) and any(covers(pattern, cuda) for pattern in row["cuda"])


def cudnn_cuda(q: Question) -> Iterator[Said]:
    if not (q.cudnn and q.cuda):
        return
    listed = cudnn_rows(q.cudnn)
    if listed:
        yield _listed_cuda(q, listed)
        return
    shipped = _shipped_with(q.cudnn, parts(q.cuda)[0])
    if shipped:
        words = f"cuDNN {q.cudnn} for CUDA {parts(q.cuda)[0]} is what PyTorch {shipped} is published with"
        yield Said("fits", words, source=source_of("pytorch"))
        return
    majors = {minor: [row_major(row) for row in rows_of] for minor, rows_of in matrices("").items()}
    windows: dict[Key, Window] = {minor: ((min(found),), (max(found),)) for minor, found in majors.items()}
    outcome = _between(q.cudnn, windows, (parts(q.cuda)[0],))
    yield _unlisted(outcome, q.cudnn, f"CUDA {q.cuda}", f"take a cuDNN for CUDA {parts(q.cuda)[0]}")


def _listed_cuda(q: Question, listed: list[Row]) -> Said:
    fitting = [row for row in listed if _supported(row, q.cuda)]
    if not fitting:
        built = ", ".join(dict.fromkeys(name for row in listed if row.get("supported", True) for name in row["cuda"]))
        words = f"cuDNN {q.cudnn} is built for CUDA {built}, the toolkit is {q.cuda}"
        return Said("refused", words, f"take a cuDNN for CUDA {parts(q.cuda)[0]}, or another CUDA")
    if all("tested" in row and release(q.cuda) not in row["tested"] for row in fitting):
        tested = ", ".join(fitting[0]["tested"])
        return Said("warning", f"cuDNN {q.cudnn} is for CUDA {fitting[0]['cuda'][0]}; its matrix lists only {tested}")
    return Said("fits", f"cuDNN {q.cudnn} is published for CUDA {release(q.cuda)}")


def _shipped_with(cudnn: str, major: int) -> str:
    """The PyTorch release that is published with this cuDNN and this CUDA major; "" if there is none."""
    for row in rows("pytorch"):
        for build in (*row["stable"], *row["experimental"]):
            same = parts(build.get("cudnn", ""))[:3] == parts(cudnn)[:3]
            if same and parts(build["cuda"])[0] == major:
                return str(row["torch"])
    return ""


def _between(cudnn: str, windows: Mapping[Key, Window], key: Key) -> Where:
    """What the matrices on either side say of `key`; what they contradict each other about is unknown."""
    older = [window for minor, window in windows.items() if minor <= parts(cudnn)[:2]]
    newer = [window for minor, window in windows.items() if minor > parts(cudnn)[:2]]
    dropped = any(key < low for low, _ in older)
    not_yet = any(high is not None and key > high for _, high in newer)
    was_there = any(high is not None and key <= high for _, high in older)
    stays = any(low <= key for low, _ in newer)
    if (dropped or not_yet) != (was_there and stays):
        return "refused" if dropped or not_yet else "fits"
    return "unknown"


def _unlisted(outcome: Where, cudnn: str, what: str, remedy: str) -> Said:
    words = {
        "fits": f"the matrices on either side of cuDNN {cudnn} both have {what}",
        "refused": f"cuDNN {cudnn} does not support {what}: no matrix on either side of it does",
        "unknown": f"cuDNN {cudnn} with {what} is not in the tables",
    }[outcome]
    return Said(outcome, words, "" if outcome == "fits" else remedy)


# ------------------------------------------------------------------------------------------------ cards


def cudnn_card(q: Question) -> Iterator[Said]:
    listed = cudnn_rows(q.cudnn) if q.cudnn else []
    fitting = [row for row in listed if not q.cuda or _supported(row, q.cuda)]
    for card in q.cards if q.cudnn and bool(listed) == bool(fitting) else ():
        if card.cc:
            yield _card(q, card, fitting)


def _card(q: Question, card: Card, listed: list[Row]) -> Said:
    telling = [row for row in listed if "cc" in row or "min_cc" in row]
    if telling:
        if any(_runs_on(row, card) for row in telling):
            return Said("fits", f"cuDNN {q.cudnn} is published for {card}")
        with_cuda = f" with CUDA {q.cuda}" if q.cuda else ""
        words = f"cuDNN {q.cudnn}{with_cuda} is not published for {card}"
        return Said("refused", words, f"take a cuDNN whose matrix lists {card.cc}")
    found = {minor: _cards_of(rows_of) for minor, rows_of in matrices(q.cuda).items()}
    windows = {minor: window for minor, window in found.items() if window}
    outcome = _between(q.cudnn, windows, parts(card.cc))
    return _unlisted(outcome, q.cudnn, str(card), "take a version that has a published matrix")


def _runs_on(row: Row, card: Card) -> bool:
    """Listed, or newer than a listed member of the same major: binaries run forward within a major."""
    key = parts(card.cc)
    if "cc" in row:
        return any(parts(cc)[0] == key[0] and parts(cc) <= key for cc in row["cc"])
    return key >= parts(row["min_cc"])


def _cards_of(matrix: list[Row]) -> Window | None:
    """From the oldest to the newest card that any row of the matrix has, its major's later members included."""
    keys = [parts(cc) for row in matrix for cc in row.get("cc", ())]
    lowest = [*keys, *(parts(row["min_cc"]) for row in matrix if "min_cc" in row)]
    return (min(lowest), (max(keys)[0], 9) if keys else None) if lowest else None


def cudnn_driver(q: Question) -> Iterator[Said]:
    """The matrix's own driver column: for some cards it asks for more than CUDA itself does."""
    if not (q.cudnn and q.cuda and q.driver):
        return
    listed = [row for row in cudnn_rows(q.cudnn) if _supported(row, q.cuda) and "min_driver" in row]
    for card in q.cards or (Card(""),):
        fitting = [row for row in listed if not card.cc or "cc" not in row or _runs_on(row, card)]
        if not fitting:
            continue
        floor = min((row["min_driver"] for row in fitting), key=parts)
        on_card = f" on {card}" if card.cc else ""
        words = f"cuDNN {q.cudnn} with CUDA {release(q.cuda)}{on_card} needs driver {floor} or newer"
        if compare(q.driver, floor) < 0 and not q.cuda_compat:
            yield Said("refused", f"{words}, not {q.driver}", f"take driver {floor} or newer")
        else:
            yield Said("fits", words)
