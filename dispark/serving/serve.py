"""`dispark serve`: drafters and schedulers under load, in turns, on the loop that measures everything else.

A benchmark, not a server: requests of a task arrive by a plan, rows come and go, and what users and system saw is
written down. Arms run forth and back, so that a drift of the machine falls on all alike.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig
from tqdm import tqdm

from dispark.checks import check_seed, check_whole
from dispark.config import build, choices, resolve
from dispark.decoding.loop import DecodingLoop
from dispark.drafters.calibrated import CalibratedDrafter, calibration_path
from dispark.interfaces import Drafter, EnergyMeter, Scheduler, Verifier
from dispark.measure import energy, provenance
from dispark.measure.losslessness import greedy_verdicts, sampling_verdict
from dispark.runs.identity import content_hashes, is_own
from dispark.runs.store import RunStore, run_key
from dispark.runs.table import to_text
from dispark.serving.arrivals import Arrival, Arrivals, TraceArrivals
from dispark.serving.blocks import BlockBudget
from dispark.serving.report import (
    FORMATS,
    Passes,
    Sla,
    check_arms,
    frames_of,
    headline_of,
    summarise_arms,
    table_row,
)
from dispark.serving.source import ServingSource, longest_text
from dispark.targets.model import wrap
from dispark.targets.spec import load
from dispark.tasks.conversation import first_messages, request_seed
from dispark.types import AGAIN, EnergyReading, Prompt, Request, RequestRecord, Sampling

log = logging.getLogger(__name__)

_HEADLINE = ("throughput_tokens_per_s", "throughput_ci", "tokens_per_s_p50", "ttft_s_p95", "verify_budget", "matl")
_WARMUP_TOKENS = 16


@dataclass
class Arm:
    """A drafter with a scheduler, and what its passes recorded."""

    name: str
    drafter: Drafter
    scheduler: Scheduler
    loop: DecodingLoop | None = None
    frames: list[tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]] = field(default_factory=list)
    readings: list[EnergyReading] = field(default_factory=list)
    records: list[RequestRecord] = field(default_factory=list)

    @property
    def spare_tokens(self) -> int:
        """Room that a request needs beyond its prompt and answer: for an anchor and a draft."""
        return 1 + self.drafter.draft_length


def run_serve(cfg: DictConfig) -> dict[str, Any]:
    """Runs one load, or finds it done, prints its table and returns the headline figures.

    Raises:
        ValueError: a setting is refused, in one line.
    """
    plain = resolve(cfg)
    _check(plain)
    for arm in plain["arms"].values():
        arm["calibration"] = calibration_path(arm["drafter"], arm.get("calibration"))
    key = run_key(plain, content_hashes(plain))
    arrivals = str(choices().get("arrivals", "arrivals"))
    slug = f"{plain['target']['name']}/{choices().get('task', 'task')}/{arrivals}/s{plain['seed']}"
    store = RunStore(plain["out"], key, slug)
    with store.attempt(plain, overwrite=cfg.overwrite) as has_work:
        if has_work:
            run = Serving(cfg, plain, store).run()
            print(to_text(pd.DataFrame(run["table"], dtype=object), FORMATS), flush=True)
            return headline_of(store.path, run, _HEADLINE)
    return headline_of(store.path, store.read().run, _HEADLINE)


class Serving:
    """One load.

    Args:
        cfg: the composed config.
        plain: the same, resolved to plain containers.
        store: where the results go.
    """

    def __init__(self, cfg: DictConfig, plain: dict[str, Any], store: RunStore) -> None:
        self.cfg, self.plain, self.store = cfg, plain, store
        self.sampling: Sampling = build(cfg.sampling)
        self.verifier: Verifier = build(cfg.verifier)
        self.meter: EnergyMeter = build(cfg.meter)
        self.arrivals: Arrivals = build(cfg.arrivals)
        self.sla = Sla(**plain["sla"])
        arms = [(name, build(node.drafter), build(node.scheduler)) for name, node in cfg.arms.items()]
        for _, drafter, _ in arms:
            self.verifier.check(self.sampling, drafter.proposal)
        prompts: list[Prompt] = build(cfg.task).prompts()
        self.loaded = load(build(cfg.target))
        self.target = wrap(self.loaded)
        self.requests, self.plan = self._requests(prompts)
        self.context = min(self.loaded.max_context, longest_text(self.requests, self.plan))
        self.num_slots = self.context + 1 + max(drafter.draft_length for _, drafter, _ in arms)
        self.num_rows = min(self.arrivals.max_in_flight or cfg.max_rows, len(self.requests))
        self.cancel_after = self._cancellations()
        self.arms = [self._arm(*parts) for parts in arms]
        for arm in self.arms:  # what refuses this target does so before the first pass
            assert arm.loop is not None
            arm.loop.bind()
            check = getattr(arm.scheduler, "check_requests", None)
            if check is not None:
                check([request.request_id for request in self.requests])

    def run(self) -> dict[str, Any]:
        """Measures and stores."""
        for arm in self.arms:
            self._warm_up(arm)
        self.meter.bind(self.target.device)
        order = [arm for _ in range(self.cfg.cycles) for arm in [*self.arms, *reversed(self.arms)]]
        with tqdm(total=len(order), desc="serve", unit="pass") as bar:
            for arm in order:
                bar.set_postfix_str(arm.name, refresh=False)
                self._pass(arm)
                bar.update()
        return self._write()

    # -- requests -----------------------------------------------------------------------------------------------

    def _requests(self, prompts: Sequence[Prompt]) -> tuple[list[Request], list[Arrival]]:
        """First turns in order, again and again, each round of them with draws of its own."""
        cfg, tokenizer = self.cfg, self.loaded.tokenizer
        if not prompts:
            raise ValueError("task has no prompts: must have at least one")
        num = cfg.num_requests
        if num is None:
            num = len(self.arrivals) if isinstance(self.arrivals, TraceArrivals) else len(prompts)
        plan = self.arrivals.plan(num, cfg.seed)
        rendered = {prompt.prompt_id: tuple(tokenizer.render(first_messages(prompt))) for prompt in prompts}
        caps = random.Random(f"caps {cfg.seed}")
        requests = []
        for i in range(num):
            prompt = prompts[i % len(prompts)]
            # As `dispark bench` names first turns, so that an oracle finds them; asked again they are others.
            name = f"{prompt.prompt_id}#0" + (f"{AGAIN}{i // len(prompts)}" if i >= len(prompts) else "")
            low = cfg.max_new_tokens if cfg.min_new_tokens is None else cfg.min_new_tokens
            requests.append(
                Request(
                    request_id=name,
                    prompt_id=prompt.prompt_id,
                    turn=0,
                    task=prompt.task,
                    category=prompt.category,
                    prompt_ids=rendered[prompt.prompt_id],
                    max_new_tokens=caps.randint(low, cfg.max_new_tokens),
                    seed=request_seed(cfg.seed, name),
                    stop_strings=tuple(self.loaded.stop_strings),
                )
            )
        return requests, plan

    def _cancellations(self) -> dict[str, int]:
        """The same for all arms."""
        draws = random.Random(f"cancel {self.cfg.seed}")
        leaving = [r for r in self.requests if draws.random() < self.cfg.cancel_share]
        return {r.request_id: draws.randint(1, r.max_new_tokens) for r in leaving}

    def _source(
        self, arm: Arm, requests: Sequence[Request], plan: Sequence[Arrival], in_flight: int | None
    ) -> ServingSource:
        budget = BlockBudget(self.cfg.kv_blocks, self.cfg.block_tokens)
        return ServingSource(requests, plan, budget, in_flight, arm.spare_tokens, self.context, self.cancel_after)

    # -- passes -------------------------------------------------------------------------------------------------

    def _arm(self, name: str, drafter: Drafter, scheduler: Scheduler) -> Arm:
        decoding: Any = drafter
        if (path := self.plain["arms"][name]["calibration"]) is not None:
            kind = self.plain["arms"][name]["drafter"].get("confidence")
            decoding = CalibratedDrafter(drafter, Path(path), kind, self.sampling, self.loaded.weights_sha256)
        blocks = self.cfg.kv_blocks
        loop = DecodingLoop(
            self.target,
            decoding,
            scheduler,
            self.verifier,
            self.sampling,
            decode=self.loaded.tokenizer.decode,
            batch_size=self.num_rows,
            num_slots=self.num_slots,
            max_context=self.context,
            kv_budget=None if blocks is None else blocks * self.cfg.block_tokens,
        )
        return Arm(name, drafter, scheduler, loop)

    def _warm_up(self, arm: Arm) -> None:
        few = [replace(r, max_new_tokens=min(_WARMUP_TOKENS, r.max_new_tokens)) for r in self.requests]
        few = few[: self.cfg.warmup]
        if few:
            assert arm.loop is not None
            arm.loop.reads_drafts = True
            arm.loop.run(self._source(arm, few, [Arrival(0.0)] * len(few), self.num_rows))
            arm.loop.reads_drafts = False

    def _pass(self, arm: Arm) -> None:
        assert arm.loop is not None
        repeat = len(arm.frames)
        source = self._source(arm, self.requests, self.plan, self.arrivals.max_in_flight)
        self.meter.start()
        trace = arm.loop.run(source)
        arm.readings.append(self.meter.stop())
        assert not source.budget.names, "blocks are given back"
        arm.frames.append(frames_of(source, trace, repeat))
        arm.records += trace.records
        for row in arm.frames[-1][0].to_dict("records"):
            self.store.append_request({"arm": arm.name} | {str(key): value for key, value in row.items()})

    # -- results ------------------------------------------------------------------------------------------------

    def _passes(self, arm: Arm) -> Passes:
        requests, rounds, steps = (pd.concat([frames[i] for frames in arm.frames]) for i in range(3))
        row_tokens = self.context + arm.spare_tokens
        users = self._users()
        return Passes(requests, rounds, steps, users, self.cfg.block_tokens, row_tokens, arm.spare_tokens)

    def _users(self) -> int | None:
        return None if self.arrivals.max_in_flight is None else self.num_rows

    def _write(self) -> dict[str, Any]:
        passes = {arm.name: self._passes(arm) for arm in self.arms}
        baseline = self.cfg.baseline or self.arms[0].name
        figures = summarise_arms(passes, baseline, self.sla)
        verdicts = self._verdicts()
        for arm in self.arms:
            joules = energy.combine(arm.readings, self.meter.min_window_s)
            tokens = figures[arm.name]["num_tokens"]
            figures[arm.name] |= {
                "energy": asdict(joules),
                "joules_per_token": None if joules.energy_j is None or not tokens else joules.energy_j / tokens,
                "losslessness": verdicts[arm.name]["verdict"],
                "drafter_weights": getattr(arm.drafter, "description", None),
            }
        for kind, index in (("rounds", 1), ("steps", 2)):
            frames = [frame[index].assign(arm=arm.name) for arm in self.arms for frame in arm.frames]
            getattr(self.store, f"write_{kind}")(pd.concat(frames, ignore_index=True))
        run: dict[str, Any] = {
            "kind": "serve",
            "status": "done",
            "target": self.loaded.name,
            "task": choices().get("task"),
            "arrivals": self.plain["arrivals"],
            "num_rows": self.num_rows,
            "num_requests": len(self.requests),
            "baseline": baseline,
            "arms": figures,
            "table": [table_row(name, found) for name, found in figures.items()],
            "losslessness": verdicts,
            "config": self.plain,
            "choices": choices(),
            "provenance": provenance.collect(
                self.target.device, self.target.dtype, extra={"weights_sha256": self.loaded.weights_sha256}
            ),
        }
        self.store.write_run(run)
        self.store.mark_done()
        return run

    def _verdicts(self) -> dict[str, Any]:
        """Of greedy texts that came to their end, against the baseline's; of the composition's law at temperatures
        above 0."""
        if not self.sampling.is_greedy:
            return {
                arm.name: sampling_verdict(
                    self.verifier, arm.drafter.proposal, arm.scheduler.is_lossless, is_own(type(arm.drafter).__module__)
                )
                for arm in self.arms
            }
        records = {arm.name: [r for r in arm.records if r.finish_reason != "cancelled"] for arm in self.arms}
        return greedy_verdicts(self.target, records, self.cfg.baseline or self.arms[0].name)


def _check(plain: Mapping[str, Any]) -> None:
    """Ranges of the top level. Raises ValueError."""
    check_seed(plain["seed"])
    whole = ("max_new_tokens", "max_rows", "cycles", "block_tokens")
    check_whole(plain, whole, or_null=("num_requests", "kv_blocks", "min_new_tokens"))
    if plain["min_new_tokens"] is not None and plain["min_new_tokens"] > plain["max_new_tokens"]:
        raise ValueError(
            f"min_new_tokens={plain['min_new_tokens']}: must be at most max_new_tokens={plain['max_new_tokens']}"
        )
    if plain["warmup"] < 0:
        raise ValueError(f"warmup={plain['warmup']}: must be a whole number >= 0")
    if not 0.0 <= plain["cancel_share"] <= 1.0:
        raise ValueError(f"cancel_share={plain['cancel_share']}: must lie in 0 to 1")
    if not plain["arms"]:
        raise ValueError("arms: there is none; choose with arm=none, or arm=[none,ngram]")
    check_arms(plain, ("drafter", "scheduler"), "a drafter and a scheduler; choose options with arm=[...]")
