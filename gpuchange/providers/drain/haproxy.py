"""drain/haproxy: out of one or several HAProxy balancers, sessions awaited; back in as found."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gpuchange.providers import balancer
from gpuchange.providers.types import AbsPath, Name, OneOrMany


class HaproxyParams(balancer.BalancerParams):
    """How a host leaves HAProxy."""

    backend: Annotated[tuple[Name, ...], OneOrMany()] = Field(
        (), description="Backend or list of backends; none: every backend that has the server."
    )
    socket: AbsPath = Field("/run/haproxy/admin.sock", description="Runtime API of HAProxy, with level admin.")


PROVIDER = balancer.drain(
    "haproxy",
    HaproxyParams,
    does="Take the host out of HAProxy, wait for its open sessions; put it back as found once health checks pass.",
    root_for="the balancer's admin socket and its owner marker",
)
