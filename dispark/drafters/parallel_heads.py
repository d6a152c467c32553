"""Drafters whose heads guess several tokens at once, all from one hidden state of the target.

The state is the final normalised one at the last position that the target has seen, the position before the anchor.
Head i guesses the token i + 1 places behind the anchor, without knowing the anchor or the other heads' guesses; the
token right after that state is the anchor itself, the target's own. A round costs the heads and no layer.

Here are the rows' states, checkpoints and the drafter protocol. What a head is made of is the method's part (see
baselines/medusa.py and baselines/blockwise.py); trees and acceptance rules are unknown here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from dispark.decoding.operators import LinearPacks
from dispark.decoding.random import RowGenerators
from dispark.decoding.target import FINAL, TargetModel
from dispark.drafters.checkpoint import (
    RANDOM,
    Checkpoint,
    check_layout,
    describe,
    fill,
    in_dtype,
    open_checkpoint,
    save_checkpoint,
    warn_random,
)
from dispark.drafters.confidence import check_confidence
from dispark.drafters.network import place, pop_vocabulary
from dispark.drafters.sequential_stage import draft_block
from dispark.drafters.vocabulary import DraftVocabulary
from dispark.types import Draft, Features, Outcome, Request, Sampling, no_draft


@dataclass(frozen=True)
class HeadsShape:
    """Heads to be made with random weights (`checkpoint=random`); each method adds what its heads are made of.

    Args:
        num_heads: heads, which is the most tokens that a round drafts.
        draft_vocab_size: the first so many ids can be drafted; None is all.
        seed: draws the weights.
    """

    num_heads: int = 5
    draft_vocab_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            low = 0 if key == "seed" else 1
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < low):
                raise ValueError(f"drafter.random.{key}={value}: must be a whole number >= {low}")


class ParallelHeadsDrafter(ABC):
    """Drafts one token with each head; the base of the methods, which say what a head is.

    Args:
        checkpoint: a folder, a pinned repository (`owner/name@revision`), or `random`.
        draft_length: tokens proposed a round, at most one a head; None is all of them.
        confidence: peak, entropy, or None for none.
        shape: what `checkpoint=random` makes.

    Raises:
        ValueError: a setting is out of range, or the checkpoint can't be read.
    """

    layout: ClassVar[str]
    feature_layers: tuple[int, ...] = (FINAL,)
    proposal: Literal["sampled", "deterministic"] = "sampled"

    def __init__(self, checkpoint: str, draft_length: int | None, confidence: str | None, shape: HeadsShape) -> None:
        self.checkpoint = str(checkpoint)
        self._shape = shape
        self._confidence = confidence
        self._file = None if self.checkpoint == RANDOM else open_checkpoint(self.checkpoint)
        if self._file is not None:
            check_layout(self._file, [self.layout])
        longest = shape.num_heads if self._file is None else self._num_heads(self._file)
        self.draft_length = longest if draft_length is None else draft_length
        if not 1 <= self.draft_length <= longest:
            raise ValueError(f"drafter.draft_length={draft_length}: must be 1 to {longest}, one token a head")
        check_confidence(confidence, False, "this drafter")
        self._target: TargetModel | None = None
        self._made_for: TargetModel | None = None
        self._vocabulary: DraftVocabulary | None = None
        self.description: dict[str, Any] = {}

    # -- the method's part --------------------------------------------------------------------------------------

    @abstractmethod
    def _num_heads(self, file: Checkpoint) -> int:
        """Heads that a checkpoint has."""

    def _tensors(self, file: Checkpoint) -> dict[str, Tensor]:
        """Its tensors, named as in the network, and d2t and t2d where it has a reduced vocabulary."""
        return dict(file.tensors)

    @abstractmethod
    def _network(self, target: TargetModel, tensors: Mapping[str, Tensor] | None, num_ids: int) -> nn.Module:
        """Heads over `num_ids` draft ids, with random weights, of the shape that the tensors (None: `random`) say.

        Raises:
            ValueError: the checkpoint was made for another target.
        """

    @abstractmethod
    def _head_logits(self, hidden_BD: Tensor, num_heads: int | None = None) -> Tensor:
        """[B, G, V_draft] logits of the first heads; None is all that draft."""

    @abstractmethod
    def train_logits(self, hidden_MD: Tensor, ends: Any) -> Tensor:
        """[M, heads, V_draft] logits of all heads, with gradients; `ends` are the target's, see training/ends.py."""

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """What the method adds to `description`."""

    @abstractmethod
    def _saved_config(self, target: TargetModel) -> dict[str, Any]:
        """config.json of a saved checkpoint."""

    # -- set-up -------------------------------------------------------------------------------------------------

    def bind(self, target: TargetModel, num_rows: int, num_slots: int) -> None:
        """Loads or makes the heads for this target once, and makes room for the rows' states.

        Raises:
            ValueError: the checkpoint was made for another target, or its tensors are not those of its layout.
        """
        if self._target is not target:
            self._load(target)
            self._target = target
        self._hidden_RD = torch.zeros((num_rows, target.hidden_size), dtype=target.dtype, device=target.device)

    def _load(self, target: TargetModel) -> None:
        if self._file is None:
            warn_random()
        self._make(target, None)
        place(self.network, target)
        if self._vocabulary is not None:
            self._vocabulary.to(target.device)
        if target.linear_backend == "onednn":
            LinearPacks(self.network).install()
        self.description = {
            **describe(self.checkpoint, self._file, self.network),
            "draft_vocab_size": None if self._vocabulary is None else len(self._vocabulary.d2t),
            "feature_layers": list(self.feature_layers),
            **self._facts(),
        }

    def _make(self, target: TargetModel, draft_ids: Tensor | None) -> None:
        """The network, from the checkpoint or with random weights."""
        if self._file is None:
            self.network = self._draw(target, draft_ids)
        else:
            tensors = self._tensors(self._file)
            self._vocabulary = pop_vocabulary(tensors, target, self.checkpoint)
            num_ids = target.vocab_size if self._vocabulary is None else len(self._vocabulary.d2t)
            self.network = self._network(target, tensors, num_ids)
            fill(self.network, tensors, self.checkpoint, self._file.layout)
        self._made_for = target

    def _draw(self, target: TargetModel, draft_ids: Tensor | None) -> nn.Module:
        """A network with random weights; its draft vocabulary is the first ids unless others are given.

        Raises:
            ValueError: more draft ids than the target has.
        """
        size = self._shape.draft_vocab_size
        if size is not None and size > target.vocab_size:
            raise ValueError(
                f"drafter.random.draft_vocab_size={size}: target {target.name} has {target.vocab_size} tokens"
            )
        if draft_ids is None and size is not None:
            draft_ids = torch.arange(size)
        self._vocabulary = None if draft_ids is None else DraftVocabulary(draft_ids, target.vocab_size)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._shape.seed)
            return self._network(target, None, target.vocab_size if draft_ids is None else len(draft_ids))

    def start(self, target: TargetModel, draft_ids: Tensor | None = None) -> nn.Module:
        """Float32 heads to be trained, from the checkpoint or fresh; `save` writes them as they then are.

        Args:
            target: what they will draft for.
            draft_ids: int64 ascending target ids, where fresh heads have a reduced draft vocabulary.

        Raises:
            ValueError: see `bind`.
        """
        self._make(target, draft_ids)
        if self._file is None:
            self._start_heads(target)
        return self.network.float().to(target.device)

    def _start_heads(self, target: TargetModel) -> None:  # noqa: B027 - a method whose heads need it overrides it
        """Gives fresh heads the weights that training starts from, where those aren't the random ones."""

    @property
    def draft_vocab_size(self) -> int | None:
        """Ids that can be drafted; None is all."""
        return self._shape.draft_vocab_size if self._vocabulary is None else len(self._vocabulary.d2t)

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        return self._vocabulary

    def save(self, folder: str | Path) -> None:
        """Writes the heads as a checkpoint that loads to the same drafts; `bind` or `start` comes first."""
        assert self._made_for is not None, "bind() or start() comes first"
        tensors = in_dtype(self.network.state_dict(), self._made_for.dtype)
        if self._vocabulary is not None:
            tensors |= self._vocabulary.state_dict()
        save_checkpoint(Path(folder), self._saved_config(self._made_for), tensors)

    # -- rounds -------------------------------------------------------------------------------------------------

    def begin(
        self, rows: Sequence[int], requests: Sequence[Request], first_tokens: Sequence[int], features: Features
    ) -> None:
        """Keeps the state of each prompt's last token."""
        self._keep(rows, features, [length - 1 for length in features.lengths])

    def propose(
        self,
        rows: Sequence[int],
        anchors_B: Tensor,
        sampling: Sampling,
        generators: RowGenerators,
        limit: int | None = None,
    ) -> Draft:
        """Every head's own distribution, drawn from independently of the others."""
        num = self.draft_length if limit is None else limit
        if num == 0:
            return no_draft(anchors_B)
        base_BGV = self.logits(rows, num)
        uniform_BG = None if sampling.is_greedy else generators.uniform("draft", self.draft_length)[:, :num]
        block = draft_block(
            base_BGV,
            base_BGV,  # the hidden states, which only sequential heads read
            anchors_B,
            sampling,
            uniform_BG,
            vocabulary=self._vocabulary,
            confidence=self._confidence,
        )
        return Draft(block.tokens_MG, [num] * len(rows), block.probs_MGV, block.confidence_MG)

    @torch.inference_mode()
    def logits(self, rows: Sequence[int], num_heads: int | None = None) -> Tensor:
        """[B, G, V_draft] logits of the rows' first heads at the position before their anchors; None is all that
        draft."""
        index = torch.tensor(list(rows)).to(self._hidden_RD.device, non_blocking=True)
        return self._head_logits(self._hidden_RD[index], num_heads)

    def update(self, rows: Sequence[int], outcome: Outcome, features: Features) -> None:
        """Keeps the state of the last accepted draft, or of the anchor where none was."""
        self._keep(rows, features, outcome.num_accepted)

    def drop(self, rows: Sequence[int]) -> None:  # noqa: B027 - a whole method: there is nothing to free
        """Nothing to do: a row's state is written anew when it begins."""

    def _keep(self, rows: Sequence[int], features: Features, places: Sequence[int]) -> None:
        """Keeps, for each row, the state of its token number `places[i]` in the call."""
        assert features.hidden_NF is not None
        starts = accumulate(features.lengths, initial=0)
        taken = [start + place for start, place in zip(starts, places, strict=False)]
        both = torch.tensor([taken, list(rows)]).to(self._hidden_RD.device, non_blocking=True)
        self._hidden_RD[both[1]] = features.hidden_NF[both[0]]


def check_hidden_size(size: int, target: TargetModel, name: str) -> None:
    """Raises ValueError where heads read states of another width than the target's."""
    if size != target.hidden_size:
        raise ValueError(
            f"drafter.checkpoint={name}: made for a hidden size of {size}, but target {target.name} has "
            f"{target.hidden_size}"
        )
