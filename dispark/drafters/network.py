"""The semi-autoregressive drafter's network: a block-parallel backbone and, on top, small sequential heads.

Hidden states of named target layers are concatenated, projected and normed to one context state per token (`fc`,
`hidden_norm`), which every layer turns into keys and values beside those of the block. The block is the anchor and mask
tokens; its slots see the whole context and each other. Base logits come from the target's head (DSpark, Cheng et al.
2026, section 2; the block stage is that of DFlash).

Weights carry DeepSpec's names. The network knows nothing of rows, caches and sampling: see semi_autoregressive.py.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dispark.decoding.operators import LinearPacks
from dispark.decoding.target import EMBEDDING, TargetModel
from dispark.drafters.checkpoint import Checkpoint, fill
from dispark.drafters.confidence import ConfidenceHead
from dispark.drafters.layers import StockLayers, layers_from, norm_like
from dispark.drafters.sequential_heads import make_head
from dispark.drafters.vocabulary import DraftVocabulary

log = logging.getLogger(__name__)

DEEPSPEC_HEADS = {"vanilla": "markov", "gated": "gated", "rnn": "rnn"}
OWN_TENSORS = ("embed_tokens.weight", "lm_head.weight")  # the target's, copied into DeepSpec's files


@dataclass(frozen=True)
class BlockConfig:
    """What a block-parallel drafter consists of, whatever file said so.

    Args:
        layers: stock config of its layers, see layers.py.
        feature_layers: target layers whose outputs make the context, in order.
        block_size: slots of a block, the anchor's included.
        mask_token_id: token in every slot but the anchor's.
        anchor_predicts: true where the anchor's slot drafts the next token (DeepSpec); false where only the mask slots
            draft, each the token at its own position (z-lab).
        head, rank: the sequential head, one of HEADS.
        confidence: "markov" for a confidence head over [h; W1[previous]], "hidden" for one over h, or "none".
        draft_vocab_size: ids that can be drafted; None is all.
        num_target_layers: of the target it was made for; None is unknown.
    """

    layers: Any
    feature_layers: tuple[int, ...]
    block_size: int
    mask_token_id: int
    anchor_predicts: bool = True
    head: str = "none"
    rank: int = 0
    confidence: str = "none"
    draft_vocab_size: int | None = None
    num_target_layers: int | None = None

    @property
    def max_draft_length(self) -> int:
        """Tokens that one block drafts."""
        return self.block_size if self.anchor_predicts else self.block_size - 1


def read_deepspec(checkpoint: Checkpoint) -> BlockConfig:
    """DeepSpec's config.json, for DSpark and DFlash alike.

    Raises:
        ValueError: a key is missing, of another type, or names something unknown.
    """
    c = checkpoint
    rank = c.need("markov_rank", int)
    head = "none"
    if rank > 0:
        kind = str(c.need("markov_head_type", str)).lower()
        if kind not in DEEPSPEC_HEADS:
            known = ", ".join(DEEPSPEC_HEADS)
            raise ValueError(f"drafter.checkpoint={c.name}: markov_head_type={kind}: must be one of {known}")
        head = DEEPSPEC_HEADS[kind]
    confidence = "none"
    if c.need("enable_confidence_head", bool):
        confidence = "markov" if c.need("confidence_head_with_markov", bool) else "hidden"
    if confidence == "markov" and rank == 0:
        raise ValueError(f"drafter.checkpoint={c.name}: confidence_head_with_markov=true needs markov_rank > 0")
    return BlockConfig(
        layers=layers_from(c.config, c.need("model_type", str)),
        feature_layers=tuple(c.need("target_layer_ids", list)),
        block_size=c.need("block_size", int),
        mask_token_id=c.need("mask_token_id", int),
        head=head,
        rank=rank,
        confidence=confidence,
        draft_vocab_size=c.config.get("draft_vocab_size"),
        num_target_layers=c.config.get("num_target_layers"),
    )


class BlockNetwork(nn.Module):
    """The trainable parts, with DeepSpec's names; the target's embedding and head stay outside.

    Args:
        config: what to build.
        vocab_size: the target's vocabulary, the ids a previous token may have.
        vocabulary: the reduced draft vocabulary, or None.
    """

    def __init__(self, config: BlockConfig, vocab_size: int, vocabulary: DraftVocabulary | None = None) -> None:
        super().__init__()
        width, eps = config.layers.hidden_size, config.layers.rms_norm_eps
        self.fc = nn.Linear(len(config.feature_layers) * width, width, bias=False)
        stock = StockLayers(config.layers)
        self.layers, self.norm = stock.layers, stock.norm
        self.hidden_norm = norm_like(stock.norm, width, eps)
        self._stock = [stock]  # in a list: its parts are registered above
        self.markov_head = make_head(config.head, vocab_size, config.rank, width, config.draft_vocab_size)
        self.confidence_head = None
        if config.confidence != "none":
            self.confidence_head = ConfidenceHead(width, config.rank if config.confidence == "markov" else 0)
        self._vocabulary = [vocabulary]
        self.config = config

    @property
    def stock(self) -> StockLayers:
        return self._stock[0]

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        return self._vocabulary[0]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._stock[0]._apply(fn)  # moves the rotary frequencies; the rest is shared and moved already
        if self._vocabulary[0] is not None:
            self._vocabulary[0]._apply(fn)
        return self

    def context(self, features: Tensor) -> Tensor:
        """[..., D] context states of [..., len(feature_layers) * D] target features."""
        states: Tensor = self.hidden_norm(self.fc(features))
        return states

    def block_tokens(self, anchors_M: Tensor) -> Tensor:
        """int64 [M, block_size]: the anchor, then masks."""
        tokens = anchors_M.new_full((anchors_M.shape[0], self.config.block_size), self.config.mask_token_id)
        tokens[:, 0] = anchors_M
        return tokens

    def predicting(self, hidden_MTD: Tensor) -> Tensor:
        """The slots that draft, of block hidden states [..., block_size, D]."""
        return hidden_MTD if self.config.anchor_predicts else hidden_MTD[..., 1:, :]

    def confidence_logits(self, hidden_MGD: Tensor, previous_MG: Tensor) -> Tensor | None:
        """float32 [M, G], or None without a confidence head."""
        if self.confidence_head is None:
            return None
        embedded = self.markov_head.embed(previous_MG) if self.confidence_head.has_markov else None
        logits: Tensor = self.confidence_head(hidden_MGD, embedded)
        return logits


class TokenEnds:
    """The drafter's two ends: the embedding before it and the LM head behind it, the target's own wherever they agree.

    Args:
        target: gives both.
        embedding, head: [V, D] and [V or V_draft, D] of the checkpoint, or None to take the target's.
        vocabulary: a reduced draft vocabulary, or None.

    `is_aliased` tells for each end whether the target's tensor serves.
    """

    def __init__(
        self,
        target: TargetModel,
        embedding: Tensor | None = None,
        head: Tensor | None = None,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        stock_embedding = target.model.get_input_embeddings()
        stock_head = target.model.get_output_embeddings()
        self.is_aliased = {
            "embed_tokens": embedding is None or _is_same(embedding, stock_embedding.weight),
            "lm_head": head is None or _is_same(head, stock_head.weight),
        }
        others = [key for key, is_same in self.is_aliased.items() if not is_same]
        if others:
            log.warning("the checkpoint's own %s differ from those of target %s", " and ".join(others), target.name)
        self._embedding = stock_embedding
        if not self.is_aliased["embed_tokens"]:
            assert embedding is not None
            self._embedding = _with_weight(stock_embedding, embedding.to(target.device, target.dtype))
        self._head = stock_head
        if vocabulary is not None and (head is None or head.shape[0] != len(vocabulary.d2t)):
            # The target's rows (or the checkpoint's full head) of the ids that can be drafted.
            full = stock_head.weight if head is None else head.to(target.device, target.dtype)
            self._head = _linear(full[vocabulary.ids.to(full.device)])
        elif not self.is_aliased["lm_head"]:
            assert head is not None
            self._head = _linear(head.to(target.device, target.dtype))
        if self._head is not stock_head and target.linear_backend == "onednn":
            LinearPacks(self._head).install()  # the target's own is packed already
        self._cap: float | None = getattr(target.model.config, "final_logit_softcapping", None)

    def embed(self, tokens: Tensor) -> Tensor:
        """[..., D], scaled as the target scales its own."""
        embedded: Tensor = self._embedding(tokens)
        return embedded

    def weights(self) -> dict[str, Tensor]:
        """Both matrices under the names that checkpoints give them."""
        return {"embed_tokens.weight": self._embedding.weight, "lm_head.weight": self._head.weight}

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V or V_draft], capped as the target caps its own."""
        logits: Tensor = self._head(hidden)
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap


def _is_same(own: Tensor, targets: Tensor) -> bool:
    return own.shape == targets.shape and torch.equal(own.to(targets.device, targets.dtype), targets)


def _with_weight(module: nn.Module, weight: Tensor) -> nn.Module:
    twin = copy.copy(module)
    twin._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    return twin


def _linear(weight: Tensor) -> nn.Module:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    return linear


def check_target(config: BlockConfig, target: TargetModel, name: str) -> None:
    """Refuses a drafter that was made for another target, before anything is decoded.

    Raises:
        ValueError: hidden size, layer count, or a feature layer doesn't fit.
    """
    head = f"drafter.checkpoint={name}"
    if config.layers.hidden_size != target.hidden_size:
        raise ValueError(
            f"{head}: made for a hidden size of {config.layers.hidden_size}, but target {target.name} has "
            f"{target.hidden_size}"
        )
    if config.num_target_layers is not None and config.num_target_layers != target.num_layers:
        raise ValueError(
            f"{head}: made for a target of {config.num_target_layers} layers, but {target.name} has {target.num_layers}"
        )
    check_features(config.feature_layers, target, name)
    if not 0 <= config.mask_token_id < target.vocab_size:
        raise ValueError(
            f"{head}: mask_token_id={config.mask_token_id}, but target {target.name} has {target.vocab_size} tokens"
        )


def check_features(feature_layers: tuple[int, ...], target: TargetModel, name: str) -> None:
    """Raises ValueError where a feature layer is out of range or the target's last."""
    for layer in feature_layers:
        if not isinstance(layer, int) or isinstance(layer, bool) or not EMBEDDING <= layer < target.num_layers - 1:
            raise ValueError(
                f"drafter.checkpoint={name}: reads layer {layer} of the target; allowed on {target.name}: "
                f"-1 (embedding) to {target.num_layers - 2} (the last layer can't be read)"
            )


def check_vocabulary(size: int, target: TargetModel, name: str) -> None:
    """Raises ValueError where a checkpoint's vocabulary isn't the target's."""
    if size != target.vocab_size:
        raise ValueError(
            f"drafter.checkpoint={name}: made for a vocabulary of {size}, but target {target.name} has "
            f"{target.vocab_size} tokens"
        )


def load_network(checkpoint: Checkpoint, config: BlockConfig, target: TargetModel) -> tuple[BlockNetwork, TokenEnds]:
    """A checkpoint's network in the target's dtype and on its device, every tensor accounted for.

    Raises:
        ValueError: it doesn't fit the target, or its tensors don't fit its layout.
    """
    check_target(config, target, checkpoint.name)
    if checkpoint.config.get("vocab_size") is not None:
        check_vocabulary(checkpoint.config["vocab_size"], target, checkpoint.name)
    made_for = checkpoint.config.get("target_text_model_type") or checkpoint.config.get("target_model_type")
    kind = str(target.model.config.model_type)
    if isinstance(made_for, str) and made_for.split("_")[0] != kind.split("_")[0]:  # gemma4_unified is gemma4_text
        raise ValueError(
            f"drafter.checkpoint={checkpoint.name}: made for a {made_for} target, but {target.name} is {kind}"
        )
    tensors = dict(checkpoint.tensors)
    if config.draft_vocab_size is not None and "d2t" not in tensors:
        raise ValueError(
            f"drafter.checkpoint={checkpoint.name}: d2t is missing, which "
            f"draft_vocab_size={config.draft_vocab_size} needs"
        )
    ends = {key: tensors.pop(key, None) for key in OWN_TENSORS}
    vocabulary = pop_vocabulary(tensors, target, checkpoint.name)
    _check_ends(ends, config, checkpoint, target)
    network = BlockNetwork(config, target.vocab_size, vocabulary)
    fill(network, tensors, checkpoint.name, checkpoint.layout)
    place(network, target)
    return network, TokenEnds(target, ends["embed_tokens.weight"], ends["lm_head.weight"], vocabulary)


def _check_ends(
    ends: Mapping[str, Tensor | None], config: BlockConfig, checkpoint: Checkpoint, target: TargetModel
) -> None:
    """DeepSpec stores both ends; reduced vocabularies and z-lab's files leave them to the target."""
    may_lack = config.draft_vocab_size is not None or checkpoint.config.get("has_target_ends") is False
    if checkpoint.layout == "deepspec_block" and not may_lack:
        missing = [key for key, tensor in ends.items() if tensor is None]
        if missing:
            raise ValueError(
                f"drafter.checkpoint={checkpoint.name}: tensors don't fit the {checkpoint.layout} layout: "
                f"{len(missing)} missing: {', '.join(missing)}"
            )
    sizes = {target.vocab_size} if config.draft_vocab_size is None else {target.vocab_size, config.draft_vocab_size}
    for key, tensor in ends.items():
        allowed = sizes if key == "lm_head.weight" else {target.vocab_size}
        shapes = [[size, config.layers.hidden_size] for size in sorted(allowed)]
        if tensor is not None and list(tensor.shape) not in shapes:
            raise ValueError(
                f"drafter.checkpoint={checkpoint.name}: {key} has shape {list(tensor.shape)}; allowed: "
                f"{' or '.join(map(str, shapes))}"
            )


def pop_vocabulary(tensors: dict[str, Tensor], target: TargetModel, name: str) -> DraftVocabulary | None:
    """Takes d2t and t2d out of a checkpoint's tensors; None where it has a full vocabulary.

    Raises:
        ValueError: they contradict each other, or don't fit the target.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None:
        return None
    try:
        return DraftVocabulary.from_tensors(d2t, t2d, target.vocab_size)
    except ValueError as error:
        raise ValueError(f"drafter.checkpoint={name}: {error}; target {target.name} has {target.vocab_size}") from error


def place(module: nn.Module, target: TargetModel) -> None:
    """Moves parameters to the target's device and dtype, for inference."""
    module.to(target.device)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(target.dtype)
    for name, buffer in module.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.data = buffer.data.to(target.dtype)
    module.eval().requires_grad_(False)
