"""Checkpoints on a host: whole or torn by their own heads, lists and sizes, without running a pickle."""

from __future__ import annotations

import io
import json
import os
import pickle
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostcode  # noqa: F401  (puts module_utils on Ansible's path)
import pytest
from ansible.module_utils import gpuchange_checkpoints as checkpoints
from ansible.module_utils import gpuchange_json_stream as json_stream
from ansible.module_utils import gpuchange_pickle_look as pickle_look
from checkpoints import distributed, safetensors, sharded
from test_module_data import findings, make


@pytest.fixture
def top(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def test_a_whole_model_has_no_findings(top: Path) -> None:
    sharded(top / "llama")
    distributed(top / "step-100")
    found = make(top)["data"]
    assert found["findings"]["kept"] == []
    assert found["checkpoints"] == {"safetensors": 3, "index": 1, "distributed": 1, "archive": 0}


def test_shards_missing_unlisted_cut_and_of_another_model_are_named(top: Path) -> None:
    index = sharded(top, shards=4)
    shard = "model-0000{}-of-00004.safetensors".format
    (top / shard(1)).unlink()
    os.truncate(top / shard(2), 1500)
    (top / shard(3)).write_bytes(safetensors({"layers.3.up": 2000}))
    (top / "model-00005-of-00004.safetensors").write_bytes(safetensors({}))
    lines = findings(top)
    size = os.path.getsize(top / shard(4))
    assert lines == [
        f"{shard(2)} has 1500 bytes, its header says {size}",
        f"{index.name} lists {shard(1)}, which is not there",
        f"{index.name} lists {shard(2)}, which has 1500 bytes, its header says {size}",
        f"{index.name} lists {shard(3)}, which holds 1 tensors, not 2",
        f"{index.name} does not list model-00005-of-00004.safetensors, which lies beside it",
    ]


def test_a_total_that_differs_and_an_index_that_forgets_a_shard_are_named(top: Path) -> None:
    index = sharded(top)
    content = json.loads(index.read_text())
    content["weight_map"] = {key: name for key, name in content["weight_map"].items() if "-00003-" not in name}
    index.write_text(json.dumps(content))
    assert findings(top) == [
        f"{index.name} says total_size 6000, its shards hold 4000 bytes",
        f"{index.name} does not list model-00003-of-00003.safetensors, which lies beside it",
        f"{index.name} lists 2 shards of model, their names say 3",
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"weight_map": {"a": "x.safetensors"', "ends in the middle"),
        ('{"weight_map": {}}', "lists no shard"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "lies outside of its directory"),
        ('{"weight_map": {"a": "gone.safetensors"}} x', "not JSON"),
        ("[" * 100, "nested more than"),
    ],
)
def test_an_index_that_is_none_says_why(top: Path, content: str, says: str) -> None:
    (top / "model.safetensors.index.json").write_text(content)
    assert says in findings(top)[0]


def test_a_shard_behind_a_link_is_followed_inside_and_never_outside(top: Path) -> None:
    outside = top.parent / "outside.safetensors"
    outside.write_bytes(b"torn")
    (top / "a.safetensors").symlink_to(outside)
    (top / "b.safetensors").symlink_to("nothing")
    (top / "blob").write_bytes(b"torn")
    (top / "c.safetensors").symlink_to("blob")
    assert findings(top) == [
        "b.safetensors is a link to nothing",
        "c.safetensors is cut: it ends within its first 8 bytes",
    ]


def test_torch_archives_are_judged_by_their_end(top: Path) -> None:
    with zipfile.ZipFile(top / "whole.pt", "w") as archive:
        archive.writestr("data.pkl", "x" * 1000)
    (top / "cut.bin").write_bytes((top / "whole.pt").read_bytes()[:800])
    (top / "legacy.bin").write_bytes(b"\x80\x02legacy")
    assert findings(top) == ["cut.bin is cut: the archive's directory at its end is missing"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_distributed_checkpoint_is_read_whatever_protocol_wrote_it(top: Path, protocol: int) -> None:
    distributed(top, ranks=3, tensors=1200, protocol=protocol)
    assert findings(top) == []
    os.truncate(top / "__1_0.distcp", 7)
    (top / "__2_0.distcp").unlink()
    (top / "__9_0.distcp").write_bytes(b"")
    assert findings(top) == [
        ".metadata lists __1_0.distcp, which has 7 bytes, not 120000",
        ".metadata lists __2_0.distcp, which is not there",
        ".metadata does not list __9_0.distcp, which lies beside it",
    ]


def test_a_distributed_checkpoint_without_its_metadata_was_never_finished(top: Path) -> None:
    distributed(top / "step", ranks=3).unlink()
    assert findings(top) == [
        "step/__0_0.distcp has no .metadata beside it: the checkpoint was never finished",
    ]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/gpuchange-was-here",)


def test_a_pickle_is_never_executed(top: Path) -> None:
    mark = Path("/tmp/gpuchange-was-here")
    (top / ".metadata").write_bytes(pickle.dumps([Evil(), {"relative_path": "x"}]))
    make(top)
    assert not mark.exists()
    pickle.loads((top / ".metadata").read_bytes())
    assert mark.exists()  # it does bite
    mark.unlink()


@pytest.mark.parametrize(
    ("torn", "says"),
    [
        (b"\x80\x04", "pickle exhausted"),
        (b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"x", "single value"),
        (b"\x80\x04" + b"(" * 300_000 + b".", "nested or wide"),
        (b"\x80\x04a.", "takes more than it has given"),
    ],
)
def test_a_metadata_file_that_is_none_says_why(top: Path, torn: bytes, says: str) -> None:
    (top / ".metadata").write_bytes(torn)
    assert says in findings(top)[0]


def test_large_metadata_and_indexes_are_read_in_bounded_memory(top: Path) -> None:
    path = distributed(top, ranks=2, tensors=30_000)
    large = {"weight_map": {f"model.layers.{n}.mlp.experts.weight": "model.safetensors" for n in range(60_000)}}
    text = io.BytesIO(json.dumps(large).encode())
    tracemalloc.start()
    with open(path, "rb") as file:
        count = sum(1 for _ in pickle_look.states(file, checkpoints.STORED))
    scalars = sum(1 for _ in json_stream.scalars(text.read))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (count, scalars) == (60_000, 60_000) and peak < 4 * 1024 * 1024


@pytest.mark.parametrize(
    "value", [{}, [], "ü\n", 1.5e3, {"a": [1, {"b": None}], "": [[]], "é\\": True}, [0] * 50_000, "x" * 200_000]
)
def test_the_stream_reads_json_as_json_does(value: Any) -> None:
    def flat(part: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
        pairs = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else None
        if pairs is None:
            yield where, part
            return
        for key, each in pairs:
            yield from flat(each, (*where, key))

    for indent in (None, 2):
        text = io.BytesIO(json.dumps(value, indent=indent).encode())
        assert list(json_stream.scalars(text.read)) == list(flat(value))


@pytest.mark.parametrize(
    "text", ["", "{", '{"a"}', '{"a":1,}', "[1,]", "[1 2]", "{1:2}", "tru", '"a', "1 2", "]", "nul", "[,]"]
)
def test_the_stream_refuses_what_is_no_json(text: str) -> None:
    with pytest.raises(ValueError):
        list(json_stream.scalars(io.BytesIO(text.encode()).read))
