"""The sequential stage: tokens of a block one after the other, drawn from the very fp32 q that is reported.

Works on base logits that are already there; a head, if any, corrects each slot's by the token drafted before it. With
`num_candidates` the correction and q are confined to each slot's best base logits: q is renormalised on them and 0
elsewhere, which is exact and much cheaper than a correction over the vocabulary.

It knows nothing of layers, caches and rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dispark.decoding.sampling import draw, probabilities
from dispark.drafters.confidence import proxy
from dispark.drafters.vocabulary import DraftVocabulary
from dispark.types import Sampling


@dataclass(frozen=True)
class DraftedBlock:
    """Tokens of M blocks.

    Args:
        tokens_MG: int64 target ids.
        probs_MGV: float32 over the target's vocabulary, or None at temperature 0.
        previous_MG: int64 the token before each slot.
        confidence_MG: float32 proxy, where one was asked for.
        logits: corrected logits of each slot, [M, G, V_draft] or [M, G, C]; only with `keep_logits`.
    """

    tokens_MG: Tensor
    probs_MGV: Tensor | None
    previous_MG: Tensor
    confidence_MG: Tensor | None
    logits: Tensor | None


def draft_block(
    base_MGV: Tensor,
    hidden_MGD: Tensor,
    anchors_M: Tensor,
    sampling: Sampling,
    uniform_MG: Tensor | None,
    *,
    head: Any = None,
    vocabulary: DraftVocabulary | None = None,
    num_candidates: int | None = None,
    confidence: str | None = None,
    keep_logits: bool = False,
) -> DraftedBlock:
    """Drafts every slot of a block.

    Args:
        base_MGV: base logits over the draft vocabulary.
        hidden_MGD: the slots' final hidden states, which some heads read.
        anchors_M: int64 the token before the first slot.
        sampling: shapes q.
        uniform_MG: float64 in [0, 1), one a slot; unused (and may be None) at temperature 0.
        head: a sequential head, or None.
        vocabulary: a reduced draft vocabulary, or None.
        num_candidates: slots are confined to so many of their best base logits; None to none.
        confidence: "peak" or "entropy" for a proxy, else None.
        keep_logits: return the corrected logits.
    """
    if num_candidates is not None and num_candidates < base_MGV.shape[-1]:
        base_MGC, ids_MGC = base_MGV.topk(num_candidates, dim=-1)
    else:
        base_MGC, ids_MGC = base_MGV, None
    if head is None:
        tokens_MG, q_MGC = _choose(base_MGC, sampling, uniform_MG)
        tokens_MG = _to_target(tokens_MG, ids_MGC, vocabulary)
        corrected: Tensor | None = base_MGC
        previous_MG = torch.cat([anchors_M.unsqueeze(1), tokens_MG[:, :-1]], dim=1)
    else:
        needs_logits = keep_logits or confidence in ("peak", "entropy")
        previous, tokens, laws, kept = anchors_M, [], [], []
        state: Tensor | None = None
        previouses = []
        for k in range(base_MGC.shape[1]):
            previouses.append(previous)
            inner, state = head.step(head.embed(previous), hidden_MGD[:, k], state)
            ids_MC = None if ids_MGC is None else ids_MGC[:, k]
            logits_MC = base_MGC[:, k] + head.bias(inner, ids_MC)
            token, q_MC = _choose(logits_MC, sampling, None if uniform_MG is None else uniform_MG[:, k])
            previous = _to_target(token, ids_MC, vocabulary)
            tokens.append(previous)
            if q_MC is not None:
                laws.append(q_MC)
            if needs_logits:
                kept.append(logits_MC)
        tokens_MG, previous_MG = torch.stack(tokens, dim=1), torch.stack(previouses, dim=1)
        q_MGC = torch.stack(laws, dim=1) if laws else None
        corrected = torch.stack(kept, dim=1) if kept else None
    conf_MG = proxy(confidence, corrected) if confidence in ("peak", "entropy") and corrected is not None else None
    probs_MGV = None if q_MGC is None else _widen(q_MGC, ids_MGC, base_MGV.shape[-1], vocabulary)
    return DraftedBlock(tokens_MG, probs_MGV, previous_MG, conf_MG, corrected if keep_logits else None)


def _choose(logits: Tensor, sampling: Sampling, uniform: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(indices, q) of [..., C] logits; q is None at temperature 0."""
    if sampling.is_greedy:
        return logits.argmax(-1), None
    assert uniform is not None
    q = probabilities(logits, sampling)
    return draw(q, uniform), q


def _to_target(index: Tensor, ids: Tensor | None, vocabulary: DraftVocabulary | None) -> Tensor:
    """Target ids of chosen indices, through the candidates and the reduced vocabulary."""
    if ids is not None:
        index = ids.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return index if vocabulary is None else vocabulary.to_target(index)


def _widen(q_MGC: Tensor, ids_MGC: Tensor | None, num_ids: int, vocabulary: DraftVocabulary | None) -> Tensor:
    """q over the target's vocabulary."""
    if ids_MGC is not None:
        narrow = q_MGC
        q_MGC = torch.zeros((*narrow.shape[:-1], num_ids), dtype=narrow.dtype, device=narrow.device)
        q_MGC.scatter_(-1, ids_MGC, narrow)
    return q_MGC if vocabulary is None else vocabulary.widen(q_MGC)
