"""Sphinx: the manual. The plan reference is written from the schema at each build, so that it cannot go stale."""

from __future__ import annotations

import sys
from pathlib import Path

import gpuchange

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from reference import plan_reference  # noqa: E402

project = "gpuchange"
version = release = gpuchange.__version__
extensions = ["myst_parser"]
html_theme = "furo"
exclude_patterns = ["_build"]
myst_heading_anchors = 3

(HERE / "plan-reference.md").write_text(plan_reference(), encoding="utf-8")
