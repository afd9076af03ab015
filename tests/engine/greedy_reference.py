"""Prompts for comparisons, and what Transformers answers to one of them alone."""

from __future__ import annotations

from typing import Any

import torch


def uneven_prompts(vocab_size: int, count: int = 24) -> list[list[int]]:
    """Lengths from 1 to 60; every third prompt starts with the same 20 tokens, so that the prefix cache has work."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 61, (count,), generator=generator).tolist()
    lengths[:3] = 1, 16, 60
    prompts = [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]
    shared = torch.randint(0, vocab_size, (20,), generator=generator).tolist()
    return [shared + prompt[:40] if i % 3 == 0 else prompt for i, prompt in enumerate(prompts)]


def reference_ids(model: Any, prompt: list[int], num_new: int) -> tuple[int, ...]:
    """Transformers' greedy continuation of one prompt, sampling defaults and EOS ids pinned off."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return tuple(output[0, len(prompt) :].tolist())
