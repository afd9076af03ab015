"""Broken checkpoints of every kind: a ValueError that names what is wrong, or exactly the right weights. In time.

What no reader can notice is left out: safetensors has no checksum, so a bit that flips inside a tensor's own bytes is
another weight.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.models.checkpoint import resolve_model
from engine.models.config import ModelConfig
from tests.engine.checkpoints import QWEN3, REPOSITORY, edit_config, write_random_checkpoint
from tests.engine.test_loader import all_tensors, assert_holds, load

SMALL = QWEN3 | {"hidden_size": 8, "intermediate_size": 12, "vocab_size": 11, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 16}
FUZZ = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """(one file, several files): the same checkpoint twice."""
    root = tmp_path_factory.mktemp("good")
    write_random_checkpoint(root / "single", SMALL, eos_token_id=[5, 9])
    write_random_checkpoint(root / "sharded", SMALL, eos_token_id=[5, 9], max_shard_size="1KB")
    assert len(list((root / "sharded").glob("*.safetensors"))) > 3
    return root / "single", root / "sharded"


@pytest.fixture
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch") / "model"


def load_or_refuse(directory: Path, good: Path) -> bool:
    """Whether it loads, and then with the good one's weights; False if it is refused with a ValueError."""
    try:
        model = load(directory)
    except ValueError:
        return False
    assert_holds(model, all_tensors(good))
    return True


def copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


def header_size(content: bytes) -> int:
    return 8 + struct.unpack("<Q", content[:8])[0]


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """A change of a file's bytes, weights excepted. Positions are fractions, so that they fit any file."""
    kind = draw(st.sampled_from(["flip", "flip", "flip", "cut", "append", "drop", "insert", "digit", "zero"]))
    where, bit = draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(0, 7))
    junk = draw(st.binary(min_size=1, max_size=9))

    def damage(content: bytes) -> bytes:
        is_tensors = content[8:9] == b"{"
        end = header_size(content) if is_tensors else len(content)
        at = int(where * end)
        if kind == "flip":
            return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]
        if kind == "digit":
            digits = [i for i in range(8 * is_tensors, end) if chr(content[i]).isdigit()]
            at = digits[int(where * len(digits))]
            return content[:at] + b"%d" % bit + content[at + 1 :]
        if kind == "cut":
            return content[: int(where * len(content))]
        if kind == "append":
            return content + junk
        if kind == "drop":
            return content[:at] + content[at + 1 :]
        if kind == "insert":
            return content[:at] + junk + content[at:]
        return content[:at] + bytes(len(content[at:end])) + content[end:]

    return damage


@settings(max_examples=200, **FUZZ)
@given(damage=damages(), which=st.integers(0, 100), sharded=st.booleans())
def test_damaged_bytes_are_refused_or_change_nothing(good, scratch, damage, which, sharded):
    source = good[sharded]
    copy(source, scratch)
    files = sorted(file for file in scratch.iterdir() if file.name.startswith("model"))
    file = files[which % len(files)]
    file.write_bytes(damage(file.read_bytes()))
    load_or_refuse(scratch, source)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**3), 10**3)
    | st.sampled_from(
        [2**31, 2**63, 10**30, -1, 0, 1.5, 1e308, float("nan"), float("inf"), "", "x", "silu", "float32"]
    )
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
FIELDS = sorted(ModelConfig.__dataclass_fields__)


@settings(max_examples=300, **FUZZ)
@given(data=st.data())
def test_any_value_of_any_field_of_the_config_is_refused_or_honoured(good, scratch, data):
    copy(good[0], scratch)
    file = scratch / "config.json"
    config = json.loads(file.read_text())
    unused = ["rope_theta", "rope_scaling", "torch_dtype", "sliding_window", "mlp_bias", "pretraining_tp"]
    field = data.draw(st.sampled_from(sorted(config) + unused))
    if isinstance(config.get(field), dict) and data.draw(st.booleans()):
        inner = data.draw(st.sampled_from([*sorted(config[field]), "factor", "type", "beta_fast"]))
        config[field][inner] = data.draw(JSON)
    elif data.draw(st.integers(0, 9)):
        config[field] = data.draw(JSON)
    else:
        config.pop(field, None)
    file.write_text(json.dumps(config))
    before = ModelConfig.from_hf(json.loads((good[0] / "config.json").read_text()))
    if load_or_refuse(scratch, good[0]):
        after = ModelConfig.from_hf(config)
        for size in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "qk_norm",
            "architecture",
        ):
            assert getattr(after, size) == getattr(before, size)


@settings(max_examples=200, **FUZZ)
@given(damage=damages(), name=st.sampled_from(["config.json", "generation_config.json"]))
def test_damaged_configuration_text_is_refused_or_read_alike_by_json(good, scratch, damage, name):
    copy(good[0], scratch)
    file = scratch / name
    file.write_bytes(damage(file.read_bytes()))
    if load_or_refuse(scratch, good[0]):
        json.loads(file.read_text())


@settings(max_examples=200, **FUZZ)
@given(data=st.data())
def test_a_damaged_index_is_refused_or_leads_to_the_same_weights(good, scratch, data):
    copy(good[1], scratch)
    file = scratch / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    names = sorted(index["weight_map"])
    name = data.draw(st.sampled_from(names))
    change = data.draw(st.sampled_from(["drop", "swap", "value", "rename", "whole"]))
    if change == "drop":
        del index["weight_map"][name]
    elif change == "swap":
        index["weight_map"][name] = index["weight_map"][data.draw(st.sampled_from(names))]
    elif change == "value":
        index["weight_map"][name] = data.draw(
            JSON | st.sampled_from(["../x.safetensors", "/etc/passwd", "config.json"])
        )
    elif change == "rename":
        index["weight_map"][data.draw(st.text(max_size=9))] = index["weight_map"].pop(name)
    else:
        index = data.draw(JSON)
    file.write_text(json.dumps(index))
    load_or_refuse(scratch, good[1])


# --- kinds that chance does not find ------------------------------------------------------------------------


def rewrite_header(file: Path, change: Callable[[dict[str, Any]], str]) -> None:
    content = file.read_bytes()
    end = header_size(content)
    header = change(json.loads(content[8:end])).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + content[end:])


def add_key(key: str, like: str) -> Callable[[dict[str, Any]], str]:
    """The header with one key more, even where it is there already."""
    return lambda header: json.dumps(header)[:-1] + f", {json.dumps(key)}: {json.dumps(header[like])}}}"


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "original_max_position_embeddings": 64}
NORM, OTHER_NORM = "model.norm.weight", "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    "change",
    [
        add_key(NORM, OTHER_NORM),
        lambda header: json.dumps(header | {NORM: header[OTHER_NORM]}),
        lambda header: json.dumps(header | {NORM: header[NORM] | {"shape": [-8]}}),
        lambda header: json.dumps(header | {NORM: header[NORM] | {"shape": [2, 4]}}),
        lambda header: json.dumps(header | {NORM: header[NORM] | {"shape": [2**63, 2]}}),
        lambda header: json.dumps(header | {NORM: header[NORM] | {"dtype": "I32"}}),
        lambda header: json.dumps(header | {NORM: header[NORM] | {"dtype": "F8_E4M3", "shape": [32]}}),
        lambda header: json.dumps(header | {NORM: header[NORM] | {"data_offsets": [0, 2**63]}}),
        lambda header: "[" * 100_000,
        lambda header: "",
    ],
)
def test_a_header_that_lies_is_refused(good, scratch, change):
    copy(good[0], scratch)
    rewrite_header(scratch / "model.safetensors", change)
    assert not load_or_refuse(scratch, good[0])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        bytes(8),
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 100_000_000) + b" " * 50,
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n",
        b"PK\x03\x04 a pickle in a zip",
        b"<!doctype html>",
    ],
)
def test_what_is_no_safetensors_file_is_named(good, scratch, content):
    copy(good[0], scratch)
    (scratch / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read as safetensors"):
        load(scratch)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"]
)
@pytest.mark.parametrize("kind", ["directory", "deep", "twice", "dangling"])
def test_odd_things_in_a_files_place_are_refused(good, scratch, name, kind):
    copy(good[name.endswith("index.json")], scratch)
    file = scratch / name
    file.unlink()
    if kind == "directory":
        file.mkdir()
    elif kind == "deep":
        file.write_text('{"a":' * 100_000)
    elif kind == "twice":
        file.write_text('{"eos_token_id": 1, "weight_map": {}, "eos_token_id": 2}')
    else:
        file.symlink_to("nowhere")
    # Without generation_config.json there is nothing to refuse.
    assert not load_or_refuse(scratch, good[0]) or (kind, name) == ("dangling", "generation_config.json")


def test_a_pipe_in_a_files_place_is_not_waited_for(good, scratch):
    """In a process of its own: a reader that waits in a system call could not be interrupted here."""
    names = ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"]
    for i, name in enumerate(names):
        copy(good[name.endswith("index.json")], scratch / str(i))
        (scratch / str(i) / name).unlink()
        os.mkfifo(scratch / str(i) / name)
    code = """if True:
        import sys
        from pathlib import Path
        from tests.engine.test_loader import load
        for directory in sorted(Path(sys.argv[1]).iterdir()):
            try:
                load(directory)
            except ValueError as error:
                print(error)
        """
    done = subprocess.run(
        [sys.executable, "-c", code, str(scratch)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    refusals = done.stdout.splitlines()
    assert [f"{name} is no regular file" in line for name, line in zip(names, refusals, strict=True)] == [
        True
    ] * 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"num_hidden_layers": 60_000, "layer_types": None},
            "num_hidden_layers is 60000, but .* tensors in all",
        ),
        ({"num_hidden_layers": 10**9, "layer_types": None}, "num_layers must be at most"),
        ({"vocab_size": 2**31 - 1}, r"has shape \(11, 8\), the model takes \(2147483647, 8\)"),
        ({"hidden_size": 10**30}, "hidden_size must be at most"),
        ({"max_position_embeddings": 2**31 - 1}, "max_position_embeddings must be at most 16777216"),
        ({"rope_parameters": YARN | {"factor": 1.7e308}}, "max_position_embeddings must be at most"),
        ({"rope_parameters": YARN | {"factor": 1e6}}, "max_position_embeddings must be at most"),
        ({"head_dim": 10**9}, "head_dim must be at most 65536"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a number in"),
        ({"rope_parameters": {"rope_theta": 10**400}}, "rope_theta must be a number"),
        ({"layer_types": 5}, "layer_types must be a list, got 5"),
        ({"architectures": [["x"]]}, "architecture .* is not supported"),
    ],
)
def test_sizes_beyond_reason_cost_neither_time_nor_memory(good, scratch, fields, message):
    copy(good[0], scratch)
    edit_config(scratch, **fields)
    with pytest.raises(ValueError, match=message):
        load(scratch)


# --- odd but valid ------------------------------------------------------------------------------------------


def test_odd_but_valid_checkpoints_load(good, scratch):
    tensors = all_tensors(good[0])
    copy(good[0], scratch)
    (scratch / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:1], "b.safetensors": names[1:2], "c.safetensors": names[2:]}
    for file, held in parts.items():
        save_file(
            {name: tensors[name].clone() for name in held},
            scratch / file,
            metadata={"format": "tf", "x": "é"},
        )
    weight_map = {name: file for file, held in parts.items() for name in held}
    index = {"metadata": {"total_size": "wrong"}, "weight_map": weight_map, "extra": [1]}
    (scratch / "model.safetensors.index.json").write_text(json.dumps(index, indent=9))
    (scratch / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'exit 1'\ntR.")
    (scratch / "unrelated.safetensors").write_bytes(b"not read")
    (scratch / "modeling_evil.py").write_text("raise SystemExit('remote code ran')")
    (scratch / "generation_config.json").unlink()
    edit_config(scratch, auto_map=None, torch_dtype="float32", _odd="x", bos_token_id=None)
    assert load_or_refuse(scratch, good[0])
    assert resolve_model(scratch, "auto").eos_token_ids == ()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_weights_stored_in_any_float_format_load_cast(good, scratch, dtype):
    copy(good[0], scratch)
    stored = {name: tensor.to(dtype) for name, tensor in load_file(scratch / "model.safetensors").items()}
    save_file(stored, scratch / "model.safetensors")
    assert_holds(load(scratch), {name: tensor.float() for name, tensor in stored.items()})


def test_remote_code_is_refused_by_name(good, scratch):
    copy(good[0], scratch)
    edit_config(scratch, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    with pytest.raises(ValueError, match="auto_map"):
        load(scratch)
