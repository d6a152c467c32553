"""A target without a download: a stock model with random weights, for tests and as a draft model of no use.

The text it writes is noise, so acceptance measured with it says nothing about a method. This module knows nothing about
devices, compute dtypes or stop tokens: see spec.py.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Any

import torch

from dispark.targets.architectures import check_architecture, config_class, model_class
from dispark.targets.cache import FetchReport
from dispark.targets.quiet import first_line, quiet_transformers
from dispark.targets.sources import source_key
from dispark.targets.tokenizer import ByteTokenizer


@dataclass(frozen=True)
class RandomWeights:
    """A stock model with random weights from a fixed seed: no download, and the same weights in every run.

    The numbers are drawn on the CPU in float32 with the model's own initialisation, so they are the same on every
    device for one version of torch.

    Args:
        architecture: a key of architectures.SUPPORTED.
        config: keys of the stock config class.
        seed: of the weights.
        tokenizer: "bytes", or null for a model that only ever sees ids (then config.vocab_size is required).
    """

    architecture: str
    config: dict[str, Any]
    seed: int = 0
    tokenizer: str | None = "bytes"

    def __post_init__(self) -> None:
        stock = config_class(self.architecture)
        unknown = sorted(set(self.config) - set(stock().to_dict()))
        if unknown:
            raise ValueError(f"config.{unknown[0]}: is not a key of {stock.__name__}")
        if self.tokenizer not in ("bytes", None):
            raise ValueError(f"tokenizer={self.tokenizer}: must be bytes or null")
        if self.tokenizer is None and "vocab_size" not in self.config:
            raise ValueError("config.vocab_size: is required where tokenizer is null")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"seed={self.seed!r}: must be a whole number")

    @property
    def key(self) -> str:
        return source_key(self.describe())

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "random",
            "architecture": self.architecture,
            "config": self.config,
            "seed": self.seed,
            "tokenizer": self.tokenizer,
        }

    def fetch(self, name: str) -> FetchReport:
        started = time.perf_counter()
        _, digest = self.build(name, torch.float32)
        return FetchReport("present", None, time.perf_counter() - started, None, digest)

    def build(self, name: str, dtype: torch.dtype) -> tuple[Any, str]:
        """Returns the model on the CPU in `dtype` and the sha256 of its float32 weights.

        Raises:
            ValueError: the config is not a valid one of the architecture, or the vocabulary is too small.
        """
        given = dict(self.config)
        if self.tokenizer == "bytes":
            tokens = ByteTokenizer()
            ids = {"bos_token_id": tokens.bos_id, "eos_token_id": tokens.eos_id, "pad_token_id": tokens.pad_id}
            given = {"vocab_size": tokens.vocab_size, **ids, **given}
            if given["vocab_size"] < tokens.vocab_size:
                raise ValueError(
                    f"target {name}: config.vocab_size={given['vocab_size']}: must be at least "
                    f"{tokens.vocab_size}, the byte tokenizer's size"
                )
        else:
            # The stock defaults are ids of some other vocabulary.
            given = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **given}
        try:
            with quiet_transformers(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                config = config_class(self.architecture)(**given)
                check_architecture(config, name)
                model = model_class(self.architecture)(config).float()
        except ValueError:
            raise
        except Exception as error:  # the config classes validate with error types of their own
            raise ValueError(f"target {name}: config: {first_line(error)}") from error
        digest = _state_sha256(model)
        # Parameters only: rotary frequencies are buffers and stay float32 in a stock model of any dtype.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        model.config.dtype = dtype
        return model, digest


def _state_sha256(model: torch.nn.Module) -> str:
    """sha256 over the names and bytes of all parameters, in name order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
