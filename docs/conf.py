"""Sphinx: the manual. The plan reference is written from the schema at each build, so that it cannot go stale."""

from __future__ import annotations

from pathlib import Path

import gpuchange
from gpuchange.docs import plan_reference

project = "gpuchange"
version = release = gpuchange.__version__
extensions = ["myst_parser"]
html_theme = "furo"
exclude_patterns = ["_build"]
myst_heading_anchors = 3

Path(__file__).with_name("plan-reference.md").write_text(plan_reference(), encoding="utf-8")
