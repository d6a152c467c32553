"""Shaping of distributions against a slow reference and transformers' own warpers; inversion against exact shares."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dispark.decoding.sampling import draw, next_token, probabilities
from dispark.types import Sampling

LAST = math.nextafter(1.0, 0.0)


def slow_probabilities(logits: list[float], sampling: Sampling) -> tuple[list[float], float]:
    """The distribution in float64, token by token, and how near any choice came to going the other way."""
    scaled = [logit / sampling.temperature for logit in logits]
    kept = [v for v in range(len(scaled)) if scaled[v] > -math.inf]
    if sampling.top_k is not None and sampling.top_k < len(scaled):
        floor = sorted(scaled, reverse=True)[sampling.top_k - 1]
        kept = [v for v in kept if scaled[v] >= floor]
    weight = {v: math.exp(scaled[v] - max(scaled)) for v in kept}
    nearness = math.inf
    if sampling.top_p is not None and sampling.top_p < 1.0:
        total, mass = sum(weight.values()), 0.0
        chosen: list[int] = []
        for v in sorted(kept, key=lambda v: (-scaled[v], v)):
            if chosen:
                nearness = min(nearness, abs(mass - sampling.top_p))
                if mass >= sampling.top_p:
                    break
            chosen.append(v)
            mass += weight[v] / total
        kept = chosen
    total = sum(weight[v] for v in kept)
    return [weight[v] / total if v in kept else 0.0 for v in range(len(scaled))], nearness


@given(
    logits=st.lists(st.integers(-4, 4).map(lambda n: n * 0.75), min_size=1, max_size=9),
    temperature=st.sampled_from([0.3, 0.8, 1.0, 1.7]),
    top_k=st.one_of(st.none(), st.integers(1, 10)),
    top_p=st.one_of(st.none(), st.floats(0.01, 1.0)),
)
@settings(max_examples=300, deadline=None)
def test_equals_the_slow_reference_ties_and_all(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    sampling = Sampling(temperature, top_k, top_p)
    expected, nearness = slow_probabilities(logits, sampling)
    assume(nearness > 1e-5)  # there float32 may well decide otherwise
    found = probabilities(torch.tensor([logits, logits[::-1]]), sampling)
    assert found.dtype == torch.float32
    assert found[0].tolist() == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, None, None), (0.6, None, 0.95), (1.3, 20, None), (0.9, 50, 0.8)]
)
def test_equals_transformers_warpers(
    dtype: torch.dtype, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(1)).mul(3).to(dtype)
    expected = TemperatureLogitsWarper(temperature)(None, logits.float())
    if dtype != torch.float32 and (top_k or top_p):
        # Coarse logits tie, and theirs then drops tokens by an unstable order: break the ties first.
        logits = logits.float() - torch.arange(300) * 1e-4
        expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k is not None:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p is not None:
        expected = TopPLogitsWarper(top_p)(None, expected)
    found = probabilities(logits, Sampling(temperature, top_k, top_p))
    torch.testing.assert_close(found, expected.softmax(-1), atol=1e-6, rtol=1e-5)


def test_greedy_is_the_first_argmax() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [-math.inf, -5.0, -math.inf], [1e4, 1e4, 1e4]])
    assert probabilities(logits, Sampling()).tolist() == [[0, 1, 0], [0, 1, 0], [1, 0, 0]]
    assert next_token(logits, Sampling(), torch.full((3,), 0.99, dtype=torch.float64)).tolist() == [1, 1, 0]
    assert probabilities(logits.bfloat16(), Sampling()).dtype == torch.float32


@pytest.mark.parametrize("temperature", [1e-4, 0.5, 1.0, 100.0])
def test_extreme_logits_stay_finite(temperature: float) -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0, -math.inf], [-1e4, -1e4, -math.inf, -math.inf], [0.0, -0.0, 1e-30, -1e4]])
    for sampling in (Sampling(temperature), Sampling(temperature, top_k=3), Sampling(temperature, top_p=0.9)):
        found = probabilities(logits, sampling)
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found.sum(-1), torch.ones(3))
        assert found[0, 3] == 0.0
        assert found[1, 2:].tolist() == [0.0, 0.0]


def test_top_k_keeps_ties_with_the_last_place() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 0.0]])
    assert probabilities(logits, Sampling(1.0, top_k=2))[0].gt(0).tolist() == [True, True, True, False]
    assert probabilities(logits, Sampling(1.0, top_k=1))[0].tolist() == [1.0, 0.0, 0.0, 0.0]
    everything = probabilities(logits, Sampling(1.0))
    for top_k in (4, 5, 1000):
        assert torch.equal(probabilities(logits, Sampling(1.0, top_k=top_k)), everything)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    sizes = [
        int(probabilities(logits, Sampling(1.0, top_p=p)).gt(0).sum()) for p in (1e-6, 0.4999, 0.51, 0.74, 0.76, 0.9)
    ]
    assert sizes == [1, 1, 2, 2, 3, 4]
    assert torch.equal(probabilities(logits, Sampling(1.0, top_p=1.0)), probabilities(logits, Sampling(1.0)))


def test_top_p_among_equals_keeps_the_lower_ids() -> None:
    found = probabilities(torch.zeros(1, 4), Sampling(1.0, top_p=0.6))
    assert found[0].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.0])


def test_top_p_counts_what_top_k_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Among the two that top-k leaves, the first has 4/7 of the mass: enough for 0.5, though 0.4 alone is not.
    assert probabilities(logits, Sampling(1.0, top_k=2, top_p=0.5))[0].tolist() == pytest.approx([1.0, 0.0, 0.0, 0.0])
    assert int(probabilities(logits, Sampling(1.0, top_p=0.5)).gt(0).sum()) == 2


weights = st.lists(
    st.one_of(st.just(0.0), st.floats(2.0**-100, 1.0, width=32), st.just(2.0**-50)), min_size=1, max_size=40
).filter(lambda values: sum(values) > 0)


@given(weights, st.one_of(st.floats(0.0, LAST), st.sampled_from([0.0, LAST, 1 - 2**-24, 0.5])))
@settings(max_examples=400, deadline=None)
def test_no_draw_ever_has_weight_zero(values: list[float], u: float) -> None:
    token = int(draw(torch.tensor([values]), torch.tensor([u], dtype=torch.float64)))
    assert values[token] > 0.0


@given(weights)
@settings(max_examples=60, deadline=None)
def test_every_token_gets_its_exact_share(values: list[float]) -> None:
    num = 2000
    grid = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    tokens = draw(torch.tensor(values).expand(num, -1), grid)
    assert torch.equal(tokens, tokens.sort().values)  # inversion: a larger uniform never gives an earlier token
    share = np.array(values) / sum(values)
    counts = np.bincount(tokens.numpy(), minlength=len(values))
    assert np.abs(counts - num * share).max() <= 1.0 + 1e-6


def test_rows_are_drawn_apart_and_weights_need_no_norm() -> None:
    rows = torch.tensor([[0.0, 7.0, 0.0], [3.0, 0.0, 1.0], [3.0, 0.0, 1.0]])
    drawn = draw(rows, torch.tensor([0.3, 0.74, 0.76], dtype=torch.float64))
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == [1, 0, 2]
    assert draw(torch.zeros(0, 3), torch.zeros(0, dtype=torch.float64)).tolist() == []


def test_next_token_inverts_the_shaped_distribution() -> None:
    logits = torch.tensor([[0.1, 0.6, 0.3]]).log().expand(1000, -1)
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    counts = torch.bincount(next_token(logits, Sampling(1.0), grid), minlength=3)
    assert counts.tolist() == pytest.approx([100, 600, 300], abs=1)
    cut = torch.bincount(next_token(logits, Sampling(1.0, top_k=2), grid), minlength=3)
    assert cut.tolist() == pytest.approx([0, 667, 333], abs=1)


def by_definition(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """One row: tokens enter by falling logit, then by id, until their mass reaches top_p."""
    probs = logits.double().softmax(-1).tolist()
    order = sorted(range(len(probs)), key=lambda token: (-float(logits[token]), token))
    kept, mass = [], 0.0
    for token in order:
        if kept and mass >= top_p:
            break
        kept.append(token)
        mass += probs[token]
    out = torch.zeros(len(probs), dtype=torch.float64)
    out[kept] = logits.double().softmax(-1)[kept]
    return out / out.sum()


@pytest.mark.parametrize("top_p", [0.02, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 9.0])
@pytest.mark.parametrize("is_coarse", [True, False])
def test_top_p_of_a_large_vocabulary(top_p: float, spread: float, is_coarse: bool) -> None:
    """Sets that lie within the few best tokens, and sets that don't; ties at every rank in coarse logits."""
    logits = spread * torch.randn(3, 3000, generator=torch.Generator().manual_seed(1))
    if is_coarse:
        logits = (2 * logits).round() / 2
    found = probabilities(logits, Sampling(1.0, top_p=top_p))
    for row in range(3):
        wanted = by_definition(logits[row], top_p)
        # Sums in float32 may put one more or one less token in at the edge.
        is_different = (found[row] > 0) != (wanted > 0)
        assert int(is_different.sum()) <= 1
        if not bool(is_different.any()):
            torch.testing.assert_close(found[row].double(), wanted, rtol=1e-4, atol=1e-9)
