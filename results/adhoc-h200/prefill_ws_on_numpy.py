"""The logic of prefill_ws.py on numpy, in fp64 against exact attention, its four partitions as threads that take turns
at random, some far slower than others. Copies land one by one at random times, NaN until then; mbarriers have phases, arrivals and bytes; a product
must find the same shared memory at its wait as at its issue; plain stores are NaN to products until their fence; slots
past a context hold NaN and the table past it garbage. A wrong phase is a deadlock, a missing wait a NaN or a change.

    python results/adhoc-h200/prefill_ws_on_numpy.py

Differences: below 2e-14. Then every mutation of the source below must fail. What this cannot see: warps of one
partition apart from each other, registers, and whether tiles lie in shared memory as [column half, slot, 64].
"""
import itertools
import operator
import random
import re
import threading
import types
from pathlib import Path

import numpy as np


class T:  # tensor or pointer (offsets into base)
    __array_priority__ = 1000

    def __init__(self, a, base=None):
        self.a, self.base = np.asarray(a), base

    dtype = types.SimpleNamespace(element_ty="half")

    def to(self, dtype):
        return T(self.a.astype(np.int64) if dtype == "i64" else self.a, self.base)

    def __bool__(self):
        return bool(self.a)

    def __index__(self):
        return int(self.a)

    def __neg__(self):
        return T(-self.a)


def raw(x):
    return x.a if isinstance(x, T) else x


def binary(f, swap=False):
    def g(x, y):
        base = getattr(x, "base", None)
        return T(f(raw(y), raw(x)) if swap else f(raw(x), raw(y)), getattr(y, "base", None) if base is None else base)

    return g


for name in "add sub mul floordiv mod truediv and lt le gt ge".split():
    f = getattr(operator, {"and": "and_"}.get(name, name))
    setattr(T, f"__{name}__", binary(f))
    if name not in ("lt", "le", "gt", "ge"):
        setattr(T, f"__r{name}__", binary(f, True))


class Deadlock(Exception):
    pass


class Race(Exception):
    pass


class Scheduler:
    def __init__(self, seed):
        self.random, self.landings, self.error = random.Random(seed), [], None
        self.speed = [self.random.choice((0.01, 1, 1)) for _ in range(5)]  # the partitions', and how fast copies land

    def run(self, functions):
        self.back = threading.Semaphore(0)
        self.workers = []
        for i, (function, arguments) in enumerate(functions):
            worker = types.SimpleNamespace(go=threading.Semaphore(0), ready=None, done=False, stores=[], products=[], i=i)
            worker.thread = threading.Thread(target=self._body, args=(worker, function, arguments), daemon=True)
            self.workers.append(worker)
            worker.thread.start()
        while True:
            live = [w for w in self.workers if not w.done]
            able = [w for w in live if w.ready is None or w.ready()]
            if self.error:
                raise self.error
            if not live and not self.landings:
                return
            if not able and not self.landings:
                raise Deadlock([w.i for w in live])
            choices = [*able, None] if self.landings else able
            pick = self.random.choices(choices, [self.speed[w.i if w else 4] for w in choices])[0]
            if pick is not None:
                self.current = pick
                self.current.go.release()
                self.back.acquire()
            else:
                self.landings.pop(self.random.randrange(len(self.landings)))()

    def _body(self, worker, function, arguments):
        worker.go.acquire()
        try:
            function(*arguments)
            if worker.products or worker.stores:
                raise Race("left in flight")
        except BaseException as error:
            self.error = error
        worker.done = True
        self.back.release()

    def pause(self, ready=None):
        worker = self.current
        worker.ready = ready
        self.back.release()
        worker.go.acquire()
        worker.ready = None


class Barrier:
    def __init__(self):
        self.count = None

    def step(self):
        if self.pending < 0 or self.pending == 0 and self.tx < 0:
            raise Race("barrier over-arrived")
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.count


class Barriers:
    def __init__(self, n):
        self.all = [Barrier() for _ in range(n)]

    def index(self, i):
        return self.all[int(raw(i))]


class Smem:
    """arr: [..., slots, 64] or, as a tile, [..., halves, slots, 64]."""

    def __init__(self, arr, tile, transposed=False):
        self.arr, self.tile, self.transposed = arr, tile, transposed

    def index(self, i):
        return Smem(self.arr[int(raw(i))], self.tile)

    def permute(self, order):
        return Smem(self.arr, self.tile, not self.transposed)

    def _reinterpret(self, dtype, shape, layout):
        lead, slots, dims = shape
        assert np.prod(shape) == self.arr.size
        return Smem(self.arr.reshape(lead, dims // 64, slots, 64), True)

    def read(self):
        a = self.arr.transpose(1, 0, 2).reshape(self.arr.shape[1], -1) if self.tile else self.arr
        return (a.T if self.transposed else a).copy()

    def write(self, value):
        self.arr[...] = value.reshape(len(value), -1, 64).transpose(1, 0, 2) if self.tile else value

    def store(self, value):
        self.write(np.full_like(self.read(), np.nan))
        S.current.stores.append((self, raw(value).copy()))
        S.pause()

    def load(self, layout):
        S.pause()
        for smem, value in S.current.stores:
            if smem.arr.ctypes.data == self.arr.ctypes.data:
                S.current.stores.remove((smem, value))
                return T(value)
        return T(self.read())


S = None
gl = types.SimpleNamespace(
    int64="i64", int32="i32", float32="f32", bfloat16="bf", float16="f", constexpr=object,
    SliceLayout=lambda *a, **k: None, BlockedLayout=lambda *a, **k: None, NVMMADistributedLayout=lambda *a, **k: None,
    DotOperandLayout=lambda *a, **k: None, NVMMASharedLayout=lambda *a, **k: None, static_range=range,
    arange=lambda a, b, layout=None: T(np.arange(a, b)),
    expand_dims=lambda x, i: T(np.expand_dims(raw(x), i), getattr(x, "base", None)),
    where=lambda c, x, y: T(np.where(raw(c), raw(x), raw(y))), zeros_like=lambda x: T(np.zeros_like(raw(x))),
    maximum=lambda x, y: T(np.maximum(raw(x), raw(y))), minimum=lambda x, y: T(np.minimum(raw(x), raw(y))),
    max=lambda x, i: T(raw(x).max(i)), sum=lambda x, i: T(raw(x).sum(i)), exp2=lambda x: T(np.exp2(raw(x))),
    abs=lambda x: T(np.abs(raw(x))), zeros=lambda shape, d, layout=None: T(np.zeros(shape)),
    full=lambda shape, v, d, layout=None: T(np.full(shape, v)), convert_layout=lambda x, layout: x,
    thread_barrier=lambda: S.pause(), inline_asm_elementwise=lambda asm, c, x, **k: x[0],
)
gl.program_id = lambda i: T(gl.pid[i])
gl.num_programs = lambda i: T(gl.grid[i])


def load(p, mask=None, other=0):
    if mask is None:
        assert (p.a >= 0).all() and (p.a < p.base.size).all()
        found = p.base[p.a]
        assert p.base.dtype != np.int64 or (found < 10**6).all(), "garbage read from the table"
        return T(found)
    m = np.broadcast_to(raw(mask), p.a.shape)
    out = np.full(p.a.shape, other, dtype=p.base.dtype)
    out[m] = p.base[p.a[m]]
    return T(out)


def store(p, v, mask=None):
    off, v = np.broadcast_arrays(p.a, raw(v))
    m = np.broadcast_to(raw(mask), off.shape)
    assert np.isnan(p.base[off[m]]).all(), "written twice"
    p.base[off[m]] = v[m]


def allocate(dtype, shape, layout):
    if dtype == "i64":
        return Barriers(shape[0]) if len(shape) == 2 else Barriers(1).index(0)
    if len(shape) == 3 and shape[2] != 64 or shape[:2] == [2, 64]:  # q
        return Smem(np.full((shape[0], shape[2] // 64, shape[1], 64), np.nan), True)
    return Smem(np.full(shape, np.nan), False)


gl.load, gl.store, gl.allocate_shared_memory = load, store, allocate
gl.warp_specialize = lambda functions, warps, registers: S.run(functions)


def init(bar, count):
    bar.count = bar.pending = count
    bar.phase = bar.tx = 0


def wait(bar, phase, pred=True):
    S.pause(lambda: bar.phase % 2 != int(raw(phase)))


def arrive(bar):
    S.pause()
    bar.pending -= 1
    bar.step()


def expect(bar, size):
    S.pause()
    bar.tx += size
    bar.pending -= 1
    bar.step()


def copy(desc, at, bar, smem):
    S.pause()
    row, column = (int(raw(x)) for x in at)
    slots = smem.arr.shape[0]
    assert 0 <= row <= desc.shape[0] - slots and 0 <= column <= desc.shape[1] - 64
    smem.arr[...] = np.nan

    def land():
        smem.arr[...] = desc[row : row + slots, column : column + 64]
        bar.tx -= slots * 64 * 2
        bar.step()

    S.landings.append(land)


def fence():
    if S is None or not hasattr(S, "current"):
        return
    S.pause()
    for smem, value in S.current.stores:
        smem.write(value)
    S.current.stores.clear()
    S.pause()


def operand(x):
    return x.read() if isinstance(x, Smem) else x.a


def mma(a, b, acc, use_acc=True, is_async=False):
    S.pause()
    before = [operand(x).copy() for x in (a, b)]
    acc = raw(acc)
    result = T(np.nan)

    def finish():
        if not all(np.array_equal(x, operand(y), equal_nan=True) for x, y in zip(before, (a, b))):
            raise Race("an operand changed during a product")
        p, v = before
        result.a = p @ v + (acc if use_acc else 0)

    S.current.products.append(finish)
    if not is_async:
        mma_wait(0, ())
    return result


def mma_wait(num_outstanding=0, deps=()):
    S.pause()
    while len(S.current.products) > num_outstanding:
        S.current.products.pop(0)()
    return deps[0] if len(deps) == 1 else tuple(deps)


SOURCE = (Path(__file__).parent / "prefill_ws.py").read_text()


def kernel(changes=()):
    source = SOURCE
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    source = re.sub(r"^(from triton[^\n(]*(\([^)]*\))?[^\n]*|import t\w+)$", "", source, flags=re.M)
    mbarrier = types.SimpleNamespace(
        init=init, wait=wait, arrive=arrive, expect=expect, MBarrierLayout=lambda: None
    )
    names = {
        "gluon": types.SimpleNamespace(jit=lambda f=None, **k: f or (lambda g: g)), "gl": gl, "mbarrier": mbarrier,
        "fence_async_shared": fence, "warpgroup_mma": mma, "warpgroup_mma_wait": mma_wait,
        "tma": types.SimpleNamespace(async_copy_global_to_shared=copy),
        "torch": types.SimpleNamespace(bfloat16=0, float16=1), "triton": None,
    }
    exec(compile(source, "prefill_ws", "exec"), names)
    return names["prefill_ws_kernel"]


def run(queries, contexts, q_heads, kv_heads, block_size, head_dim, order, pingpong, stages=2, scale=None, seed=0, spare=0, main=None):
    global S
    main = main or kernel()
    rng = np.random.default_rng(seed)
    counts = [-(-c // block_size) for c in contexts]
    blocks = sum(counts) + 3
    k, v = (rng.standard_normal((blocks, block_size, kv_heads, head_dim)) for _ in range(2))
    table = np.full((len(contexts), max(counts) + 1), 10**6, dtype=np.int64)
    free = rng.permutation(blocks)
    start = 0
    for row, (count, context) in enumerate(zip(counts, contexts)):
        table[row, :count] = free[start : start + count]
        start += count
        if context % block_size:
            for cache in (k, v):
                cache[table[row, count - 1], context % block_size :] = np.nan
    for cache in (k, v):
        cache[free[start:]] = np.nan
    q = rng.standard_normal((sum(queries), q_heads, head_dim))
    out = np.full_like(q, np.nan)
    locs, lens = np.cumsum([0, *queries]), np.array(contexts)
    scale = head_dim**-0.5 if scale is None else scale
    group = q_heads // kv_heads
    gl.grid = (-(-(max(queries) + spare) // (128 // group)), kv_heads, len(queries))
    pointer = lambda a: T(np.int64(0), a.reshape(-1))
    flat = [cache.reshape(blocks * block_size, -1) for cache in (k, v)]
    for n, gl.pid in enumerate(itertools.product(*map(range, gl.grid))):
        S = Scheduler(seed * 1000 + n)
        main(
            pointer(q), *flat, pointer(out), pointer(table), pointer(lens.astype(np.int32)), pointer(locs.astype(np.int32)),
            T(scale * 1.4426950408889634), q_heads * head_dim, head_dim, head_dim, head_dim, q_heads * head_dim, head_dim,
            table.shape[1], GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, BLOCK_M=128, BLOCK_N=128,
            BOX=int(np.gcd(block_size, 128)), STAGES=stages, ORDER=order, PINGPONG=pingpong, CONSUMER_REGS=0,
            PRODUCER_REGS=0,
        )
    worst = 0
    for row, (n, context) in enumerate(zip(queries, contexts)):
        kk, vv = (np.concatenate([c[b] for b in table[row, : counts[row]]] or [c[0]])[:context] for c in (k, v))
        for i in range(n):
            position = context - n + i
            for head in range(q_heads):
                s = kk[: position + 1, head // group] @ q[locs[row] + i, head] * scale
                p = np.exp(s - s.max())
                found = np.abs(p @ vv[: position + 1, head // group] / p.sum() - out[locs[row] + i, head]).max()
                worst = max(worst, found) if not np.isnan(found) else float("nan")
                if np.isnan(worst):
                    return worst
    return worst


CASES = [
    (([1, 30, 0, 17, 12], [1, 400, 300, 17, 900], 8, 2, 16, 128), {}),
    (([5, 40, 64], [500, 130, 127], 14, 2, 16, 64), {"spare": 70}),
    (([70], [71], 4, 2, 24, 128), {}),
    (([3, 129], [385, 256], 2, 1, 8, 64), {"stages": 3}),
    (([20], [640], 5, 1, 32, 128), {"scale": -0.3}),
    (([9], [700], 4, 1, 256, 128), {"stages": 3}),
    (([2], [300], 128, 1, 16, 64), {}),
]
MUTATIONS = [
    ("(tile // STAGES + 1) & 1)\n        mbarrier.expect", "(tile // STAGES) & 1)\n        mbarrier.expect"),
    ("mbarrier.wait(empty.index(stage), (tile // STAGES + 1) & 1)", "pass"),
    ("mbarrier.wait(v_clean, 0)", "_wait_full(v_full, last, STAGES)"),
    ("_wait_full(full, last, STAGES)", "pass"),
    ("        fence_async_shared()\n        _meet()\n        mbarrier.arrive(clean)", "        mbarrier.arrive(clean)"),
    ("        fence_async_shared()\n        _meet()\n        mbarrier.arrive(clean)", "        mbarrier.arrive(clean)\n        fence_async_shared()"),
    ("(tile // STAGES) & 1)", "(tile // STAGES + 1) & 1)"),
    ("_wait_full(v_full, tile - 1, STAGES)", "pass"),
    ("_wait_full(k_full, tile, STAGES)", "pass"),
    ("(turn + 1 - WHO) & 1", "turn & 1"),
    ("mbarrier.arrive(v_empty.index(stage_before))", "pass"),
    ("mbarrier.arrive(k_empty.index(0))", "pass"),
    ("mbarrier.init(v_empty.index(i), count=2)", "mbarrier.init(v_empty.index(i), count=1)"),
    ("key = gl.minimum(tile * BLOCK_N + i * BOX, last_box)", "key = tile * BLOCK_N + i * BOX"),
    ("BLOCK_N * HEAD_DIM * 2", "BLOCK_N * HEAD_DIM"),
    ("range((end - last * BLOCK_N) // 8, BLOCK_N // 8)", "range((end - last * BLOCK_N) // 8 + 1, BLOCK_N // 8)"),
]

if __name__ == "__main__":
    np.seterr(invalid="ignore")
    for (arguments, options), order, pingpong in itertools.product(CASES, ("values", "keys", "none"), (True, False)):
        worst = max(run(*arguments, order, pingpong, seed=seed, **options) for seed in (0, 1))
        print(*arguments, order, pingpong, options, worst, flush=True)
        assert worst < 1e-13
    for change in MUTATIONS:
        outcome = "NOT CAUGHT"
        for seed in range(6):
            try:
                worst = run([5, 40], [700, 530], 8, 2, 16, 64, "values", True, seed=seed, main=kernel([change]))
            except (Deadlock, Race, AssertionError) as error:
                outcome = f"{type(error).__name__} {error}"
                break
            if not worst < 1e-13:
                outcome = f"difference {worst}"
                break
        print(repr(change[0][:60]), "->", repr(change[1][:40]), ":", outcome, flush=True)
        assert outcome != "NOT CAUGHT"
