"""The DiSpark drafter: a block in parallel, then its tokens one after the other (DSpark, Cheng et al. 2026).

A round: the target's features of the tokens that were emitted become keys and values of every draft layer and stay; the
block (anchor and masks) attends to them and to itself, and its own keys and values are never kept; the sequential stage
turns base logits into tokens. Context covers every position before the anchor; the anchor itself is known by its token
only.

Here are rows, caches and the drafter protocol; the network is in network.py, the choice of tokens in
sequential_stage.py. The target is known by its features, its embedding and its head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dispark.decoding.random import RowGenerators
from dispark.decoding.target import TargetModel
from dispark.drafters.checkpoint import RANDOM, Checkpoint, check_layout, describe, open_checkpoint, warn_random
from dispark.drafters.confidence import check_confidence
from dispark.drafters.layers import PackedLayers, layers_like
from dispark.drafters.network import (
    BlockConfig,
    BlockNetwork,
    TokenEnds,
    check_target,
    load_network,
    place,
    read_deepspec,
)
from dispark.drafters.saving import save_block
from dispark.drafters.sequential_heads import HEADS, start_head
from dispark.drafters.sequential_stage import DraftedBlock, draft_block
from dispark.drafters.vocabulary import DraftVocabulary
from dispark.types import Draft, Features, Outcome, Request, Sampling, no_draft

Reader = Callable[[Checkpoint], BlockConfig]


@dataclass(frozen=True)
class BlockShape:
    """A drafter to be made with random weights (`checkpoint=random`).

    Args:
        num_layers: draft layers.
        block_size: slots of a block, the anchor's included.
        head, rank: the sequential head.
        has_confidence: with a confidence head over [h; W1[previous]], or over h where there is no sequential head.
        feature_layers: target layers to read; None spreads five over the target.
        mask_token_id: None is the target's last id.
        draft_vocab_size: the first so many ids can be drafted; None is all.
        seed: draws the weights.
    """

    num_layers: int = 2
    block_size: int = 7
    head: str = "markov"
    rank: int = 128
    has_confidence: bool = True
    feature_layers: list[int] | None = None
    mask_token_id: int | None = None
    draft_vocab_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for key, low in (("num_layers", 1), ("block_size", 1), ("rank", 1), ("draft_vocab_size", 1)):
            value = getattr(self, key)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < low):
                raise ValueError(f"drafter.random.{key}={value}: must be a whole number >= {low}")
        if self.head not in HEADS:
            raise ValueError(f"drafter.random.head={self.head}: must be one of {', '.join(HEADS)}")

    def config(self, target: TargetModel, anchor_predicts: bool) -> BlockConfig:
        """The config of such a drafter for a target.

        Raises:
            ValueError: more draft ids than the target has.
        """
        size = self.draft_vocab_size
        if size is not None and size > target.vocab_size:
            raise ValueError(
                f"drafter.random.draft_vocab_size={size}: target {target.name} has {target.vocab_size} tokens"
            )
        if self.feature_layers is not None and not self.feature_layers:
            raise ValueError("drafter.random.feature_layers=[]: must name at least one layer, or null")
        features = spread_layers(target.num_layers) if self.feature_layers is None else self.feature_layers
        confidence = "none"
        if self.has_confidence:
            confidence = "hidden" if self.head == "none" else "markov"
        return BlockConfig(
            layers=layers_like(target.model.config, self.num_layers),
            feature_layers=tuple(features),
            block_size=self.block_size,
            mask_token_id=target.vocab_size - 1 if self.mask_token_id is None else self.mask_token_id,
            anchor_predicts=anchor_predicts,
            head=self.head,
            rank=0 if self.head == "none" else self.rank,
            confidence=confidence,
            draft_vocab_size=size,
            num_target_layers=target.num_layers,
        )


def spread_layers(num_layers: int, num: int = 5) -> list[int]:
    """At most `num` distinct layers, from the second to the fourth from the end where there are so many."""
    low, high = (1, num_layers - 3) if num_layers >= 5 else (0, num_layers - 2)
    num = max(1, min(num, high - low + 1))
    if num == 1:
        return [max(0, (low + high) // 2)]
    return [round(low + i * (high - low) / (num - 1)) for i in range(num)]


class SemiAutoregressiveDrafter:
    """Drafts with a block-parallel network.

    Args:
        checkpoint: a folder, a pinned repository (`owner/name@revision`), or `random`.
        draft_length: tokens proposed a round, at most what a block drafts; None is all of them.
        num_candidates: confine each slot to so many of its best base logits; None to none.
        confidence: head, peak, entropy, or None for none.
        random: what `checkpoint=random` makes.

    Raises:
        ValueError: a setting is out of range, or the checkpoint can't be read.
    """

    readers: ClassVar[dict[str, Reader]] = {"deepspec_block": read_deepspec}
    proposal: Literal["sampled", "deterministic"] = "sampled"

    def __init__(
        self,
        checkpoint: str = RANDOM,
        draft_length: int | None = None,
        num_candidates: int | None = None,
        confidence: str | None = "head",
        random: BlockShape | None = None,
        anchor_predicts: bool = True,
    ) -> None:
        if num_candidates is not None and num_candidates < 1:
            raise ValueError(f"drafter.num_candidates={num_candidates}: must be at least 1, or null for no limit")
        self.checkpoint = str(checkpoint)
        self._shape = random if random is not None else BlockShape()
        self._num_candidates = num_candidates
        self._confidence = confidence
        self._anchor_predicts = anchor_predicts
        self._file: Checkpoint | None = None
        self._config: BlockConfig | None = None
        if self.checkpoint == RANDOM:
            longest = self._shape.block_size - (0 if anchor_predicts else 1)
            self.feature_layers: tuple[int, ...] = ()  # known once the target is
            has_head = self._shape.has_confidence
        else:
            self._file = open_checkpoint(self.checkpoint)
            check_layout(self._file, self.readers)
            self._config = self.readers[self._file.layout](self._file)
            longest, self.feature_layers = self._config.max_draft_length, self._config.feature_layers
            has_head = self._config.confidence != "none"
        if longest < 1:
            size = self._shape.block_size if self._config is None else self._config.block_size
            raise ValueError(f"block_size={size}: must be at least 2 where the anchor's slot drafts nothing, else 1")
        self.draft_length = longest if draft_length is None else draft_length
        if not 1 <= self.draft_length <= longest:
            raise ValueError(f"drafter.draft_length={draft_length}: must be 1 to {longest}, which one block drafts")
        check_confidence(confidence, has_head, "this drafter")
        self.network: BlockNetwork
        self._target: TargetModel | None = None
        self._made_for: TargetModel | None = None
        self._pending: list[tuple[list[int], Features, list[int]]] = []
        self.description: dict[str, Any] = {}

    # -- set-up -------------------------------------------------------------------------------------------------

    def bind(self, target: TargetModel, num_rows: int, num_slots: int) -> None:
        """Loads or makes the network for this target once, and makes room for rows.

        Raises:
            ValueError: the checkpoint was made for another target, or its tensors are not those of its layout.
        """
        if self._target is not target:
            self._load(target)
            self._target = target
        # A draft block may be longer than what is proposed of it.
        self._packed.open(num_rows, num_slots + max(0, self.config.block_size - self.draft_length))
        self._pending.clear()

    def _load(self, target: TargetModel) -> None:
        if self._file is None:
            warn_random()
            vocabulary = self._draw(target, None)
            place(self.network, target)
            self._ends = TokenEnds(target, vocabulary=vocabulary)
        else:
            self.network, self._ends = load_network(self._file, self.config, target)
        self._made_for = target
        self.feature_layers = self.config.feature_layers
        self._packed = PackedLayers(self.network.stock, target.linear_backend == "onednn", self.network)
        self.description = {
            **describe(self.checkpoint, self._file, self.network),
            "is_aliased": self._ends.is_aliased,
            "num_layers": self.config.layers.num_hidden_layers,
            "block_size": self.config.block_size,
            "head": self.config.head,
            "feature_layers": list(self.config.feature_layers),
        }

    def _draw(self, target: TargetModel, draft_ids: Tensor | None) -> DraftVocabulary | None:
        """Makes a float32 network with random weights; it drafts the first ids unless others are given."""
        self._config = config = self._shape.config(target, self._anchor_predicts)
        check_target(config, target, RANDOM)
        if draft_ids is None and config.draft_vocab_size is not None:
            draft_ids = torch.arange(config.draft_vocab_size)
        vocabulary = None if draft_ids is None else DraftVocabulary(draft_ids, target.vocab_size)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._shape.seed)
            self.network = BlockNetwork(config, target.vocab_size, vocabulary)
        return vocabulary

    def start(self, target: TargetModel, draft_ids: Tensor | None = None) -> BlockNetwork:
        """A float32 network to be trained, from the checkpoint or with fresh weights; `save` writes it as it then is.

        Args:
            target: what it will draft for.
            draft_ids: int64 ascending target ids, where fresh weights have a reduced draft vocabulary.

        Raises:
            ValueError: see `bind`.
        """
        if self._file is None:
            self._draw(target, draft_ids)
            if self.network.markov_head is not None:
                start_head(self.network.markov_head, self._shape.seed)
        else:
            self.network, _ = load_network(self._file, self.config, target)
        self.feature_layers = self.config.feature_layers
        self._made_for = target
        return self.network.float().to(target.device)

    @property
    def config(self) -> BlockConfig:
        assert self._config is not None, "bind() comes first"
        return self._config

    @property
    def draft_vocab_size(self) -> int | None:
        """Ids that can be drafted; None is all."""
        return self._shape.draft_vocab_size if self._config is None else self._config.draft_vocab_size

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        return self.network.vocabulary

    def save(self, folder: str | Path, has_ends: bool = True) -> None:
        """Writes the network of a bound or started drafter; see saving.py."""
        assert self._made_for is not None, "bind() or start() comes first"
        save_block(Path(folder), self.network, self._made_for, has_ends)

    # -- rounds -------------------------------------------------------------------------------------------------

    def begin(
        self, rows: Sequence[int], requests: Sequence[Request], first_tokens: Sequence[int], features: Features
    ) -> None:
        """Makes context of the prompts' features."""
        for row in rows:
            self._packed.cache.admit(row)
        self._append(rows, features)

    def propose(
        self,
        rows: Sequence[int],
        anchors_B: Tensor,
        sampling: Sampling,
        generators: RowGenerators,
        limit: int | None = None,
    ) -> Draft:
        """The two stages in turn."""
        num = self.draft_length if limit is None else limit
        if num == 0:
            return no_draft(anchors_B)
        hidden_BGD, base_BGV = self.parallel_stage(rows, anchors_B, num)
        uniform_BG = None if sampling.is_greedy else generators.uniform("draft", self.draft_length)[:, :num]
        block = self.sequential_stage(hidden_BGD, base_BGV, anchors_B, sampling, uniform_BG)
        confidence = block.confidence_MG
        if self._confidence == "head":
            logits = self.network.confidence_logits(hidden_BGD, block.previous_MG)
            confidence = None if logits is None else logits.sigmoid()
        return Draft(block.tokens_MG, [num] * len(rows), block.probs_MGV, confidence)

    def parallel_stage(self, rows: Sequence[int], anchors_B: Tensor, limit: int | None = None) -> tuple[Tensor, Tensor]:
        """([B, G, D] hidden states, [B, G, V_draft] base logits) of the first slots that draft; the block is whole, as
        in training, whatever the limit."""
        self._absorb()
        size = self.config.block_size
        plan = self._packed.plan(rows, [size] * len(rows), is_causal=False)
        inputs_BTD = self._ends.embed(self.network.block_tokens(anchors_B))
        hidden_ND = self._packed.run(plan, inputs_BTD.flatten(0, 1))
        hidden_BTD = hidden_ND.view(len(rows), size, -1)
        hidden_BGD = self.network.predicting(hidden_BTD)[
            :, : self.draft_length if limit is None else limit
        ].contiguous()
        return hidden_BGD, self._ends.logits(hidden_BGD)

    def sequential_stage(
        self, hidden_BGD: Tensor, base_BGV: Tensor, anchors_B: Tensor, sampling: Sampling, uniform_BG: Tensor | None
    ) -> DraftedBlock:
        """Tokens from base logits."""
        return draft_block(
            base_BGV,
            hidden_BGD,
            anchors_B,
            sampling,
            uniform_BG,
            head=self.network.markov_head,
            vocabulary=self.network.vocabulary,
            num_candidates=self._num_candidates,
            confidence=self._confidence,
        )

    def update(self, rows: Sequence[int], outcome: Outcome, features: Features) -> None:
        """Keeps the features of the anchor and the accepted drafts until the next block, which needs them first."""
        self._pending.append((list(rows), features, [1 + n for n in outcome.num_accepted]))

    def drop(self, rows: Sequence[int]) -> None:
        """Frees the rows."""
        for names, _, kept in self._pending:
            for i, row in enumerate(names):
                if row in rows:
                    kept[i] = 0
        for row in rows:
            self._packed.cache.drop(row)

    def _absorb(self) -> None:
        """Turns the features of the last round's accepted tokens into context, those of dropped rows left out."""
        for names, features, kept in self._pending:
            assert features.hidden_NF is not None
            starts = accumulate(features.lengths, initial=0)
            alive = [(row, start, num) for row, start, num in zip(names, starts, kept, strict=False) if num > 0]
            if not alive:
                continue
            index = torch.tensor([start + k for _, start, num in alive for k in range(num)])
            hidden = features.hidden_NF[index.to(features.hidden_NF.device, non_blocking=True)]
            self._append([row for row, _, _ in alive], Features(hidden, [num for _, _, num in alive]))
        self._pending.clear()

    def _append(self, rows: Sequence[int], features: Features) -> None:
        """Makes context of features, behind what the rows have."""
        assert features.hidden_NF is not None
        self._packed.append_context(rows, self.network.context(features.hidden_NF), features.lengths)
        for row, num in zip(rows, features.lengths, strict=True):
            self._packed.advance(row, num)
