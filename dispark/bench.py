"""`dispark bench`: one drafter on one task, in turns with autoregressive decoding, written to a run directory.

The prompts are cut into chunks; on each chunk the arms take turns A B B A, so that a drift of the machine falls on both
alike. Only the passes are timed and metered; loading, warm-up, checks and trackers lie outside. What a figure means
stands in METRICS.md; this module only makes and stores the records.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig
from tqdm import tqdm

from baselines.autoregressive import AutoregressiveDrafter
from baselines.hf_generate import HfGenerate
from dispark.config import build, choices, resolve, slug, sweep_name
from dispark.decoding.loop import DecodingLoop
from dispark.decoding.rows import Trace
from dispark.decoding.target import TargetModel
from dispark.drafters.calibrated import CalibratedDrafter, calibration_path
from dispark.interfaces import Drafter, EnergyMeter, Scheduler, TaskSuite, Tracker, Verifier
from dispark.measure import degeneracy, energy, memory, provenance
from dispark.measure.losslessness import greedy_verdicts, sampling_verdict
from dispark.measure.nvml import device_state
from dispark.measure.throughput import BASELINE_ARM, GENERATE_ARM, what_if_throughput_tokens_per_s
from dispark.measure.views import all_views
from dispark.protocols import check_protocol
from dispark.runs.compare import compare_arms, render
from dispark.runs.identity import content_hashes, is_own
from dispark.runs.loaded import LoadedRun
from dispark.runs.store import RunStore, StoredRun, run_key
from dispark.targets.model import wrap
from dispark.targets.spec import LoadedTarget, load
from dispark.tasks.conversation import (
    ConversationSource,
    check_lengths,
    context_need,
    render_fingerprint,
    request_seed,
)
from dispark.types import EnergyReading, Prompt, RequestRecord, Sampling

log = logging.getLogger(__name__)

LOOKUP_ARM = "transformers.prompt_lookup"
PROTOCOLS: dict[str, type] = {
    "drafter": Drafter,
    "verifier": Verifier,
    "scheduler": Scheduler,
    "meter": EnergyMeter,
    "tracker": Tracker,
    "task": TaskSuite,
}
_WARMUP_TOKENS = 24


def run_bench(cfg: DictConfig) -> dict[str, Any]:
    """Runs one job, or finds it done, prints its table and returns the headline figures.

    Raises:
        ValueError: a setting is refused, in one line.
    """
    plain = resolve(cfg)
    plain["calibration"] = calibration_path(plain["drafter"], plain["calibration"])
    contents = content_hashes(plain)
    store = RunStore(plain["paths"]["runs"], run_key(plain, contents), slug(plain))
    with store.attempt(plain, overwrite=cfg.overwrite) as has_work:
        if has_work:
            run = Bench(cfg, plain, store, contents).run()
            print(render(compare_arms(run), "text"), flush=True)
            return headline(run)
    return headline(LoadedRun(store.read()))


def headline(run: LoadedRun) -> dict[str, Any]:
    """The figures of a run that its last line of output shows, as the run stored them."""
    summary = run.run["summary"]
    keys = ("matl", "matl_ci", "throughput_tokens_per_s", "speedup", "speedup_ci", "is_speedup_distinguishable")
    row: dict[str, Any] = {"run": str(run.path)}
    row |= {key: run.label(key) for key in ("target", "task", "drafter", "sampling")}
    row |= {key: summary.get(key) for key in (*keys, "host_share", "joules_per_token")}
    row["energy_reason"] = summary["reasons"].get("joules_per_token")
    row["losslessness"] = run.of("losslessness").get("verdict")
    row["degenerate_share"] = run.of("degeneracy").get("degenerate_share")
    row["has_random_weights"] = run.has_random_weights
    if run.run.get("what_if"):
        row["what_if"] = run.run["what_if"]
    return row


@dataclass
class Arm:
    """One way of decoding, and everything its passes recorded."""

    name: str
    decode: Callable[[ConversationSource], Trace]
    drafter: Drafter | None
    loops: list[DecodingLoop] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    records: list[RequestRecord] = field(default_factory=list)
    readings: list[EnergyReading] = field(default_factory=list)
    peaks: list[memory.PeakMemory] = field(default_factory=list)
    wall_s: float = 0.0
    num_passes: dict[int, int] = field(default_factory=dict)


@lru_cache(maxsize=1)
def _load_target(node: str) -> tuple[LoadedTarget, TargetModel]:
    """The last target stays in memory, so that a sweep's jobs share it. `node` is its resolved config as JSON."""
    loaded = load(build(json.loads(node), "target"))
    return loaded, wrap(loaded)


class Bench:
    """One job.

    Args:
        cfg: the composed config.
        plain: the same, resolved to plain containers.
        store: where the results go.
        contents: hashes of the files that the config points at.
    """

    def __init__(self, cfg: DictConfig, plain: dict[str, Any], store: RunStore, contents: dict[str, str]) -> None:
        self.cfg, self.plain, self.store, self.contents = cfg, plain, store, contents
        names = choices()
        self.drafter_name = names.get("drafter") or str(plain["drafter"]["_target_"]).rsplit(".", 1)[-1]
        self.sampling: Sampling = build(cfg.sampling)
        self.verifier: Verifier = build(cfg.verifier)
        self.scheduler: Scheduler = build(cfg.scheduler)
        self.drafter: Drafter = build(cfg.drafter)
        self.meter = build(cfg.meter)
        self.tracker = build(cfg.tracker)
        self.suite = build(cfg.task)
        for group, protocol in PROTOCOLS.items():
            check_protocol(getattr(self, "suite" if group == "task" else group), protocol, group)
        self.verifier.check(self.sampling, self.drafter.proposal)
        if cfg.generate_baseline and cfg.batch_size > 1:
            raise ValueError(f"generate_baseline=true with batch_size={cfg.batch_size}: it runs one request at a time")

        self.loaded, self.target = _load_target(json.dumps(plain["target"], sort_keys=True))
        self.tokenizer = self.loaded.tokenizer
        prompts = self.suite.prompts()
        self.prompts, self.skipped = check_lengths(prompts, self.tokenizer, self.loaded.max_context, cfg.on_overlong)
        needs = [context_need(prompt, self.tokenizer, cfg.max_new_tokens) for prompt in self.prompts]
        self.context = min(self.loaded.max_context, max(needs))
        self.num_slots = self.context + self.drafter.draft_length + 1
        self.skipped_turns: dict[str, str] = {}

    def run(self) -> LoadedRun:
        """Measures, checks and stores; returns the run as a reader finds it."""
        device = self.target.device
        before = device_state(device)
        arms = self._arms()
        self._warm_up(arms)
        self.meter.bind(device)
        chunks = chunks_of(self.prompts, self.cfg.chunk, self.cfg.batch_size)
        schedule = list(order_of_passes(len(chunks), [arm.name for arm in arms], self.cfg.repeats))
        by_name = {arm.name: arm for arm in arms}
        every_s = 0.5 if sys.stderr.isatty() else 15.0  # a log file needs few lines
        title = f"{self.drafter_name} on {self.suite.name}"
        with tqdm(total=len(schedule), desc=title, unit="pass", mininterval=every_s) as bar:
            for chunk, name in schedule:
                self._pass(by_name[name], chunk, chunks[chunk])
                bar.set_postfix_str(name, refresh=False)
                bar.update()
        return self._write(arms, {"before": before, "after": device_state(device)})

    # -- arms and passes ----------------------------------------------------------------------------------------

    def _arms(self) -> list[Arm]:
        """The autoregressive arm first, the drafter's second, outside arms last."""
        arms = [self._loop_arm(BASELINE_ARM, AutoregressiveDrafter())]
        if not isinstance(self.drafter, AutoregressiveDrafter):
            arms.append(self._loop_arm(self.drafter_name, self._calibrated()))
        if self.cfg.generate_baseline:
            arms.append(self._outside_arm(GENERATE_ARM, {}))
            if hasattr(self.drafter, "generate_options"):
                arms.append(self._outside_arm(LOOKUP_ARM, self.drafter.generate_options()))
        return arms

    def _calibrated(self) -> Drafter:
        """The drafter, its confidences calibrated where that was asked for."""
        if (path := self.plain["calibration"]) is None:
            return self.drafter
        kind = self.plain["drafter"].get("confidence")
        calibrated: Any = CalibratedDrafter(self.drafter, Path(path), kind, self.sampling, self.loaded.weights_sha256)
        return calibrated

    def _loop_arm(self, name: str, drafter: Drafter) -> Arm:
        loop = DecodingLoop(
            self.target,
            drafter,
            self.scheduler,
            self.verifier,
            self.sampling,
            decode=self.tokenizer.decode,
            batch_size=self.cfg.batch_size,
            num_slots=self.num_slots,
            max_context=self.context,
        )
        return Arm(name, loop.run, drafter, [loop])

    def _outside_arm(self, name: str, options: dict[str, Any]) -> Arm:
        outside = HfGenerate(self.target, self.sampling, self.tokenizer.decode, options)
        return Arm(name, lambda source: Trace(records=outside.run(source)), None)

    def _source(self, prompts: Sequence[Prompt], max_new_tokens: int, repeat: int) -> ConversationSource:
        return ConversationSource(
            prompts,
            self.tokenizer,
            max_new_tokens,
            # Not seed + repeat: a sweep over seeds would then share most of its texts.
            request_seed(self.cfg.seed, f"repeat {repeat}"),
            stop_strings=[*self.loaded.stop_strings, *self.cfg.stop_strings],
            max_context=self.context,
        )

    def _warm_up(self, arms: Sequence[Arm]) -> None:
        """Decodes the first prompts with every arm; nothing of it is kept."""
        prompts = self.prompts[: self.cfg.warmup]
        for arm in arms if prompts else ():
            log.info("warm-up: %s on %d prompts", arm.name, len(prompts))
            for loop in arm.loops:
                loop.reads_drafts = True
            arm.decode(self._source(prompts, min(_WARMUP_TOKENS, self.cfg.max_new_tokens), 0))
            for loop in arm.loops:
                loop.reads_drafts = False

    def _pass(self, arm: Arm, chunk: int, prompts: Sequence[Prompt]) -> None:
        """One arm over one chunk, timed and metered; its records are kept and its requests stored at once."""
        repeat = arm.num_passes.get(chunk, 0)
        arm.num_passes[chunk] = repeat + 1
        source = self._source(prompts, self.cfg.max_new_tokens, repeat)
        peak = memory.MemoryMeter(self.target.device)
        peak.start()
        self.meter.start()
        start_s = time.perf_counter()
        trace = arm.decode(source)
        arm.wall_s += time.perf_counter() - start_s
        arm.readings.append(self.meter.stop())
        arm.peaks.append(peak.stop())
        tag = {"arm": arm.name, "repeat": repeat}
        first = len(arm.steps)  # steps are numbered through all passes of an arm
        arm.rounds += [tag | row | {"step": row["step"] + first} for row in trace.rounds]
        arm.steps += [tag | {"chunk": chunk} | row | {"step": row["step"] + first} for row in trace.steps]
        arm.records += trace.records
        self.skipped_turns |= source.skipped_turns
        for record in trace.records:
            arm.requests.append(tag | request_row(record, is_in_loop=arm.drafter is not None))
            self.store.append_request(arm.requests[-1])

    # -- results ------------------------------------------------------------------------------------------------

    def _write(self, arms: Sequence[Arm], states: dict[str, Any]) -> LoadedRun:
        rounds = pd.DataFrame([row for arm in arms for row in arm.rounds])
        steps = pd.DataFrame([row for arm in arms for row in arm.steps])
        self.store.write_rounds(rounds)
        self.store.write_steps(steps)
        requests = pd.DataFrame([row for arm in arms for row in arm.requests])
        own = arms[1] if len(arms) > 1 and arms[1].drafter is not None else arms[0]
        extra = {
            "attention": "packed scaled_dot_product_attention over a ragged cache",
            "linear_backend": self.target.linear_backend,
            "weights_sha256": self.loaded.weights_sha256,
            "target": self.loaded.provenance,
            "device_state": states,
        }
        run: dict[str, Any] = {
            "key": self.store.key,
            "slug": self.store.slug,
            "status": "done",
            "sweep": sweep_name(),
            "target": self.loaded.name,
            "task": self.suite.name,
            "task_version": self.suite.version,
            "drafter": self.drafter_name,
            "drafter_weights": getattr(self.drafter, "description", None),
            "scheduler": choices().get("scheduler", type(self.scheduler).__name__),
            "verifier": choices().get("verifier", type(self.verifier).__name__),
            "sampling": asdict(self.sampling),
            "config": self.plain,
            "choices": choices(),
            "contents": self.contents,
            "fingerprint": render_fingerprint(self._source(self.prompts, self.cfg.max_new_tokens, 0).rendered),
            "num_prompts": len(self.prompts),
            "skipped_prompts": self.skipped,
            "skipped_turns": self.skipped_turns,
            "provenance": provenance.collect(self.target.device, self.target.dtype, extra=extra),
            "energy": {arm.name: asdict(energy.combine(arm.readings, self.meter.min_window_s)) for arm in arms},
            "memory": {arm.name: asdict(memory.combine(arm.peaks)) for arm in arms},
            "losslessness": self._verdicts(arms),
            "degeneracy": {
                arm.name: asdict(degeneracy.summarise([record.output_ids for record in arm.records])) for arm in arms
            },
            "pass_wall_s": {arm.name: arm.wall_s for arm in arms},
            "views": all_views(
                rounds, requests, arm=own.name, baseline=BASELINE_ARM, draft_length=self.drafter.draft_length
            ),
            "what_if": self._what_if(own, rounds, steps),
        }
        loaded = LoadedRun(StoredRun(self.store.path, run))
        run["summary"] = loaded.summary()
        run["summaries"] = {arm.name: loaded.summary(arm=arm.name) for arm in arms if arm.drafter is not None}
        if self.skipped_turns:
            note = f"{len(self.skipped_turns)} later turns were left out: no room in the context after the answers"
            run["summary"]["warnings"].append(note)
        run["warnings"] = run["summary"]["warnings"]
        self.store.write_run(run)
        self.store.mark_done()
        self.tracker.log_run(run, compare_arms(loaded))
        return loaded

    def _verdicts(self, arms: Sequence[Arm]) -> dict[str, Any]:
        if not self.cfg.check_losslessness:
            return {arm.name: {"verdict": None, "reason": "check_losslessness=false"} for arm in arms}
        if self.sampling.is_greedy:
            records = {arm.name: arm.records for arm in arms if arm.drafter is not None}
            verdicts = greedy_verdicts(self.target, records, BASELINE_ARM)
        else:
            verdicts = {
                arm.name: sampling_verdict(
                    self.verifier,
                    arm.drafter.proposal,
                    self.scheduler.is_lossless,
                    is_own(type(getattr(arm.drafter, "uncalibrated", arm.drafter)).__module__),
                )
                for arm in arms
                if arm.drafter is not None
            }
        outside = {"verdict": None, "reason": "decoded outside the loop"}
        return {arm.name: verdicts.get(arm.name, outside) for arm in arms}

    def _what_if(self, own: Arm, rounds: pd.DataFrame, steps: pd.DataFrame) -> dict[str, Any] | None:
        """Throughput with a stated draft cost in the place of the measured one, for drafters that state one."""
        cost_s = getattr(own.drafter, "draft_cost_s", None)
        if cost_s is None:
            return None
        mine = [frame[frame["arm"] == own.name] for frame in (steps, rounds)]
        return {
            "draft_cost_s": cost_s,
            "what_if_throughput_tokens_per_s": what_if_throughput_tokens_per_s(mine[0], mine[1], cost_s),
        }


def chunks_of(prompts: Sequence[Prompt], size: int | None, batch_size: int) -> list[Sequence[Prompt]]:
    """Prompts by chunk: `size` each, or evenly at least 4 and at least twice the rows of a batch, to keep it full."""
    if size is None:
        num_chunks = max(1, len(prompts) // max(4, 2 * batch_size))
        size = max(1, -(-len(prompts) // num_chunks))
    return [prompts[i : i + size] for i in range(0, len(prompts), size)]


def order_of_passes(num_chunks: int, arms: Sequence[str], repeats: int) -> Iterator[tuple[int, str]]:
    """(chunk, arm) pairs: on each chunk the arms forth and back, `repeats` times. One arm alone runs twice."""
    for chunk in range(num_chunks):
        for _ in range(repeats):
            for arm in [*arms, *reversed(arms)]:
                yield chunk, arm


def request_row(record: RequestRecord, is_in_loop: bool) -> dict[str, Any]:
    """A line of requests.jsonl. Arms outside the loop have no phase times and no first-token time."""
    request = record.request
    return {
        "request_id": request.request_id,
        "prompt_id": request.prompt_id,
        "turn": request.turn,
        "task": request.task,
        "category": request.category,
        "num_prompt_tokens": len(request.prompt_ids),
        "num_output_tokens": len(record.output_ids),
        "finish_reason": record.finish_reason,
        "num_rounds": record.num_rounds if is_in_loop else None,
        "prefill_s": record.prefill_s if is_in_loop else None,
        "decode_s": record.decode_s if is_in_loop else None,
        "ttft_s": record.ttft_s,
        "latency_s": record.latency_s,
        "seed": request.seed,
        "output_ids": record.output_ids,
        "text": record.text,
    }
