"""`dispark simulate`: arms with their schedulers on a simulated engine, reported as `dispark serve` reports real ones.

Everything that comes out says that it is simulated.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pandas as pd
from hydra.utils import get_class
from omegaconf import DictConfig

from dispark.checks import check_seed, check_whole
from dispark.config import build, choices, resolve
from dispark.interfaces import Scheduler
from dispark.measure import provenance
from dispark.runs.identity import content_hashes
from dispark.runs.store import RunStore, run_key
from dispark.runs.table import to_text
from dispark.serving.acceptance import Acceptance
from dispark.serving.arrivals import Arrivals, TraceArrivals
from dispark.serving.blocks import BlockBudget
from dispark.serving.costs import Cost, CostModel
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
from dispark.serving.simulate import Engine
from dispark.serving.source import longest_text
from dispark.tasks.conversation import request_seed
from dispark.types import Request

_HEADLINE = ("throughput_tokens_per_s", "tokens_per_s_p50", "ttft_s_p95", "verify_budget", "mean_draft_length", "matl")
_NUM_PROMPTS = 64  # of which each request is one, so that intervals have something to redraw


def run_simulate(cfg: DictConfig) -> dict[str, Any]:
    """Runs one load, or finds it done, prints its table and returns the headline figures.

    Raises:
        ValueError: a setting is refused, in one line.
    """
    plain = resolve(cfg)
    _check(plain)
    slug = f"{choices().get('engine', 'engine')}/{choices().get('arrivals', 'arrivals')}/s{plain['seed']}"
    store = RunStore(plain["out"], run_key(plain, content_hashes(plain)), slug)
    with store.attempt(plain, overwrite=cfg.overwrite) as has_work:
        run = _run(cfg, plain, store) if has_work else store.read().run
    if has_work:
        print("simulated, not measured:")
        print(to_text(pd.DataFrame(run["table"], dtype=object), FORMATS), flush=True)
    return {"is_simulated": True} | headline_of(store.path, run, _HEADLINE)


def _run(cfg: DictConfig, plain: Mapping[str, Any], store: RunStore) -> dict[str, Any]:
    arrivals: Arrivals = build(cfg.arrivals)
    model: CostModel = build(cfg.engine)
    sla = Sla(**plain["sla"])
    requests = _requests(plain, arrivals)
    plan = arrivals.plan(len(requests), cfg.seed)
    rows = min(arrivals.max_in_flight or cfg.max_rows, len(requests))
    users = None if arrivals.max_in_flight is None else rows
    longest = longest_text(requests, plan)
    passes = {}
    for name, node in cfg.arms.items():
        acceptance: Acceptance | None = None if node.acceptance is None else build(node.acceptance)
        cost = model.cost(build(node.drafting))
        scheduler = scheduler_of(plain["arms"][name]["scheduler"], cost, f"arms.{name}.scheduler")
        capacity = rows * longest if cfg.kv_blocks is None else cfg.kv_blocks * cfg.block_tokens
        engine = Engine(acceptance, scheduler, cost, rows, capacity)
        spare = 1 + (0 if acceptance is None else acceptance.draft_length)
        budget = BlockBudget(cfg.kv_blocks, cfg.block_tokens)
        source, trace = engine.run(requests, plan, users, budget, longest + spare)
        passes[name] = Passes(*frames_of(source, trace, 0), users, cfg.block_tokens, longest + spare, spare)
    baseline = cfg.baseline or next(iter(passes))
    figures = summarise_arms(passes, baseline, sla)
    run: dict[str, Any] = {
        "kind": "simulate",
        "is_simulated": True,
        "status": "done",
        "engine": plain["engine"],
        "arrivals": plain["arrivals"],
        "num_rows": rows,
        "num_requests": len(requests),
        "baseline": baseline,
        "arms": figures,
        "table": [table_row(name, found) for name, found in figures.items()],
        "config": plain,
        "choices": choices(),
        "provenance": provenance.collect("cpu", "none"),
    }
    store.write_run(run)
    store.mark_done()
    return run


def scheduler_of(node: Mapping[str, Any], cost: Cost, group: str) -> Scheduler:
    """A scheduler that plans with a simulated cost in the place of a profile, and has no telemetry.

    Args:
        node: resolved settings.
        cost: of the engine.
        group: where the node stands, for messages.
    """
    given = {key: value for key, value in node.items() if key != "_target_"}
    if "telemetry" in given:
        given["telemetry"] = None
    if "profile" not in given:
        scheduler: Scheduler = build({"_target_": node["_target_"], **given}, group)
        return scheduler
    # A cost is no config: the settings are held against the constructor before it is added.
    build({"_target_": node["_target_"], **given, "profile": "simulated"}, group)
    kind: Any = get_class(str(node["_target_"]))
    planned: Scheduler = kind(**(given | {"profile": None, "cost": cost.step_cost}))
    return planned


def _requests(plain: Mapping[str, Any], arrivals: Arrivals) -> list[Request]:
    num = plain["num_requests"]
    if num is None:
        num = len(arrivals) if isinstance(arrivals, TraceArrivals) else 8 * (arrivals.max_in_flight or 128)
    draws = random.Random(f"lengths {plain['seed']}")
    found = []
    for i in range(num):
        prompt, answer = draws.randint(*plain["prompt_tokens"]), draws.randint(*plain["answer_tokens"])
        name = f"r{i}"
        seed = request_seed(plain["seed"], name)
        found.append(Request(name, f"p{i % _NUM_PROMPTS}", 0, "simulated", "simulated", (0,) * prompt, answer, seed))
    return found


def _check(plain: Mapping[str, Any]) -> None:
    """Ranges of the top level. Raises ValueError."""
    check_seed(plain["seed"])
    check_whole(plain, ("max_rows", "block_tokens"), or_null=("num_requests", "kv_blocks"))
    for key in ("prompt_tokens", "answer_tokens"):
        if len(plain[key]) != 2 or not 1 <= plain[key][0] <= plain[key][1]:
            raise ValueError(f"{key}={plain[key]}: must be [low, high] with 1 <= low <= high")
    needs = "acceptance, drafting and scheduler; choose with simulated=[...]"
    check_arms(plain, ("acceptance", "drafting", "scheduler"), needs)
