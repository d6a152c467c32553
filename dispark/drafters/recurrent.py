"""Feature-recurrent drafting: one token after another, each from the token before it and the state that drafted it.

The target's feature of position i goes with the token at i + 1, at rotary position i. A round first feeds what the
target emitted since the last one, in such pairs; the state of the last pair drafts the first token. Every further token
takes one small forward on [embedding of the token drafted last, state that drafted it], at the positions after. Then
the cache is rolled back to the target's pairs: drafted states are never context of a later round.

Here are rows, the cache and the drafter protocol. What the network is, a method says (baselines/eagle3.py, mtp.py,
eagle.py); the target is known by its features, its embedding and its head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dispark.decoding.random import RowGenerators
from dispark.decoding.target import TargetModel, chunks
from dispark.drafters.checkpoint import RANDOM, Checkpoint, check_layout, describe, open_checkpoint, warn_random
from dispark.drafters.confidence import check_confidence
from dispark.drafters.layers import PackedLayers
from dispark.drafters.recurrent_config import ConfigMaker, RecurrentConfig
from dispark.drafters.recurrent_network import RecurrentNetwork
from dispark.drafters.recurrent_parts import RecurrentParts, load_parts, make_parts, save_parts
from dispark.drafters.sequential_stage import draft_block
from dispark.drafters.vocabulary import DraftVocabulary
from dispark.types import Draft, Features, Outcome, Request, Sampling, no_draft

CHUNK = 1024  # pairs a call at most: a long prompt's mask would outgrow the memory

Reader = Callable[[Checkpoint], RecurrentConfig]


class RecurrentDrafter:
    """Drafts with a feature-recurrent network. A method's subclass names its layouts and how it is saved.

    Args:
        checkpoint: a folder, a pinned repository (`owner/name@revision`), or `random`.
        draft_length: tokens proposed a round; None is what the checkpoint was trained for, or `default_length`.
        confidence: peak, entropy, or None for none.
        shape: what `checkpoint=random` makes.

    Raises:
        ValueError: a setting is out of range, or the checkpoint can't be read.
    """

    readers: ClassVar[dict[str, Reader]] = {}
    default_length: ClassVar[int] = 4
    saves_ends: ClassVar[bool] = False  # a method's layout may hold copies of the target's embedding and head
    proposal: Literal["sampled", "deterministic"] = "sampled"

    def __init__(self, checkpoint: str, draft_length: int | None, confidence: str | None, shape: Any) -> None:
        self.checkpoint = str(checkpoint)
        self._shape: ConfigMaker = shape
        self._confidence = confidence
        self._file: Checkpoint | None = None
        self._config: RecurrentConfig | None = None
        if self.checkpoint != RANDOM:
            self._file = open_checkpoint(self.checkpoint)
            check_layout(self._file, self.readers)
            self._config = self.readers[self._file.layout](self._file)
        trained_length = None if self._config is None else self._config.draft_length
        self.draft_length: int = (trained_length or self.default_length) if draft_length is None else draft_length
        if not isinstance(self.draft_length, int) or self.draft_length < 1:
            raise ValueError(
                f"drafter.draft_length={draft_length}: must be a whole number >= 1, or null for the drafter's own"
            )
        check_confidence(confidence, False, "this drafter")
        self.feature_layers: tuple[int, ...] = ()  # known once the target is
        self.description: dict[str, Any] = {}
        self._target: TargetModel | None = None
        self._made_for: TargetModel | None = None
        self._pending: dict[int, tuple[Tensor, list[int]]] = {}  # features and tokens that the row has yet to take in

    # -- set-up -------------------------------------------------------------------------------------------------

    def bind(self, target: TargetModel, num_rows: int, num_slots: int) -> None:
        """Loads or makes the network for this target once, and makes room for rows.

        Raises:
            ValueError: the checkpoint was made for another target, or its tensors are not those of its layout.
        """
        if self._target is not target:
            self._load(target)
            self._target = target
        self._packed.open(num_rows, num_slots)
        self._pending.clear()

    def _load(self, target: TargetModel) -> None:
        if self._file is None:
            warn_random()
        self._make(target, None)
        self._packed = PackedLayers(self.network.stock, target.linear_backend == "onednn", self.network)
        self.description = {
            **describe(self.checkpoint, self._file, self.network),
            "is_aliased": self._parts.ends.is_aliased,
            "num_layers": self.config.layers.num_hidden_layers,
            "draft_vocab_size": None if self.vocabulary is None else len(self.vocabulary.d2t),
            "feature_layers": list(self.feature_layers),
        }

    def _make(self, target: TargetModel, draft_ids: Tensor | None) -> None:
        """The parts, from the checkpoint or with random weights."""
        if self._file is None:
            self._config = self._shape.config(target)
        config = self.config
        config.check_target(target, self.checkpoint)
        self.feature_layers = config.features(target)
        if self._file is None:
            self._parts = make_parts(config, target, self._shape.seed, draft_ids)
        else:
            self._parts = load_parts(self._file, config, self.rename(self._file.tensors), target)
        self._made_for = target

    def start(self, target: TargetModel, draft_ids: Tensor | None = None) -> RecurrentNetwork:
        """A float32 network to be trained, from the checkpoint or with fresh weights; `save` writes it as it then is.

        Args:
            target: what it will draft for.
            draft_ids: int64 ascending target ids, where fresh weights have a reduced draft vocabulary.

        Raises:
            ValueError: see `bind`.
        """
        self._make(target, draft_ids)
        return self.network.float()

    @property
    def draft_vocab_size(self) -> int | None:
        """Ids that can be drafted; None is all."""
        size: int | None = self._shape.draft_vocab_size if self._config is None else self._config.draft_vocab_size
        return size

    def rename(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A checkpoint's tensors under the network's names."""
        return tensors

    @property
    def config(self) -> RecurrentConfig:
        assert self._config is not None, "bind() comes first"
        return self._config

    @property
    def network(self) -> RecurrentNetwork:
        return self._parts.network

    @property
    def parts(self) -> RecurrentParts:
        return self._parts

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        return self._parts.vocabulary

    def save(self, folder: str | Path, has_ends: bool | None = None) -> None:
        """Writes the drafter, bound or started before, as a checkpoint that drafts bit for bit the same.

        Args:
            folder: made where absent.
            has_ends: write embedding and head even where they are the target's; None as the method's layout has it.

        Raises:
            ValueError: it has not been bound to a target yet.
        """
        if self._made_for is None:
            raise ValueError(
                f"drafter.checkpoint={self.checkpoint}: save() comes after bind(), which makes the network"
            )
        has_ends = self.saves_ends if has_ends is None else has_ends
        keys = self.saved_keys() | ({} if has_ends or not self.saves_ends else {"has_target_ends": False})
        save_parts(Path(folder), self._parts, self.config, self._made_for, keys, has_ends)

    def saved_keys(self) -> dict[str, Any]:
        """What config.json needs beside the layers' keys, by the layout that the method is saved in."""
        raise NotImplementedError

    # -- rounds -------------------------------------------------------------------------------------------------

    def begin(
        self, rows: Sequence[int], requests: Sequence[Request], first_tokens: Sequence[int], features: Features
    ) -> None:
        """Pairs the prompts' features with the tokens after them; they are fed when the row drafts first."""
        assert features.hidden_NF is not None
        parts = features.hidden_NF.split(features.lengths)
        for row, request, first, part in zip(rows, requests, first_tokens, parts, strict=True):
            self._packed.cache.admit(row)
            self._pending[row] = part, [*request.prompt_ids[1:], first]

    def propose(
        self,
        rows: Sequence[int],
        anchors_B: Tensor,
        sampling: Sampling,
        generators: RowGenerators,
        limit: int | None = None,
    ) -> Draft:
        """Feeds what was emitted since, then one token at a time."""
        num = self.draft_length if limit is None else limit
        if num == 0:
            return no_draft(anchors_B)
        uniform_BG = None if sampling.is_greedy else generators.uniform("draft", self.draft_length)
        hidden_BD = self.extend(rows)
        lengths = [self._packed.cache.length(row) for row in rows]
        token_B, blocks = anchors_B, []
        for k in range(num):
            if k > 0:
                hidden_BD = self.step(rows, token_B, hidden_BD)
            block = draft_block(
                self.logits(hidden_BD).unsqueeze(1),
                hidden_BD.unsqueeze(1),
                token_B,
                sampling,
                None if uniform_BG is None else uniform_BG[:, k : k + 1],
                vocabulary=self.vocabulary,
                confidence=self._confidence,
            )
            token_B = block.tokens_MG[:, 0]
            blocks.append(block)
        for row, length in zip(rows, lengths, strict=True):
            self._packed.cache.set_length(row, length)
        return Draft(
            torch.cat([block.tokens_MG for block in blocks], dim=1),
            [num] * len(rows),
            _joined([block.probs_MGV for block in blocks]),
            _joined([block.confidence_MG for block in blocks]),
        )

    def update(self, rows: Sequence[int], outcome: Outcome, features: Features) -> None:
        """Pairs the features of the anchor and the accepted drafts with the tokens after them, to be fed next round."""
        assert features.hidden_NF is not None
        parts = features.hidden_NF.split(features.lengths)
        for row, part, tokens in zip(rows, parts, outcome.emitted, strict=True):
            new = part[: len(tokens)]
            if row in self._pending:  # nothing was drafted, so what came before is still to be fed
                before, fed = self._pending[row]
                self._pending[row] = torch.cat([before, new]), [*fed, *tokens]
            else:
                self._pending[row] = new, tokens

    def drop(self, rows: Sequence[int]) -> None:
        """Frees the rows."""
        for row in rows:
            self._pending.pop(row, None)
            self._packed.cache.drop(row)

    # -- steps --------------------------------------------------------------------------------------------------

    def extend(self, rows: Sequence[int]) -> Tensor:
        """Takes in the pairs that are pending: [B, D] the state of each row's last one. The rows grow by them."""
        pairs = [self._pending.pop(row) for row in rows]
        lengths = [len(tokens) for _, tokens in pairs]
        found = []
        for chunk in chunks(lengths, CHUNK):
            tokens = torch.tensor([token for i, low, high in chunk for token in pairs[i][1][low:high]])
            features = torch.cat([pairs[i][0][low:high] for i, low, high in chunk])
            names, counts = [rows[i] for i, _, _ in chunk], [high - low for _, low, high in chunk]
            device = features.device
            hidden_ND = self._run(names, counts, tokens.to(device, non_blocking=True), self.network.project(features))
            for name, count in zip(names, counts, strict=True):
                self._packed.advance(name, count)
            ends = torch.tensor(counts).cumsum(0) - 1
            is_last = torch.tensor([high == lengths[i] for i, _, high in chunk])
            found.append(hidden_ND[ends[is_last].to(device, non_blocking=True)])
        return torch.cat(found)

    def step(self, rows: Sequence[int], tokens_B: Tensor, hidden_BD: Tensor) -> Tensor:
        """Feeds one token a row with the state that drafted it: [B, D] the next state. The rows grow by one."""
        hidden_BD = self._run(rows, [1] * len(rows), tokens_B, hidden_BD)
        for row in rows:
            self._packed.advance(row, 1)
        return hidden_BD

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """[B, V or V_draft] logits of states."""
        return self._parts.ends.logits(self.network.read(hidden_BD))

    def _run(self, rows: Sequence[int], lengths: Sequence[int], tokens_N: Tensor, hidden_ND: Tensor) -> Tensor:
        plan = self._packed.plan(rows, lengths)
        inputs_ND = self.network.mix(self._parts.ends.embed(tokens_N), hidden_ND)
        return self.network.recur(self._packed.run(plan, inputs_ND))


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Blocks of one slot side by side, or None where there is nothing to join."""
    present = [part for part in parts if part is not None]
    return torch.cat(present, dim=1) if present else None
