"""The target: a stock transformers causal LM behind packed calls and a ragged cache.

A call takes the tokens of any number of rows, flattened to one sequence, and gives logits and the hidden states of the
tapped layers. Nothing is kept until `commit` says how many of a row's tokens stay; not committing them is the rollback.
Any smaller causal LM that drafts is driven through this same class.

It does not know what a draft, a round or a request is, and it never samples.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dispark.decoding.attention import PACKED_ATTENTION, make_plan
from dispark.decoding.operators import LinearBackend, LinearPacks, choose_linear_backend
from dispark.decoding.ragged_cache import RaggedCache
from dispark.types import Features

EMBEDDING = -1
FINAL = -2
_CPU_MAX_WASTE = 512.0


class TargetModel:
    """Packed forwards over one stock model.

    Args:
        model: a transformers causal LM in eval mode; this object replaces its attention implementation.
        name: for messages.
        stop_ids: token ids that end a text.
        max_context: tokens the model can attend over, prompt and output together.
        vocab_fingerprint: identifies the tokenizer's vocabulary, or None where there is no tokenizer.
        linear_backend: "auto" packs linear weights for oneDNN where that helps, "stock" never does.
        token_bucket, slot_bucket: pad packed calls to multiples, so that shapes repeat; None pads nothing.
        prefill_chunk: prompt tokens per prefill call at most.
    """

    def __init__(
        self,
        model: Any,
        *,
        name: str,
        stop_ids: Sequence[int],
        max_context: int,
        vocab_fingerprint: str | None = None,
        linear_backend: LinearBackend = "auto",
        token_bucket: int | None = None,
        slot_bucket: int | None = None,
        prefill_chunk: int = 512,
    ) -> None:
        for key, value in (
            ("token_bucket", token_bucket),
            ("slot_bucket", slot_bucket),
            ("prefill_chunk", prefill_chunk),
        ):
            if value is not None and value < 1:
                raise ValueError(f"target.{key}={value}: must be at least 1")
        self.model = model
        self.name = name
        self.stop_ids = frozenset(stop_ids)
        self.max_context = max_context
        self.vocab_fingerprint = vocab_fingerprint
        self.vocab_size: int = model.config.vocab_size
        self.hidden_size: int = model.config.hidden_size
        self.num_layers: int = model.config.num_hidden_layers
        weight = model.get_output_embeddings().weight
        self.device: torch.device = weight.device
        self.dtype: torch.dtype = weight.dtype
        self.linear_backend = choose_linear_backend(linear_backend, weight)
        self._buckets: dict[str, Any] = {"token_bucket": token_bucket, "slot_bucket": slot_bucket}
        self._max_waste = _CPU_MAX_WASTE if self.device.type == "cpu" else float("inf")
        self._prefill_chunk = prefill_chunk
        self._packs = LinearPacks(model) if self.linear_backend == "onednn" else None
        # A model may be wrapped twice, with other stop ids say; what it was before is known to the first wrapper only.
        self._stock_attention: str = model.__dict__.setdefault("stock_attention", model.config._attn_implementation)
        if model.__dict__.setdefault("linear_backend", self.linear_backend) != self.linear_backend:
            raise ValueError(
                f"target.linear_backend={self.linear_backend}: this model already runs with {model.linear_backend}, "
                "and its layers can't do both; load it a second time"
            )
        self._cache: RaggedCache | None = None
        self._feature_layers: tuple[int, ...] = ()
        self._taps: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self._use_packed()

    # -- set-up -------------------------------------------------------------------------------------------------

    def open(self, num_rows: int, num_slots: int, feature_layers: Sequence[int] = ()) -> None:
        """Makes room for `num_rows` rows of `num_slots` tokens and taps `feature_layers`; forgets all rows.

        Raises:
            ValueError: a feature layer does not exist, is the last one (transformers normalises it) or comes twice.
        """
        self.check_feature_layers(feature_layers)
        if self._cache is None or (self._cache.num_rows, self._cache.num_slots) != (num_rows, num_slots):
            self._cache = RaggedCache(num_rows, num_slots)
        self._cache.clear()
        self._feature_layers = tuple(feature_layers)
        for hook in self._hooks:
            hook.remove()
        self._hooks = [self._tap(layer) for layer in self._feature_layers]

    def check_feature_layers(self, feature_layers: Sequence[int]) -> None:
        """See `open`. Layer i >= 0 is the raw output of decoder layer i, -1 the embedding output, -2 the normalised
        hidden state that the LM head reads."""
        for layer in feature_layers:
            if layer in (EMBEDDING, FINAL) or 0 <= layer < self.num_layers - 1:
                continue
            raise ValueError(
                f"feature_layers={list(feature_layers)}: layer {layer} can't be tapped on {self.name}; allowed: "
                f"0..{self.num_layers - 2}, {EMBEDDING} (embedding output) and {FINAL} (final normalised state)"
            )
        if len(set(feature_layers)) != len(feature_layers):
            raise ValueError(f"feature_layers={list(feature_layers)}: every layer may be named once")

    @contextmanager
    def stock(self) -> Iterator[Any]:
        """The untouched model, as transformers loads it, for the time of a `with` block; blocks may be nested."""
        if self.model.config._attn_implementation == self._stock_attention:
            yield self.model
            return
        self.model.config._attn_implementation = self._stock_attention
        if self._packs is not None:
            self._packs.remove()
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        try:
            yield self.model
        finally:
            self._use_packed()
            self._hooks = [self._tap(layer) for layer in self._feature_layers]

    def _use_packed(self) -> None:
        self.model.config._attn_implementation = PACKED_ATTENTION
        if self._packs is not None:
            self._packs.install()

    def _tap(self, layer: int) -> Any:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            self._taps[layer] = hidden[0]

        backbone = self.model.get_decoder()
        module = {EMBEDDING: backbone.embed_tokens, FINAL: backbone.norm}.get(layer)
        return (module if module is not None else backbone.layers[layer]).register_forward_hook(keep)

    def sibling(self, name: str) -> TargetModel:
        """The same weights with rows of their own, for a drafter that runs the target itself."""
        twin = copy.copy(self)
        twin.name = name
        twin._cache, twin._feature_layers, twin._taps, twin._hooks = None, (), {}, []
        return twin

    # -- rows ---------------------------------------------------------------------------------------------------

    @property
    def cache(self) -> RaggedCache:
        """Row lengths and memory, to read.

        Raises:
            ValueError: `open` has not been called.
        """
        if self._cache is None:
            raise ValueError(f"target {self.name}: open() comes before any call")
        return self._cache

    def length(self, row: int) -> int:
        """Committed tokens of a row."""
        return self.cache.length(row)

    def room(self, row: int) -> int:
        """Tokens that a row can still take without leaving its slots or the model's context."""
        return min(self.max_context, self.cache.num_slots) - self.cache.length(row)

    def admit(self, row: int) -> None:
        self.cache.admit(row)

    @torch.inference_mode()  # the cache was filled under it, and rows move
    def drop(self, row: int) -> None:
        self.cache.drop(row)

    def commit(self, row: int, num_kept: int) -> None:
        """Keeps the first `num_kept` tokens of the row's last call; the others are rolled back."""
        self.cache.set_length(row, self.cache.length(row) + num_kept)

    def rewind(self, row: int, length: int) -> None:
        """Forgets every token of the row behind its first `length`: O(1), the slots are written anew later."""
        assert length <= self.cache.length(row), (row, length)
        self.cache.set_length(row, length)

    # -- calls --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self,
        rows: Sequence[int],
        tokens_N: Tensor,
        lengths: Sequence[int],
        keep_last: bool = False,
        num_layers: int | None = None,
    ) -> tuple[Tensor, Features]:
        """One packed call that appends `lengths[i]` tokens to `rows[i]` without committing them.

        Args:
            tokens_N: int64 [N] on the device, row after row.
            keep_last: logits of each row's last token only.
            num_layers: run only so many first layers, then the final norm and the head; such a call writes the keys
                and values of those layers alone and gives no features. None runs all.

        Returns:
            (logits [N, V] or [B, V] in the model's dtype, the tapped features of all N tokens).

        Raises:
            ValueError: a row would outgrow its slots, or there are not so many layers.
        """
        plan = make_plan(self.cache, rows, lengths, self.device, max_waste=self._max_waste, **self._buckets)
        num_real = tokens_N.shape[0]
        if plan.num_tokens > num_real:
            tokens_N = torch.nn.functional.pad(tokens_N, (0, plan.num_tokens - num_real))
        extra: dict[str, Any] = {}
        if keep_last:
            ends = torch.tensor(lengths).cumsum(0) - 1
            extra["logits_to_keep"] = ends.to(self.device, non_blocking=True)
        with self._cut_to(num_layers):
            output = self.model(
                input_ids=tokens_N.unsqueeze(0),
                position_ids=plan.position_N.unsqueeze(0),
                use_cache=False,
                packed=plan,
                **extra,
            )
        logits = output.logits[0]
        hidden = None
        if self._feature_layers and num_layers is None:
            hidden = torch.cat([self._taps[layer] for layer in self._feature_layers], dim=-1)[:num_real]
        self._taps.clear()
        return logits if keep_last else logits[:num_real], Features(hidden, list(lengths))

    @contextmanager
    def _cut_to(self, num_layers: int | None) -> Iterator[None]:
        """The model with its first layers only, for the time of one call.

        The list of layers is cut and not `config.num_hidden_layers`, from which Gemma 4 reads other shapes as well.
        """
        if num_layers is None:
            yield
            return
        if not 1 <= num_layers <= self.num_layers:
            raise ValueError(f"num_layers={num_layers}: target {self.name} has layers 1 to {self.num_layers} to run")
        backbone = self.model.get_decoder()
        whole = backbone.layers
        backbone.layers = whole[:num_layers]
        try:
            yield
        finally:
            backbone.layers = whole

    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Features]:
        """Admits the rows and commits their prompts, in chunks of at most `prefill_chunk` tokens.

        Returns:
            (logits [B, V] after each prompt's last token, features of every prompt token, row after row).

        Raises:
            ValueError: an empty prompt, or one that does not fit.
        """
        for row, prompt in zip(rows, prompts, strict=True):
            if len(prompt) == 0:
                raise ValueError("a prompt has no tokens; at least 1 is needed")
            self.admit(row)
        last: dict[int, Tensor] = {}
        hidden: dict[int, list[Tensor]] = {row: [] for row in rows}
        for chunk in chunks([len(prompt) for prompt in prompts], self._prefill_chunk):
            ids = [token for i, low, high in chunk for token in prompts[i][low:high]]
            names, lengths = [rows[i] for i, _, _ in chunk], [high - low for _, low, high in chunk]
            tokens = torch.tensor(ids, dtype=torch.int64).to(self.device, non_blocking=True)
            logits, features = self.forward(names, tokens, lengths, keep_last=True)
            parts = features.hidden_NF.split(lengths) if features.hidden_NF is not None else [None] * len(names)
            for row, length, row_logits, part in zip(names, lengths, logits, parts, strict=True):
                self.commit(row, length)
                last[row] = row_logits
                if part is not None:
                    hidden[row].append(part)
        joined = [part for row in rows for part in hidden[row]]
        return (
            torch.stack([last[row] for row in rows]),
            Features(torch.cat(joined) if joined else None, [len(prompt) for prompt in prompts]),
        )

    def verify(self, rows: Sequence[int], tokens_BT: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Features]:
        """Packs the first `lengths[i]` tokens of every row of `tokens_BT` (anchor, then drafts) and calls the model.

        Returns:
            (logits [N, V], features of the N tokens), row after row.
        """
        width = tokens_BT.shape[1]
        if all(length == width for length in lengths):
            tokens_N = tokens_BT.reshape(-1)
        else:
            index = [i * width + t for i, length in enumerate(lengths) for t in range(length)]
            tokens_N = tokens_BT.reshape(-1)[torch.tensor(index).to(self.device, non_blocking=True)]
        return self.forward(rows, tokens_N, lengths)


def chunks(lengths: Sequence[int], limit: int) -> Iterator[list[tuple[int, int, int]]]:
    """Splits prompts into calls of at most `limit` tokens: lists of (index, from, to)."""
    chunk: list[tuple[int, int, int]] = []
    room = limit
    for i, length in enumerate(lengths):
        low = 0
        while low < length:
            high = min(length, low + room)
            chunk.append((i, low, high))
            room -= high - low
            low = high
            if room == 0:
                yield chunk
                chunk, room = [], limit
    if chunk:
        yield chunk
