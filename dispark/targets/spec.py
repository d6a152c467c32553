"""A target: what to load, how to talk to it and where to run it; and the loading itself.

`TargetSpec` is built from a YAML of the `target` group. `load` turns it into a stock `transformers` model with its
tokenizer and stop ids; `fetch` only makes sure that the weights are here. This module does not know how the model is
called: that is decoding/'s part.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch

from dispark.targets.architectures import load_config, model_class
from dispark.targets.cache import FetchReport, library_versions
from dispark.targets.quiet import first_line, quiet_transformers
from dispark.targets.random_weights import RandomWeights
from dispark.targets.sources import DTYPES, FolderSource, ModelFiles, Source
from dispark.targets.tokenizer import ByteTokenizer, ChatTokenizer, NoTokenizer, Tokenizer
from dispark.types import check_device_name, pick_device

log = logging.getLogger(__name__)

CALL_OPTIONS = ("linear_backend", "token_bucket", "slot_bucket", "prefill_chunk")


@dataclass(frozen=True)
class TargetSpec:
    """Everything the config says about a target.

    Args:
        name: the YAML's name.
        source: the key of `sources` to use.
        sources: the ways to get the weights, already built.
        dtype: compute dtype: float32, bfloat16 or float16.
        device: auto, cpu, cuda or cuda:N.
        max_context: longest prompt plus output in tokens; None is the model's max_position_embeddings.
        chat_template: None is the tokenizer's own, "none" is raw text, else a jinja string.
        system_prompt: None leaves it to the template.
        template_kwargs: variables of the template.
        extra_stop_ids: token ids that end a generation besides the generation config's.
        extra_stop_tokens: the same by spelling.
        stop_strings: texts that end an answer.
        linear_backend, token_bucket, slot_bucket, prefill_chunk: see decoding/target.py, which checks them.
        license: a note for the user; nothing reads it.

    Raises:
        ValueError: a value is not allowed; the message names the key.
    """

    name: str
    source: str
    sources: dict[str, Source]
    dtype: str = "float32"
    device: str = "auto"
    max_context: int | None = None
    chat_template: str | None = None
    system_prompt: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    extra_stop_ids: list[int] = field(default_factory=list)
    extra_stop_tokens: list[str] = field(default_factory=list)
    stop_strings: list[str] = field(default_factory=list)
    linear_backend: str = "auto"
    token_bucket: int | None = None
    slot_bucket: int | None = None
    prefill_chunk: int = 512
    license: str = ""

    def __post_init__(self) -> None:
        if self.source not in self.sources:
            raise ValueError(f"target.source={self.source}: target {self.name} has {', '.join(self.sources) or 'none'}")
        if not isinstance(self.sources[self.source], Source):
            raise ValueError(f"target.sources.{self.source}: must be an object with a _target_ of dispark.targets")
        if self.dtype not in DTYPES:
            raise ValueError(f"target.dtype={self.dtype}: must be one of {', '.join(DTYPES)}")
        check_device_name(self.device)
        if self.max_context is not None and not (_is_int(self.max_context) and self.max_context >= 2):
            raise ValueError(f"target.max_context={self.max_context}: must be a whole number >= 2, or null")
        if self.chat_template is not None and not isinstance(self.chat_template, str):
            raise ValueError(f"target.chat_template={self.chat_template}: must be null, none or a jinja string")
        if self.system_prompt is not None and not isinstance(self.system_prompt, str):
            raise ValueError(f"target.system_prompt={self.system_prompt}: must be a string, or null")
        for index, token in enumerate(self.extra_stop_ids):
            if not _is_int(token) or token < 0:
                raise ValueError(f"target.extra_stop_ids[{index}]={token}: must be a whole number >= 0")
        for key in ("extra_stop_tokens", "stop_strings"):
            for index, spelling in enumerate(getattr(self, key)):
                if not isinstance(spelling, str) or not spelling:
                    raise ValueError(f"target.{key}[{index}]={spelling}: must be a string that is not empty")


@dataclass(frozen=True)
class LoadedTarget:
    """A target in memory.

    Args:
        name: the spec's name.
        model: a stock causal LM in eval mode without gradients, on `device` in `dtype`.
        tokenizer: its tokenizer with the chat format of the spec.
        stop_ids: every id that ends a generation, in order, without repeats; empty where the model has none.
        max_context: most tokens of prompt and output together.
        vocab_size: width of the logits, which may be more than the tokenizer's size.
        weights_sha256: hash of the weights as stored, before the cast to `dtype`.
        provenance: where the weights came from, and the library versions now.
        stop_strings: texts that end an answer.
        call_options: how packed calls are made, as TargetModel takes it.
    """

    name: str
    model: Any
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    max_context: int
    vocab_size: int
    weights_sha256: str
    device: torch.device
    dtype: torch.dtype
    provenance: dict[str, Any]
    stop_strings: tuple[str, ...] = ()
    call_options: dict[str, Any] = field(default_factory=dict)


def fetch(spec: TargetSpec) -> FetchReport:
    """Makes the selected source's weights present and sound; see FetchReport. Raises ValueError where it can't."""
    return spec.sources[spec.source].fetch(spec.name)


def load(spec: TargetSpec) -> LoadedTarget:
    """Loads a target, fetching it first if it is absent.

    Raises:
        ValueError: in one line: the device is not there, the source can't be had, the cached files are damaged, the
            architecture is not supported, or the spec doesn't fit the model.
    """
    device, dtype = pick_device(spec.device), DTYPES[spec.dtype]
    source = spec.sources[spec.source]
    tokenizer: Tokenizer
    if isinstance(source, RandomWeights):
        model, weights_sha256 = source.build(spec.name, dtype)
        provenance = {**source.describe(), "key": source.key}
        if source.tokenizer == "bytes":
            if spec.chat_template is not None:
                raise ValueError("target.chat_template: the byte tokenizer has its own chat format; must be null")
            tokenizer = ByteTokenizer(spec.system_prompt)
        else:
            tokenizer = NoTokenizer(model.config.vocab_size, spec.name)
    else:
        assert isinstance(source, FolderSource)
        files = source.open(spec.name)
        weights_sha256, provenance = files.weights_sha256, files.provenance
        model = _load_model(files, dtype, spec.name)
        tokenizer = _load_tokenizer(files, spec)
    model = model.to(device).eval().requires_grad_(False)
    limit = int(model.config.max_position_embeddings)
    if spec.max_context is not None and spec.max_context > limit:
        raise ValueError(f"target.max_context={spec.max_context}: target {spec.name} reads at most {limit} tokens")
    vocab_size = int(model.config.vocab_size)
    return LoadedTarget(
        name=spec.name,
        model=model,
        tokenizer=tokenizer,
        stop_ids=_stop_ids(spec, model.generation_config.eos_token_id, tokenizer, vocab_size),
        max_context=spec.max_context or limit,
        vocab_size=vocab_size,
        weights_sha256=weights_sha256,
        device=device,
        dtype=dtype,
        provenance={"target": spec.name, "source": spec.source, **provenance, "versions": library_versions()},
        stop_strings=tuple(spec.stop_strings),
        call_options={key: getattr(spec, key) for key in CALL_OPTIONS},
    )


def _load_model(files: ModelFiles, dtype: torch.dtype, name: str) -> Any:
    config = load_config(files.folder, name)
    log.info("loading target %s from %s", name, files.folder)
    try:
        with quiet_transformers():
            model, info = model_class(config.model_type).from_pretrained(
                files.folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # safetensors, torch and transformers each have their own
        raise ValueError(f"target {name}: {files.folder} can't be loaded: {first_line(error)}") from error
    # The library fills what is missing with random numbers and only warns.
    absent = sorted(info["missing_keys"])
    if absent:
        raise ValueError(f"target {name}: {files.folder} lacks {len(absent)} weights, the first is {absent[0]}")
    return model


def _load_tokenizer(files: ModelFiles, spec: TargetSpec) -> ChatTokenizer:
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            stock = AutoTokenizer.from_pretrained(files.folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ValueError(
            f"target {spec.name}: the tokenizer in {files.folder} can't be loaded: {first_line(error)}"
        ) from error
    return ChatTokenizer(stock, spec.chat_template, spec.system_prompt, spec.template_kwargs, spec.name)


def _stop_ids(spec: TargetSpec, eos: int | list[int] | None, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """All stop ids: the generation config's, else the tokenizer's end token, then the spec's extras."""
    ids = [eos] if isinstance(eos, int) else list(eos or [])
    if not ids and tokenizer.eos_id is not None:
        ids = [tokenizer.eos_id]
    ids += spec.extra_stop_ids
    for spelling in spec.extra_stop_tokens:
        token = tokenizer.token_id(spelling)
        if token is None:
            raise ValueError(f"target.extra_stop_tokens={spelling}: is no token of target {spec.name}")
        ids.append(token)
    for token in ids:
        if token >= vocab_size:
            raise ValueError(f"target.extra_stop_ids={token}: target {spec.name} has {vocab_size} tokens")
    return tuple(dict.fromkeys(ids))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
