"""Who is told of each durable event. Observers only listen: none can stop, delay or change a change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from gpuchange.planner import State
from gpuchange.states import Event

Observer = Callable[[Event, State], None]
"""Called on the engine's main thread right after `event` is on disk and folded into `state`."""

_log = logging.getLogger(__name__)


def tell(observers: Iterable[Observer], event: Event, state: State) -> None:
    """Tells each observer. One that fails is logged and passed over: a full terminal must not hold a host."""
    for observer in observers:
        try:
            observer(event, state)
        except Exception as error:
            _log.warning("event %d could not be shown: %s", event.seq, error)
