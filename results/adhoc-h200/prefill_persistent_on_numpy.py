"""prefill_persistent.py on tests/kernels/gluon_on_numpy.py: fuzzed cases, several programs and schedules, and errors put in.

    PYTHONPATH=. OMP_NUM_THREADS=1 python results/adhoc-h200/prefill_persistent_on_numpy.py SECONDS [SEED]

Added to the stand-in: cp.async (NaN at once, read when asked for, seen by products after its wait, a fence and a meeting),
and that a warpgroup's shared memory is not written before its warps have met since they loaded from it.
"""

import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch

from tests.kernels import gluon_on_numpy as on_numpy
from tests.kernels.gluon_on_numpy import Array, KernelError, RaceError, SharedMemory, execute
from tests.kernels.prefill_case import make_case

SOURCE = Path(__file__).parent / "prefill_persistent.py"
shared_name = "kernels.prefill.warp_specialized"
LANDED = Path(__file__).parents[2] / "kernels" / "prefill" / "warp_specialized.py"
TOLERANCE = 1e-13


def _written(memory):
    """Before a partition writes shared memory."""
    partition = on_numpy._partition()
    loaded = vars(partition).setdefault("loaded", [])
    if partition.index < 2 and any(memory.overlaps(other) for other in loaded):  # the others are a warp each
        raise RaceError("a partition writes what its other warps may not have loaded yet")
    if any(memory.overlaps(other) for other, _ in vars(partition).setdefault("asked", [])):
        raise RaceError("a partition writes where its copies land")
    partition.stores = [store for store in partition.stores if not store.memory.overlaps(memory)]


def _store(self, value, plain=SharedMemory.store):
    _written(self)
    plain(self, value)


def _load(self, layout, plain=SharedMemory.load):
    found = plain(self, layout)
    vars(on_numpy._partition()).setdefault("loaded", []).append(self)
    return found


def _meet(plain=on_numpy._meet):
    plain()
    vars(on_numpy._partition())["loaded"] = []


def _ask(memory, pointer, mask=None):
    on_numpy._pause()
    _written(memory)
    value = on_numpy._load(pointer, mask)
    memory.data[...] = np.nan
    vars(on_numpy._partition())["asked"].append((memory, value.values))


def _await(num_outstanding=0):
    on_numpy._pause()
    partition = on_numpy._partition()
    for memory, value in vars(partition).setdefault("asked", []):
        partition.stores.append(on_numpy._PlainStore(memory, value))
    partition.asked = []


def _wait(barrier, parity, pred=True, plain=on_numpy._wait):
    if pred:
        plain(barrier, parity)


def _arrive(barrier, pred=True, plain=on_numpy._arrive):
    if pred:
        plain(barrier)


def module(seed=0, changes=()):
    SharedMemory.store, SharedMemory.load = _store, _load
    shared = execute(LANDED, seed=seed)  # what it imports, on numpy too
    shared.DTYPES, shared._meet = (torch.float64,), _meet
    shared.mbarrier.wait, shared.mbarrier.arrive = _wait, _arrive
    with mock.patch.dict(sys.modules, {shared_name: shared}):
        made = execute(
            SOURCE,
            seed=seed,
            changes=(
                ("from triton.experimental.gluon.language.nvidia.ampere import async_copy\n", "async_copy = None\n"),
                *changes,
            ),
        )
    made.async_copy = SimpleNamespace(
        async_copy_global_to_shared=_ask, commit_group=lambda: None, wait_group=_await
    )
    made._meet = _meet
    made.mbarrier.wait, made.mbarrier.arrive = _wait, _arrive
    made.gl.to_tensor = Array
    made.gl.load = lambda pointer, mask=None, other=0.0: on_numpy._load(
        pointer, None if mask is None else Array(on_numpy._raw(mask)), other
    )
    return made


def largest_error(case, *, seed=0, changes=(), scale=None, **options):
    out = case.untouched_out()
    module(seed, changes).prefill_persistent(*case.args, scale=scale, out=out, **options)
    return (out - case.expected(scale)).abs().max().item()


def fuzzed(r):
    kv_heads, group = r.choice([1, 2, 3]), r.choice([1, 2, 3, 4, 5, 7, 8, 32, 64, 100, 128])
    batch = r.choice([1, 2, 3, 5])
    most = 8 if group > 16 else 40 if group > 4 else 200
    queries = [r.choice([0, 1, 2, r.randrange(1, 40) if group < 16 else 2, r.randrange(1, most)]) for _ in range(batch)]
    if not any(queries):
        queries[-1] = 1
    contexts = [n + r.choice([0, 0, 1, 127, 128, r.randrange(0, 500)]) for n in queries]
    case = make_case(
        queries, contexts, num_q_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=r.choice([64, 128]),
        block_size=r.choice([8, 16, 24, 32, 64, 128, 256]), seed=r.randrange(10**6), dtype=torch.float64, device="cpu",
    )  # fmt: skip
    options = dict(
        stages=r.choice([2, 2, 2, 3, 4]), zigzag=r.random() < 0.7, snake=r.random() < 0.7, seed=r.randrange(10**6),
        early_queries=r.random() < 0.7, wide_offsets=r.random() < 0.3, num_programs=r.choice([1, 1, 2, 3, 5, 132]), scale=r.choice([None, None, -0.2]),
    )  # fmt: skip
    return (queries, contexts, kv_heads, group), case, options


MUTATIONS = {
    # the copying warps
    "phases start anew with an item": ("((done + tile) // STAGES + 1) & 1)", "(tile // STAGES + 1) & 1)"),
    "stages start anew with an item": ("stage = (done + tile) % STAGES", "stage = tile % STAGES"),
    "waits for no empty stage": ("mbarrier.wait(empty.index(stage), ((done + tile) // STAGES + 1) & 1)", "pass"),
    "reads the table past the end": ("gl.minimum(tile * BLOCK_N + i * BOX, last_box)", "tile * BLOCK_N + i * BOX"),
    "counts no tiles": ("done += num_tiles", "done += 0"),
    "zeroes before the values are there": ("_wait_full(full, done - 1, STAGES)", "pass"),
    "zeroes without a fence": ("fence_async_shared()\n            _meet()", "_meet()"),
    "tells before it meets": ("_meet()\n            mbarrier.arrive(clean.index(stage_last))", "mbarrier.arrive(clean.index(stage_last)); _meet()"),
    "tells of last tiles only": ("mbarrier.arrive(clean.index(stage))", "pass"),
    "never tells of last tiles": ("mbarrier.arrive(clean.index(stage_last))", "pass"),
    "zeroes another stage": ("stage_last = (done - 1) % STAGES", "stage_last = done % STAGES"),
    "producers go another way": ("        number = _next_number(number, turn, step, SNAKE)\n        row, first, start, stop = _seek(number, row, first, locs_ptr, batch, TOKENS, KV_HEADS)\n\n\n", "        number = number + step // 2\n        row, first, start, stop = _seek(number, row, first, locs_ptr, batch, TOKENS, KV_HEADS)\n\n\n"),
    # the warpgroups
    "awaits no first keys of an item": ("        if is_next:\n            _wait_full(k_full, count, STAGES)", "        pass"),
    "awaits keys after the last item": ("        if is_next:\n            _wait_full(k_full, count, STAGES)", "        _wait_full(k_full, count, STAGES)"),
    "never frees an item's first keys": ("mbarrier.arrive(k_empty.index(stage), pred=is_next)", "pass"),
    "awaits values, not zeroes": ("_wait_full(v_clean, count - 1, STAGES)", "_wait_full(v_full, count - 1, STAGES)"),
    "awaits no zeroes": ("_wait_full(v_clean, count - 1, STAGES)", "pass"),
    "takes the last queries": ("warpgroup_mma(next_q,", "warpgroup_mma(this_q,"),
    "asks for queries too early": ("        _meet()\n        _ask_queries(next_q", "        _ask_queries(next_q"),
    "asks into the buffer in use": ("next_q = q_smem.index(turn & 1)", "next_q = q_smem.index((turn - 1) & 1)"),
    "stores over the next queries": ("this_q.store((acc", "next_q.store((acc"),
    "does not fence queries": ("    fence_async_shared()\n    _meet()\n\n\n@gluon.jit\ndef _attend", "    _meet()\n\n\n@gluon.jit\ndef _attend"),
    "no meeting after queries": ("    fence_async_shared()\n    _meet()\n\n\n@gluon.jit\ndef _attend", "    fence_async_shared()\n\n\n@gluon.jit\ndef _attend"),
    "does not await queries": ("async_copy.wait_group(0)", "pass"),
    "keeps the output": ("        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=mma_o)\n        p = p_next", "        p = p_next"),
    "keeps the maximum": ("p_next, rescale, row_max, row_sum = _weigh(s, no_max, no_sum,", "p_next, rescale, row_max, row_sum = _weigh(s, row_max, no_sum,"),
    "keeps the sum": ("p_next, rescale, row_max, row_sum = _weigh(s, no_max, no_sum,", "p_next, rescale, row_max, row_sum = _weigh(s, no_max, row_sum,"),
    "divides by the next sum": ("this_q.store((acc * factor)", "this_q.store((acc / gl.expand_dims(row_sum, 1))"),
    "takes this item's positions": ("positions = next_position + ", "positions = position + "),
    "takes this item's edge": ("shared_end = (next_position + ", "shared_end = (position + "),
    "stores at the next token": ("kv_head, token, num_tokens, position, num_tiles = next_head, next_token,", "kv_head, token, num_tokens, position, num_tiles = next_head, token,"),
    "stores at this head": ("kv_head, token, num_tokens, position, num_tiles = next_head,", "kv_head, token, num_tokens, position, num_tiles = kv_head,"),
    "loads rows too early": ("whole lines\n        _meet()\n", "whole lines\n"),
    "frees last values in use": ("        acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc_next, p))\n        mbarrier.arrive(v_empty.index(stage_before))\n        this_q", "        mbarrier.arrive(v_empty.index(stage_before))\n        acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc_next, p))\n        this_q"),
    "never frees last values": ("        mbarrier.arrive(v_empty.index(stage_before))\n        this_q", "        this_q"),
    "count stands still between items": ("next_tiles\n        count += 1", "next_tiles"),
    # the items
    "skips rows": ("first += items", "first += items + 1"),
    "stops a row early": ("while (row < batch) & (number >=", "while (row < batch) & (number >"),
    "rounds tiles down": ("    items = (stop - start + TOKENS - 1) // TOKENS * KV_HEADS\n    while", "    items = (stop - start) // TOKENS * KV_HEADS\n    while"),
    "wrong tile": ("// TOKENS - 1 - level", "// TOKENS - level"),
    "snake without its end": ("turn * step - 1 - number", "turn * step - number"),
    "too few barriers' arrivals": ("mbarrier.init(v_empty.index(i), count=2)", "mbarrier.init(v_empty.index(i), count=1)"),
}  # fmt: skip


def mutation_case(seed):
    """Items of one and of many tiles, edges of tiles, rows without queries."""
    case = make_case(
        [5, 65, 0, 1, 1, 1, 40], [700, 530, 9, 127, 128, 129, 40], num_q_heads=8, num_kv_heads=2, head_dim=64,
        block_size=16, seed=seed, dtype=torch.float64, device="cpu",
    )  # fmt: skip
    return case


def main():
    seconds, r = float(sys.argv[1]), random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    start, worst, number = time.time(), 0.0, 0
    while time.time() - start < seconds:
        names, case, options = fuzzed(r)
        try:
            error = largest_error(case, **options)
        except BaseException:
            print("FAILED", names, options, flush=True)
            raise
        worst, number = max(worst, error), number + 1
        assert error < TOLERANCE, (names, options, error)
    print(number, "cases, worst", worst, flush=True)
    if len(sys.argv) > 3:
        return
    for stages, programs in ((2, 3), (3, 1), (2, 132)):
        for seed in range(2):
            error = largest_error(mutation_case(seed), seed=seed, num_programs=programs, stages=stages, scale=-0.2)
            assert error < TOLERANCE, (stages, programs, seed, error)
    missed = []
    for name, change in MUTATIONS.items():
        outcome = "NOT CAUGHT"
        for seed in range(5):
            try:
                error = largest_error(
                    mutation_case(seed), seed=seed, changes=(change,), num_programs=(3, 1, 2)[seed % 3], scale=-0.2
                )
            except (KernelError, IndexError) as error:
                outcome = f"{type(error).__name__} {error}"
                break
            if not error < TOLERANCE:
                outcome = f"difference {error}"
                break
        print(f"{name}: {outcome}", flush=True)
        missed += [name] * (outcome == "NOT CAUGHT")
    print("not caught:", missed)


if __name__ == "__main__":
    main()
