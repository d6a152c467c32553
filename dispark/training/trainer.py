"""The training loop: several drafters side by side on one feature stream.

A step: the next batches -> features of the target, once -> each student's loss and gradients -> sums over processes ->
each student's optimizer. Now and then: figures, a state to resume from, and for each student its checkpoint, its
figures on held-out rows, and the comparison of both with real decoding.

What a step sees hangs on seed and step alone (plan.py), so a run that was killed goes on exactly.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dispark.decoding.target import TargetModel
from dispark.interfaces import Drafter
from dispark.runs.files import dumps, read_jsonl, write_text
from dispark.training.features import FeatureStream
from dispark.training.optimizer import MasterAdamW, OptimizerSettings
from dispark.training.parity import ParityReport, check_parity
from dispark.training.plan import StepPlan, stream_seed
from dispark.training.rows import TrainingRow
from dispark.training.state import StateStore
from dispark.training.students import Student
from dispark.training.sums import Sums
from dispark.training.world import World

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
_SMOOTHING = 0.98  # of the loss that divergence is judged by
_PROBE_STEPS = 5  # before the time to go is estimated


@dataclass(frozen=True)
class TrainSettings:
    """How a run goes; what each means stands in conf/train.yaml."""

    steps: int
    batch_rows: int
    accumulate: int
    seed: int
    log_every: int
    checkpoint_every: int
    minutes: float | None
    divergence: float | None
    parity_rows: int
    parity_tokens: int
    parity_tolerance: float


class Trainer:
    """One run.

    Args:
        students: by name, started.
        open_drafter: makes the drafter that reads a saved checkpoint of a student.
        target: that all draft for.
        stream: of features of the rows.
        online: of features of any text, uncut.
        rows, held_out: to train on, and not to.
        settings, optimizer: how.
        out: the run's folder.
        world: the processes.
    """

    def __init__(
        self,
        students: dict[str, Student],
        open_drafter: Callable[[str, Path], Drafter],
        target: TargetModel,
        stream: FeatureStream,
        online: FeatureStream,
        rows: Sequence[TrainingRow],
        held_out: Sequence[TrainingRow],
        settings: TrainSettings,
        optimizer: OptimizerSettings,
        out: Path,
        world: World,
    ) -> None:
        self.students, self.target, self.stream, self._online = students, target, stream, online
        self.rows, self.held_out = list(rows), list(held_out)
        self.settings, self.out, self.world = settings, out, world
        self._open_drafter, self._schedule = open_drafter, optimizer
        self.on_metrics: Callable[[Mapping[str, Any]], None] = lambda line: None
        self.optimizers = {
            name: MasterAdamW(student.network, target.dtype, student.lr, optimizer, student.own_lrs)
            for name, student in students.items()
        }
        self.plan = StepPlan([len(row.tokens) for row in rows], settings.batch_rows, settings.seed)
        self.store = StateStore(out / "state")
        self.step = 0
        self.totals: dict[str, float] = {"seconds": 0.0, "tokens": 0, **{f"anchors/{name}": 0 for name in students}}
        self._smooth: dict[str, list[float]] = {}  # by student: smoothed loss, its weight, its least value
        self._sums = {name: Sums() for name in students}
        self._tokens, self._clock = 0, time.perf_counter()

    # -- the run ------------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Trains to the last step, or until the time is over; whether the last step was reached.

        Raises:
            ValueError: a loss diverged, or what decodes is not what was trained. The last good state stays.
        """
        s, began = self.settings, time.perf_counter()
        first, every_s = self.step, 0.5 if sys.stderr.isatty() else 15.0
        bar = tqdm(total=s.steps, initial=self.step, unit="step", mininterval=every_s, disable=not self.world.is_first)
        with bar:
            while self.step < s.steps:
                lines = self._step()
                self.step += 1
                bar.update()
                is_over = self._is_over(began)
                is_checkpoint = self.step % s.checkpoint_every == 0 or self.step == s.steps or is_over
                if is_checkpoint or self.step % s.log_every == 0:
                    bar.set_postfix_str(self._log(lines))
                if is_checkpoint:
                    self._checkpoint()
                if self.step - first == _PROBE_STEPS and self.world.is_first:
                    each, left = (time.perf_counter() - began) / _PROBE_STEPS, s.steps - self.step
                    log.info("%d steps to go at %.2f s: about %.0f minutes", left, each, left * each / 60)
                if is_over and self.step < s.steps:
                    return False
        return True

    def _is_over(self, began: float) -> bool:
        if self.settings.minutes is None:
            return False
        is_over = torch.tensor(float(time.perf_counter() - began > self.settings.minutes * 60))
        return bool(self.world.reduce(is_over.to(self.target.device)) > 0)  # all stop at the same step

    def _step(self) -> dict[str, dict[str, float]]:
        """One step of every student; (learning rate and norm of the gradients) by student."""
        s = self.settings
        for k in range(s.accumulate):
            epoch, numbers = self.plan.batch(self.step * s.accumulate + k)
            mine = numbers[self.world.rank :: self.world.size]
            width = self.stream.num_tokens([self.rows[i] for i in numbers])  # the same in all processes
            batch = self.stream.batch([self.rows[i] for i in mine], width)
            seeds = [stream_seed(s.seed, epoch, self.rows[i].row_id) for i in mine]
            self._tokens += int(batch.is_real_BT.sum())
            for name, student in self.students.items():
                loss = student.loss(batch, seeds, self.world.reduce)
                (loss.total / s.accumulate).backward()
                self.optimizers[name].gather()
                self._sums[name].add(loss)
        factor = self._schedule.factor(self.step, s.steps)
        lines = {}
        for name, optimizer in self.optimizers.items():
            if self.world.size > 1:
                optimizer.reduce(self.world.reduce)
            norm = optimizer.step(factor)
            if not math.isfinite(norm):
                self._stop(name, f"its gradients are not finite (norm {norm})")
            lines[name] = {"lr": self.students[name].lr * factor, "grad_norm": norm}
        return lines

    def _stop(self, name: str, what: str) -> None:
        steps = self.store.steps()
        kept = f"the last good state is {self.store.path(steps[-1])}" if steps else "there is no state yet"
        raise ValueError(
            f"students.{name}: step {self.step}: {what}; {kept}. Lower students.{name}.lr, or lengthen optimizer.warmup"
        )

    # -- figures ------------------------------------------------------------------------------------------------

    def _log(self, lines: dict[str, dict[str, float]]) -> str:
        """Writes a line for each student; what the progress bar shows."""
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        tokens = float(self.world.reduce(torch.tensor(float(self._tokens), device=self.target.device)))
        self._tokens = 0
        self.totals["seconds"] += seconds
        self.totals["tokens"] += tokens
        shown = []
        for name, sums in self._sums.items():
            anchors = float(self.world.reduce(torch.tensor(float(sums.num_anchors), device=self.target.device)))
            self.totals[f"anchors/{name}"] += anchors
            figures = sums.figures(self.world)
            line = {
                "kind": "train",
                "student": name,
                "step": self.step,
                "epoch": self.step * self.settings.accumulate / self.plan.num_batches,
                **figures,
                **lines[name],
                "anchors": self.totals[f"anchors/{name}"],
                "anchors_per_s": anchors / seconds,
                "tokens_per_s": tokens / seconds,
                "seconds": self.totals["seconds"],
            }
            self._write(line)
            shown.append(f"{name} {figures['loss']:.3f} {figures['expected_matl']:.2f}")
            self._judge(name, figures["loss"])
        self._sums = {name: Sums() for name in self.students}
        return ", ".join(shown)

    def _judge(self, name: str, loss: float) -> None:
        """Stops a student whose smoothed loss has risen far above its least value."""
        if not math.isfinite(loss):
            self._stop(name, f"its loss is {loss}")
        mean, weight, least = self._smooth.get(name, [0.0, 0.0, math.inf])
        mean, weight = _SMOOTHING * mean + (1 - _SMOOTHING) * loss, _SMOOTHING * weight + (1 - _SMOOTHING)
        least = min(least, mean / weight)
        self._smooth[name] = [mean, weight, least]
        limit = self.settings.divergence
        if limit is not None and mean / weight > limit * least:
            self._stop(name, f"its loss diverges: {mean / weight:.3f} on average, {least:.3f} before")

    def _write(self, line: dict[str, Any]) -> None:
        if self.world.is_first:
            with (self.out / METRICS).open("a", encoding="utf-8") as file:
                file.write(f"{dumps(line)}\n")
            self.on_metrics(line)

    # -- states and checkpoints ---------------------------------------------------------------------------------

    def resume(self) -> None:
        """Goes to the newest state, if there is one, forgets the figures that came after it, and does what was to be
        done with it if the run was stopped on the way.

        Raises:
            ValueError: the state isn't one of these students, or decodes otherwise than it was trained.
        """
        steps = self.store.steps()
        if not steps:
            self._forget(0, is_checked=True)
            return
        meta, tensors = self.store.load(steps[-1], list(self.students))
        for name, optimizer in self.optimizers.items():
            try:
                optimizer.load(tensors[name])
            except ValueError as error:
                raise ValueError(f"out={self.out}: the state of student {name} doesn't fit: {error}") from error
        self.step, self.totals = meta["step"], meta["totals"]
        self._smooth = meta["smooth"]
        is_checked = self.store.is_checked(self.step)
        self.world.wait()  # all have seen the mark, or its absence
        self._forget(self.step, is_checked)
        if self.world.is_first:
            log.info("going on from step %d", self.step)
        if not is_checked:
            self._check()

    def _forget(self, step: int, is_checked: bool) -> None:
        """Leaves the lines of the steps that count."""
        path = self.out / METRICS
        if self.world.is_first and path.is_file():
            kept = [
                line
                for line in read_jsonl(path)
                if line["step"] <= step and (is_checked or line["kind"] != "held_out" or line["step"] < step)
            ]
            write_text(path, "".join(f"{dumps(line)}\n" for line in kept))

    def _checkpoint(self) -> None:
        """A state, then what goes with it."""
        if self.world.is_first:
            self._save_state()
        self._check()

    def _check(self) -> None:
        """Each student's checkpoint, its held-out figures and its parity with decoding; marks the state when done."""
        began = time.perf_counter()
        if self.world.is_first:
            self._use_averages(True)
            for name, student in self.students.items():
                student.save(self.out / name)
            if self.held_out:
                reports = {name: self._parity(name, student) for name, student in self.students.items()}
                for name, figures in self._held_out_figures().items():
                    parity = {f"parity/{key}": value for key, value in asdict(reports[name]).items()}
                    self._write({"kind": "held_out", "student": name, "step": self.step, **figures, **parity})
            self._use_averages(False)
            self.store.mark_checked(self.step)
        self.world.wait()
        self._clock += time.perf_counter() - began

    def _use_averages(self, is_on: bool) -> None:
        for optimizer in self.optimizers.values():
            optimizer.use_average(is_on)

    def _save_state(self) -> None:
        meta = {"totals": self.totals, "smooth": self._smooth}
        self.store.save(self.step, meta, {name: o.state() for name, o in self.optimizers.items()})

    def _parity(self, name: str, student: Student) -> ParityReport:
        s = self.settings
        rows = [row for row in self.held_out if len(row.prompt_ids) <= 256][: s.parity_rows] or self.held_out[:1]
        drafter = self._open_drafter(name, self.out / name)
        report = check_parity(student, drafter, self.target, self._online, rows, s.parity_tokens)
        if report.different_share > s.parity_tolerance:
            raise ValueError(
                f"students.{name}: step {self.step}: what decodes is not what was trained: of {report.num_slots} "
                f"drafted tokens {report.num_different} differ from the training forward's (parity_tolerance="
                f"{s.parity_tolerance}); accepted a round: {report.simulated_accepted:.2f} simulated, "
                f"{report.loop_accepted:.2f} in the loop"
            )
        return report

    @torch.no_grad()
    def _held_out_figures(self) -> dict[str, dict[str, Any]]:
        """By student, as in training, over all held-out rows at anchors that stay the same."""
        sums = {name: Sums() for name in self.students}
        for low in range(0, len(self.held_out), self.settings.batch_rows):
            rows = self.held_out[low : low + self.settings.batch_rows]
            batch = self.stream.batch(rows)
            seeds = [stream_seed(self.settings.seed, "held out", row.row_id) for row in rows]
            for name, student in self.students.items():
                sums[name].add(student.loss(batch, seeds, lambda values: values))
        return {name: each.figures(World()) for name, each in sums.items()}


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """Lines of a run's metrics.jsonl, in order."""
    return read_jsonl(out / METRICS)
