"""From a target spec to the model that the loop drives.

The one place where loading (this folder) meets the packed calls (decoding/). Knows neither drafters nor requests.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dispark.decoding.target import TargetModel
from dispark.targets.spec import LoadedTarget, TargetSpec, load


def wrap(loaded: LoadedTarget, **options: Any) -> TargetModel:
    """A loaded target behind packed calls; `options` replace those of its spec (buckets, linear backend)."""
    return TargetModel(
        loaded.model,
        name=loaded.name,
        stop_ids=loaded.stop_ids,
        max_context=loaded.max_context,
        vocab_fingerprint=loaded.tokenizer.vocab_fingerprint,
        **(loaded.call_options | options),
    )


def open_target(
    spec: TargetSpec, device: torch.device | None = None, dtype: torch.dtype | None = None, **options: Any
) -> TargetModel:
    """Loads a spec and wraps it, on another device or in another dtype than the spec's where given.

    Raises:
        ValueError: this is no spec; or see spec.load.
    """
    if not isinstance(spec, TargetSpec):
        raise ValueError(
            f"{spec}: is not a target; where a setting takes one, choose an option: +target@drafter.model={spec}"
        )
    changes: dict[str, Any] = {}
    if device is not None:
        changes["device"] = str(device)
    if dtype is not None:
        changes["dtype"] = str(dtype).removeprefix("torch.")
    return wrap(load(replace(spec, **changes)), **options)
