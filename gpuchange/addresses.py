"""How an address is written where a port, a path or a user stands beside it. IPv6 needs brackets there."""

from __future__ import annotations

import ipaddress
from urllib.parse import quote


def is_ipv6(address: str) -> bool:
    """Whether `address` is an IPv6 literal; brackets and a zone (`fe80::1%eth0`) are allowed."""
    return _ipv6(address) is not None


def bare(address: str) -> str:
    """The address without brackets: what sockets, ssh and `ansible_host` want."""
    return _ipv6(address) or address


def format_host(address: str, port: int | None = None, *, url: bool = False) -> str:
    """`address` for use before a colon: `10.0.0.5:22`, `[2001:db8::10]:22`, rsync's `[fe80::1%eth0]:`.

    Names and IPv4 addresses stay as they are. With `url`, the percent sign of a zone is written `%25` (RFC 6874).
    """
    inner = _ipv6(address)
    host = address if inner is None else f"[{_zone_quoted(inner) if url else inner}]"
    return host if port is None else f"{host}:{port}"


def _ipv6(address: str) -> str | None:
    inner = address[1:-1] if address.startswith("[") and address.endswith("]") else address
    try:
        return inner if isinstance(ipaddress.ip_address(inner), ipaddress.IPv6Address) else None
    except ValueError:
        return None


def _zone_quoted(address: str) -> str:
    ip, percent, zone = address.partition("%")
    return f"{ip}%25{quote(zone, safe='')}" if percent else ip
