"""The engine's configuration: every option of LLM, validated once, then handed around explicitly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

MAX_GRAPH_CHUNK_TOKENS = 8192
"""Prompt tokens of a step that a CUDA graph holds, at most."""

MAX_NUM_SEQS = 1 << 20
"""Every sequence that may run has a row of its own in tensors and lists on the host and the device."""


@dataclass(frozen=True)
class EngineConfig:
    """Options of the engine, as LLM's arguments name them. See LLM for what each means.

    Raises ValueError, naming the field, the value and the limit, for anything out of range or contradictory.
    """

    device: str = "auto"
    dtype: str | torch.dtype = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    seed: int = 0
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    graph_chunk_tokens: int | Literal["auto"] = "auto"
    use_triton: bool | Literal["auto"] = "auto"
    decode_attention: str = "auto"
    prefill_attention: str = "auto"
    layer_fusion: Literal["off", "persistent"] = "off"
    all_reduce: Literal["auto", "torch", "one_shot"] = "auto"
    block_size: int = 16
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling: Literal["mixed", "prefill_first"] = "mixed"
    overlap_scheduling: bool | Literal["auto"] = "auto"
    record_token_times: bool = False
    worker_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size"):
            _check_count(name, getattr(self, name))
        for name in ("num_kv_blocks", "max_model_len"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        most = self.graph_chunk_tokens
        if most != "auto" and (type(most) is not int or not 0 <= most <= MAX_GRAPH_CHUNK_TOKENS):
            raise ValueError(
                f"graph_chunk_tokens must be 'auto' or an integer from 0 to {MAX_GRAPH_CHUNK_TOKENS}, got {most!r}"
            )
        if self.max_num_seqs > MAX_NUM_SEQS:
            raise ValueError(f"max_num_seqs must be at most {MAX_NUM_SEQS}, got {self.max_num_seqs}")
        flags = ("enforce_eager", "enable_prefix_caching", "enable_chunked_prefill", "record_token_times")
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        _check_choice("load_format", self.load_format, ("auto", "dummy"))
        _check_choice("layer_fusion", self.layer_fusion, ("off", "persistent"))
        _check_choice("all_reduce", self.all_reduce, ("auto", "torch", "one_shot"))
        _check_choice("scheduling", self.scheduling, ("mixed", "prefill_first"))
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")
        for name in ("use_triton", "overlap_scheduling"):
            if not isinstance(getattr(self, name), bool) and getattr(self, name) != "auto":
                raise ValueError(f"{name} must be True, False or 'auto', got {getattr(self, name)!r}")
        utilization = self.gpu_memory_utilization
        if (
            isinstance(utilization, bool)
            or not isinstance(utilization, int | float)
            or not 0 < utilization <= 1
        ):
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {utilization!r}")
        timeout = self.worker_timeout_s
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
            raise ValueError(f"worker_timeout_s must be a number of seconds above 0, got {timeout!r}")
        if isinstance(self.dtype, str):
            _check_choice("dtype", self.dtype, ("auto", *DTYPES))
        elif self.dtype not in DTYPES.values():
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")
        if self.tensor_parallel_size > 8:
            raise ValueError(f"tensor_parallel_size must be at most 8, got {self.tensor_parallel_size}")

    def resolve_device(self) -> torch.device:
        """The device to run on; ValueError if it is not there."""
        name = self.device
        if name == "auto":
            return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        return _device(name)

    def resolve_devices(self, count: int) -> tuple[torch.device, ...]:
        """A device for each of `count` ranks; ValueError if they are not there.

        "auto", "cuda" and "cuda:N" stand for consecutive CUDA devices, "cpu" for the CPU, which all share. A list with
        commas names each rank's device; naming one GPU twice shares it, which is slow and meant for tests.
        """
        if "," in str(self.device):
            devices = tuple(_device(name.strip()) for name in self.device.split(","))
            if len(devices) != count:
                raise ValueError(
                    f"device names {len(devices)} devices for {count} ranks (tensor_parallel_size)"
                )
            if len({device.type for device in devices}) > 1:
                raise ValueError(f"device must be all CUDA or all CPU, got {self.device!r}")
            return devices
        first = self.resolve_device()
        if first.type == "cpu":
            return (first,) * count
        start, visible = first.index, torch.cuda.device_count()
        if start + count > visible:
            raise ValueError(
                f"tensor_parallel_size needs {count} CUDA devices from {first} on, but {visible} are visible"
            )
        return tuple(torch.device("cuda", start + i) for i in range(count))

    def resolve_overlap(self, device: torch.device) -> bool:
        """Whether the host works on one step while the device runs the next."""
        return device.type == "cuda" if self.overlap_scheduling == "auto" else bool(self.overlap_scheduling)

    def resolve_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """The dtype of weights, activations and KV: the one asked for, or the checkpoint's own."""
        if isinstance(self.dtype, torch.dtype):
            return self.dtype
        return model_dtype if self.dtype == "auto" else DTYPES[self.dtype]

    def resolve_max_model_len(self, max_position_embeddings: int) -> int:
        """Tokens of a sequence at most, prompt and output together."""
        if self.max_model_len is None:
            return max_position_embeddings
        if self.max_model_len > max_position_embeddings:
            raise ValueError(
                f"max_model_len is {self.max_model_len}, the model's max_position_embeddings is "
                f"{max_position_embeddings}"
            )
        return self.max_model_len


def _device(name: Any) -> torch.device:
    """The CPU or the CUDA device of that name; ValueError if it is not there."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {name!r}") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"device must be a CPU or a CUDA device, got {name!r}")
    count = torch.cuda.device_count()
    index = device.index or 0
    if index >= count:
        raise ValueError(f"device is {name!r}, but {count} CUDA device(s) are visible")
    return torch.device("cuda", index)


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
