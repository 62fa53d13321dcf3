"""Writes checkpoints as their tools lay them out: safetensors with an index, torch distributed checkpoints."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"


def safetensors(tensors: dict[str, int]) -> bytes:
    """A file with these tensors of so many bytes each."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(range(256)) * (at // 256) + bytes(at % 256)


def sharded(folder: Path, shards: int = 3, size: int = 1000) -> Path:
    """A Hugging Face model of several shards with two tensors each; returns its index."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number in range(1, shards + 1):
        name = f"model-{number:05}-of-{shards:05}.safetensors"
        tensors = {f"layers.{number}.up": size, f"layers.{number}.down": size}
        (folder / name).write_bytes(safetensors(tensors))
        weight_map.update(dict.fromkeys(tensors, name))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 2 * size * shards}, "weight_map": weight_map}, indent=2))
    return index


@dataclass
class Chunk:
    offsets: Any
    sizes: Any


@dataclass(frozen=True)
class Index:
    fqn: str
    offset: Any = None
    index: int | None = None


@dataclass
class Stored:
    relative_path: str
    offset: int
    length: int
    transform_descriptors: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclass
class Metadata:
    state_dict_metadata: dict[str, Any]
    planner_data: Any = None
    storage_data: Any = None
    storage_meta: Any = None
    version: str | None = None


def distributed(folder: Path, ranks: int = 2, tensors: int = 5, length: int = 100, protocol: int = 4) -> Path:
    """A torch distributed checkpoint, its `.metadata` pickled under torch's names; returns that file."""
    folder.mkdir(parents=True, exist_ok=True)
    stored: dict[Any, Any] = {}
    for rank in range(ranks):
        name = f"__{rank}_0.distcp"
        (folder / name).write_bytes(bytes(length) * tensors)
        for number in range(tensors):
            stored[Index(f"layer{number}.weight", (rank, 0), rank)] = Stored(name, number * length, length)
    known = {f"layer{number}.weight": [Chunk((0, 0), (4, 4)), Chunk((4, 0), (4, 4))] for number in range(tensors)}
    path = folder / ".metadata"
    path.write_bytes(_pickled(Metadata(known, {"step": ("step",)}, stored), protocol))
    return path


def _pickled(value: Any, protocol: int) -> bytes:
    """As torch would: the classes bear its modules' names, which no reader here can import."""
    homes = {Chunk: METADATA, Index: METADATA, Metadata: METADATA, Stored: FILESYSTEM}
    own = {each: (each.__module__, each.__qualname__) for each in homes}
    made = {name: ModuleType(name) for name in ("torch", "torch.distributed", "torch.distributed.checkpoint")}
    made.update({name: ModuleType(name) for name in set(homes.values())})
    names = {Chunk: "ChunkStorageMetadata", Index: "MetadataIndex", Metadata: "Metadata", Stored: "_StorageInfo"}
    kept = {name: sys.modules.get(name) for name in made}
    try:
        sys.modules.update(made)
        for each, home in homes.items():
            each.__module__, each.__qualname__ = home, names[each]
            setattr(made[home], names[each], each)
        return pickle.dumps(value, protocol)
    finally:
        for each, (module, qualname) in own.items():
            each.__module__, each.__qualname__ = module, qualname
        for name, module_of in kept.items():
            if module_of is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_of
