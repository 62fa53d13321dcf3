"""Cards set again as they were recorded: only what differs, in an order that works, and never what somebody made."""

from __future__ import annotations

from typing import Any

import hostcode
import pytest
from ansible.module_utils import gpuchange_card_settings as settings

assert hostcode  # puts module_utils on the path
A, B = "GPU-a", "GPU-b"
GOAL: list[dict[str, Any]] = [
    {"uuid": A, "persistence": "Enabled", "power_limit": 500.0, "mig_mode": "Enabled",
     "mig": ["3g.40gb:0", "1g.10gb:4"]},
    {"uuid": B, "persistence": None, "power_limit": None, "mig_mode": None, "mig": []},
]  # fmt: skip


class Tool:
    """nvidia-smi, as far as these settings go; `refuses` fails at a word."""

    def __init__(self, mig: str = "Disabled", devices: int = 0, limit: str = "700.00", refuses: str = "-") -> None:
        self.mig, self.devices, self.limit, self.refuses, self.set = mig, devices, limit, refuses, list[str]()

    def __call__(self, argv: list[str], *_: Any) -> dict[str, Any]:
        words = " ".join(argv[1:])
        if words.startswith("--query"):
            rows = [
                f"0, {A}, Disabled, {self.limit}, {self.mig}",
                f"1, {B}, [N/A], [N/A], [N/A]",
                "Unable to determine",
            ]
            return {"rc": 0, "out": "\n".join(rows), "err": ""}
        if words == "-L":
            lines = [f"GPU 0: X (UUID: {A})", *["  MIG 1g.10gb Device 0: (UUID: MIG-1)"] * self.devices]
            return {"rc": 0, "out": "\n".join([*lines, f"GPU 1: X (UUID: {B})"]), "err": ""}
        self.set.append(words)
        self.mig = "Enabled" if "-mig 1" in words else self.mig
        refused = self.refuses in words.split()
        return {"rc": 2 if refused else 0, "out": "", "err": "no\n" if refused else ""}


def put_back(monkeypatch: pytest.MonkeyPatch, tool: Tool) -> list[dict[str, Any]]:
    monkeypatch.setattr(settings, "run", tool)
    return settings.put_back(GOAL)


def test_what_differs_is_set_and_devices_come_after_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Tool()
    done = put_back(monkeypatch, tool)
    wanted = [f"-i {A} -pm 1", f"-i {A} -mig 1", f"-i {A} -pl 500", "mig -i 0 -cgi 3g.40gb:0,1g.10gb:4 -C"]
    assert tool.set == wanted and [row["rc"] for row in done] == [0] * 4


def test_what_is_as_wanted_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Tool(mig="Enabled", devices=1, limit="500.2")
    assert [row["command"] for row in put_back(monkeypatch, tool)] == [f"nvidia-smi -i {A} -pm 1"]


def test_a_card_that_does_not_tell_its_limit_is_not_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Tool(mig="Enabled", devices=2, limit="[N/A]")
    put_back(monkeypatch, tool)
    assert tool.set == [f"-i {A} -pm 1"]


def test_the_first_refusal_ends_it_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    done = put_back(monkeypatch, Tool(refuses="-mig"))
    assert [row["rc"] for row in done] == [0, 2] and done[-1]["said"] == "no"


def test_no_tool_no_deed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "run", lambda *_: {"rc": None, "out": "", "err": "nvidia-smi: not installed"})
    assert settings.put_back(GOAL) == []
