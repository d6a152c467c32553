"""transformers' own `generate`, timed on the same prompts beside the loop: the outside reference.

It runs the untouched model one request at a time, with or without its prompt lookup. It is an arm of a benchmark, not a
drafter: it has its own cache, counts and stopping, and only request-level times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dispark.decoding.target import TargetModel
from dispark.interfaces import RequestSource
from dispark.types import RequestRecord, Sampling


class HfGenerate:
    """Decodes a source of requests through `model.generate`.

    Args:
        target: whose stock model is called.
        sampling: temperature, top-k and top-p, handed on.
        decode: token ids to text.
        options: further keywords of `generate`, for example prompt_lookup_num_tokens.
    """

    def __init__(
        self,
        target: TargetModel,
        sampling: Sampling,
        decode: Callable[[Sequence[int]], str],
        options: dict[str, Any] | None = None,
    ) -> None:
        self._target, self._sampling, self._decode = target, sampling, decode
        self._options = options or {}

    @torch.inference_mode()
    def run(self, source: RequestSource) -> list[RequestRecord]:
        """Decodes until the source is empty.

        Raises:
            ValueError: a request has stop strings, which this arm doesn't serve.
        """
        records = []
        with self._target.stock() as model:
            while (request := source.next()) is not None:
                if request.stop_strings:
                    raise ValueError("generate_baseline=true with stop_strings: not served; allowed: no stop strings")
                record = RequestRecord(request)
                start_s = time.perf_counter()
                record.output_ids = self._generate(model, request.prompt_ids, request.max_new_tokens, request.seed)
                record.latency_s = time.perf_counter() - start_s
                is_stopped = record.output_ids[-1] in self._target.stop_ids
                record.finish_reason = "stop" if is_stopped else "length"
                record.text = self._decode(record.output_ids)
                records.append(record)
                source.finish(record)
        return records

    def _generate(self, model: Any, prompt_ids: Sequence[int], max_new_tokens: int, seed: int) -> list[int]:
        ids = torch.tensor([list(prompt_ids)], device=self._target.device)
        stops = sorted(self._target.stop_ids)
        options: dict[str, Any] = {"do_sample": False}
        if not self._sampling.is_greedy:
            options = {
                "do_sample": True,
                "temperature": self._sampling.temperature,
                "top_k": self._sampling.top_k or 0,
                "top_p": self._sampling.top_p or 1.0,
            }
            torch.manual_seed(seed)  # generate knows the global generator only
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            eos_token_id=stops or None,
            pad_token_id=stops[0] if stops else 0,
            **options,
            **self._options,
        )
        return output[0, ids.shape[1] :].tolist()  # the copy to the host waits for the device
