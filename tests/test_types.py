"""Scalar types of plans and addresses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from gpuchange.addresses import bare, format_host, is_ipv6
from gpuchange.providers import types


def read(kind: Any, value: Any) -> Any:
    return TypeAdapter(kind).validate_python(value)


@pytest.mark.parametrize(
    ("kind", "value", "read_as"),
    [
        (types.Duration, "90s", 90),
        (types.Duration, "1d2h", 93600),
        (types.Duration, 300, 300),
        (types.Size, "2GiB", 2 * 1024**3),
        (types.Size, "1TB", 10**12),
        (types.Size, "512B", 512),
        (types.Percent, "5%", 5.0),
        (types.Percent, "0.5%", 0.5),
        (types.Version, "12.10", "12.10"),
        (types.Version, types.Plain("570.172.08"), "570.172.08"),
        (types.Version, "1:570.172.08-0ubuntu1~22.04", "1:570.172.08-0ubuntu1~22.04"),
        (types.AbsPath, "/srv//models/./", "/srv/models"),
        (types.AbsPath, "/srv/Modèle mit Blank", "/srv/Modèle mit Blank"),
        (types.UnitName, "getty@tty1.service", "getty@tty1.service"),
        (types.HostPattern, "gpu[01:03]:&rack1", "gpu[01:03]:&rack1"),
        (types.Argv, ["docker", "ps", "--format", "{{.ID}}", ""], ("docker", "ps", "--format", "{{.ID}}", "")),
        (types.Count, "12", 12),
    ],
)
def test_good_values(kind: Any, value: Any, read_as: Any) -> None:
    assert read(kind, value) == read_as
    assert read(kind, read_as) == read_as, "a converted value passes again"


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (types.Duration, ["", "90", "5 m", "-5m", "5m ", "1m1h", "٣s", "1.5h", True, None, [], "m"]),
        (types.Size, ["", "2", "2gb", "-1GiB", "1.5GiB", True, None]),
        (types.Percent, ["5", "101%", "-1%", "5 %", "%", True, None]),
        (
            types.Version,
            [12.1, 12, types.Plain("12.10"), types.Plain("570"), types.Plain("1e3"), "", " 1", "latest", "1 2", None],
        ),
        (
            types.AbsPath,
            [
                "",
                " ",
                "/",
                "//",
                "/.",
                "a",
                "~/a",
                "/a/../b",
                "/a ",
                " /a",
                "/a\nb",
                "/{{ x }}",
                "/{% x %}",
                "/a\x00",
                None,
            ],
        ),
        (
            types.UnitName,
            ["", "modelserver", "-x.service", "a b.service", "../a.service", "a.service;id", "{{x}}.service"],
        ),
        (types.HostPattern, ["", "-x", "a b", "a\x1b", "@file", "{{ x }}", "\u2028"]),
        (types.Name, ["", "-a", "a b", "a/b", "a;b", "a\n", "{{x}}", "x" * 200]),
        (types.Text, ["", "  ", "a\x1b[31m", "a\u2028b", "\ud800"]),
        (types.Argv, [[], [""], ["a\0"], "true"]),
        (types.Count, ["-1", "0777", "1_0", "1.0", "", " 1", True, None, 1.5, "9" * 5000]),
    ],
)
def test_bad_values(kind: Any, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValidationError):
            read(kind, value)
            pytest.fail(f"took {value!r}")


@given(st.integers(0, 999_999_999))
def test_durations_and_sizes_are_written_as_they_are_read(value: int) -> None:
    assert read(types.Duration, types.written(value, "duration")) == value
    assert read(types.Size, types.written(value, "size")) == value


@pytest.mark.case("ipv6-host-in-rsync-step")
@pytest.mark.parametrize(
    ("address", "port", "written"),
    [
        ("2001:db8::10", None, "[2001:db8::10]"),
        ("2001:db8::10", 22, "[2001:db8::10]:22"),
        ("[2001:db8::10]", 22, "[2001:db8::10]:22"),
        ("fe80::1%eth0", None, "[fe80::1%eth0]"),
        ("::ffff:10.0.0.5", 22, "[::ffff:10.0.0.5]:22"),
        ("10.0.0.5", 22, "10.0.0.5:22"),
        ("10.0.0.5", None, "10.0.0.5"),
        ("gpu-01.example", 443, "gpu-01.example:443"),
    ],
)
def test_addresses_are_bracketed_where_a_colon_follows(address: str, port: int | None, written: str) -> None:
    """case: ipv6-host-in-rsync-step."""
    assert format_host(address, port) == written


def test_a_zone_is_quoted_in_a_url_and_brackets_can_be_taken_off() -> None:
    assert format_host("fe80::1%eth0", 8404, url=True) == "[fe80::1%25eth0]:8404"
    assert bare("[2001:db8::10]") == "2001:db8::10"
    assert bare("gpu-01") == "gpu-01"
    assert is_ipv6("fe80::1%eth0") and not is_ipv6("10.0.0.5") and not is_ipv6("gpu-01:22")
