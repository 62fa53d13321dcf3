"""preflight/haproxy: every HAProxy can be asked, knows the server, and may be told to drain it. Changes nothing."""

from __future__ import annotations

from gpuchange.providers.balancer import preflight

PROVIDER = preflight("haproxy", root_for="the balancer's admin socket and its owner marker")
