"""All layers in one launch against the separate kernels, in the interpreter; what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from kernels.persistent import LayerShape, LayerTile, PersistentLayers
from tests.kernels.persistent_case import Step, random_layers, run_separately

QWEN3 = LayerShape(
    hidden_size=48,
    intermediate_size=72,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    eps=1e-6,
    qk_norm=True,
    attention_bias=False,
    mlp_bias=False,
)
LLAMA = dataclasses.replace(QWEN3, qk_norm=False, attention_bias=True, mlp_bias=True)
TILE = LayerTile(numel=2048, block_k=32, keys=32)
LAYERS = 2


def check(
    shape: LayerShape,
    contexts: list[int],
    device: torch.device,
    *,
    num_programs: int | None,
    tile: LayerTile = TILE,
    block_size: int = 16,
    num_layers: int = LAYERS,
) -> None:
    weights = random_layers(shape, num_layers, device=device)
    step = Step.random(shape, num_layers, contexts, block_size=block_size, device=device)
    expected = step.clone()
    run_separately(shape, weights, expected)
    if device.type == "cuda":
        num_programs = None
    layers = PersistentLayers(shape, weights, num_programs=num_programs, tile=tile)
    for scratch in (layers._qkv, layers._heads, layers._gated, layers._partial, layers._lse):
        scratch.fill_(float("nan"))
    step.run(layers)
    rows = [row for row, context in enumerate(contexts) if context]  # what a padding row holds means nothing
    torch.testing.assert_close(step.stream[rows], expected.stream[rows], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(step.kv_cache, expected.kv_cache, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert step.stream[rows].isfinite().all()
    assert layers._counter.item() == 0, "the next launch's barriers would not hold"


@pytest.mark.parametrize("shape", [QWEN3, LLAMA], ids=["qk-norm", "biases"])
def test_equals_the_separate_kernels(shape: LayerShape, device: torch.device) -> None:
    """Three splits of one row: six programs, two stripes or more each."""
    check(shape, [70], device, num_programs=6)


@pytest.mark.parametrize(
    ("contexts", "num_programs"),
    [
        ([1], 7),  # nothing cached, one program too many
        ([2, 100], 5),  # the first row's second split is empty
        ([0, 33], 9),  # a padding row, and a program too many again
        ([64, 65], 11),
    ],
)
def test_rows_and_contexts(contexts: list[int], num_programs: int, device: torch.device) -> None:
    check(QWEN3, contexts, device, num_programs=num_programs, num_layers=1)


@pytest.mark.parametrize(
    ("block_size", "keys"), [(16, 16), (16, 64), (64, 32), (64, 64), (48, 32)], ids=lambda value: str(value)
)
def test_blocks_and_tiles_of_keys(block_size: int, keys: int, device: torch.device) -> None:
    tile = dataclasses.replace(TILE, keys=keys)
    check(QWEN3, [150], device, num_programs=5, tile=tile, block_size=block_size, num_layers=1)


@pytest.mark.parametrize("context", [1, 70])
def test_rounds_where_the_separate_kernels_do(context: int, device: torch.device) -> None:
    """In fp16, of which the interpreter keeps every bit: not one may differ for want of a rounding."""
    weights = random_layers(QWEN3, 1, dtype=torch.float16, device=device)
    step = Step.random(QWEN3, 1, [context], dtype=torch.float16, device=device)
    expected = step.clone()
    run_separately(QWEN3, weights, expected)
    step.run(PersistentLayers(QWEN3, weights, num_programs=6 if device.type == "cpu" else None, tile=TILE))
    if device.type == "cpu":
        assert torch.equal(step.stream, expected.stream)
    torch.testing.assert_close(step.stream, expected.stream, rtol=5e-3, atol=5e-3)


def test_an_output_beyond_the_numbers_leaves_the_others_alone(device: torch.device) -> None:
    weights = random_layers(QWEN3, 1, device=device)
    weights[0]["down"][5, 60] = float("inf")
    step = Step.random(QWEN3, 1, [20], device=device)
    step.run(PersistentLayers(QWEN3, weights, num_programs=2 if device.type == "cpu" else None, tile=TILE))
    assert (~step.stream.isfinite()).nonzero().tolist() == [[0, 5]]


def test_one_program_meets_itself(device: torch.device) -> None:
    """All phases in one launch, as on a GPU: its barriers and its loads ahead of them."""
    check(dataclasses.replace(QWEN3, num_q_heads=3, num_kv_heads=1), [40], device, num_programs=1)


def test_rows_do_not_see_one_another(device: torch.device) -> None:
    """NaN in one row stays there."""
    weights = random_layers(QWEN3, 1, device=device)
    layers = PersistentLayers(QWEN3, weights, num_programs=8 if device.type == "cpu" else None, tile=TILE)
    step = Step.random(QWEN3, 1, [20, 35], device=device)
    poisoned = step.clone()
    poisoned.stream[0] = float("nan")
    step.run(layers)
    poisoned.run(layers)
    assert poisoned.stream[0].isnan().all()
    assert torch.equal(poisoned.stream[1], step.stream[1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 80}, "head_dim is 80, supported: powers of two from 16 to 256"),
        ({"num_q_heads": 5}, "num_q_heads is 5, expected a multiple of num_kv_heads 2"),
        ({"num_q_heads": 34}, "num_q_heads is 34, the limit is 16 for each KV head"),
        ({"hidden_size": 100}, "hidden_size is 100, expected a multiple of 8"),
        ({"intermediate_size": 36}, "intermediate_size is 36, expected a multiple of 8"),
    ],
)
def test_shapes_that_are_refused(change: dict[str, int], reason: str, device: torch.device) -> None:
    shape = dataclasses.replace(QWEN3, **change)
    assert shape.unsupported() == reason
    with pytest.raises(ValueError, match=reason):
        PersistentLayers(shape, random_layers(QWEN3, 1, device=device))


def test_weights_that_are_refused(device: torch.device) -> None:
    def refused(name: str, weight: torch.Tensor, match: str) -> None:
        weights = random_layers(QWEN3, 2, device=device)
        weights[1][name] = weight
        with pytest.raises(ValueError, match=match):
            PersistentLayers(QWEN3, weights)

    down = torch.zeros(72, 48, device=device)
    refused("down", down, r"layer 1: down must be contiguous \[48, 72\], got shape \(72, 48\)")
    refused("down", down.T, "layer 1: down must be contiguous")
    refused(
        "down", down.T.contiguous().half(), "layer 1: down must be torch.float32 on .*, got torch.float16"
    )
    shifted = torch.zeros(48 * 72 + 1, device=device)[1:].view(48, 72)
    refused(
        "down", shifted, "layer 1: down must be torch.float32 on .* at a multiple of 16 bytes, got .* at 0x"
    )
    refused("o_bias", torch.zeros(48, device=device), "layer 1 has down, .*, expected down, gate_up")


def test_grids_and_networks_that_are_refused(device: torch.device) -> None:
    weights = random_layers(QWEN3, 1, device=device)
    for num_programs in (-1, 0, 1):
        with pytest.raises(ValueError, match=f"num_programs is {num_programs}, the least is num_kv_heads, 2"):
            PersistentLayers(QWEN3, weights, num_programs=num_programs)
    with pytest.raises(ValueError, match="weights has no layers, the least is 1"):
        PersistentLayers(QWEN3, [])
    with pytest.raises(ValueError, match="layer 0 has , expected down"):
        PersistentLayers(QWEN3, [{}])


def test_calls_that_are_refused(device: torch.device) -> None:
    weights = random_layers(QWEN3, 1, device=device)
    step = Step.random(QWEN3, 1, [20, 35, 40], device=device)
    with pytest.raises(ValueError, match="stream has 3 rows, the limit is 2"):
        step.run(PersistentLayers(QWEN3, weights, num_programs=9))
    layers = PersistentLayers(QWEN3, weights, num_programs=3)
    with pytest.raises(
        ValueError, match="stream has 2 rows, the limit is 1"
    ):  # a program has one row and KV head
        Step.random(QWEN3, 1, [20, 35], device=device).run(layers)
    step = Step.random(QWEN3, 1, [20], device=device)
    for name, value, match in (
        ("stream", step.stream[:, :40], r"stream must be contiguous \[rows, 48\], got shape \(1, 40\)"),
        ("stream", step.stream.half(), "stream must be torch.float32 on .*, got torch.float16"),
        ("kv_cache", step.kv_cache[..., :8], r"kv_cache must be \[1, 2, num_blocks, block_size, 2, 16\]"),
        ("kv_cache", step.kv_cache[:, :, :, :8], "kv_cache must be .* with contiguous blocks"),
        (
            "kv_cache",
            step.kv_cache[:, :, :, :8].contiguous(),
            "kv_cache: block_size is 8, supported: multiples of 16",
        ),
        ("kv_cache", step.kv_cache.half(), "kv_cache must be torch.float32"),
        ("block_table", step.block_table[:0], r"block_table must be \[1, max_blocks\], got shape \(0, 3\)"),
        ("block_table", step.block_table[0], r"block_table must be \[1, max_blocks\], got shape \(3,\)"),
        ("block_table", step.block_table.long(), "block_table must be torch.int32 on .*, got torch.int64"),
        ("positions", step.positions.int(), "positions must be torch.int64 on .*, got torch.int32"),
        ("positions", step.positions[:0], r"positions must be contiguous \[1\], got shape \(0,\)"),
        ("context_lens", step.context_lens[:0], r"context_lens must be contiguous \[1\], got shape \(0,\)"),
        ("slot_mapping", step.slot_mapping.int(), "slot_mapping must be torch.int64 on .*, got torch.int32"),
        ("cos_sin", step.cos_sin.half(), "cos_sin must be torch.float32 on .*, got torch.float16"),
        ("cos_sin", step.cos_sin[:, :1], r"cos_sin must be contiguous \[max_position, 2, 8\], got shape"),
    ):
        with pytest.raises(ValueError, match=match):
            dataclasses.replace(step, **{name: value}).run(layers)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"numel": 1000}, "numel is 1000, expected a power of two"),
        ({"numel": 32}, "numel is 32, the least is 64"),
        ({"keys": 8}, "keys is 8, the least is 16"),
        ({"block_k": 4}, "block_k is 4, the least is 8"),
        ({"num_warps": 0}, "num_warps is 0, expected a power of two"),
    ],
)
def test_tiles_that_are_refused(change: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(TILE, **change)
