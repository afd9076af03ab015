"""Sampling without a sort: the same tokens as the torch path, with small chunks so that short rows have many."""

from __future__ import annotations

import pytest
import torch

from kernels import sampling_triton
from kernels.sampling import greedy, sample

# Extreme logits overflow to infinities on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(sampling_triton, "CHUNK", 128)


def compare(logits, temperature, top_k, top_p, uniform, device):
    """Both paths' ids, which must agree, on the host. Parameters of one value are views of stride 0."""
    rows = len(logits)
    parameters = (
        torch.as_tensor(temperature, dtype=torch.float32).expand(rows),
        torch.as_tensor(top_k, dtype=torch.int64).expand(rows),
        torch.as_tensor(top_p, dtype=torch.float32).expand(rows),
        torch.as_tensor(uniform, dtype=torch.float64).expand(rows),
    )
    logits = logits.to(device)
    by_triton = sample(logits, *parameters, use_triton=True).cpu()
    assert torch.equal(by_triton, sample(logits, *parameters).cpu())
    return by_triton


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16]
)
@pytest.mark.parametrize("vocab_size", [1, 7, 300])
def test_mixed_rows_agree_with_the_torch_path(dtype, vocab_size, device):
    """Greedy, plain, top-k, top-p, both and neither in one batch, negative logits and ties among them."""
    logits = torch.randn(7, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3 - 2
    logits[1], logits[6] = logits[1].round(), logits[6].round()
    logits[2, 1::2] = -INF
    compare(
        logits.to(dtype),
        [1.0, 0.7, 1.3, 0.0, 2.0, 0.5, 1.0],
        [-1, 7, 40, 3, vocab_size - 1, 0, 25],
        [1.0, 0.9, 0.5, 0.5, 1.0, 0.8, 0.99],
        torch.linspace(0.05, 0.95, 7),
        device,
    )


@pytest.mark.parametrize(("top_k", "top_p"), [(200, 1.0), (-1, 0.5), (200, 0.5), (-1, 1.0)])
def test_ties_keep_the_lowest_ids_across_chunks(top_k, top_p, device):
    """300 equal logits: all weights are one unit, so both paths agree exactly at every uniform."""
    uniform = [0.0, 0.25, 0.6, 1 - 2**-53]
    ids = compare(torch.zeros(4, 300, dtype=torch.float16), 0.8, top_k, top_p, uniform, device)
    kept = (200 if top_k > 0 else 300) * top_p
    assert ids.tolist() == [int(u * kept) for u in uniform]


def test_ties_below_a_peak(device):
    """k cuts amid ties that lie before and after the likeliest token."""
    logits = torch.full((3, 300), -1.0, dtype=torch.bfloat16)
    logits[:, 170] = 2.0
    ids = compare(logits, 1.0, [100, 1, 2], 1.0, 1 - 2**-53, device)
    assert ids.tolist() == [170, 170, 170]
    ids = compare(logits, 5.0, [100, 1, 2], 1.0, 0.0, device)
    assert ids.tolist() == [0, 170, 0]
    assert compare(logits, 50.0, 200, 1.0, 1 - 2**-53, device).tolist() == [199] * 3


def test_top_p_counts_ties_of_negative_logits(device):
    """The weight at the cut is computed from its bit pattern, whose low bits a shift has dropped."""
    logits = torch.full((2, 300), -2.0, dtype=torch.bfloat16)
    logits[:, 170] = 1.0
    weight = torch.tensor(-3.0).double().exp()
    kept = ((0.7 * (1 + 299 * weight) - 1) / weight).ceil().int().item()
    ids = compare(logits, 1.0, -1, 0.7, 1 - 2**-53, device)
    assert ids.tolist() == [kept if kept > 170 else kept - 1] * 2


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [*((top_k, 0.9999999) for top_k in (-1, 1, 300, 305)), (-1, 1e-6), (305, 1e-6), (-1, 0.0), (1, 0.0)],
)
def test_edges_of_the_parameters(top_k, top_p, device):
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    ids = compare(logits, 1.0, top_k, top_p, [0.37, 0.999], device)
    if top_k == 1 or top_p < 0.1:
        assert torch.equal(ids, logits.argmax(1))


def test_extreme_logits_and_both_zeros(device):
    logits = torch.full((4, 260), -INF, dtype=torch.bfloat16)
    logits[0, [3, 200, 250]] = torch.tensor([1e30, 1e30, -1e30]).bfloat16()
    logits[1, [3, 200, 250]] = torch.tensor([-3e38, 3e38, -1e30]).bfloat16()
    logits[2, [3, 200]] = torch.tensor([-0.0, 0.0]).bfloat16()
    logits[3, [3, 200]] = torch.tensor([0.0, -0.0]).bfloat16()
    for temperature in (1e-5, 1.0):
        for top_k, top_p in ((-1, 1.0), (2, 0.9)):
            assert compare(logits, temperature, top_k, top_p, 0.7, device).tolist() == [200, 200, 200, 200]
    assert compare(logits, 1.0, 1, 1.0, 0.7, device).tolist() == [3, 200, 3, 3]
    assert compare(logits, 1e-44, -1, 1.0, 0.2, device).tolist() == [3, 200, 3, 3]


def test_greedy(device):
    logits = torch.zeros(4, 300)
    logits[0, [7, 131, 290]] = 2.5
    logits[1, [299, 256]] = 1e30
    logits[2] = -INF
    logits[3, 0], logits[3, 1:] = -0.0, -1.0
    assert greedy(logits.to(device), use_triton=True).tolist() == [7, 256, -1, 0]
    assert compare(logits, 0.0, 5, 0.5, 0.9, device).tolist() == [7, 256, -1, 0]
    view = torch.zeros(300, 4).T
    view[:, 150] = 1
    assert greedy(view.to(device), use_triton=True).tolist() == [150] * 4
    assert greedy(logits[:0].to(device), use_triton=True).shape == (0,)


@pytest.mark.parametrize(
    ("dtype", "temperature", "top_k", "top_p"),
    [
        (torch.float32, 0.0, -1, 1.0),
        (torch.bfloat16, 0.0, -1, 1.0),
        (torch.float32, 1.0, -1, 1.0),
        (torch.bfloat16, 1.0, -1, 1.0),
        (torch.bfloat16, 1.0, 9, 0.9),
        (torch.float16, 1.0, -1, 0.9),
    ],
)
def test_rows_that_are_not_finite_have_no_token_and_spoil_no_other(dtype, temperature, top_k, top_p, device):
    """Odd values in the first chunk, in the last, beside infinities of the other sign, and everywhere."""
    healthy = torch.randn(300, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits = healthy.repeat(12, 1)
    logits[1, 140], logits[2, 299], logits[3] = NAN, INF, NAN
    logits[4], logits[5, 0], logits[6, 299] = -INF, -NAN, NAN
    logits[7] = -INF
    logits[7, 200] = NAN
    logits[8, ::2], logits[9, :256] = -INF, -INF  # which leaves some
    logits[10, 3], logits[10, 4] = INF, NAN
    ids = compare(logits, temperature, top_k, top_p, 0.4, device)
    odd = [1, 2, 3, 4, 5, 6, 7, 10]
    assert ids[odd].tolist() == [-1] * len(odd)
    assert (ids[[0, 8, 9, 11]] >= 0).all()
    alone = compare(healthy[None], temperature, top_k, top_p, 0.4, device)
    assert ids[0] == ids[11] == alone[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_each_token_becomes_its_slots_newest(temperature, top_p, device):
    """0 where there is none; slots that are not named keep theirs, and one that is named again and again has one."""
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    logits[3, 7] = NAN
    slots = torch.tensor([4, 1, 6, 0, 6], device=device)
    newest = torch.full((7,), 777, device=device)
    logits = logits.to(device)
    parameters = (
        torch.full((5,), temperature, dtype=torch.float64, device=device),
        torch.full((5,), -1, device=device),
        torch.full((5,), top_p, dtype=torch.float64, device=device),
        torch.linspace(0.1, 0.9, 5, dtype=torch.float64, device=device),
    )
    if temperature:
        keep = {"any_top_k": False, "any_top_p": top_p < 1, "keep_in": (newest, slots)}
        ids = sampling_triton.sample(logits, *parameters, **keep)
    else:
        ids = sampling_triton.greedy(logits, keep_in=(newest, slots))
    assert torch.equal(ids, sample(logits, *parameters))
    assert ids[3] == -1
    kept = newest.tolist()
    assert [kept[slot] for slot in (4, 1, 0)] == [int(ids[0]), int(ids[1]), 0]
    assert kept[6] in (int(ids[2]), int(ids[4]))
    assert [kept[slot] for slot in (2, 3, 5)] == [777] * 3


def test_needless_searches_are_not_launched(monkeypatch, device):
    searches = []
    original = sampling_triton._Rows.search

    def count(self, *, by_count):
        searches.append("top_k" if by_count else "top_p")
        original(self, by_count=by_count)

    monkeypatch.setattr(sampling_triton._Rows, "search", count)
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for temperature, top_k, top_p, expected in (
        ([0.0, 0.0], 5, 0.5, []),
        ([1.0, 0.0], [-1, 5], [1.0, 0.5], []),
        ([1.0, 0.0], [5, -1], 1.0, ["top_k"]),
        ([1.0, 0.0], 50, 0.5, ["top_p"]),
        ([1.0, 1.0], [5, -1], [1.0, 0.5], ["top_k", "top_p"]),
    ):
        searches.clear()
        compare(logits, temperature, top_k, top_p, [0.2, 0.8], device)
        assert searches == expected
