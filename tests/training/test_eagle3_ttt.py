"""Training-time test: what is trained is what decodes, step by step; padding and supervision."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from conformance.toolbox import make_request, open_tiny

from baselines.eagle import EagleDrafter, EagleShape
from baselines.eagle3 import Eagle3Drafter, Eagle3Shape
from baselines.mtp import MtpDrafter, MtpShape
from dispark.decoding.target import TargetModel
from dispark.training.eagle3_ttt import TttBatch, shift_left, supervised, ttt_states
from dispark.types import Features

LENGTH, STEPS = 9, 3
KINDS: dict[str, tuple[Any, Any]] = {
    "eagle3": (Eagle3Drafter, Eagle3Shape),
    "mtp": (MtpDrafter, MtpShape),
    "eagle": (EagleDrafter, EagleShape),
}


@cache
def target_of(name: str) -> TargetModel:
    return open_tiny(name)


def random_drafter(kind: str, name: str, **shape: Any) -> Any:
    drafter_class, shape_class = KINDS[kind]
    drafter = drafter_class(random=shape_class(**shape), draft_length=STEPS)
    drafter.bind(target_of(name), 2, 40)
    return drafter


def random_batch(width: int, lengths: list[int], seed: int = 3) -> TttBatch:
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    is_real = torch.arange(LENGTH) < torch.tensor(lengths).unsqueeze(1)
    return TttBatch(
        tokens_BT=torch.randint(1, 250, (rows, LENGTH), generator=generator) * is_real,
        is_real_BT=is_real,
        loss_mask_BT=is_real.clone(),
        features_BTF=torch.randn(rows, LENGTH, width, generator=generator) * is_real.unsqueeze(-1),
    )


def batch_for(drafter: Any, lengths: list[int]) -> TttBatch:
    return random_batch(len(drafter.feature_layers) * target_of("tiny").hidden_size, lengths)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["tiny", "tiny_qwen3", "tiny_gemma3", "tiny_gemma4"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_step_says_the_same_in_training_and_in_decoding(kind: str, name: str, num_layers: int) -> None:
    """From every position, chains over the text's own tokens; rows of two lengths."""
    drafter = random_drafter(kind, name, num_layers=num_layers)
    lengths = [LENGTH, 6]
    batch = batch_for(drafter, lengths)
    steps = list(ttt_states(drafter.network, drafter.parts.ends, batch, STEPS))
    assert len(steps) == STEPS
    num_compared = 0
    for row, length in enumerate(lengths):
        tokens = batch.tokens_BT[row].tolist()
        for i in range(length - 1):
            drafter.bind(target_of(name), 1, 40)
            features = Features(batch.features_BTF[row, : i + 1], [i + 1])
            drafter.begin([0], [make_request(tokens[: i + 1])], [tokens[i + 1]], features)
            hidden = drafter.extend([0])
            for s in range(STEPS):
                if i + 1 + s >= length:
                    break
                if s > 0:
                    hidden = drafter.step([0], torch.tensor([tokens[i + 1 + s]]), hidden)
                torch.testing.assert_close(steps[s][1][row, i], hidden[0], rtol=1e-4, atol=1e-4)
                num_compared += 1
    assert num_compared == (8 + 7 + 6) + (5 + 4 + 3)


def test_decoding_goes_on_after_training() -> None:
    drafter = random_drafter("eagle3", "tiny")
    before = drafter.network.stock.config._attn_implementation
    batch = batch_for(drafter, [LENGTH])
    list(ttt_states(drafter.network, drafter.parts.ends, batch, 2))
    assert drafter.network.stock.config._attn_implementation == before
    broken = TttBatch(batch.tokens_BT[:, :4], batch.is_real_BT, batch.loss_mask_BT, batch.features_BTF)
    with pytest.raises(RuntimeError):
        list(ttt_states(drafter.network, drafter.parts.ends, broken, 2))
    assert drafter.network.stock.config._attn_implementation == before


def test_padding_and_what_comes_later_do_not_count() -> None:
    """Real positions see neither padding nor, in later steps, other positions' tokens."""
    drafter = random_drafter("eagle3", "tiny")
    batch = batch_for(drafter, [6])
    noisy = TttBatch(batch.tokens_BT.clone(), batch.is_real_BT, batch.loss_mask_BT, batch.features_BTF.clone())
    noisy.tokens_BT[:, 6:] = 99
    noisy.features_BTF[:, 6:] = 1e4
    both = [list(ttt_states(drafter.network, drafter.parts.ends, one, STEPS)) for one in (batch, noisy)]
    for s, (plain, other) in enumerate(zip(*both, strict=True)):
        kept = 5 - s  # positions whose token at this step is real
        torch.testing.assert_close(plain[1][:, :kept], other[1][:, :kept])
        assert not torch.allclose(plain[1][:, 6:], other[1][:, 6:])


# -- supervision --------------------------------------------------------------------------------------------------


def test_shift_left() -> None:
    values = torch.tensor([[1, 2, 3]])
    assert shift_left(values, 0).tolist() == [[1, 2, 3]]
    assert shift_left(values, 2, fill=9).tolist() == [[3, 9, 9]]
    assert shift_left(values, 5).tolist() == [[0, 0, 0]]


def test_supervision_moves_with_the_step_and_spares_the_last_token() -> None:
    batch = TttBatch(
        tokens_BT=torch.zeros(2, 5, dtype=torch.int64),
        is_real_BT=torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool(),
        loss_mask_BT=torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1]]).bool(),
        features_BTF=torch.zeros(2, 5, 1),
    )
    assert supervised(batch, 0).int().tolist() == [[0, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
    assert supervised(batch, 1).int().tolist() == [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert supervised(batch, 2).int().tolist() == [[1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
