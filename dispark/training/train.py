"""`dispark train`: drafters for one target, trained side by side, resumable, each saved as a checkpoint that decodes.

This module reads the config and puts the parts together; the loop is in trainer.py. Under torchrun all processes run
it, and the first alone writes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from dispark.checks import check_whole
from dispark.config import build, resolve
from dispark.decoding.target import TargetModel
from dispark.interfaces import Drafter, TrainingTracker
from dispark.measure import provenance
from dispark.protocols import check_protocol
from dispark.runs.files import check_writable, dumps, locked, write_text
from dispark.runs.tracking import NullTracker
from dispark.targets.model import wrap
from dispark.targets.spec import LoadedTarget, load
from dispark.training.card import write_card
from dispark.training.draft_ids import coverage, frequent_ids
from dispark.training.feature_cache import CachedFeatures
from dispark.training.features import FeatureStream
from dispark.training.plan import split_held_out
from dispark.training.rows import TrainingRow, describe, read_all
from dispark.training.state import StateStore
from dispark.training.students import Student
from dispark.training.trainer import METRICS, Trainer, TrainSettings, read_metrics
from dispark.training.world import World, use_own_device

log = logging.getLogger(__name__)

SETTINGS, RUN, LOCK = "settings.json", "run.json", ".lock"
EXTENDED = "extended"  # key of both files: how many steps the run was to have before, each until which step
_NOT_SETTINGS = (
    "paths", "hydra", "out", "tracker", "data", "more_data", "overwrite", "minutes", "log_every", "checkpoint_every",
    "divergence", "parity_rows", "parity_tokens", "parity_tolerance", "feature_cache",
)  # fmt: skip


def run_train(cfg: DictConfig) -> dict[str, Any]:
    """Trains, or goes on training, and returns the last figures on held-out rows.

    Raises:
        ValueError: a setting is refused, the folder holds another run, or training had to be stopped.
    """
    plain = resolve(cfg)
    _check(plain)
    with flushed_denormals():
        return _run(cfg, plain)


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Takes denormal numbers for 0: peaked attention has weights of 1e-38 and less, with which CPUs are 7 times as slow
    (measured on scores with a deviation of 40)."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def _run(cfg: DictConfig, plain: dict[str, Any]) -> dict[str, Any]:
    out = Path(plain["out"])
    check_writable(out, "out")
    rows, metas = read_all([plain["data"], *plain["more_data"]])
    rows = _fitting(rows, plain["max_tokens"])
    meta = describe(rows)
    use_own_device()
    loaded = load(build(cfg.target))
    for folder, one in zip([plain["data"], *plain["more_data"]], metas, strict=True):
        _check_rows(rows, one, loaded, folder)
    target = wrap(loaded)
    world = World.join(target.device)
    try:
        if plain["batch_rows"] < world.size:
            raise ValueError(f"batch_rows={plain['batch_rows']}: must be at least 1 for each of {world.size} processes")
        with ExitStack() as held:
            if world.is_first:
                held.enter_context(locked(out / LOCK, f"another dispark train in {out}"))
            return _train(cfg, plain, out, rows, meta, loaded, target, world)
    finally:
        world.leave()


def _train(
    cfg: DictConfig,
    plain: dict[str, Any],
    out: Path,
    rows: list[TrainingRow],
    meta: dict[str, Any],
    loaded: LoadedTarget,
    target: TargetModel,
    world: World,
) -> dict[str, Any]:
    train_numbers, held_out_numbers = split_held_out([row.row_id for row in rows], plain["held_out"])
    train_rows, held_out = ([rows[i] for i in numbers] for numbers in (train_numbers, held_out_numbers))
    students: dict[str, Student] = {name: build(cfg.students[name]) for name in plain["students"]}
    covered = start_all(students, train_rows, target)
    layers = [layer for student in students.values() for layer in student.feature_layers]
    stream: FeatureStream = FeatureStream(target, layers, plain["max_tokens"])
    cache: CachedFeatures | None = None
    if plain["feature_cache"] is not None:
        identity = {"weights_sha256": loaded.weights_sha256}
        stream = cache = CachedFeatures(stream, Path(plain["feature_cache"]), identity)
    keys = TrainSettings.__dataclass_fields__
    tracker = build(cfg.tracker) if world.is_first else NullTracker()
    check_protocol(tracker, TrainingTracker, "tracker")
    trainer = Trainer(
        students,
        lambda name, folder: open_drafter(plain["students"][name], folder),
        target,
        stream,
        FeatureStream(target, layers, sys.maxsize),
        train_rows,
        held_out,
        TrainSettings(**{key: plain[key] for key in keys}),
        build(cfg.optimizer),
        out,
        world,
    )
    # Whatever is refused was refused by now: the folder is this run's.
    settings = {key: value for key, value in plain.items() if key not in _NOT_SETTINGS}
    settings |= {"data_fingerprint": meta["fingerprint"], "weights_sha256": loaded.weights_sha256}
    if world.is_first:
        _open_folder(out, settings, plain["overwrite"])
        if cache is not None:
            cache.fill(rows)
    world.wait()
    if cache is not None:
        cache.read_index()
    trainer.resume()
    is_finished = trainer.step >= plain["steps"]
    if not is_finished:
        slug = f"train/{loaded.name}/{'+'.join(students)}/s{plain['seed']}"
        with tracker.training({"key": _key(out), "slug": slug, "config": plain}) as on_metrics:
            trainer.on_metrics = on_metrics
            is_finished = trainer.run()
    metrics = read_metrics(out)
    last = {line["student"]: line for line in metrics if line["kind"] == "held_out"}
    result = {
        "out": str(out),
        "step": trainer.step,
        "is_finished": is_finished,
        "totals": trainer.totals,
        "draft_coverage": covered,
        "held_out": last,
    }
    if world.is_first:
        settings = json.loads((out / SETTINGS).read_text(encoding="utf-8"))
        run = result | {"config": plain, "data": meta, EXTENDED: settings.get(EXTENDED, [])}
        run["provenance"] = provenance.collect(target.device, target.dtype)
        write_text(out / RUN, dumps(run, indent=1) + "\n")
        for name in students:
            write_card(out / name, name, run, [line for line in metrics if line["student"] == name])
        for name, line in last.items():
            print(f"{out / name}: step {line['step']} of {plain['steps']}, {_figures(line)}")
    return result


def _key(out: Path) -> str:
    """Of a run for trackers: its settings, but for how long it goes on, and its folder."""
    settings = json.loads((out / SETTINGS).read_text(encoding="utf-8"))
    text = dumps({key: settings[key] for key in settings if key not in ("steps", EXTENDED)}) + str(out.resolve())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _figures(line: Mapping[str, Any]) -> str:
    accept = " ".join(f"{value:.3f}" for value in line["accept_at"])
    return (
        f"held-out loss {line['loss']:.3f}, acceptance {accept}, MATL of greedy decoding {line['parity/loop_matl']:.2f}"
    )


def start_all(students: Mapping[str, Student], rows: list[TrainingRow], target: TargetModel) -> dict[str, float]:
    """Makes every network; the share of the answers' tokens that each one's draft vocabulary covers."""
    ids: dict[int, Tensor] = {}
    for student in students.values():
        size = student.drafter.draft_vocab_size
        if size is not None and size not in ids:
            ids[size] = frequent_ids(rows, size, target.vocab_size, target.stop_ids)
        with torch.random.fork_rng(devices=[]):
            student.start(target, None if size is None else ids[size])
    return {name: coverage(rows, student.drafter.vocabulary) for name, student in students.items()}


def open_drafter(node: Mapping[str, Any], folder: Path) -> Drafter:
    """The drafter of a student's node, reading a saved checkpoint."""
    drafter: Drafter = build({**node["drafter"], "checkpoint": str(folder)}, "drafter")
    return drafter


def _check(plain: Mapping[str, Any]) -> None:
    """Ranges of the top level; raises ValueError."""
    check_whole(plain, ("steps", "batch_rows", "accumulate", "log_every", "checkpoint_every", "parity_rows"))
    if plain["parity_tokens"] < 2:
        raise ValueError(f"parity_tokens={plain['parity_tokens']}: must be a whole number >= 2, or there is no round")
    if plain["held_out"] < 0:
        raise ValueError(f"held_out={plain['held_out']}: must be a whole number >= 0")
    if plain["max_tokens"] < 8:
        raise ValueError(f"max_tokens={plain['max_tokens']}: must be at least 8")
    for key, low in (("minutes", 0), ("divergence", 1)):
        if plain[key] is not None and not plain[key] > low:
            raise ValueError(f"{key}={plain[key]}: must be above {low}, or null")
    if not 0 <= plain["parity_tolerance"] <= 1:
        raise ValueError(f"parity_tolerance={plain['parity_tolerance']}: must lie in 0 .. 1")
    if not plain["students"]:
        raise ValueError("students: there is none; choose with student=dispark, or student=[dispark,dflash]")
    for name, node in plain["students"].items():
        if not isinstance(node, dict) or "_target_" not in node:
            raise ValueError(f"students.{name}: has no _target_; choose options with student=[...]")


def _fitting(rows: list[TrainingRow], max_tokens: int) -> list[TrainingRow]:
    """The rows that have something to learn from when they are cut.

    Raises:
        ValueError: there is none.
    """
    kept = [row for row in rows if len(row.prompt_ids) < max_tokens]
    if not kept:
        raise ValueError(f"max_tokens={max_tokens}: no prompt of the data is shorter than that")
    if len(kept) < len(rows):
        log.warning(
            "%d of %d rows are left out: no answer is left of them in %d tokens",
            len(rows) - len(kept),
            len(rows),
            max_tokens,
        )
    return kept


def _check_rows(rows: list[TrainingRow], meta: Mapping[str, Any], loaded: LoadedTarget, data: str) -> None:
    """Raises ValueError where the data was made by another target."""
    name = meta["settings"].get("target", {}).get("name")
    if name is not None and name != loaded.name:
        raise ValueError(f"data={data}: was made by target {name}, but this is {loaded.name}; make data with it")
    largest, size = max(max(row.tokens) for row in rows), loaded.model.config.vocab_size
    if largest >= size:
        raise ValueError(f"data={data}: holds token {largest}, but target {loaded.name} has {size}")


def _open_folder(out: Path, settings: dict[str, Any], overwrite: bool) -> None:
    """Makes the folder this run's: it is empty, or holds a run of the same settings, or one that has no state yet.

    Raises:
        ValueError: it holds something else.
    """
    note, states = out / SETTINGS, out / "state"
    wanted = json.loads(dumps(settings))
    extended: list[dict[str, int]] = []
    found = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else None
    if found is not None and "students" not in found:
        raise ValueError(f"out={out}: holds something else than a training run; choose another folder")
    if overwrite and found is not None:
        for path in [states, *(out / name for name in found["students"])]:
            shutil.rmtree(path, ignore_errors=True)
        for path in (note, out / RUN, out / METRICS):
            path.unlink(missing_ok=True)
        found = None
    step = max(StateStore(states).steps(), default=0)
    if found is not None and step:
        extended = found.pop(EXTENDED, [])
        if found["steps"] < wanted["steps"] and found | {"steps": wanted["steps"]} == wanted:
            log.info("the run of %d steps goes on at step %d as one of %d", found["steps"], step, wanted["steps"])
            extended.append({"steps": found["steps"], "until": step})
        elif found != wanted:
            keys = [key for key in sorted({*found, *wanted}) if found.get(key) != wanted.get(key)]
            raise ValueError(
                f"out={out}: holds a run of other settings ({', '.join(keys)}); "
                "choose another folder, or overwrite=true (steps alone can be raised)"
            )
    if extended:
        wanted[EXTENDED] = extended
    write_text(note, dumps(wanted, indent=1) + "\n")
