"""Sampling: the documented rule against exact fractions, and that no row sees another (cases D1, D3, D4)."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kernels import sampling
from kernels.sampling import filtered_probs, finite_rows, greedy, sample, sample_filtered

NAN, INF = float("nan"), float("inf")
QWEN_VOCABULARY = 151_936


def parameters(rows, temperature=1.0, top_k=-1, top_p=1.0):
    return (
        torch.full((rows,), temperature, dtype=torch.float32),
        torch.full((rows,), top_k, dtype=torch.int64),
        torch.full((rows,), top_p, dtype=torch.float32),
    )


def probs_of(probabilities, temperature=1.0, top_k=-1, top_p=1.0):
    """filtered_probs of one row whose softmax is `probabilities`."""
    logits = torch.tensor([probabilities], dtype=torch.float64).log().float()
    return filtered_probs(logits, *parameters(1, temperature, top_k, top_p))[0]


def close(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float32), atol=1e-6, rtol=1e-5)


def uniforms(*values):
    return torch.tensor(values, dtype=torch.float64)


# --- the rule ------------------------------------------------------------------------------------------


def test_top_p_keeps_the_crossing_token_and_the_first():
    close(probs_of([0.5, 0.3, 0.2], top_p=0.6), [0.625, 0.375, 0])
    close(probs_of([0.2, 0.5, 0.3], top_p=0.6), [0, 0.625, 0.375])
    close(probs_of([0.5, 0.3, 0.2], top_p=0.81), [0.5, 0.3, 0.2])
    close(probs_of([0.2, 0.5, 0.3], top_p=1e-6), [0, 1, 0])
    close(probs_of([0.5, 0.3, 0.2], top_p=1.0), [0.5, 0.3, 0.2])
    close(probs_of([0.2, 0.5, 0.3], top_p=0.0), [0, 1, 0])
    close(probs_of([0.25] * 4, top_p=0.5), [0.5, 0.5, 0, 0])  # exactly reached: the next one goes


def test_top_k_is_by_rank_lower_id_first():
    close(probs_of([0.3, 0.25, 0.25, 0.2], top_k=2), [6 / 11, 5 / 11, 0, 0])
    close(probs_of([0.25, 0.3, 0.25, 0.2], top_k=2), [5 / 11, 6 / 11, 0, 0])
    close(probs_of([0.25] * 4, top_k=1), [1, 0, 0, 0])


@pytest.mark.parametrize("top_k", [-1, 0, 4, 9])
def test_top_k_off(top_k):
    close(probs_of([0.1, 0.2, 0.3, 0.4], top_k=top_k), [0.1, 0.2, 0.3, 0.4])


def test_top_p_counts_after_top_k_is_renormalised():
    # Of [.4, .3] renormalised, .571 alone reaches .55; of the whole distribution .4 would not.
    close(probs_of([0.4, 0.3, 0.2, 0.1], top_k=2, top_p=0.55), [1, 0, 0, 0])


def test_temperature():
    close(probs_of([0.8, 0.2], temperature=0.5), [16 / 17, 1 / 17])
    close(probs_of([0.8, 0.2], temperature=2.0), [2 / 3, 1 / 3])
    close(probs_of([0.2, 0.8], temperature=0.0), [0, 1])
    close(probs_of([0.2, 0.8], temperature=1e-4), [0, 1])


def test_a_probability_below_a_unit_counts_as_0_and_one_above_it_is_kept():
    """Of 2 or 3 tokens the unit is 2^-60. A tail too small for fp64 sums to show it is still not cut at p = 1."""
    assert probs_of([1, 2**-59.5]).sign().tolist() == [1, 1]
    assert probs_of([1, 2**-60.5]).sign().tolist() == [1, 0]
    assert probs_of([1, 2**-58, 2**-58], top_k=2).sign().tolist() == [1, 1, 0]
    assert probs_of([1, 2**-58, 2**-58], top_k=2, top_p=0.999).sign().tolist() == [1, 0, 0]


@st.composite
def rows_with_ties(draw):
    vocab_size = draw(st.integers(1, 12))
    # Logits are multiples of ln 2, so that the exact probabilities are fractions; ties are common.
    powers = draw(st.lists(st.integers(-6, 0), min_size=vocab_size, max_size=vocab_size))
    top_k = draw(st.integers(-1, vocab_size + 2))
    top_p = Fraction(draw(st.integers(1, 97)), 97)
    return powers, top_k, top_p


@settings(max_examples=200, deadline=None)
@given(rows_with_ties())
def test_equals_exact_fractions(row):
    powers, top_k, top_p = row
    weights = [Fraction(2) ** power for power in powers]
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if 0 < top_k < len(order):
        order = order[:top_k]
    total = sum(weights[token] for token in order)
    kept, before = [], Fraction(0)
    for token in order:
        if kept and top_p < 1 and before >= top_p * total:
            break
        kept.append(token)
        before += weights[token]
    expected = [float(weights[t] / before) if t in kept else 0.0 for t in range(len(weights))]
    # Where p is a cumulative sum itself, rounding decides.
    sums = [sum(weights[token] for token in kept[:i]) / total for i in range(1, len(kept) + 1)]
    assume(top_p == 1 or all(abs(s - top_p) > Fraction(1, 10**6) for s in sums))
    logits = torch.tensor([powers]).double() * math.log(2)
    actual = filtered_probs(logits, *parameters(1, 1.0, top_k, float(top_p)))[0]
    close(actual, expected)


# --- the draw ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_p", [1.0, 0.97])
def test_inverts_the_cumulative_distribution_in_the_order_of_ids(top_p):
    logits = torch.tensor([[0.3, 1e-9, 0.1, 0.6]]).log()
    logits[0, 1] = -INF
    grid = torch.linspace(0, 1 - 1e-9, 1001, dtype=torch.float64)
    ids = sample(logits.expand(1001, 4), *parameters(1001, top_p=top_p), grid)
    expected = torch.where(grid < 0.3, 0, torch.where(grid < 0.4, 2, 3))
    far_from_an_edge = ((grid - 0.3).abs() > 1e-6) & ((grid - 0.4).abs() > 1e-6)
    assert torch.equal(ids[far_from_an_edge], expected[far_from_an_edge])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, -1, 1.0), (0.7, -1, 1.0), (1.3, 9, 1.0), (0.9, 20, 0.8)]
)
def test_frequencies_pass_chi_square(temperature, top_k, top_p):
    draws = 40_000
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(0)) * 1.5
    expected = (logits[0].double() / temperature).softmax(0)
    order = expected.argsort(descending=True)[: top_k if top_k > 0 else None]
    mass = expected[order] / expected[order].sum()
    order = order[mass.cumsum(0) - mass < top_p]
    uniform = torch.rand(draws, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ids = sample(logits.expand(draws, -1), *parameters(draws, temperature, top_k, top_p), uniform)
    counts = torch.bincount(ids, minlength=30).double()
    assert counts.sum() == counts[order].sum()
    expected_counts = expected[order] / expected[order].sum() * draws
    statistic = ((counts[order] - expected_counts) ** 2 / expected_counts).sum().item()
    freedom = len(order) - 1
    # Wilson-Hilferty: the 99.99th percentile of chi-square.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (5, 1.0), (-1, 0.9), (3, 0.5)])
def test_never_draws_probability_zero(uniform, top_k, top_p):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 1000, generator=generator) * 8
    logits[torch.rand(64, 1000, generator=generator) < 0.5] = -INF
    logits[:, 0] = logits[:, -1] = -INF
    args = parameters(64, 1.0, top_k, top_p)
    ids = sample(logits, *args, torch.full((64,), uniform, dtype=torch.float64))
    assert (filtered_probs(logits, *args).gather(1, ids[:, None]) > 0).all()


@pytest.mark.parametrize("top_k", [-1, 0, QWEN_VOCABULARY, QWEN_VOCABULARY + 5, 1, 50])
@pytest.mark.parametrize("top_p", [0.9999999, 1.0, 1e-6])
def test_a_large_vocabulary(top_k, top_p):
    """An fp32 cumulative sum of this many probabilities ends at .9999972, below p."""
    logits = torch.randn(2, QWEN_VOCABULARY, generator=torch.Generator().manual_seed(0))
    args = parameters(2, 1.0, top_k, top_p)
    ids = sample(logits, *args, uniforms(0.37, 1 - 2**-53))
    assert ((ids >= 0) & (ids < QWEN_VOCABULARY)).all()
    kept = (filtered_probs(logits, *args) > 0).sum(1)
    if top_p == 1e-6 or top_k == 1:
        assert torch.equal(ids, logits.argmax(1))
        assert (kept == 1).all()
    elif top_k == 50:
        assert (kept == 50).all()
    elif top_p == 1.0:
        assert (kept == QWEN_VOCABULARY).all()
    else:
        assert ((kept < QWEN_VOCABULARY) & (kept > QWEN_VOCABULARY * 0.99)).all()


def test_huge_logits():
    logits = torch.tensor([[1e30, -1e30, 1e30, -INF], [-1e30, -1e30, -3e38, 3e38], [1e30, 1e30, 0, 0]])
    for temperature in (1e-5, 1.0, 10.0):
        ids = sample(logits, *parameters(3, temperature), uniforms(0.7, 0.7, 0.2))
        assert ids.tolist() == [2, 3, 0]
    assert filtered_probs(logits, *parameters(3))[0].tolist() == [0.5, 0, 0.5, 0]


# --- greedy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_greedy_takes_the_lowest_id_of_a_tie(dtype):
    logits = torch.zeros(3, 100, dtype=dtype)
    logits[0, [7, 31]] = 2.5
    logits[1, [99, 98, 42]] = 1e30
    assert greedy(logits).tolist() == [7, 42, 0]


def test_greedy_rows_amid_sampled_ones():
    """D1: always the lower id of the tie, and the other row's draws do not notice the greedy rows."""
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    logits[:, [7, 31]] = 9.0
    temperature = torch.tensor([0, 0.8, 0])
    _, top_k, top_p = parameters(3)
    for u in torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).tolist():
        ids = sample(logits, temperature, top_k, top_p, uniforms(0.9, u, 0.1))
        alone = sample(logits[1:2], temperature[1:2], top_k[:1], top_p[:1], uniforms(u))
        assert ids[0] == ids[2] == 7
        assert ids[1] == alone[0]


def test_only_filtered_rows_sort(monkeypatch):
    logits = torch.randn(2, 50)

    def no_sort(*_args, **_options):
        raise AssertionError("sorted")

    monkeypatch.setattr(torch.Tensor, "sort", no_sort)
    temperature, top_k, top_p = parameters(2)
    sample(logits, temperature, top_k, top_p, uniforms(0.1, 0.9))
    sample(logits, temperature * 0, top_k + 6, top_p * 0.5, uniforms(0.1, 0.9))
    for off in (0, 51):
        sample(logits, temperature, torch.full((2,), off), top_p + 0.5, uniforms(0.1, 0.9))
    with pytest.raises(AssertionError, match="sorted"):
        sample(logits, temperature, top_k + 6, top_p, uniforms(0.1, 0.9))


def test_triton_is_called_when_asked_for_and_not_otherwise(monkeypatch):
    for name in ("greedy", "sample"):
        monkeypatch.setattr(sampling.sampling_triton, name, lambda *_args, name=name, **_options: name)
    logits = torch.zeros(1, 5)
    assert greedy(logits, use_triton=True) == "greedy"
    assert greedy(logits).tolist() == [0]
    for temperature, name in ((0.0, "greedy"), (1.0, "sample")):
        arguments = (logits, *parameters(1, temperature), uniforms(0))
        assert sample(*arguments, use_triton=True) == name
        assert sample(*arguments).tolist() == [0]


# --- rows are independent ------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_do_not_depend_on_their_neighbours(data):
    rows, vocab_size = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([3, 257, 4096]))
    draw_list = lambda values: data.draw(st.lists(values, min_size=rows, max_size=rows))  # noqa: E731
    temperature = torch.tensor(draw_list(st.sampled_from([0.0, 0.3, 1.0, 2.0])))
    top_k = torch.tensor(draw_list(st.sampled_from([-1, 0, 1, 2, 50, 10_000])))
    top_p = torch.tensor(draw_list(st.sampled_from([1e-6, 0.4, 0.95, 1.0])))
    uniform = torch.tensor(draw_list(st.floats(0, 1, exclude_max=True)), dtype=torch.float64)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(rows, vocab_size, generator=generator).to(
        data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    )
    together = sample(logits, temperature, top_k, top_p, uniform)
    probs = filtered_probs(logits, temperature, top_k, top_p)
    for row in range(rows):
        one = slice(row, row + 1)
        assert sample(logits[one], temperature[one], top_k[one], top_p[one], uniform[one])[0] == together[row]
        alone = filtered_probs(logits[one], temperature[one], top_k[one], top_p[one])[0]
        assert torch.equal(alone, probs[row])
        assert probs[row, together[row]] > 0
        assert abs(probs[row].double().sum() - 1) < 1e-6


@pytest.mark.parametrize(("elements", "largest"), [(300, 3), (50, 1)])
def test_pieces_bound_the_scratch_and_change_no_row(monkeypatch, elements, largest):
    """Of 20 rows 5 are greedy, 5 drawn from all tokens and 10 filtered: each drawn one is weighed once."""
    logits = torch.randn(20, 100, generator=torch.Generator().manual_seed(0))
    args = (
        torch.tensor([0.0, 1.0, 0.7, 1.0]).repeat(5),
        torch.tensor([9, 100, 30, 0]).repeat(5),
        torch.tensor([0.5, 1.0, 1.0, 0.9]).repeat(5),
        torch.linspace(0, 0.999, 20, dtype=torch.float64),
    )
    whole = sample(logits, *args)
    pieces = []

    def weigh(logits, temperature, weigh=sampling._weights):
        pieces.append(len(logits))
        return weigh(logits, temperature)

    monkeypatch.setattr(sampling, "_weights", weigh)
    monkeypatch.setattr(sampling, "PIECE_ELEMENTS", elements)
    assert torch.equal(sample(logits, *args), whole)
    assert max(pieces) == largest
    assert sum(pieces) == 15


@pytest.mark.parametrize(
    "run", [sample_filtered, torch.compile(sample_filtered, backend="eager", fullgraph=True)]
)
def test_rows_that_are_all_filtered_need_no_decision_on_the_host(run):
    """The same tokens, also in one graph, in which a decision would be an error."""
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(5)).mul(8).round() / 4  # with ties
    logits[7] = NAN
    arguments = (*parameters(40, 0.6, 50, 0.9), torch.linspace(0, 0.999, 40, dtype=torch.float64))
    ids = run(logits, *arguments)
    assert torch.equal(ids, sample(logits, *arguments))
    assert len(set(ids.tolist())) > 10


def test_rows_that_are_not_finite_have_no_token_and_spoil_no_other():
    healthy = torch.randn(100, generator=torch.Generator().manual_seed(0))
    logits = healthy.repeat(6, 1)
    logits[1, 3], logits[2, 99], logits[4, :] = NAN, INF, -INF
    logits[5, 50:] = -INF
    assert finite_rows(logits).tolist() == [True, False, False, True, False, True]
    for top_k, top_p in ((-1, 1.0), (5, 0.9)):
        ids = sample(logits, *parameters(6, 1.0, top_k, top_p), torch.full((6,), 0.3, dtype=torch.float64))
        alone = sample(healthy[None], *parameters(1, 1.0, top_k, top_p), uniforms(0.3))
        assert ids[0] == ids[3] == alone[0]
        assert 0 <= ids[5] < 50
        assert ids[[1, 2, 4]].tolist() == [-1] * 3
        probs = filtered_probs(logits, *parameters(6, 1.0, top_k, top_p))
        assert probs.isnan().any(1).tolist() == [False, True, True, False, True, False]
    likeliest, likeliest_of_half = int(healthy.argmax()), int(healthy[:50].argmax())
    expected = [likeliest, -1, -1, likeliest, -1, likeliest_of_half]
    assert sample(logits, *parameters(6, 0.0), torch.zeros(6, dtype=torch.float64)).tolist() == expected
    assert greedy(logits).tolist() == expected


def test_no_rows():
    empty = torch.empty(0, 10)
    assert sample(empty, *parameters(0), uniforms()).shape == (0,)
    assert filtered_probs(empty, *parameters(0)).shape == (0, 10)


BAD = {
    r"logits must be .*\(2, 0\)": {"logits": torch.zeros(2, 0)},
    r"logits must be .*\(5,\)": {"logits": torch.zeros(5)},
    r"logits must be .*\(2, 5, 1\)": {"logits": torch.zeros(2, 5, 1)},
    "logits must be .*int64": {"logits": torch.zeros(2, 5, dtype=torch.int64)},
    r"temperature must be \[2\] .*\(3,\)": {"temperature": torch.ones(3)},
    r"top_k must be \[2\] .*\(1,\)": {"top_k": torch.ones(1)},
    r"top_p must be \[2\] .*\(2, 1\)": {"top_p": torch.ones(2, 1)},
    r"uniform must be \[2\] .*float32": {"uniform": torch.zeros(2)},
    r"uniform must be \[2\] .*\(1,\)": {"uniform": uniforms(0)},
    r"uniform must be \[2\] .*\(3,\)": {"uniform": uniforms(0, 0, 0)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    temperature, top_k, top_p = parameters(2)
    good = {"logits": torch.zeros(2, 5), "temperature": temperature, "top_k": top_k, "top_p": top_p}
    bad = {**good, "uniform": uniforms(0, 0), **BAD[message]}
    for draw in (sample, sample_filtered):
        with pytest.raises(ValueError, match=message):
            draw(**bad)
    del bad["uniform"]
    if "uniform" not in message:
        with pytest.raises(ValueError, match=message):
            filtered_probs(**bad)
