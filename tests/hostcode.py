"""Lets tests import what runs on hosts: playbooks/module_utils under its Ansible name, playbooks/library by path."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import ansible.module_utils
import ansible.module_utils.basic as basic

PLAYBOOKS = Path(__file__).resolve().parent.parent / "playbooks"
if str(PLAYBOOKS / "module_utils") not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(str(PLAYBOOKS / "module_utils"))

OWNER = {"change": "c1", "controller": "k1", "fence": 1, "reason": "test", "ticket": ""}


def library(name: str) -> ModuleType:
    """The module playbooks/library/<name>.py, imported."""
    spec = importlib.util.spec_from_file_location(name, PLAYBOOKS / "library" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def set_arguments(**params: Any) -> None:
    """What the next AnsibleModule(...) in this process will read as its arguments."""
    basic._ANSIBLE_ARGS = json.dumps({"ANSIBLE_MODULE_ARGS": params}).encode()
    basic._ANSIBLE_PROFILE = "legacy"


def call(name: str, **params: Any) -> dict[str, Any]:
    """Run a module in this process; the JSON that it printed."""
    set_arguments(**params)
    out = io.StringIO()
    with redirect_stdout(out), suppress(SystemExit):
        library(name).main()
    return dict(json.loads(out.getvalue().strip().splitlines()[-1]))
