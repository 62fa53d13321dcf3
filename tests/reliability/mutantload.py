"""How a mutant gets into a process: as its module is imported, or into functions that are there already."""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from reliability.mutation import mutated

At = tuple[int, int]


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, at: At) -> None:
        super().__init__(name, path)
        self.at = at

    def get_code(self, fullname: str) -> CodeType:
        return compile(mutated(Path(self.path).read_text(), self.at), self.path, "exec")


class Finder(importlib.abc.MetaPathFinder):
    """Put first into sys.meta_path: the module is imported with its fault."""

    def __init__(self, root: Path, module: str, at: At) -> None:
        self.name, self.path, self.at = _name(module), str(root / module), at

    def find_spec(self, fullname: str, _path: Any, _target: ModuleType | None = None) -> Any:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=_Loader(fullname, self.path, self.at))


def swap(root: Path, module: str, at: At) -> bool:
    """Put the fault into the imported module's functions. False, and nothing done, when it does not lie in one."""
    sound = functions(root / module)
    faulty = _functions(compile(mutated((root / module).read_text(), at), "", "exec"))
    moved = [name for name, code in faulty.items() if sound.get(name) != code]
    if sound.keys() != faulty.keys() or len(moved) != 1:
        return False
    function = _live(sys.modules[_name(module)], moved[0])
    if function is None or function.__code__.co_freevars != faulty[moved[0]].co_freevars:
        return False
    function.__code__ = faulty[moved[0]]
    return True


@lru_cache
def functions(path: Path) -> dict[str, CodeType]:
    """The functions of a module as it is; asked for before a fork, its forks need not compile it."""
    return _functions(compile(ast.parse(path.read_text()), "", "exec"))


def _name(module: str) -> str:
    return module.removesuffix(".py").replace("/", ".")


def _functions(code: CodeType) -> dict[str, CodeType]:
    """Functions and methods of a compiled module by their qualified name; what is inside one belongs to it."""
    found: dict[str, CodeType] = {}
    for part in code.co_consts:
        if not isinstance(part, CodeType) or part.co_name.startswith("<"):
            continue
        if part.co_flags & 0x2:  # CO_NEWLOCALS: a function, not the body of a class
            found[part.co_qualname] = part
        else:
            found |= _functions(part)
    return found


def _live(module: ModuleType, name: str) -> FunctionType | None:
    found: Any = module
    for part in name.split("."):
        found = vars(found).get(part)
    for inner in ("fget", "func", "__func__", "__wrapped__"):
        found = getattr(found, inner, found)
    return found if isinstance(found, FunctionType) else None
