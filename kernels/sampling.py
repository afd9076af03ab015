"""From logits to token ids: greedy, temperature, top-k and top-p, each row by itself.

The rule, for a row with temperature above 0:

1. Probabilities are softmax(logits / temperature).
2. top_k keeps the k likeliest tokens by rank; tokens of equal logits rank by id, the lower first. Off
   where k <= 0 or k >= vocab_size.
3. top_p then keeps, of the renormalised rest and in rank order, the fewest tokens whose probabilities
   reach p: the token that crosses p stays, and so does the first always. Off where p >= 1.
4. The draw inverts the cumulative distribution of what is kept, in the order of ids.

A row with temperature 0 takes its likeliest token, the lowest id on a tie. A row that is not finite, that is with a
NaN, a +inf, or nothing above -inf, has no token: -1.

Probabilities are held as integers: exp((logit - max) / temperature), computed in fp64, in units of
2^-(62 - bits of vocab_size): 2^-44 for 151,936 tokens. Their sums are exact in any order, so a row's result
depends neither on its neighbours nor on how a device splits a sum, cumulative sums never fall, and a token
of probability 0 is never drawn. What is below a unit counts as 0. kernels/sampling_triton.py follows the same
rule without a sort.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels import sampling_triton

# Rows are sampled in pieces of about this many logits, to bound the fp64 and int64 scratch (64 MB each).
PIECE_ELEMENTS = 1 << 23


def greedy(logits: Tensor, *, use_triton: bool = False) -> Tensor:
    """The likeliest id of each row, the lowest on a tie, -1 if not finite: [rows, vocab_size] to [rows] int64."""
    if use_triton:
        return sampling_triton.greedy(logits)
    return logits.argmax(dim=-1).masked_fill_(~finite_rows(logits), -1)


def finite_rows(logits: Tensor) -> Tensor:
    """[rows] bool: whether a row can be sampled. False with a NaN, a +inf, or nothing above -inf."""
    return logits.amax(dim=-1).isfinite()


def filtered_probs(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[rows, vocab_size] fp32: the distribution from which `sample` draws; its arguments.

    A greedy row has 1 at its token. A row that is not finite (see `finite_rows`) has no distribution: NaN.
    """
    _check(logits, temperature, top_k, top_p)
    probs = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    probs.scatter_(1, logits.argmax(dim=-1)[:, None], 1.0)
    for rows, weights in _drawn_weights(logits, temperature, top_k, top_p):
        probs[rows] = (weights.double() / weights.sum(-1, keepdim=True)).float()
    return probs.masked_fill_(~finite_rows(logits)[:, None], float("nan"))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    uniform: Tensor,
    *,
    use_triton: bool = False,
) -> Tensor:
    """One id a row, [rows] int64, by the rule above.

    logits: [rows, vocab_size], any floating dtype; -inf forbids a token.
    temperature: [rows], 0 for greedy, else positive. top_k: [rows] integers. top_p: [rows], above 0.
    uniform: [rows] float64 in [0, 1), a row's only source of chance; unused where it is greedy.

    The parameters may stay on the host: which rows are drawn and which are filtered is decided there, and
    then no device is waited for. use_triton is the faster path on a GPU, where no row is sorted; its
    exponentials are fp32.
    """
    _check(logits, temperature, top_k, top_p, uniform)
    uniform = uniform.to(logits.device)
    if use_triton:
        drawn, has_top_k, has_top_p = _row_kinds(temperature, top_k, top_p, logits.shape[1])
        if not drawn.any():
            return greedy(logits, use_triton=True)
        return sampling_triton.sample(
            logits,
            temperature.to(logits.device),
            top_k.to(logits.device),
            top_p.to(logits.device),
            uniform,
            any_top_k=bool((drawn & has_top_k).any()),
            any_top_p=bool((drawn & has_top_p).any()),
        )
    ids = greedy(logits)
    for rows, weights in _drawn_weights(logits, temperature, top_k, top_p):
        ids[rows] = _draw(weights, uniform[rows], ids[rows])
    return ids


def sample_filtered(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor
) -> Tensor:
    """What `sample` does on torch with rows that are all drawn and filtered, without a decision on the host.

    So it can be captured and compiled, and compared with the Triton path alone. Arguments as of `sample`, each
    temperature positive, all on one device; their values are not checked. All rows are one piece, whose scratch takes
    about 64 bytes a logit.
    """
    _check(logits, temperature, top_k, top_p, uniform)
    weights = _filter(_weights(logits, temperature), logits, top_k, top_p)
    return _draw(weights, uniform, greedy(logits))


def _check(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor | None = None
) -> None:
    if logits.dim() != 2 or not logits.shape[1] or not logits.is_floating_point():
        raise ValueError(
            "logits must be [rows, vocab_size] floating point, "
            f"got shape {tuple(logits.shape)} {logits.dtype}"
        )
    for name, parameter in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p)):
        if parameter.shape != logits.shape[:1]:
            raise ValueError(
                f"{name} must be [{logits.shape[0]}] as logits has rows, got shape {tuple(parameter.shape)}"
            )
    if uniform is not None and (uniform.shape != logits.shape[:1] or uniform.dtype != torch.float64):
        raise ValueError(
            f"uniform must be [{logits.shape[0]}] float64, got shape {tuple(uniform.shape)} {uniform.dtype}"
        )


def _row_kinds(
    temperature: Tensor, top_k: Tensor, top_p: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """[rows] bool each: drawn at all, top_k on, top_p on."""
    return temperature > 0, (top_k > 0) & (top_k < vocab_size), top_p < 1


def _drawn_weights(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """(rows, integer weights of their tokens) in pieces that cover the rows with temperature above 0."""
    device, vocab_size = logits.device, logits.shape[1]
    drawn, has_top_k, has_top_p = _row_kinds(temperature, top_k, top_p, vocab_size)
    filtered = (has_top_k | has_top_p).tolist()
    kinds = [(row, filtered[row]) for row, is_drawn in enumerate(drawn.tolist()) if is_drawn]
    temperature, top_k, top_p = temperature.to(device), top_k.to(device), top_p.to(device)
    for sort in (False, True):
        chosen = [row for row, needs_sort in kinds if needs_sort == sort]
        if not chosen:
            continue
        for rows in torch.tensor(chosen, device=device).split(max(1, PIECE_ELEMENTS // vocab_size)):
            weights = _weights(logits[rows], temperature[rows])
            if sort:
                weights = _filter(weights, logits[rows], top_k[rows], top_p[rows])
            yield rows, weights


def _weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """Probabilities as integers (see the top of the file); all 0 in a row that is not finite."""
    unit = float(1 << (62 - logits.shape[1].bit_length()))
    shifted = logits.double()
    shifted -= shifted.amax(-1, keepdim=True)
    shifted /= temperature.double()[:, None]
    return shifted.exp_().nan_to_num_(nan=0.0).mul_(unit).long()


def _filter(weights: Tensor, logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`weights` with 0 for each token that top-k or top-p drops. Ranks are those of the logits."""
    vocab_size = weights.shape[1]
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    ranked = weights.gather(1, order)
    cumulative = ranked.cumsum(-1)
    limit = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)[:, None]
    kept_total = cumulative.gather(1, limit.long() - 1)
    rank = torch.arange(vocab_size, device=weights.device)
    reached = (cumulative - ranked).double() >= top_p.double()[:, None] * kept_total
    dropped = (rank >= limit) | (reached & (rank > 0) & (top_p < 1)[:, None])
    return torch.zeros_like(weights).scatter_(1, order, ranked.masked_fill_(dropped, 0))


def _draw(weights: Tensor, uniform: Tensor, otherwise: Tensor) -> Tensor:
    """The id of each row in whose share of the cumulative weights `uniform` falls; `otherwise` where all are 0."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    # Below total however it rounds: uniform is at most 1 - 2^-53, which takes off more than fp64's total may gain.
    target = (uniform[:, None] * total).long()
    # The first id whose cumulative weight exceeds the target: so it has a weight of its own.
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return torch.where(total.squeeze(1) > 0, drawn, otherwise)
