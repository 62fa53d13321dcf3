"""Waiting for a condition, bounded and named: the one door to tenacity."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import tenacity

from gpuchange.errors import GpuchangeError

T = TypeVar("T")


class WaitTimeout(GpuchangeError):
    """The condition did not come true in time."""


def wait_until(
    predicate: Callable[[], T],
    *,
    timeout: float,
    what: str,
    interval: float = 0.2,
    retry_on: tuple[type[BaseException], ...] = (),
) -> T:
    """Call `predicate` every `interval` seconds until it gives something true, and return that.

    Exceptions of the types `retry_on` count as "not yet". Raises WaitTimeout after `timeout` seconds,
    saying `what` was awaited and, if the last try raised, with which error.
    """
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_result(lambda result: not result) | tenacity.retry_if_exception_type(retry_on),
        stop=tenacity.stop_after_delay(timeout),
        wait=tenacity.wait_fixed(interval),
    )
    try:
        return retrying(predicate)
    except tenacity.RetryError as error:
        cause = error.last_attempt.exception()
        raise WaitTimeout(
            f"waited {timeout:g} s in vain for {what}", why=f"last try: {cause}" if cause else ""
        ) from cause
