"""Where Triton is not installed (it is required on Linux only), every module imports and the torch paths run."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["triton"] = None  # makes `import triton` raise ImportError
import torch
from kernels import prefill, sampling
from kernels.activation import silu_mul
from kernels.kv_write import write_kv
from kernels.norm import add_rms_norm, rms_norm
from kernels.rope import apply_rope

x = torch.ones(2, 8)
add_rms_norm(x, x, torch.ones(8), 1e-6, use_triton=False)
silu_mul(x, use_triton=False)
q = torch.ones(2, 1, 8)
apply_rope(q, q.clone(), torch.arange(2), torch.ones(4, 2, 4), use_triton=False)
cache = torch.zeros(2, 4, 1, 8)
write_kv(q, q, cache, cache.clone(), torch.arange(2), use_triton=False)
sampling.greedy(x)
available = prefill.available("cpu")
assert "torch" in available and "triton" not in available, available
table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
out = prefill.get("torch")(q, cache, cache, table, lengths, torch.tensor([0, 2], dtype=torch.int32), 2)
assert torch.allclose(out, q), out
assert prefill.get("triton").unavailable(torch.device("cuda")) == "triton is not installed"
print("ran")
"""


def test_torch_paths_run_without_triton():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout == "ran\n", done.stderr
