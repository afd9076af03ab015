"""A model's configuration, read from config.json: every value is honoured or refused, none is ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.models.rope import RopeConfig

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Architecture:
    """What sets one architecture apart from the common decoder, and its defaults for fields config.json leaves out.

    default_head_dim: None means hidden_size / num_attention_heads. kv_heads_default_to_q: num_key_value_heads may be
    left out. has_mlp_bias: mlp_bias is a field of this architecture. window_needs_switch: sliding_window only counts
    when use_sliding_window is true.
    """

    model_type: str
    qk_norm: bool
    default_head_dim: int | None
    kv_heads_default_to_q: bool
    has_mlp_bias: bool
    window_needs_switch: bool


ARCHITECTURES = {
    "Qwen3ForCausalLM": Architecture(
        model_type="qwen3",
        qk_norm=True,
        default_head_dim=128,
        kv_heads_default_to_q=False,
        has_mlp_bias=False,
        window_needs_switch=True,
    ),
    "LlamaForCausalLM": Architecture(
        model_type="llama",
        qk_norm=False,
        default_head_dim=None,
        kv_heads_default_to_q=True,
        has_mlp_bias=True,
        window_needs_switch=False,
    ),
}


def _fields(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_q_heads", "num_kv_heads"),
    *("head_dim", "max_position_embeddings"),
)

_LARGEST_SIZE = {
    "head_dim": 2**16,
    "num_layers": 2**16,
    "num_q_heads": 2**16,
    "max_position_embeddings": 2**24,
}
"""Far beyond any network, and small enough that a misprint is refused before memory is asked for."""

_HONOURED = _fields("""
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim hidden_act rms_norm_eps max_position_embeddings tie_word_embeddings attention_bias
    mlp_bias rope_theta rope_scaling rope_parameters partial_rotary_factor original_max_position_embeddings
    sliding_window use_sliding_window max_window_layers layer_types pretraining_tp eos_token_id dtype torch_dtype
""")
"""Fields that from_hf reads."""

_HARMLESS = _fields("""
    transformers_version tokenizer_class transformers.js_config is_llama_config unsloth_version unsloth_fixed
    name_or_path unk_token_id initializer_range attention_dropout use_cache bos_token_id pad_token_id return_dict
    output_attentions output_hidden_states torchscript id2label label2id problem_type finetuning_task
    task_specific_params chunk_size_feed_forward do_sample temperature top_k top_p typical_p min_length max_length
    num_beams num_beam_groups num_return_sequences length_penalty repetition_penalty early_stopping
""")
"""Fields that do not change the network's logits: training, book-keeping, and defaults of Transformers' generate()."""


@dataclass(frozen=True)
class HeadsPerRank:
    """Attention heads that one tensor-parallel rank holds."""

    num_q_heads: int
    num_kv_heads: int


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only network. Sizes count elements; names follow the papers, not config.json.

    qk_norm: RMSNorm over each query and key head before RoPE (Qwen3). attention_bias: q, k, v and o projections have a
    bias. mlp_bias: gate, up and down have one. max_position_embeddings: positions a sequence may have; where
    config.json states yarn's original context, that is its factor times as many if more.
    eos_token_ids: as config.json lists them; generation_config's are added by resolve_model. dtype: the checkpoint's.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"architecture {self.architecture!r} is not supported; known: {', '.join(ARCHITECTURES)}"
            )
        for name in _SIZES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
            if value > _LARGEST_SIZE.get(name, 2**31 - 1):
                raise ValueError(
                    f"{name} must be at most {_LARGEST_SIZE.get(name, 2**31 - 1)}, got {value:.6g}"
                )
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads is {self.num_q_heads}, not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}")
        for name in ("tie_word_embeddings", "qk_norm", "attention_bias", "mlp_bias"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        eps = self.rms_norm_eps
        if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps <= 1:
            raise ValueError(f"rms_norm_eps must be a number in [0, 1], got {eps!r}")
        if self.dtype not in DTYPES.values():
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the fields of a Hugging Face config.json.

        A field left out takes the default of Transformers' class where that does not hide a mistake; sizes and
        rope_theta are never guessed. Raises ValueError, naming field and value, for what is missing or contradictory,
        for a feature the decoder lacks, and for a field it does not know unless that is switched off (null, false, 0).
        """
        name, architecture = _architecture(config)
        _refuse_unsupported(config, name, architecture)
        q_heads = _required(config, "num_attention_heads")
        hidden_size = _required(config, "hidden_size")
        rope = RopeConfig.from_hf(config)
        return cls(
            architecture=name,
            vocab_size=_required(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_required(config, "intermediate_size"),
            num_layers=_required(config, "num_hidden_layers"),
            num_q_heads=q_heads,
            num_kv_heads=_num_kv_heads(config, architecture, q_heads),
            head_dim=_head_dim(config, architecture, hidden_size, q_heads),
            rms_norm_eps=_default(config, "rms_norm_eps", 1e-6),
            rope=rope,
            max_position_embeddings=_max_positions(config, rope),
            tie_word_embeddings=_default(config, "tie_word_embeddings", False),
            qk_norm=architecture.qk_norm,
            attention_bias=_default(config, "attention_bias", False),
            mlp_bias=_default(config, "mlp_bias", False),
            eos_token_ids=eos_ids(config.get("eos_token_id"), "config.json"),
            dtype=_dtype(config),
        )

    def heads_per_rank(self, size: int) -> HeadsPerRank:
        """Heads of one of `size` ranks; KV heads are replicated when there are fewer than ranks."""
        check_parallel(self, size)
        return HeadsPerRank(self.num_q_heads // size, max(self.num_kv_heads // size, 1))


def check_parallel(config: ModelConfig, size: int) -> None:
    """Raise ValueError, naming the field and its value, unless the network can be split over `size` ranks.

    The vocabulary is padded, so it always divides. KV heads divide, or are replicated over an equal number of ranks.
    """
    if size < 1:
        raise ValueError(f"tensor_parallel_size must be at least 1, got {size}")
    for name in ("num_q_heads", "intermediate_size"):
        if getattr(config, name) % size:
            raise ValueError(
                f"{name} is {getattr(config, name)}, which tensor_parallel_size {size} does not divide"
            )
    if config.num_kv_heads % size and size % config.num_kv_heads:
        raise ValueError(
            f"num_kv_heads is {config.num_kv_heads}: tensor_parallel_size {size} neither divides it nor is a "
            "multiple of it"
        )


def eos_ids(value: Any, source: str) -> tuple[int, ...]:
    """eos_token_id as config.json and generation_config.json write it: null, one id or a list of ids."""
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ValueError(f"eos_token_id in {source} must be a token id or a list of them, got {value!r}")
    return ids


def _architecture(config: Mapping[str, Any]) -> tuple[str, Architecture]:
    model_type = config.get("model_type")
    names = config.get("architectures")
    if names is None:
        names = [name for name, known in ARCHITECTURES.items() if known.model_type == model_type]
        if not names:
            known_types = ", ".join(known.model_type for known in ARCHITECTURES.values())
            raise ValueError(
                f"architectures is missing and model_type is {model_type!r}; known: {known_types}"
            )
    if not isinstance(names, list | tuple) or len(names) != 1:
        raise ValueError(f"architectures must name one architecture, got {names!r}")
    name = names[0]
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(f"architecture {name!r} is not supported; known: {', '.join(ARCHITECTURES)}")
    if model_type is not None and model_type != ARCHITECTURES[name].model_type:
        raise ValueError(f"model_type is {model_type!r}, but architectures names {name!r}")
    return name, ARCHITECTURES[name]


def _refuse_unsupported(config: Mapping[str, Any], name: str, architecture: Architecture) -> None:
    for field, value in config.items():
        known = field in _HONOURED or field in _HARMLESS or field.startswith("_")
        if not known and value not in (None, False, 0, "", [], {}, ()):
            raise ValueError(
                f"config.json's {field} = {value!r} is not supported: this engine does not know it"
            )
    neutral = {"hidden_act": "silu", "use_sliding_window": False, "pretraining_tp": 1}
    if not architecture.has_mlp_bias:
        neutral["mlp_bias"] = False
    if not architecture.window_needs_switch:
        neutral["sliding_window"] = None
    for field, only in neutral.items():
        value = config.get(field)
        if value is not None and value != only:
            raise ValueError(f"{field} is {value!r}; only {only!r} is supported for {name}")
    layer_types = config.get("layer_types")
    if layer_types is None:
        return
    if not isinstance(layer_types, list | tuple):
        raise ValueError(f"layer_types must be a list, got {layer_types!r}")
    other = [kind for kind in layer_types if kind != "full_attention"]
    if other:
        raise ValueError(f"layer_types has {other[0]!r}; only 'full_attention' is supported")
    if len(layer_types) != config.get("num_hidden_layers"):
        raise ValueError(
            f"layer_types has {len(layer_types)} entries, num_hidden_layers is {config.get('num_hidden_layers')}"
        )


def _num_kv_heads(config: Mapping[str, Any], architecture: Architecture, q_heads: int) -> int:
    if config.get("num_key_value_heads") is not None:
        return config["num_key_value_heads"]
    # Written as null it means multi-head attention; left out, only some architectures define it so.
    if architecture.kv_heads_default_to_q or "num_key_value_heads" in config:
        return q_heads
    return _required(config, "num_key_value_heads")


def _head_dim(config: Mapping[str, Any], architecture: Architecture, hidden_size: int, q_heads: int) -> int:
    if config.get("head_dim") is not None:
        return config["head_dim"]
    if architecture.default_head_dim is not None:
        return architecture.default_head_dim
    if (
        not isinstance(hidden_size, int)
        or not isinstance(q_heads, int)
        or q_heads < 1
        or hidden_size % q_heads
    ):
        raise ValueError(
            f"head_dim is missing, and hidden_size {hidden_size!r} is not a multiple of num_attention_heads "
            f"{q_heads!r}"
        )
    return hidden_size // q_heads


def _max_positions(config: Mapping[str, Any], rope: RopeConfig) -> Any:
    positions = _required(config, "max_position_embeddings")
    if rope.rope_type != "yarn" or not isinstance(positions, int):
        return positions
    # Those who switch yarn on in a config.json leave this field as it was (Qwen's model cards say to do so).
    places = (config, config.get("rope_parameters") or {}, config.get("rope_scaling") or {})
    stated = [place.get("original_max_position_embeddings") for place in places]
    stretched = [(rope.factor or 1) * original for original in stated if original]
    return max(positions, *(int(min(length, 2.0**62)) for length in stretched), 0)


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    values = [config[field] for field in ("dtype", "torch_dtype") if config.get(field) is not None]
    names = {str(value).removeprefix("torch.") for value in values}
    if len(names) > 1:
        raise ValueError(f"dtype is {values[0]!r} but torch_dtype is {values[1]!r}")
    name = names.pop() if names else "float32"
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def _required(config: Mapping[str, Any], field: str) -> Any:
    if config.get(field) is None:
        raise ValueError(f"config.json has no {field}")
    return config[field]


def _default(config: Mapping[str, Any], field: str, value: Any) -> Any:
    return value if config.get(field) is None else config[field]
