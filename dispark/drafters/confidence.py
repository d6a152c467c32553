"""How sure a drafter is that a drafted token survives, given that those before it did.

Three sources: a trained head, and two proxies that any drafter with a distribution has. All are known before the token
is drawn, so a rule on them does not anticipate it; the probability of the drawn token would. They are float32 numbers
in [0, 1], to be calibrated on held-out text before they are taken for probabilities.

The module does not know what a scheduler does with them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

CONFIDENCES = ("head", "peak", "entropy")


class ConfidenceHead(nn.Module):
    """sigmoid(w [h; W1[previous]] + b), or of h alone; named as DeepSpec's (`proj`).

    Args:
        hidden_size: width of h.
        rank: width of W1's rows, or 0 where the head reads h alone.
    """

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.has_markov = rank > 0
        self.proj = nn.Linear(hidden_size + rank, 1)

    def forward(self, hidden_MD: Tensor, embedded_MR: Tensor | None) -> Tensor:
        """float32 [...] logits; `embedded_MR` are the rows of W1, unused where the head reads h alone."""
        inputs = hidden_MD
        if self.has_markov:
            assert embedded_MR is not None
            inputs = torch.cat([hidden_MD, embedded_MR], dim=-1)
        logits: Tensor = self.proj(inputs).squeeze(-1)
        return logits.float()


def proxy(kind: str, logits_MV: Tensor) -> Tensor:
    """float32 [...] confidence from a draft distribution at temperature 1, before sampling settings.

    `peak` is the largest probability, `entropy` is exp(-entropy): 1 for a point mass, 1/V for the uniform law.

    Raises:
        ValueError: an unknown kind.
    """
    log_probs = logits_MV.float().log_softmax(-1)
    if kind == "peak":
        return log_probs.amax(-1).exp()
    if kind == "entropy":
        entropy = -(log_probs.exp() * log_probs.clamp_min(-1e4)).sum(-1)
        return (-entropy).exp()
    raise ValueError(f"drafter.confidence={kind}: must be one of {', '.join(CONFIDENCES)}, or null for none")


def check_confidence(kind: str | None, has_head: bool, drafter: str) -> None:
    """Raises ValueError for an unknown kind, and for "head" where there is none."""
    if kind is not None and kind not in CONFIDENCES:
        raise ValueError(f"drafter.confidence={kind}: must be one of {', '.join(CONFIDENCES)}, or null for none")
    if kind == "head" and not has_head:
        raise ValueError(
            f"drafter.confidence=head: {drafter} has no confidence head; allowed: peak, entropy, or null for none"
        )
