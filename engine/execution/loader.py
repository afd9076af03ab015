"""Filling a model's parameters: from safetensors, straight to the device, or with random numbers."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.layers.attention_metadata import KernelChoice
from engine.layers.weight_shard import WeightShard
from engine.models.checkpoint import ModelSource
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.weight_files import locate_tensors
from engine.parallel.group import ParallelGroup

DUMMY_STD = 0.02
"""Of dummy weights: that of the usual initialisation, with which activations stay finite in any number of layers."""

_FLOAT_FORMATS = ("F64", "F32", "F16", "BF16")
_DERIVED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


def load_model(
    source: ModelSource,
    *,
    load_format: str,
    device: torch.device,
    dtype: torch.dtype,
    group: ParallelGroup,
    kernels: KernelChoice,
    seed: int,
) -> Decoder:
    """Build this rank's part of the model on `device` in `dtype` and fill it.

    load_format "auto" reads the checkpoint at source.path, "dummy" draws weights from `seed`, the same ones for any
    number of ranks and, but for the cast, for any `dtype`. Raises ValueError, naming the tensor or file, if the
    checkpoint does not fit the model exactly.
    """
    if load_format != "dummy" and source.path is None:
        raise ValueError("a model without a checkpoint needs load_format 'dummy'")
    ignored = ["lm_head.weight"] if source.config.tie_word_embeddings else []
    if load_format != "dummy":
        assert source.path is not None
        check_size(source.config, source.path)
        # Against a model without memory first: a size that is wrong must not cost the memory it asks for.
        shapes = Decoder(
            source.config, group=group, kernels=kernels, dtype=dtype, device=torch.device("meta")
        )
        check_weights(list(shapes.weight_shards()), source.path, ignored=ignored)
    try:
        model = Decoder(source.config, group=group, kernels=kernels, dtype=dtype, device=device)
    except RuntimeError as error:
        raise ValueError(f"{source.path or 'the model'} does not fit on {device}: {error}") from error
    shards = list(model.weight_shards())
    if load_format == "dummy":
        draw_weights(shards, seed, source.config.dtype)
    else:
        assert source.path is not None
        read_weights(shards, source.path, ignored=ignored)
    return model.eval()


def check_size(config: ModelConfig, directory: Path) -> None:
    """Raise ValueError if config.json asks for more layers than there are tensors: no need to build them to know."""
    num_tensors = len(locate_tensors(directory))
    if config.num_layers > num_tensors:
        raise ValueError(
            f"num_hidden_layers is {config.num_layers}, but {directory} has {num_tensors} tensors in all"
        )


def check_weights(
    shards: Sequence[WeightShard], directory: Path, *, ignored: Iterable[str] = ()
) -> dict[Path, list[WeightShard]]:
    """The shards by the file that holds their tensor, after a look at names, shapes and formats in the headers.

    ignored: tensors that the files may hold although no shard takes them; precomputed inverse frequencies may too.
    """
    location = locate_tensors(directory)
    wanted = {shard.name: shard for shard in shards}
    _refuse_any(f"{directory} lacks", set(wanted) - set(location))
    surplus = {name for name in set(location) - set(wanted) - set(ignored) if not _DERIVED.fullmatch(name)}
    _refuse_any(f"{directory} has, but the model does not take,", surplus)
    by_file: dict[Path, list[WeightShard]] = defaultdict(list)
    for shard in shards:
        by_file[location[shard.name]].append(shard)
    for file, file_shards in by_file.items():
        with safe_open(file, framework="pt") as tensors:
            for shard in file_shards:
                stored = tensors.get_slice(shard.name)
                if tuple(stored.get_shape()) != shard.full_shape:
                    raise ValueError(
                        f"tensor {shard.name!r} in {file} has shape {tuple(stored.get_shape())}, the model "
                        f"takes {shard.full_shape}"
                    )
                if stored.get_dtype() not in _FLOAT_FORMATS:
                    raise ValueError(
                        f"tensor {shard.name!r} in {file} is {stored.get_dtype()}; supported: "
                        f"{', '.join(_FLOAT_FORMATS)}"
                    )
    return by_file


@torch.no_grad()
def read_weights(shards: Sequence[WeightShard], directory: Path, *, ignored: Iterable[str] = ()) -> None:
    """Copy each shard's slice of its tensor from the safetensors in `directory`, one tensor at a time.

    Nothing but the slice is read, and it goes to the target's device before it is cast. ignored: see check_weights.
    """
    for file, file_shards in check_weights(shards, directory, ignored=ignored).items():
        with safe_open(file, framework="pt", device=str(file_shards[0].target.device)) as tensors:
            for shard in file_shards:
                if not shard.target.numel():
                    continue
                try:
                    shard.target.copy_(shard.slice_of(tensors.get_slice(shard.name)))
                except SafetensorError as error:
                    raise ValueError(f"tensor {shard.name!r} in {file} cannot be read: {error}") from error


@torch.no_grad()
def draw_weights(shards: Iterable[WeightShard], seed: int, dtype: torch.dtype) -> None:
    """Norm weights 1, all others normal with standard deviation DUMMY_STD.

    Each tensor has a stream of its own, drawn in full on the target's device, so a rank's slice is the same part of the
    same numbers whatever the number of ranks. dtype: the checkpoint's, in which they are drawn before they are cast to
    the target's, as if read from files; so a bf16 model has the same weights in an fp32 engine as in a bf16 one.
    """
    for shard in shards:
        target = shard.target
        if shard.name.endswith("norm.weight"):
            target.fill_(1.0)
            continue
        digest = hashlib.sha256(f"{seed} {shard.name}".encode()).digest()
        generator = torch.Generator(target.device).manual_seed(int.from_bytes(digest[:8]) >> 1)
        if tuple(target.shape) == shard.full_shape and target.dtype == dtype:
            target.normal_(0.0, DUMMY_STD, generator=generator)
            continue
        full = torch.empty(shard.full_shape, dtype=dtype, device=target.device)
        target.copy_(shard.slice_of(full.normal_(0.0, DUMMY_STD, generator=generator)))


def _refuse_any(complaint: str, names: set[str]) -> None:
    if names:
        first, *others = sorted(names)
        raise ValueError(f"{complaint} tensor {first!r}" + (f" and {len(others)} more" if others else ""))
