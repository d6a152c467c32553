"""The drafter that drafts nothing."""

from __future__ import annotations

import torch
from conformance.toolbox import make_request, open_tiny

from baselines.autoregressive import AutoregressiveDrafter
from dispark.decoding.random import RowGenerators
from dispark.interfaces import Drafter
from dispark.types import Features, Outcome, Sampling


def test_it_proposes_nothing_and_keeps_nothing() -> None:
    drafter: Drafter = AutoregressiveDrafter()
    assert isinstance(drafter, Drafter)
    assert (drafter.draft_length, drafter.feature_layers, drafter.proposal) == (0, (), "deterministic")
    drafter.bind(open_tiny(), 2, 16)
    drafter.begin([0, 1], [make_request([1]), make_request([2], 1)], [3, 4], Features(None, [1, 1]))
    generators = RowGenerators([0, 1], [1, 1], torch.device("cpu"))
    for sampling in (Sampling(), Sampling(1.0)):
        draft = drafter.propose([0, 1], torch.tensor([3, 4]), sampling, generators)
        assert draft.tokens_BG.shape == (2, 0)
        assert draft.tokens_BG.dtype == torch.int64
        assert draft.lengths == [0, 0]
        assert draft.probs_BGV is None
    drafter.update([0, 1], Outcome([[5], [6]], [0, 0], [None, None], [False, False]), Features(None, [1, 1]))
    drafter.drop([1, 0])
    assert vars(drafter) == {}
