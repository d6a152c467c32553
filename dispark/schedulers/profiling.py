"""`dispark profile`: measures what steps of the target cost here, and what drafting does.

All rows are filled once; every kind of step then runs in turns, so that a machine that slows down slows all of them. A
step is the packed verify of the loop, without what the host does around it. A draft is `propose`, and `update` after a
round of which nothing was accepted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig
from tqdm import tqdm

from dispark.checks import check_file
from dispark.config import build, choices, resolve
from dispark.decoding.random import RowGenerators
from dispark.decoding.target import TargetModel
from dispark.interfaces import Drafter
from dispark.runs.table import to_text
from dispark.schedulers.profile import Profile, Table, check_ascending, identity_of
from dispark.targets.model import wrap
from dispark.targets.spec import load
from dispark.types import Outcome, Request, Sampling

_WARM_UP = 1
_PREFILLS = (16, 64, 256, 1024)


@torch.inference_mode()
def measure(
    target: TargetModel, rows: Sequence[int], tokens: Sequence[int], context: int, repeats: int, seed: int = 0
) -> Profile:
    """Times every kind of step, and prefills.

    Args:
        target: free.
        rows, tokens: ascending numbers of rows, and of tokens in each.
        context: tokens that each row holds before.
        repeats: counted steps of each kind.
        seed: of the tokens.
    """
    most = rows[-1]
    lengths = [num for num in _PREFILLS if num < target.max_context]
    texts = _texts(target, most, context, seed)
    prompts = {num: _texts(target, 1, num, seed) for num in lengths}
    generator = torch.Generator().manual_seed(seed)
    target.open(most + 1, max(context + tokens[-1], *lengths) if lengths else context + tokens[-1])
    target.prefill(list(range(most)), texts)
    inputs = {
        (num, width): torch.randint(target.vocab_size, (num * width,), generator=generator).to(target.device)
        for num in rows
        for width in tokens
    }

    def step(kind: tuple[int, int]) -> float:
        num, width = kind
        return _seconds(target, lambda: target.forward(list(range(num)), inputs[kind], [width] * num))

    def prefill(num: int) -> float:
        seconds = _seconds(target, lambda: target.prefill([most], prompts[num]))
        target.drop(most)
        return seconds

    seconds = _in_turns("steps", list(inputs), step, repeats)
    prefills = _in_turns("prefills", lengths, prefill, repeats)
    samples = tuple(tuple(tuple(seconds[num, width]) for width in tokens) for num in rows)
    verify = Table(tuple(rows), tuple(tokens), samples)
    return Profile(identity_of(target), context, verify, {num: tuple(prefills[num]) for num in lengths})


@torch.inference_mode()
def measure_drafts(
    target: TargetModel,
    drafter: Drafter,
    rows: Sequence[int],
    context: int,
    repeats: int,
    seed: int = 0,
) -> Table:
    """Times drafting 1 .. draft_length tokens in each row, greedily.

    Args:
        target: free.
        drafter: not bound to anything that is still needed.
        rows: ascending.
        context: tokens that each row holds at first; a token is added each time.
        repeats: counted rounds of each kind.
        seed: of the tokens.
    """
    most, widths, sampling = rows[-1], range(1, drafter.draft_length + 1), Sampling()
    kinds = [(num, width) for num in rows for width in widths]
    num_slots = context + (repeats + _WARM_UP) * len(kinds) + drafter.draft_length + 2
    texts = _texts(target, most, context, seed)
    drafter.bind(target, most, num_slots)
    target.open(most, num_slots, drafter.feature_layers)
    names = list(range(most))
    logits, features = target.prefill(names, texts)
    requests = [Request(str(row), str(row), 0, "profile", "profile", tuple(texts[row]), 1, row) for row in names]
    anchors = logits.argmax(-1)
    drafter.begin(names, requests, anchors.tolist(), features)
    num_rounds = 0

    def draft(kind: tuple[int, int]) -> float:
        nonlocal num_rounds
        num, width = kind
        num_rounds += 1
        part, generators = names[:num], RowGenerators(names[:num], [num_rounds] * num, target.device)
        found: list[Any] = []
        seconds = _seconds(
            target, lambda: found.append(drafter.propose(part, anchors[:num], sampling, generators, width))
        )
        tokens = torch.cat([anchors[:num].unsqueeze(1), found[0].tokens_BG], dim=1)
        logits, features = target.verify(part, tokens, [1 + n for n in found[0].lengths])
        starts = torch.tensor([0, *(1 + n for n in found[0].lengths)]).cumsum(0)[:-1]
        anchors[:num] = logits[starts.to(logits.device)].argmax(-1)
        for row in part:
            target.commit(row, 1)
        outcome = Outcome([[token] for token in anchors[:num].tolist()], [0] * num, [None] * num, [False] * num)
        return seconds + _seconds(target, lambda: drafter.update(part, outcome, features))

    seconds = _in_turns("drafts", kinds, draft, repeats)
    samples = tuple(tuple(tuple(seconds[num, width]) for width in widths) for num in rows)
    return Table(tuple(rows), tuple(widths), samples)


def run_profile(cfg: DictConfig) -> dict[str, Any]:
    """Measures, prints the tables, writes the file and returns the headline figures. A file that holds for the same
    target, hardware and context keeps its other drafters.

    Raises:
        ValueError: settings that can't be measured, or a file that can't be written.
    """
    rows, tokens, path = tuple(cfg.rows), tuple(cfg.tokens), Path(cfg.out)
    for key, values in (("rows", rows), ("tokens", tokens)):
        check_ascending(key, values)
    for key in ("context", "repeats"):
        if cfg[key] < 1:
            raise ValueError(f"{key}={cfg[key]}: must be a whole number >= 1")
    check_file(path, "out")
    drafter: Drafter = build(cfg.drafter)
    target = wrap(load(build(cfg.target)))
    if cfg.context + tokens[-1] > target.max_context:
        raise ValueError(f"context={cfg.context}: with {tokens[-1]} tokens a row more than {target.max_context}")
    profile = measure(target, rows, tokens, cfg.context, cfg.repeats)
    kept, known = _drafts_of(path, profile)
    if drafter.draft_length > 0:
        name = choices().get("drafter", type(drafter).__name__)
        kept[name] = measure_drafts(target, drafter, rows, cfg.context, cfg.repeats)
        known[name] = {"settings": resolve(cfg)["drafter"], "weights": getattr(drafter, "description", None)}
    profile = replace(profile, drafts=kept, drafters=known)
    profile.save(path)
    table = _lines("verify", profile.verify)
    for name, each in kept.items():
        table += _lines(f"draft {name}", each)
    print(to_text(pd.DataFrame(table), {"ms": ".1f", "least": ".1f", "most": ".1f"}))
    prefill_ms = {num: 1e3 * statistics.median(samples) for num, samples in profile.prefill.items()}
    return {"out": str(path), **identity_of(target), "context": cfg.context, "steps": table, "prefill_ms": prefill_ms}


def _drafts_of(path: Path, profile: Profile) -> tuple[dict[str, Table], dict[str, Any]]:
    """The drafters of a file that is there, if it holds for the same: (times, what they hold for)."""
    try:
        before = Profile.load(path, "out")
    except ValueError:
        return {}, {}
    if (before.identity, before.context) != (profile.identity, profile.context):
        return {}, {}
    return dict(before.drafts), dict(before.drafters)


def _lines(what: str, table: Table) -> list[dict[str, Any]]:
    return [
        {
            "what": what,
            "rows": num,
            "tokens a row": width,
            "tokens": num * width,
            "ms": 1e3 * statistics.median(cell),
            "least": 1e3 * min(cell),
            "most": 1e3 * max(cell),
        }
        for num, line in zip(table.rows, table.samples_s, strict=True)
        for width, cell in zip(table.tokens, line, strict=True)
    ]


def _in_turns(
    title: str, kinds: Sequence[Any], measure_one: Callable[[Any], float], repeats: int
) -> Mapping[Any, list[float]]:
    """Samples of each kind, the kinds taking turns; the first turns don't count."""
    found: dict[Any, list[float]] = {kind: [] for kind in kinds}
    for turn in tqdm(range(_WARM_UP + repeats), desc=title, unit="turn"):
        for kind in kinds:
            seconds = measure_one(kind)
            if turn >= _WARM_UP:
                found[kind].append(seconds)
    return found


def _seconds(target: TargetModel, work: Callable[[], Any]) -> float:
    """What it takes, the device idle before and after."""
    _wait(target.device)
    start = time.perf_counter()
    work()
    _wait(target.device)
    return time.perf_counter() - start


def _texts(target: TargetModel, num: int, length: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    texts: list[list[int]] = torch.randint(target.vocab_size, (num, length), generator=generator).tolist()
    return texts


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
