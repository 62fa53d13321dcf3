"""drain/nginx: marked down in the upstreams of one or several nginx, each reloaded once; back in as found."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gpuchange.providers import balancer
from gpuchange.providers.types import AbsPath, Name, OneOrMany


class NginxParams(balancer.BalancerParams):
    """How a host leaves nginx."""

    upstream: Annotated[tuple[Name, ...], OneOrMany()] = Field(
        (), description="Upstream or list of upstreams; none: every upstream that has the server."
    )
    config: AbsPath = Field("/etc/nginx/nginx.conf", description="nginx's main configuration file.")
    health: AbsPath | None = Field(
        None, description="Path that must answer with 2xx or 3xx on release; none: a connection is enough."
    )


PROVIDER = balancer.drain(
    "nginx",
    NginxParams,
    does="Mark the host down in nginx and reload, wait for its open sessions; put it back as found once it answers.",
    root_for="nginx's configuration and reload, and the balancer's owner marker",
)
