"""`dispark data`: prompts and the target's answers to them, resumable, with an estimate before anything long starts.

Conversations are decoded part by part: what a pass of the loop records is let go after each part, and every finished
row is on disk at once. How rows are made is synthesis.py's business, what they are rows.py's.
"""

from __future__ import annotations

import hashlib
import logging
import math
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from tqdm import tqdm

from dispark.checks import check_whole
from dispark.config import build, resolve
from dispark.decoding.loop import DecodingLoop
from dispark.runs.files import check_writable, dumps, locked
from dispark.runs.identity import content_hashes
from dispark.targets.model import wrap
from dispark.targets.spec import LoadedTarget, load
from dispark.tasks.suite import SHIPPED, JsonlSuite, PackagedSuite
from dispark.training.endpoint import ChatFormat, OpenAIEndpoint
from dispark.training.filters import PromptFilter
from dispark.training.rows import RowWriter, TrainingRow
from dispark.training.seeds import Seed, reported_as
from dispark.training.synthesis import SynthesisSource

log = logging.getLogger(__name__)

_NOT_SETTINGS = ("paths", "hydra", "out", "batch_size", "part", "minutes")
_BYTES_PER_TOKEN = 8  # of rows.jsonl and Parquet together, measured


def run_data(cfg: DictConfig) -> dict[str, Any]:
    """Makes the data set, or finishes it, and returns its data.json.

    Raises:
        ValueError: a setting is refused, the folder can't be written or holds other data, or no row was made.
    """
    plain = resolve(cfg)
    check_whole(plain, ("batch_size", "part", "max_new_tokens", "max_prompt_tokens", "max_turn_tokens"))
    if plain["minutes"] is not None and not plain["minutes"] > 0:
        raise ValueError(f"minutes={plain['minutes']}: must be above 0, or null for no end")
    out = Path(plain["out"])
    check_writable(out, "out")
    settings = {key: value for key, value in plain.items() if key not in _NOT_SETTINGS}
    kept_out = evaluation_prompts(plain["exclude"])
    settings |= {"contents": content_hashes(settings), "python": platform.python_version()}
    settings |= {"kept_out": hashlib.sha256(dumps(kept_out).encode()).hexdigest()}
    endpoint = build(cfg.endpoint)
    chat = ChatFormat.of(plain["target"]) if isinstance(endpoint, OpenAIEndpoint) else None
    with locked(out / ".lock", f"another dispark data in {out}"):
        return _make(cfg, plain, out, settings, kept_out, endpoint, chat)


def _make(
    cfg: DictConfig,
    plain: dict[str, Any],
    out: Path,
    settings: dict[str, Any],
    kept_out: list[str],
    endpoint: Any,
    chat: ChatFormat | None,
) -> dict[str, Any]:
    writer = RowWriter(out, settings)
    prompt_filter = PromptFilter(kept_out)
    seeds: list[Seed] = build(cfg.prompts).seeds(cfg.seed)
    for row in writer.rows:  # what is there counts as seen
        prompt_filter.accepts(row.prompt)
    prompt_filter.refused.clear()
    done = writer.done
    waiting = [item for item in seeds if item.row_id not in done]
    if waiting:
        loaded = load(build(cfg.target))
        if chat is not None:
            ask(endpoint, chat, cfg, loaded, writer, prompt_filter, waiting, len(seeds))
        else:
            Synthesis(cfg, loaded, writer, prompt_filter).run(waiting, len(seeds))
    meta = writer.finish({"refused": dict(prompt_filter.refused), "num_seeds": len(seeds)})
    kinds = ", ".join(f"{kind} {num}" for kind, num in meta["num_by_kind"].items())
    print(f"{out}: {meta['num_rows']} rows, {meta['num_answer_tokens']:,} answer tokens ({kinds})")
    return {"out": str(out)} | {key: value for key, value in meta.items() if key != "settings"}


def evaluation_prompts(exclude: list[str]) -> list[str]:
    """Every turn of the shipped suites and of the files to be kept out of training."""
    prompts = PackagedSuite("all", list(SHIPPED), "1").prompts()
    for path in exclude:
        with reported_as("exclude", "exclude"):
            prompts += JsonlSuite(path).prompts()
    return [turn for prompt in prompts for turn in prompt.turns]


def ask(
    endpoint: OpenAIEndpoint,
    chat: ChatFormat,
    cfg: DictConfig,
    loaded: LoadedTarget,
    writer: RowWriter,
    prompt_filter: PromptFilter,
    seeds: list[Seed],
    num_all: int,
) -> None:
    """Takes the answers from a server; see endpoint.py."""
    tokenizer, prompts, end = loaded.tokenizer, {}, _end_of(cfg.minutes)

    def accepted() -> Iterator[Seed]:
        for item in seeds:
            if time.perf_counter() > end:
                log.info("time is over; the same command goes on")
                return
            if item.text is None or prompt_filter.accepts(item.text):
                ids = [] if item.text is None else tokenizer.render([{"role": "user", "content": item.text}])
                if len(ids) > cfg.max_prompt_tokens:
                    prompt_filter.refused["prompt too long"] += 1
                    continue
                prompts[item.row_id] = ids
                yield item

    every_s = 0.5 if sys.stderr.isatty() else 15.0
    with tqdm(total=num_all, initial=num_all - len(seeds), unit="seed", mininterval=every_s) as bar:
        for item, answer in endpoint.answers(accepted(), build(cfg.sampling), cfg.max_new_tokens, cfg.seed, chat):
            assert item.text is not None
            ids = tokenizer.encode(answer.text)
            if answer.finish_reason == "stop" and tokenizer.eos_id is not None:
                ids = [*ids, tokenizer.eos_id]
            row = TrainingRow(item.row_id, item.kind, item.text, prompts.pop(item.row_id), ids, answer.finish_reason)
            writer.append(row)
            bar.update()
    for reason, num in endpoint.failed.items():
        prompt_filter.refused[reason] += num


def _end_of(minutes: float | None) -> float:
    """When no new prompt is taken any more, on the clock of time.perf_counter."""
    return math.inf if minutes is None else time.perf_counter() + 60 * minutes


class Synthesis:
    """The long part: the loop over parts of the seeds.

    Args:
        cfg: the command's config.
        loaded: the target.
        writer: takes the rows.
        prompt_filter: judges the prompts.
    """

    def __init__(self, cfg: DictConfig, loaded: LoadedTarget, writer: RowWriter, prompt_filter: PromptFilter) -> None:
        self.cfg, self.writer, self.filter = cfg, writer, prompt_filter
        self.tokenizer, self.stop_strings = loaded.tokenizer, loaded.stop_strings
        longest = max(cfg.max_prompt_tokens + cfg.max_new_tokens, cfg.max_turn_tokens + 256)
        context = min(longest, loaded.max_context)
        drafter = build(cfg.drafter)
        self.loop = DecodingLoop(
            wrap(loaded),
            drafter,
            build(cfg.scheduler),
            build(cfg.verifier),
            build(cfg.sampling),
            decode=self.tokenizer.decode,
            batch_size=cfg.batch_size,
            num_slots=context + drafter.draft_length + 1,
            max_context=context,
        )

    def run(self, seeds: list[Seed], num_all: int) -> None:
        """Works through the seeds; prints an estimate from the first few conversations before the rest."""
        self._end = _end_of(self.cfg.minutes)
        probe = min(len(seeds), self.cfg.batch_size)
        parts = [seeds[:probe]] + [seeds[i : i + self.cfg.part] for i in range(probe, len(seeds), self.cfg.part)]
        every_s = 0.5 if sys.stderr.isatty() else 15.0
        with tqdm(total=num_all, initial=num_all - len(seeds), unit="seed", mininterval=every_s) as bar:
            for number, part in enumerate(parts):
                if self._is_over():
                    log.info("time is over; the same command goes on")
                    return
                start = time.perf_counter()
                source = self._source(part)
                self.loop.run(source)
                seconds = time.perf_counter() - start
                bar.update(len(part) - source.num_left)
                bar.set_postfix_str(f"{source.num_tokens / seconds:.0f} tok/s, {len(self.writer.rows)} rows")
                for reason, num in source.left_out.items():
                    self.filter.refused[reason] += num
                if number == 0 and len(parts) > 1:
                    self._estimate(len(seeds) - len(part), source.num_tokens / len(part), seconds / len(part))

    def _source(self, part: list[Seed]) -> SynthesisSource:
        cfg = self.cfg
        return SynthesisSource(
            part,
            self.tokenizer,
            self.filter,
            self.writer,
            max_new_tokens=cfg.max_new_tokens,
            max_prompt_tokens=cfg.max_prompt_tokens,
            max_turn_tokens=cfg.max_turn_tokens,
            seed=cfg.seed,
            stop_strings=self.stop_strings,
            is_over=self._is_over,
        )

    def _is_over(self) -> bool:
        return time.perf_counter() > self._end

    def _estimate(self, num_left: int, tokens: float, seconds: float) -> None:
        """Says how much is to come, and whether there is room for it.

        Raises:
            ValueError: the disk is too small.
        """
        size = num_left * tokens * _BYTES_PER_TOKEN
        free = shutil.disk_usage(self.writer.folder).free
        log.info(
            "%d conversations to go: about %.2f million tokens, %.0f minutes, %.0f MB on disk (%.0f MB free)",
            num_left,
            num_left * tokens / 1e6,
            num_left * seconds / 60,
            size / 1e6,
            free / 1e6,
        )
        if size > free:
            raise ValueError(f"out={self.writer.folder}: needs about {size / 1e6:.0f} MB, {free / 1e6:.0f} are free")
