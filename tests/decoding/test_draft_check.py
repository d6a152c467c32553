"""What a drafter hands over is held to its promise, one clear line for each way of breaking it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conformance.toolbox import decode_all, make_drafter, make_requests, open_tiny
from torch import Tensor

from dispark.decoding.draft_check import check_draft, draft_limit
from dispark.types import Draft, Load, Sampling

B, G, V = 2, 3, 5


class Sampled:
    draft_length = G
    proposal = "sampled"


def good(**changes: Any) -> Draft:
    tokens = torch.tensor([[0, 1, 2], [4, 3, 0]])
    draft = Draft(tokens, [3, 1], torch.full((B, G, V), 0.2), torch.full((B, G), 0.5))
    return replace(draft, **changes)


def check(draft: Any, drafter: Any = None, temperature: float = 1.0) -> None:
    drafter = drafter or Sampled()
    check_draft(draft, drafter, B, V, Sampling(temperature), drafter.draft_length, reads_values=True)


def law(*entries: float) -> Tensor:
    return torch.tensor(entries).expand(B, G, V)


def test_what_keeps_the_promise_passes() -> None:
    check(good())
    check(good(probs_BGV=None), temperature=0.0)
    check(good(probs_BGV=None, lengths=[0, 0]))
    check(good(tokens_BG=torch.zeros(B, 0, dtype=torch.int64), lengths=[0, 0], probs_BGV=None, confidence_BG=None))
    check(good(probs_BGV=None), SimpleNamespace(draft_length=9, proposal="deterministic"))
    # Entries beyond a row's length are nobody's business.
    check(good(tokens_BG=torch.tensor([[0, 1, 2], [4, 99, -1]])))


BAD: list[tuple[Any, str]] = [
    (None, "propose: returned NoneType; must be a Draft"),
    (good(tokens_BG=torch.zeros(B, G)), r"tokens_BG: float32 \[2, 3\]; must be int64 \[2, G\]"),
    (good(tokens_BG=torch.zeros(B, G, dtype=torch.int32)), "tokens_BG: int32"),
    (good(tokens_BG=torch.zeros(G, dtype=torch.int64)), r"tokens_BG: int64 \[3\]"),
    (good(tokens_BG=torch.zeros(G, B, dtype=torch.int64)), r"tokens_BG: int64 \[3, 2\]"),
    (good(lengths=[3]), r"lengths: \[3\]; must be a list of 2 whole numbers"),
    (good(lengths=torch.tensor([3, 1])), "must be a list of 2 whole numbers"),
    (good(lengths=[3, True]), "must be a list of 2 whole numbers"),
    (good(lengths=[-1, 1]), r"lengths: \[-1, 1\]; must be 0 to 3 \(draft_length=3"),
    (good(lengths=[4, 1]), "must be 0 to 3"),
    (good(confidence_BG=torch.zeros(B, V)), r"confidence_BG: float32 \[2, 5\]; must be float32 \[2, 3\]"),
    (good(confidence_BG=torch.full((B, G), 1.5)), "confidence_BG: a value outside; must be 0 to 1"),
    (good(confidence_BG=torch.full((B, G), float("nan"))), "confidence_BG"),
    (good(probs_BGV=None), "probs_BGV: None; must be the law of every token"),
    (good(probs_BGV=torch.full((B, G, V - 1), 0.25)), r"probs_BGV: float32 \[2, 3, 4\]; must be float32 \[2, 3, 5\]"),
    (good(probs_BGV=torch.full((B, G, V), 0.2).half()), "probs_BGV: float16"),
    (good(probs_BGV=torch.full((B, G, V), 1e-6)), "probs_BGV: sums off by 1; must be finite laws that sum to 1"),
    (good(probs_BGV=torch.full((B, G, V), float("nan"))), "probs_BGV"),
    (good(probs_BGV=law(1.2, -0.2, 0, 0, 0)), "probs_BGV"),
    (good(probs_BGV=law(0, 0, 0, 0, 1.0)), "tokens_BG: a token that its own law gives no probability"),
    (good(tokens_BG=torch.tensor([[0, 1, 5], [4, 3, 0]])), r"tokens_BG: ids 0..5; must be 0 to 4"),
    (good(tokens_BG=torch.tensor([[0, -1, 2], [4, 3, 0]])), "tokens_BG: ids -1..4"),
]


@pytest.mark.parametrize(("draft", "words"), BAD)
def test_broken_promises(draft: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        check(draft)
    assert str(caught.value).startswith("drafter ")
    assert "Sampled: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_than_the_drafter_announced() -> None:
    with pytest.raises(ValueError, match=r"must be 0 to 2 \(draft_length=2, 3 tokens a row\)"):
        check(good(), SimpleNamespace(draft_length=2, proposal="sampled"))


def test_a_point_mass_has_no_law() -> None:
    with pytest.raises(ValueError, match=r'must be None \(proposal="deterministic"\)'):
        check(good(), SimpleNamespace(draft_length=3, proposal="deterministic"))


def test_the_loop_checks_every_round() -> None:
    drafter: Any = make_drafter("draft_model")
    propose = drafter.propose

    def one_too_many(*arguments: Any) -> Draft:
        draft = propose(*arguments)
        return replace(draft, lengths=[draft.tokens_BG.shape[1] + 1] * len(draft.lengths))

    drafter.propose = one_too_many
    with pytest.raises(ValueError, match=r"lengths: \[5\]; must be 0 to 4"):
        decode_all(open_tiny(), drafter, make_requests([[1, 2, 3]]))


class Asks:
    """Stands for a scheduler that limits drafts."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def draft_limit(self, load: Load) -> Any:
        return self.answer


def test_a_longer_draft_than_was_asked_for_is_refused() -> None:
    check_draft(good(lengths=[2, 1]), Sampled(), B, V, Sampling(1.0), 2)
    with pytest.raises(
        ValueError, match=r"lengths: \[3, 1\]; must be 0 to 2 \(draft_length=3, limit=2, 3 tokens a row"
    ):
        check_draft(good(), Sampled(), B, V, Sampling(1.0), 2)


@pytest.mark.parametrize(("answer", "limit"), [(None, 3), (0, 0), (2, 2), (9, 3)])
def test_limits_of_schedulers(answer: Any, limit: int) -> None:
    scheduler: Any = Asks(answer)
    assert draft_limit(scheduler, Load(1, 0, 0, [1]), 3) == limit


@pytest.mark.parametrize("answer", [-1, 1.5, "2"])
def test_what_is_no_limit(answer: Any) -> None:
    scheduler: Any = Asks(answer)
    with pytest.raises(ValueError, match=r"scheduler .*\.Asks: draft_limit: .*; must be a whole number >= 0, or None"):
        draft_limit(scheduler, Load(1, 0, 0, [1]), 3)
