"""preflight/nginx: every nginx passes its own test, knows the server, and may be reloaded. Changes nothing."""

from __future__ import annotations

from gpuchange.providers.balancer import preflight

PROVIDER = preflight("nginx", root_for="nginx's own test of its configuration, and the balancer's owner marker")
