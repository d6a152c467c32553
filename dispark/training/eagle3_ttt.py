"""Training-time test of feature-recurrent drafters: a training forward that drafts as decoding does (Eagle-3).

Step 0 sees the target's features of the text; every later step takes the states of the step before, as drafting will.
At step s position i is fed the token at i + 1 + s, at rotary position i + s, and sees what it would in decoding: the
text's pairs up to itself (step 0) and, of every later step, its own. Tokens are the text's own (teacher forcing).

It knows neither data nor optimizers, and works on the network that decodes. What is done with the logits: losses.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dispark.drafters.network import TokenEnds
from dispark.drafters.recurrent_network import RecurrentNetwork
from dispark.drafters.vocabulary import DraftVocabulary
from dispark.training.attention import DENSE_ATTENTION, DenseCall


@dataclass(frozen=True)
class TttBatch:
    """Sequences, right-padded.

    Args:
        tokens_BT: int64.
        is_real_BT: bool, false on padding.
        loss_mask_BT: bool, true where a token may be supervised.
        features_BTF: tapped target states, in the drafter's `feature_layers` order.
    """

    tokens_BT: Tensor
    is_real_BT: Tensor
    loss_mask_BT: Tensor
    features_BTF: Tensor


@dataclass(frozen=True)
class TttStep:
    """One step: int64 tokens_BT that were fed, states hidden_BTD that recur, logits_BTV over what can be drafted."""

    tokens_BT: Tensor
    hidden_BTD: Tensor
    logits_BTV: Tensor


def shift_left(values: Tensor, num: int, fill: float = 0) -> Tensor:
    """[B, T, ...] moved `num` positions to the left, `fill` behind."""
    moved = torch.full_like(values, fill)
    if num < values.shape[1]:
        moved[:, : values.shape[1] - num] = values[:, num:]
    return moved


def ttt_mask(lengths_B: Tensor, num_positions: int, step: int) -> Tensor:
    """bool [B, T, (step + 1) * T]: step 0's keys up to the query, later steps' at the query; nothing from the last
    `step` real positions on, whose text is not known."""
    position_T = torch.arange(num_positions, device=lengths_B.device)
    same_TT = position_T[:, None] == position_T[None, :]
    seen_TK = torch.cat([position_T[:, None] >= position_T[None, :], *[same_TT] * step], dim=1)
    is_query_BT = position_T < (lengths_B - step).unsqueeze(1)
    return seen_TK & is_query_BT.unsqueeze(-1)


def forward_ttt(network: RecurrentNetwork, ends: TokenEnds, batch: TttBatch, num_steps: int) -> list[TttStep]:
    """Runs all steps; gradients flow through all of them, keys and values of earlier ones included.

    The network is left with the attention function it had.
    """
    num_positions = batch.tokens_BT.shape[1]
    lengths_B = batch.is_real_BT.sum(1)
    position_BT = torch.arange(num_positions, device=lengths_B.device).expand_as(batch.tokens_BT)
    hidden_BTD = network.project(batch.features_BTF)
    past: dict[int, tuple[Tensor, Tensor]] = {}
    steps = []
    before = network.stock.config._attn_implementation
    network.stock.use_attention(DENSE_ATTENTION)
    try:
        for s in range(num_steps):
            call = DenseCall(ttt_mask(lengths_B, num_positions, s), past)
            tokens_BT = shift_left(batch.tokens_BT, s + 1)
            hidden_BTD = network(ends.embed(tokens_BT), hidden_BTD, position_BT + s, dense=call)
            steps.append(TttStep(tokens_BT, hidden_BTD, ends.logits(network.read(hidden_BTD))))
            past = {layer: _joined(past.get(layer), own) for layer, own in call.own.items()}
    finally:
        network.stock.use_attention(before)
    return steps


def _joined(old: tuple[Tensor, Tensor] | None, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values with a step's behind them."""
    if old is None:
        return new
    return torch.cat([old[0], new[0]], dim=2), torch.cat([old[1], new[1]], dim=2)


def soft_labels(target_logits_BTV: Tensor, step: int, vocabulary: DraftVocabulary | None = None) -> Tensor:
    """float32 [B, T, V or V_draft]: the target's distribution after the token fed at `step`, uniform behind the end.

    A reduced vocabulary gets the distribution renormalised on it.
    """
    logits = target_logits_BTV.float()
    if vocabulary is not None:
        logits = logits[..., vocabulary.ids.to(logits.device)]
    return shift_left(logits.softmax(-1), step + 1, fill=1.0 / logits.shape[-1])


def supervised(
    batch: TttBatch,
    step: int,
    vocabulary: DraftVocabulary | None = None,
    target_logits_BTV: Tensor | None = None,
) -> Tensor:
    """bool [B, T]: positions whose draft at `step` is supervised.

    The loss mask without each sequence's last real token, moved along; with a reduced vocabulary only where the
    target's most likely token can be drafted (needs `target_logits_BTV`).
    """
    is_last_BT = batch.is_real_BT & ~shift_left(batch.is_real_BT, 1)
    found_BT = shift_left(batch.loss_mask_BT & batch.is_real_BT & ~is_last_BT, step)
    if vocabulary is None:
        return found_BT
    assert target_logits_BTV is not None, "a reduced vocabulary needs the target's logits"
    can_draft_BT = vocabulary.t2d.to(found_BT.device)[target_logits_BTV.argmax(-1)]
    return found_BT & shift_left(can_draft_BT, step + 1)
