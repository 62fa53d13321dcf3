"""The verb audit: heads printed and compared, tampering with exit 8, words for whatever file there is."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from made_changes import CREATED, STEPS, done, make

from gpuchange.cli import main

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUCHANGE_STATE", str(tmp_path / "changes"))
    monkeypatch.setenv("NO_COLOR", "1")
    make(tmp_path / "changes", "a", [CREATED, *done("gpu1", STEPS[0])])
    return tmp_path / "changes"


def head(capsys: Captured) -> str:
    capsys.readouterr()
    assert main(["audit", "head", "a"]) == 0
    return capsys.readouterr().out.strip()


def cut(root: Path) -> None:
    database = sqlite3.connect(root / "a" / "journal.db")
    database.execute("DROP TRIGGER events_last")
    database.execute("DELETE FROM events WHERE seq = 3")
    database.commit()
    database.close()


def test_a_head_is_one_line_and_holds_later_too(root: Path, capsys: Captured, tmp_path: Path) -> None:
    line = head(capsys)
    name, seq, digest = line.split(" ")
    assert (name, seq, len(digest)) == ("a", "3", 64)
    (tmp_path / "heads").write_text(f"other 9 {'0' * 64}\n\n{line}\n")
    for anchor in (str(tmp_path / "heads"), digest):
        assert main(["audit", "verify", "a", "--head", anchor]) == 0
        assert "1 head(s) that were kept elsewhere" in capsys.readouterr().out
    assert main(["--json", "audit", "head", "a"]) == 0
    assert json.loads(capsys.readouterr().out) == {"type": "head", "change": "a", "seq": 3, "hash": digest}
    assert main(["--json", "audit", "verify", "a"]) == 0
    assert json.loads(capsys.readouterr().out)["anchors"] == 0


def test_a_cut_end_is_told_by_a_head_and_the_verb_says_that_only_a_head_can(
    root: Path, capsys: Captured, tmp_path: Path
) -> None:
    line = head(capsys)
    (tmp_path / "heads").write_text(line)
    cut(root)
    assert main(["audit", "verify", "a"]) == 0
    assert "only a head kept elsewhere tells" in capsys.readouterr().out
    assert main(["audit", "verify", "a", "--head", str(tmp_path / "heads")]) == 8
    assert "row 3 is missing or differs from the head" in capsys.readouterr().err
    assert main(["audit", "verify", "a", "--head", line.split()[2]]) == 8
    assert "the row of the head is missing" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "a 3 xyz", "a three " + "0" * 64, "\x00\xff", f"b 3 {'0' * 64}"])
def test_what_is_no_head_is_a_usage_error(root: Path, capsys: Captured, tmp_path: Path, text: str) -> None:
    (tmp_path / "heads").write_text(text)
    assert main(["audit", "verify", "a", "--head", str(tmp_path / "heads")]) == 64
    assert str(tmp_path / "heads") in capsys.readouterr().err
    assert main(["audit", "verify", "a", "--head", str(tmp_path / "none")]) == 64
    assert main(["audit", "verify", "a", "--head", "0" * 63]) == 64


@pytest.mark.parametrize("raw", [b"", b"no database", b"SQLite format 3\x00" + b"\xff" * 5000])
def test_no_database_at_all_is_said_in_words(root: Path, capsys: Captured, raw: bytes) -> None:
    (root / "a" / "journal.db").write_bytes(raw)
    for verb in (["verify"], ["head"]):
        assert main(["audit", *verb, "a"]) == 8
        err = capsys.readouterr().err
        assert "error: " in err and "unexpected" not in err


@pytest.mark.parametrize("meta", ["[" * 9000, "NaN", "7", '{"hosts"'])
def test_own_data_that_gpuchange_never_writes(root: Path, capsys: Captured, meta: str) -> None:
    database = sqlite3.connect(root / "a" / "journal.db")
    database.execute("UPDATE meta SET json = ?", (meta,))
    database.commit()
    database.close()
    assert main(["audit", "verify", "a"]) == 8
    assert "row 0" in capsys.readouterr().err
