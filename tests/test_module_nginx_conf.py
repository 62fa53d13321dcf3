"""nginx's configuration as people write it: where an upstream's servers stand, a mark put there and taken away."""

from __future__ import annotations

from pathlib import Path

import hostcode  # noqa: F401  (puts module_utils on Ansible's path)
import pytest
from ansible.module_utils import gpuchange_nginx_conf as conf
from hypothesis import given
from hypothesis import strategies as st

MAIN = b"""# pid of the master; not } a block
pid /run/x.pid;
http {
  log_format main '$remote_addr "x;y" ${status}';
  map $uri $long { default 0; ~^/stream\\{  1; }
  content_by_lua_block { if a then b = "{" .. "}" end }
  upstream gpu { least_conn; server 10.0.0.11:8000 weight=5; server "gpu2";
    server [2001:db8::3]:8000 down; include up/*.conf; }
  upstream other { server 10.0.0.11:9000; server unix:/run/x.sock backup; }
  server { listen 80; server_name x; location / { proxy_pass http://gpu; } }
}
"""


@pytest.fixture
def main(tmp_path: Path) -> Path:
    (tmp_path / "up").mkdir()
    (tmp_path / "up" / "b.conf").write_bytes(b"server gpu5:1;\n")
    (tmp_path / "up" / "a.conf").write_bytes(b"# more\nserver gpu4:8000 max_fails=0 down ;")
    (tmp_path / "nginx.conf").write_bytes(MAIN)
    return tmp_path / "nginx.conf"


def test_every_server_of_every_upstream_is_found(main: Path) -> None:
    directives = conf.read(str(main))
    rows = conf.servers(directives)
    seen = [(r["upstream"], r["address"], r["port"], r["admin"], r["weight"], Path(r["file"]).name) for r in rows]
    assert seen == [
        ("gpu", "10.0.0.11", 8000, "ready", 5, "nginx.conf"),
        ("gpu", "gpu2", 80, "ready", 1, "nginx.conf"),
        ("gpu", "2001:db8::3", 8000, "down", 1, "nginx.conf"),
        ("gpu", "gpu4", 8000, "down", 1, "a.conf"),
        ("gpu", "gpu5", 1, "ready", 1, "b.conf"),
        ("other", "10.0.0.11", 9000, "ready", 1, "nginx.conf"),
        ("other", "unix:/run/x.sock", 0, "ready", 1, "nginx.conf"),
    ]
    assert conf.value(directives, "pid") == "/run/x.pid" and conf.value(directives, "user", "www") == "www"


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        *(("10.0.0.11", 2), ("10.0.0.11:8000", 1), ("10.0.0.11:80", 0), ("gpu2", 1), ("gpu2:80", 1), ("gpu", 0)),
        *(("2001:db8::3", 1), ("[2001:DB8::3]:8000", 1), ("[2001:db8::3]:9", 0), ("[2001:db8::3]", 1)),
    ],
)
def test_a_server_is_named_with_its_port_or_without(main: Path, wanted: str, count: int) -> None:
    rows = conf.servers(conf.read(str(main)))
    assert sum(conf.same_server(row, wanted) for row in rows) == count


def test_a_mark_put_and_taken_away_leaves_every_byte(main: Path) -> None:
    text = main.read_bytes()
    ends = [row["end"] for row in conf.servers(conf.read(str(main))) if row["address"] == "10.0.0.11"]
    main.write_bytes(conf.with_down(text, ends))
    rows = [row for row in conf.servers(conf.read(str(main))) if row["address"] == "10.0.0.11"]
    assert [row["admin"] for row in rows] == ["down", "down"]
    assert conf.without_down(main.read_bytes(), [row["end"] for row in rows]) == text
    assert conf.without_down(text, ends) is None, "what is not there is not taken away"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"http { } }", "c:1: unexpected }"),
        (b'a;\nb "open;', "c:2 cannot be read"),
        (b"a;\n\n'x", "c:3 cannot be read"),
    ],
)
def test_what_is_no_configuration_is_said_with_its_line(text: bytes, said: str) -> None:
    with pytest.raises(conf.NginxError, match=said):
        list(conf.parse("c", text))


def test_includes_that_go_round_end(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("include c;")
    with pytest.raises(conf.NginxError, match="levels deep"):
        conf.read(str(tmp_path / "c"))
    with pytest.raises(conf.NginxError, match="cannot be read: No such file"):
        conf.read(str(tmp_path / "none"))


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_in_words(text: bytes) -> None:
    try:
        conf.servers(list(conf.parse("c", b"upstream u {" + text)))
    except conf.NginxError as error:
        assert str(error).startswith("c:")
