"""Ways to watch a host that is back in service."""
