"""Loading: every shard of every parameter exactly once, or an error that names it (F1, F4 of the case list)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.execution.loader import load_model
from engine.layers.linear import PackedColumnParallelLinear
from engine.models.checkpoint import resolve_model
from engine.models.decoder import Decoder
from engine.parallel.group import ParallelGroup
from tests.engine.checkpoints import LLAMA, QWEN3, edit_config, write_random_checkpoint
from tests.engine.paged_batch import choose

UNTIED = QWEN3 | {"tie_word_embeddings": False}
BIASED = LLAMA | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2}


def load(
    model: Any,
    *,
    load_format: str = "auto",
    dtype: torch.dtype = torch.float32,
    group: ParallelGroup | None = None,
    seed: int = 0,
) -> Decoder:
    return load_model(
        resolve_model(model, load_format),
        load_format=load_format,
        device=torch.device("cpu"),
        dtype=dtype,
        group=group or ParallelGroup.single(),
        kernels=choose(),
        seed=seed,
    )


def all_tensors(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_holds(model: Decoder, tensors: dict[str, torch.Tensor]) -> None:
    shards = {shard.name: shard for shard in model.weight_shards()}
    for name, shard in shards.items():
        torch.testing.assert_close(shard.target, shard.slice_of(tensors[name]), rtol=0, atol=0)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters start as NaN: one that is not filled shows."""

    def poison(shape: Any, **options: Any) -> torch.Tensor:
        return torch.full(shape, torch.nan, **options)

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return poison if name == "empty" else getattr(torch, name)

    monkeypatch.setattr("engine.layers.linear.torch", Torch())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("config", [QWEN3, UNTIED, BIASED], ids=["tied", "untied", "biased"])
@pytest.mark.parametrize("max_shard_size", ["1GB", "40KB"])
def test_every_parameter_is_filled(tmp_path: Path, config: dict[str, Any], max_shard_size: str) -> None:
    write_random_checkpoint(tmp_path, config, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "40KB")
    model, tensors = load(tmp_path), all_tensors(tmp_path)
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
    assert_holds(model, tensors)
    assert {shard.name for shard in model.weight_shards()} == set(tensors)
    assert sum(tensor.numel() for tensor in tensors.values()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_cast_to_the_dtype_asked_for(tmp_path: Path, dtype: torch.dtype) -> None:
    write_random_checkpoint(tmp_path, UNTIED)
    model = load(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert_holds(model, {name: tensor.to(dtype) for name, tensor in all_tensors(tmp_path).items()})


# --- tied embeddings (F1) -----------------------------------------------------------------------------------


def write_in_order(directory: Path, tensors: dict[str, torch.Tensor], head_first: bool) -> None:
    """Two files, of which the first in name and in the index holds the head or the embedding."""
    for file in directory.glob("model*"):
        file.unlink()
    head = {name: tensor.clone() for name, tensor in tensors.items() if name == "lm_head.weight"}
    rest = {name: tensor.clone() for name, tensor in tensors.items() if name not in head}
    parts = [part for part in ([head, rest] if head_first else [rest, head]) if part]
    weight_map = {}
    for i, part in enumerate(parts):
        save_file(part, directory / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{i}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head_in_file", [False, True])
def test_the_head_follows_the_config(
    tmp_path: Path, tied: bool, head_in_file: bool, head_first: bool
) -> None:
    write_random_checkpoint(tmp_path, UNTIED)
    edit_config(tmp_path, tie_word_embeddings=tied)
    tensors = all_tensors(tmp_path)
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    assert not torch.equal(embedding, head)
    if not head_in_file:
        del tensors["lm_head.weight"]
    write_in_order(tmp_path, tensors, head_first)
    if not tied and not head_in_file:
        with pytest.raises(ValueError, match=r"lm_head\.weight"):
            load(tmp_path)
        return
    model = load(tmp_path)
    assert torch.equal(model.embed_tokens.weight, embedding)
    if tied:
        assert model.lm_head.weight.data_ptr() == model.embed_tokens.weight.data_ptr()
    else:
        assert torch.equal(model.lm_head.weight, head)


# --- what does not fit --------------------------------------------------------------------------------------

K = "model.layers.1.self_attn.k_proj.weight"


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[K]


def transpose(tensors: dict[str, torch.Tensor]) -> None:
    tensors[K] = tensors[K].T.contiguous()


def quantise(tensors: dict[str, torch.Tensor]) -> None:
    tensors[K] = tensors[K].to(torch.int8)


def add_bias(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.self_attn.k_proj.bias"] = torch.zeros(48)


def add_layer(tensors: dict[str, torch.Tensor]) -> None:
    tensors[K.replace("layers.1", "layers.3")] = tensors[K].clone()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (drop, rf"lacks tensor '{K}'"),
        (transpose, rf"'{K}'.*shape \(64, 48\).*\(48, 64\)"),
        (quantise, rf"'{K}'.*I8"),
        (add_bias, r"does not take, tensor 'model\.layers\.1\.self_attn\.k_proj\.bias'"),
        (add_layer, r"does not take, tensor 'model\.layers\.3\."),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], complaint: str
) -> None:
    write_random_checkpoint(tmp_path, QWEN3)
    tensors = all_tensors(tmp_path)
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=complaint):
        load(tmp_path)


def test_derived_tensors_of_old_checkpoints_are_left_aside(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, QWEN3)
    tensors = all_tensors(tmp_path) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(12)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert_holds(load(tmp_path), tensors)


def test_files_that_do_not_fit_their_index_are_named(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, QWEN3, max_shard_size="40KB")
    index_file = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    home = index["weight_map"][K]
    other = next(file for file in index["weight_map"].values() if file != home)

    def attempt(weight_map: dict[str, Any], complaint: str) -> None:
        index_file.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match=complaint):
            load(tmp_path)

    weight_map = index["weight_map"]
    attempt(weight_map | {K: other}, rf"puts tensor '{K}' in {other}, but it is in {home}")
    attempt(weight_map | {"extra": other}, rf"puts tensor 'extra' in {other}, but no file holds it")
    attempt(weight_map | {K: f"../{home}"}, rf"puts tensor '{K}' in '\.\./")
    attempt(
        weight_map | {K: "absent.safetensors"}, rf"puts tensor '{K}' in absent\.safetensors, which is missing"
    )
    attempt({}, "no weight_map")
    save_file(load_file(tmp_path / other) | {K: torch.zeros(48, 64)}, tmp_path / other)
    attempt(weight_map, rf"tensor '{K}' is in both")
    index_file.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 200, -1000])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    write_random_checkpoint(tmp_path, QWEN3)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        load(tmp_path)


def test_pickles_are_never_read(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, QWEN3)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle"):
        load(tmp_path)


def test_two_checkpoints_in_one_directory_are_refused(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, QWEN3, max_shard_size="40KB")
    save_file(all_tensors(tmp_path), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="both"):
        load(tmp_path)


# --- ranks (F4) ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("config", [QWEN3, UNTIED, BIASED], ids=["tied", "untied", "biased"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_the_shards_of_all_ranks_make_up_the_full_tensors(
    tmp_path: Path, config: dict[str, Any], size: int, load_format: str
) -> None:
    """Vocabulary 307 is odd, and at size 4 the two KV heads are replicated: rank r holds head r // 2."""
    write_random_checkpoint(tmp_path, config)
    full = {shard.name: shard.target for shard in load(tmp_path, load_format=load_format).weight_shards()}
    ranks = [load(tmp_path, load_format=load_format, group=ParallelGroup(rank, size)) for rank in range(size)]
    shards = [{shard.name: shard for shard in model.weight_shards()} for model in ranks]
    for name, tensor in full.items():
        pieces = [rank[name] for rank in shards]
        for piece in pieces:
            assert torch.equal(piece.target, piece.slice_of(tensor)), name
        if pieces[0].target.shape == tensor.shape:
            continue
        unique = {piece.start: piece.target for piece in pieces}
        copies = 2 if size == 4 and ("k_proj" in name or "v_proj" in name) else 1
        assert len(unique) == size // copies
        joined = torch.cat([unique[start] for start in sorted(unique)], dim=pieces[0].dim)
        assert torch.equal(joined, tensor), name
    for model in ranks:
        padding = model.embed_tokens.weight[model.embed_tokens.ids.num_ids :]
        assert not padding.any()
        for name, parameter in model.named_parameters():
            assert parameter.isfinite().all(), name
    assert ranks[-1].embed_tokens.weight[ranks[-1].embed_tokens.ids.num_ids :].numel() > 0


def test_a_rank_with_padding_only_loads(tmp_path: Path) -> None:
    """5 ids over 4 ranks: 2, 2, 1 and none."""
    write_random_checkpoint(tmp_path, UNTIED | {"vocab_size": 5})
    ids = [load(tmp_path, group=ParallelGroup(rank, 4)).embed_tokens.ids for rank in range(4)]
    assert [(part.start, part.num_ids, part.num_rows) for part in ids] == [
        (0, 2, 2),
        (2, 2, 2),
        (4, 1, 2),
        (5, 0, 2),
    ]


def test_a_rank_reads_only_its_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import engine.execution.loader as loader

    write_random_checkpoint(tmp_path, UNTIED)
    elements = 0

    class Counting:
        def __init__(self, stored: Any) -> None:
            self.get_shape, self.get_dtype, self.stored = stored.get_shape, stored.get_dtype, stored

        def __getitem__(self, index: Any) -> torch.Tensor:
            nonlocal elements
            part = self.stored[index]
            elements += part.numel()
            return part

    class File:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.file = real(*args, **options)

        def __enter__(self) -> Any:
            self.opened = self.file.__enter__()
            return self

        def __exit__(self, *args: Any) -> None:
            self.file.__exit__(*args)

        def get_slice(self, name: str) -> Counting:
            return Counting(self.opened.get_slice(name))

    real = loader.safe_open
    monkeypatch.setattr(loader, "safe_open", File)
    model = load(tmp_path, group=ParallelGroup(1, 2))
    assert elements == sum(shard.target.numel() for shard in model.weight_shards())


# --- dummy weights ------------------------------------------------------------------------------------------


def test_dummy_weights_come_from_the_seed() -> None:
    first, again, other = (load(QWEN3, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters()):
        assert torch.equal(a, b), name
        if name.endswith("norm.weight"):
            assert (a == 1).all()
        else:
            assert not torch.equal(a, c), name
            assert 0.015 < a.std() < 0.025
    gate, up = first.layers[0].mlp.gate_up_proj.weight.chunk(2)
    assert not torch.equal(gate, up)


def test_dummy_weights_need_no_checkpoint_file(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, QWEN3)
    (tmp_path / "model.safetensors").unlink()
    from_directory, from_mapping = (load(model, load_format="dummy") for model in (tmp_path, QWEN3))
    for a, b in zip(from_directory.parameters(), from_mapping.parameters()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("group", [ParallelGroup.single(), ParallelGroup(1, 2)], ids=["tp1", "tp2"])
def test_dummy_weights_are_the_checkpoints_whatever_the_engines_dtype(group: ParallelGroup) -> None:
    """A model in bf16 is the same one in fp32; a model in fp32 loses to bf16 what the cast takes, and no more."""
    for stored in ("bfloat16", "float32"):
        config = QWEN3 | {"dtype": stored}
        half, single = (
            load(config, load_format="dummy", dtype=dtype, group=group)
            for dtype in (torch.bfloat16, torch.float32)
        )
        for (name, a), b in zip(half.named_parameters(), single.parameters()):
            assert (a.dtype, b.dtype) == (torch.bfloat16, torch.float32)
            assert torch.equal(a, b.bfloat16()), name
            assert stored == "float32" or torch.equal(a.float(), b), name


def test_packed_projections_are_where_the_forward_pass_looks_for_them() -> None:
    model = load(UNTIED, load_format="dummy")
    shards = {shard.name: shard.target for shard in model.weight_shards()}
    qkv = model.layers[0].self_attn.qkv_proj
    assert isinstance(qkv, PackedColumnParallelLinear)
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    assert torch.equal(qkv.weight, torch.cat([shards[name] for name in names]))


# --- on a GPU -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_weights_go_straight_to_the_gpu(tmp_path: Path) -> None:
    """No second copy on the way: beyond the model itself, at most one tensor as stored, and its cast."""
    config = UNTIED | {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192}
    write_random_checkpoint(tmp_path, config, max_shard_size="8MB")
    tensors = all_tensors(tmp_path)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load_model(
        resolve_model(tmp_path, "auto"),
        load_format="auto",
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        group=ParallelGroup.single(),
        kernels=choose(),
        seed=0,
    )
    largest = max(tensor.nbytes for tensor in tensors.values())
    held = torch.cuda.memory_allocated() - before
    assert torch.cuda.max_memory_allocated() - before <= held + 2 * largest + 2**20
    assert_holds(model, {name: tensor.to("cuda", torch.bfloat16) for name, tensor in tensors.items()})


@pytest.mark.gpu
def test_dummy_weights_on_a_gpu_are_the_same_for_any_number_of_ranks() -> None:
    def shards(group: ParallelGroup) -> dict[str, Any]:
        model = load_model(
            resolve_model(UNTIED, "dummy"),
            load_format="dummy",
            device=torch.device("cuda"),
            dtype=torch.bfloat16,
            group=group,
            kernels=choose(),
            seed=0,
        )
        return {shard.name: shard for shard in model.weight_shards()}

    full = shards(ParallelGroup.single())
    for rank in range(2):
        for name, shard in shards(ParallelGroup(rank, 2)).items():
            assert torch.equal(shard.target, shard.slice_of(full[name].target)), name
