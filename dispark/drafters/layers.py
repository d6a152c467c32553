"""Stock decoder layers of a target's family, over a ragged cache of their own.

A drafter's layers are the target's kind of layer, so they are built from the same stock `transformers` classes: norms,
rotary frequencies, activations and caps are theirs, and no family needs a class here. New are only the calls: packed
rows as in decoding/, blocks whose tokens see each other in both directions, and keys and values that are projected from
a given context instead of from the layer's own input.

It does not know what the hidden states mean, nor tokens, logits or rounds.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dispark.decoding.attention import PACKED_ATTENTION, Plan, make_plan
from dispark.decoding.operators import LinearPacks
from dispark.decoding.ragged_cache import RaggedCache
from dispark.targets.architectures import config_class
from dispark.targets.quiet import first_line, quiet_transformers

_CPU_MAX_WASTE = 512.0


def layers_like(target_config: Any, num_layers: int, **changes: Any) -> Any:
    """A stock config for `num_layers` layers in the shape of the target's full-attention ones.

    Args:
        target_config: the target's stock config; not changed.
        num_layers: how many layers.
        changes: other keys to set, for example intermediate_size.
    """
    given = copy.deepcopy(target_config.to_dict())
    kinds = given.get("layer_types") or []
    if given.get("per_layer_config"):
        # Shapes by layer (Gemma 4): take those of the last layer that attends to everything.
        full = max((i for i, kind in enumerate(kinds) if kind == "full_attention"), default=len(kinds) - 1)
        own = given["per_layer_config"].get(str(full), given["per_layer_config"].get(full))
        given["per_layer_config"] = None if own is None else dict.fromkeys(range(num_layers), own)
    if kinds:
        given["layer_types"] = ["full_attention"] * num_layers
    return layers_from(given | {"num_hidden_layers": num_layers} | changes, target_config.model_type)


def layers_from(keys: dict[str, Any], model_type: str) -> Any:
    """A stock config from plain keys, as a checkpoint's config.json has them.

    Raises:
        ValueError: an unsupported model type, or keys that its config class refuses.
    """
    # The layers carry no embedding: tokens are embedded by the target's table, or by one of the drafter's.
    own = {key: value for key, value in keys.items() if key != "mask_token_id"}
    own |= {"vocab_size": 1, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    try:
        return config_class(model_type).from_dict(own)
    except Exception as error:  # the config classes validate with error types of their own
        raise ValueError(f"drafter.checkpoint: config.json: {first_line(error)}") from error


def stock_backbone(config: Any) -> Any:
    """The stock model body (layers, final norm, rotary embedding) with random weights, float32, on the CPU."""
    from transformers import AutoModel

    with quiet_transformers():
        body = AutoModel.from_config(copy.deepcopy(config), attn_implementation=PACKED_ATTENTION)
    return body.float().eval()


def norm_like(norm: nn.Module, width: int, eps: float) -> nn.Module:
    """A norm of the same kind, of another width; weights as at initialisation."""
    return type(norm)(width, eps=eps)


def rotate(states_MHE: Tensor, cos_ME: Tensor, sin_ME: Tensor) -> Tensor:
    """Rotary embedding with halves as pairs (Su et al. 2021), for tokens x heads x head_dim."""
    first, second = states_MHE.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return states_MHE * cos_ME.unsqueeze(-2) + turned * sin_ME.unsqueeze(-2)


class StockLayers(nn.Module):
    """Layers and final norm, named as in checkpoints (`layers.0.self_attn.q_proj.weight`, `norm.weight`).

    Args:
        config: see `layers_from`.
        has_final_norm: false leaves the outputs as they are; `norm` is then the caller's to apply.
    """

    def __init__(self, config: Any, has_final_norm: bool = True) -> None:
        super().__init__()
        body = stock_backbone(config)
        self.layers: nn.ModuleList = body.layers
        self.norm: nn.Module = body.norm
        if not has_final_norm:
            body.norm = nn.Identity()
        self._body = [body]  # in a list: its parts are registered above, under the checkpoint's names
        self._has_layer_types = "layer_type" in inspect.signature(type(body.rotary_emb).forward).parameters

    @property
    def config(self) -> Any:
        return self._body[0].config

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Only the frequencies are not registered above; they keep float32, as in a stock model of any dtype.
        rotary = self._body[0].rotary_emb
        for name, buffer in rotary.named_buffers():
            module = rotary.get_submodule(name.rpartition(".")[0])
            setattr(module, name.rpartition(".")[2], buffer.to(fn(buffer).device))
        return super()._apply(fn, recurse)

    def forward(self, inputs_embeds: Tensor, position_ids: Tensor, **attention: Any) -> Tensor:
        """The stock body's output for [B, M, D] inputs at int64 [B, M] positions."""
        output = self._body[0](inputs_embeds=inputs_embeds, position_ids=position_ids, use_cache=False, **attention)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def use_attention(self, name: str) -> None:
        """Chooses a registered attention function for all layers."""
        self._body[0].config._attn_implementation = name

    def context_keys_values(self, context_MD: Tensor, position_M: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values that every layer makes of a given context, without its input norm.

        Args:
            context_MD: one state per token, the same for all layers.
            position_M: int64 positions.

        Returns:
            For each layer (keys, values), each [H_kv, M, head_dim], keys normed and rotated.
        """
        rotary = self._body[0].rotary_emb
        turns: dict[Any, tuple[Tensor, Tensor]] = {}
        found = []
        for layer in self.layers:
            attention: Any = layer.self_attn
            kind = getattr(attention, "layer_type", None) if self._has_layer_types else None
            if kind not in turns:
                extra = (kind,) if self._has_layer_types else ()
                cos, sin = rotary(context_MD.unsqueeze(0), position_M.unsqueeze(0), *extra)
                turns[kind] = cos[0], sin[0]
            keys_MHE = attention.k_proj(context_MD).unflatten(-1, (-1, attention.head_dim))
            values_MHE = keys_MHE
            if attention.v_proj is not None:
                values_MHE = attention.v_proj(context_MD).unflatten(-1, (-1, attention.head_dim))
            if hasattr(attention, "k_norm"):
                keys_MHE = attention.k_norm(keys_MHE)
            if hasattr(attention, "v_norm"):
                values_MHE = attention.v_norm(values_MHE)
            keys_MHE = rotate(keys_MHE, *turns[kind])
            found.append((keys_MHE.transpose(0, 1), values_MHE.transpose(0, 1)))
        return found


class PackedLayers:
    """Packed calls of `StockLayers` on rows of a ragged cache.

    Args:
        layers: on their device, in their dtype.
        is_onednn: reorder linear weights once for oneDNN (see operators.py).
        pack: the module whose linear layers are reordered; None is `layers`.
    """

    def __init__(self, layers: StockLayers, is_onednn: bool = False, pack: nn.Module | None = None) -> None:
        self._layers = layers
        weight = next(layers.parameters())
        self._device = weight.device
        self._max_waste = _CPU_MAX_WASTE if self._device.type == "cpu" else float("inf")
        self._cache: RaggedCache | None = None
        if is_onednn:
            LinearPacks(pack if pack is not None else layers).install()

    def open(self, num_rows: int, num_slots: int) -> None:
        """Makes room and forgets all rows."""
        if self._cache is None or (self._cache.num_rows, self._cache.num_slots) != (num_rows, num_slots):
            self._cache = RaggedCache(num_rows, num_slots)
        self._cache.clear()

    @property
    def cache(self) -> RaggedCache:
        assert self._cache is not None, "open() comes first"
        return self._cache

    def plan(self, rows: Sequence[int], lengths: Sequence[int], is_causal: bool = True) -> Plan:
        """A call that appends `lengths[i]` tokens to `rows[i]`."""
        return make_plan(self.cache, rows, lengths, self._device, max_waste=self._max_waste, is_causal=is_causal)

    def run(self, plan: Plan, inputs_ND: Tensor) -> Tensor:
        """[N, D] outputs. Keys and values are written behind the rows' tokens; the rows' lengths stay."""
        output = self._layers(inputs_ND.unsqueeze(0), plan.position_N.unsqueeze(0), packed=plan)
        return output[0]

    def append_context(self, rows: Sequence[int], context_ND: Tensor, lengths: Sequence[int]) -> None:
        """Writes keys and values of a given context behind the rows' tokens; the rows' lengths stay."""
        plan = self.plan(rows, lengths)
        for number, (keys, values) in enumerate(self._layers.context_keys_values(context_ND, plan.position_N)):
            self.cache.write(number, plan.write_index(keys.shape[0]), keys, values)

    def advance(self, row: int, num: int) -> None:
        """Keeps `num` more of the row's written tokens."""
        self.cache.set_length(row, self.cache.length(row) + num)
