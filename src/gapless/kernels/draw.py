# Kernel bodies are Triton's language, not typed Python: only these three checks are off.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Temperature, top_k, top_p, min_p and the draw in one launch, without sorting: :func:`draw_tokens_triton`.

A filter keeps the tokens above some logit, so it is enough to find that logit. It is searched by counting: one pass
over the row sums how many tokens, and how much probability, lie above each of three pivots, and narrows the interval
to a quarter. (The way of threshold search in "top-k selection by bisection", Tang et al., arXiv 2109.07709 for sorting
networks and FlashInfer's pivots, Ye et al., arXiv 2501.01005; the draw itself is exact and needs one number only.)
As soon as the tokens that can be kept are few, they are copied out, and the rest of the search never leaves the
cache. A row that is nearly flat goes on over the whole row, which is slower and as right.

The plain version is :func:`gapless.sampling.drawing.draw_tokens`: the same order of filters, ties at the edge of top_p
by token id, and the same inversion of the cumulative distribution in the order of ids.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gapless.kernels.launch import launch_kernel

__all__ = ["draw_tokens_triton"]

_BLOCK = 2048
_MAX_CANDIDATES = 4096


@triton.jit
def _search(src, n, most, temperature, lo, hi, count_lo, want_count, want_mass, cap, BLOCK: tl.constexpr):
    """Narrow ``[lo, hi)``, distances to the largest logit, between "enough lies above" and "not enough".

    Enough is ``want_count`` tokens or the mass ``want_mass``. Ends when at most ``cap`` tokens lie above ``lo``, or
    when all tokens inside have one value, which then is ``lo``. Returns lo, the count above it, and the mass above hi.
    """
    mass_hi = 0.0
    done = 0
    rounds = 0
    while (done == 0) & (count_lo > cap):
        step = (hi - lo) * 0.25
        p1, p2, p3 = lo + step, lo + 2 * step, lo + 3 * step
        n1 = tl.zeros((BLOCK,), tl.int32)
        n2 = tl.zeros((BLOCK,), tl.int32)
        n3 = tl.zeros((BLOCK,), tl.int32)
        w1 = tl.zeros((BLOCK,), tl.float32)
        w2 = tl.zeros((BLOCK,), tl.float32)
        w3 = tl.zeros((BLOCK,), tl.float32)
        least = tl.full((BLOCK,), float("inf"), tl.float32)
        largest = tl.full((BLOCK,), -float("inf"), tl.float32)
        for start in range(0, n, BLOCK):
            place = start + tl.arange(0, BLOCK)
            d = tl.load(src + place, mask=place < n, other=-float("inf")) - most
            w = tl.exp(d / temperature)
            n1 += (d >= p1).to(tl.int32)
            n2 += (d >= p2).to(tl.int32)
            n3 += (d >= p3).to(tl.int32)
            w1 += tl.where(d >= p1, w, 0.0)
            w2 += tl.where(d >= p2, w, 0.0)
            w3 += tl.where(d >= p3, w, 0.0)
            inside = (d >= lo) & (d < hi)
            least = tl.where(inside, tl.minimum(least, d), least)
            largest = tl.where(inside, tl.maximum(largest, d), largest)
        c1, c2, c3 = tl.sum(n1, 0), tl.sum(n2, 0), tl.sum(n3, 0)
        m1, m2, m3 = tl.sum(w1, 0), tl.sum(w2, 0), tl.sum(w3, 0)
        first, last = tl.min(least, 0), tl.max(largest, 0)
        enough1 = (c1 >= want_count) | (m1 >= want_mass)
        enough2 = (c2 >= want_count) | (m2 >= want_mass)
        enough3 = (c3 >= want_count) | (m3 >= want_mass)
        rounds += 1
        # The bound is for rows that are not numbers: 4**-64 of any interval is less than a bit.
        if (first >= last) | (rounds >= 64):
            lo = first
            done = 1
        else:
            mass_hi = tl.where(enough3, mass_hi, tl.where(enough2, m3, tl.where(enough1, m2, m1)))
            hi = tl.where(enough3, hi, tl.where(enough2, p3, tl.where(enough1, p2, p1)))
            count_lo = tl.where(enough3, c3, tl.where(enough2, c2, tl.where(enough1, c1, count_lo)))
            lo = tl.where(enough3, p3, tl.where(enough2, p2, tl.where(enough1, p1, lo)))
    return lo, hi, count_lo, mass_hi


@triton.jit
def _mass_above(src, n, most, temperature, edge, BLOCK: tl.constexpr):
    """The mass of the tokens at ``edge`` and above."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        place = start + tl.arange(0, BLOCK)
        d = tl.load(src + place, mask=place < n, other=-float("inf")) - most
        total += tl.where(d >= edge, tl.exp(d / temperature), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _place_of_draw(src, n, most, temperature, least, count, whole, top_k, top_p, min_p, number, BLOCK: tl.constexpr):
    """Filter and draw among ``src[:n]``, of which ``count`` values at ``least`` and above count.

    ``whole`` is the mass of the row; a ``top_k`` of 0 is off, and the k largest are among those that count.
    """
    above = temperature * 1e-3
    edge = least
    tied = 1 << 30  # how many of the tokens at the edge itself are kept
    if top_k > 0:
        edge, _hi, _count, _mass = _search(
            src, n, most, temperature, least, above, count, top_k, float("inf"), 0, BLOCK
        )
    if top_p < 1.0:
        want = top_p * whole
        if top_k > 0:
            want = top_p * _mass_above(src, n, most, temperature, edge, BLOCK)
        edge, _hi, _count, mass = _search(src, n, most, temperature, edge, above, count, 1 << 30, want, 0, BLOCK)
        ties = tl.ceil((want - mass) / tl.exp(edge / temperature))
        tied = tl.minimum(tl.maximum(ties, 1.0), 1e9).to(tl.int32)
    heavier = tl.zeros((BLOCK,), tl.float64)
    at_edge = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, n, BLOCK):
        place = start + tl.arange(0, BLOCK)
        d = tl.load(src + place, mask=place < n, other=-float("inf")) - most
        w = tl.exp(d / temperature)
        heavier += tl.where((d > edge) & (w >= min_p), w, 0.0).to(tl.float64)
        at_edge += ((d == edge) & (w >= min_p)).to(tl.int32)
    equal = tl.sum(at_edge, 0)
    edge_weight = tl.exp(edge / temperature).to(tl.float64)
    target = number * (tl.sum(heavier, 0) + tl.minimum(equal, tied).to(tl.float64) * edge_weight)
    passed = tl.full((), 0.0, tl.float64)
    before = 0
    found = -1
    last = 0
    for start in range(0, n, BLOCK):
        if found < 0:
            place = start + tl.arange(0, BLOCK)
            d = tl.load(src + place, mask=place < n, other=-float("inf")) - most
            w = tl.exp(d / temperature)
            at = (d == edge).to(tl.int32)
            rank = tl.cumsum(at, 0) + before
            kept = ((d > edge) | ((d == edge) & (rank <= tied))) & (w >= min_p) & (w > 0.0)
            wide = tl.where(kept, w, 0.0).to(tl.float64)
            total = tl.sum(wide, 0)
            last = tl.maximum(last, tl.max(tl.where(kept, place, 0), 0))
            if passed + total > target:
                there = (tl.cumsum(wide, 0) + passed > target) & kept
                found = tl.min(tl.where(there, place, n), 0)
                # The two sums round differently: what only the one has passed is the last token of the block.
                found = tl.where(found == n, last, found)
            passed += total
            before += tl.sum(at, 0)
    return tl.where(found < 0, last, found)


@triton.jit
def _draw_kernel(
    logits,  # [num_samples, vocab_size], fp32
    samples,  # [n], int64
    maxima,  # [num_samples], fp32
    temperatures,  # [n], fp32
    top_ks,  # [n], int32
    top_ps,  # [n], fp32
    min_ps,  # [n], fp32
    numbers,  # [n], fp64
    tokens,  # [n], int64
    values,  # [n, CAP], fp32: candidates that were copied out
    ids,  # [n, CAP], int32
    vocab_size,
    BLOCK: tl.constexpr,
    CAP: tl.constexpr,
):
    """One program draws for one sample."""
    i = tl.program_id(0).to(tl.int64)
    sample = tl.load(samples + i)
    row = logits + sample * vocab_size
    most = tl.load(maxima + sample)
    temperature = tl.load(temperatures + i)
    top_k, top_p, min_p = tl.load(top_ks + i), tl.load(top_ps + i), tl.load(min_ps + i)
    number = tl.load(numbers + i)
    # Below this a weight is zero in fp32: such tokens are never drawn, kept or not.
    floor = -104.0 * temperature
    weights = tl.zeros((BLOCK,), tl.float32)
    counts = tl.zeros((BLOCK,), tl.int32)
    lowest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        d = tl.load(row + place, mask=place < vocab_size, other=-float("inf")) - most
        counted = (d >= floor) & (d > -float("inf"))
        weights += tl.where(counted, tl.exp(d / temperature), 0.0)
        counts += counted.to(tl.int32)
        lowest = tl.where(counted, tl.minimum(lowest, d), lowest)
    least, count = tl.min(lowest, 0), tl.sum(counts, 0)
    top_k = tl.where(top_k < count, top_k, 0)
    limited = (top_p < 1.0) | (top_k > 0)
    whole = tl.sum(weights, 0)
    least_kept, count_kept = least, count
    if limited & (count > CAP):
        want_count = tl.where(top_k > 0, top_k, 1 << 30)
        want_mass = tl.where(top_k > 0, float("inf"), top_p * whole)
        least_kept, _hi, count_kept, _mass = _search(
            row, vocab_size, most, temperature, least, temperature * 1e-3, count, want_count, want_mass, CAP, BLOCK
        )
    src = row
    stored = vocab_size
    copied = 0
    if limited & (count_kept <= CAP):
        stored = 0
        for start in range(0, vocab_size, BLOCK):
            place = start + tl.arange(0, BLOCK)
            x = tl.load(row + place, mask=place < vocab_size, other=-float("inf"))
            kept = (x - most >= least_kept) & (place < vocab_size)
            slot = stored + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(values + i * CAP + slot, x, mask=kept & (slot < CAP))
            tl.store(ids + i * CAP + slot, place, mask=kept & (slot < CAP))
            stored += tl.sum(kept.to(tl.int32), 0)
        # Other threads of this program read what these wrote.
        tl.debug_barrier()
        src = values + i * CAP
        stored = tl.minimum(stored, CAP)
        copied = 1
        least = least_kept
        count = stored
    found = _place_of_draw(src, stored, most, temperature, least, count, whole, top_k, top_p, min_p, number, BLOCK)
    if copied == 1:
        found = tl.load(ids + i * CAP + found)
    tl.store(tokens + i, found.to(tl.int64))


def draw_tokens_triton(
    logits: Tensor,
    samples: Tensor,
    maxima: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    numbers: Tensor,
    *,
    needs_filter: bool,
) -> Tensor:
    """Draw a token for some samples; the arguments are those of the plain version.

    Args:
        logits: ``[num_samples, vocab_size]``, fp32, contiguous; not changed.
        samples: ``[n]``, int64.
        maxima: ``[num_samples]``, fp32: the largest logit of each row.
        temperatures, top_ps, min_ps: ``[n]``, fp32.
        top_ks: ``[n]``, int32.
        numbers: ``[n]``, fp64, in [0, 1).
        needs_filter: not looked at: rows without filters skip them anyway.

    Returns:
        ``[n]``, int64; any token for a row whose logits are not numbers.
    """
    count, vocab_size = len(samples), logits.shape[1]
    assert logits.is_contiguous()
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    values = torch.empty((count, _MAX_CANDIDATES), dtype=torch.float32, device=logits.device)
    ids = torch.zeros((count, _MAX_CANDIDATES), dtype=torch.int32, device=logits.device)
    launch_kernel(
        _draw_kernel,
        (count,),
        logits, samples, maxima, temperatures, top_ks, top_ps, min_ps, numbers, tokens, values, ids, vocab_size,
        BLOCK=_BLOCK, CAP=_MAX_CANDIDATES, num_warps=8,
    )  # fmt: skip
    return tokens
