"""The target's embedding and head as a drafter in training sees them: frozen, but gradients pass through to states.

What decodes uses reordered weights that know no gradients (operators.py), so training has ends of its own, over the
same tensors. It knows nothing of losses and batches.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dispark.decoding.target import TargetModel
from dispark.drafters.vocabulary import DraftVocabulary


class FrozenEnds:
    """Embedding before a drafter and head behind it.

    Args:
        target: whose they are.
        vocabulary: the reduced draft vocabulary, or None.
    """

    def __init__(self, target: TargetModel, vocabulary: DraftVocabulary | None = None) -> None:
        self._embedding = target.model.get_input_embeddings()
        weight: Tensor = target.model.get_output_embeddings().weight.detach()
        if vocabulary is not None:
            weight = weight[vocabulary.ids.to(weight.device)].contiguous()
        self._weight = weight
        self._target, self._parts = target, dict[bytes, FrozenEnds]()
        self._cap: float | None = getattr(target.model.config, "final_logit_softcapping", None)

    def of(self, vocabulary: DraftVocabulary) -> FrozenEnds:
        """The same ends over a reduced draft vocabulary, made once for each."""
        key = vocabulary.d2t.cpu().numpy().tobytes()
        if key not in self._parts:
            self._parts[key] = FrozenEnds(self._target, vocabulary)
        return self._parts[key]

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """[..., D], scaled as the target scales its own."""
        embedded: Tensor = self._embedding(tokens)
        return embedded

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V or V_draft], capped as the target caps its own."""
        logits = F.linear(hidden, self._weight)
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap
