"""Sinks for finished runs. The run directory stays the source of truth: a tracker may lose its copy, never a result.

`log_run` is called after the measured window has closed and the run is on disk. What a tracker is given: `run` as in
run.json (of its keys `key`, `slug`, `choices`, `config`, `provenance` and `summary` are used, each optional) and
`rows`, one row per task. Weights & Biases gets the resolved config, the summary's scalars, and two tables: `tasks`
(those rows) and `acceptance` (the per-position rates). Rounds stay in rounds.parquet: there are too many of them.

Not known here: whether the server will ever get an offline run; `wandb sync` in the folder `dir` uploads them.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from dispark.runs.files import to_jsonable

log = logging.getLogger(__name__)

MODES = ("offline", "online")
RATES = ("acceptance_at", "conditional_acceptance_at")


class NullTracker:
    """Logs nowhere."""

    def log_run(self, run: dict[str, Any], rows: pd.DataFrame) -> None:
        """Does nothing."""

    @contextmanager
    def training(self, run: dict[str, Any]) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        """Takes the lines of a training run and does nothing with them."""
        yield lambda line: None


class WandbTracker:
    """Sends each finished run to Weights & Biases; offline unless asked.

    The W&B id is the run's key, so a repeated run meets its own earlier record instead of making a second one.

    Args:
        project: W&B project.
        entity: W&B user or team; None is the account's default.
        mode: "offline" writes `<dir>/wandb/offline-run-*`, "online" also uploads.
        group: W&B group; None for none.
        tags: tags beside the names of target, task and drafter.
        dir: folder that gets `wandb/`.
        timeout_s: seconds to wait for the server at start and at the end, each.

    Raises:
        ValueError: unknown mode, or a timeout that is not positive.
    """

    # Shared by all trackers of a process: in a sweep only the first job pays for a server that does not answer.
    is_unreachable = False

    def __init__(
        self,
        project: str = "dispark",
        entity: str | None = None,
        mode: str = "offline",
        group: str | None = None,
        tags: Sequence[str] = (),
        dir: str = "results/runs",
        timeout_s: float = 10.0,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"tracker.mode={mode}: must be one of {', '.join(MODES)}")
        if timeout_s <= 0:
            raise ValueError(f"tracker.timeout_s={timeout_s}: must be a number of seconds above 0")
        self.project = project
        self.entity = entity
        self.mode = mode
        self.group = group
        self.tags = tuple(tags)
        self.dir = Path(dir)
        self.timeout_s = float(timeout_s)

    def log_run(self, run: dict[str, Any], rows: pd.DataFrame) -> None:
        """Logs one run; whatever goes wrong becomes a warning."""
        try:
            self._log(run, rows)
        except Exception as error:
            log.warning("tracker: W&B did not take the run (%s); its results are safe in its folder", _line(error))

    @contextmanager
    def training(self, run: dict[str, Any]) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        """An open W&B run for the time of a training: each line given goes to it as it comes.

        Args:
            run: `key`, `slug` and `config` are used.
        """
        session: Any = None
        try:
            session = self._start(_wandb(), run, "train")
        except Exception as error:
            log.warning("tracker: W&B did not take the training (%s); its curves are in its folder", _line(error))
        has_failed = [session is None]

        def take(line: Mapping[str, Any]) -> None:
            if has_failed[0]:
                return
            try:
                session.log(dict(curves(line)), step=int(line["step"]))
            except Exception as error:
                has_failed[0] = True
                log.warning("tracker: W&B takes no more lines (%s); the curves are in the run's folder", _line(error))

        try:
            yield take
        finally:
            if session is not None:
                try:
                    session.finish()
                except Exception as error:
                    log.warning("tracker: W&B did not end the training (%s)", _line(error))

    def _log(self, run: dict[str, Any], rows: pd.DataFrame) -> None:
        wandb = _wandb()
        session = self._start(wandb, run, "bench")
        try:
            tasks = to_jsonable(rows.to_dict(orient="records"))
            tables = {"tasks": _table(wandb, [{str(k): _cell(v) for k, v in row.items()} for row in tasks])}
            tables["acceptance"] = _table(wandb, acceptance_rows(run.get("summary") or {}, rows))
            session.log({name: table for name, table in tables.items() if table is not None})
            session.summary.update(dict(scalars(run.get("summary") or {})))
        except BaseException:
            session.finish(exit_code=1)
            raise
        session.finish()
        log.info("tracker: W&B run %s in %s", session.id, Path(session.dir).parent)

    def _start(self, wandb: Any, run: dict[str, Any], kind: str) -> Any:
        """An open W&B run; offline where the server does not answer in time."""
        self.dir.mkdir(parents=True, exist_ok=True)
        if self.mode == "offline" or WandbTracker.is_unreachable:
            return self._init(wandb, run, kind, "offline")
        before = set(self.dir.glob("wandb/run-*"))
        try:
            return self._init(wandb, run, kind, "online")
        except Exception as error:
            WandbTracker.is_unreachable = True
            log.warning("tracker: W&B cannot be reached (%s); logging offline, `wandb sync` uploads it", _line(error))
        wandb.teardown()  # its service process still counts the id as taken
        for folder in set(self.dir.glob("wandb/run-*")) - before:  # what the failed attempt left
            shutil.rmtree(folder, ignore_errors=True)
        return self._init(wandb, run, kind, "offline")

    def _init(self, wandb: Any, run: dict[str, Any], kind: str, mode: str) -> Any:
        choices = run.get("choices") or {}
        names = [str(choices[group]) for group in ("target", "task", "drafter") if choices.get(group)]
        config = {name: to_jsonable(run.get(name) or {}) for name in ("config", "choices", "provenance")}
        return wandb.init(
            project=self.project,
            entity=self.entity,
            mode=mode,
            id=run.get("key"),
            resume="allow" if mode == "online" else None,
            name=config["config"].get("name") or run.get("slug"),
            group=self.group,
            job_type=kind,
            tags=[*self.tags, *names],
            dir=str(self.dir),
            config={**config["config"], "choices": config["choices"], "provenance": config["provenance"]},
            reinit="finish_previous",
            settings=wandb.Settings(
                init_timeout=self.timeout_s,
                finish_timeout=self.timeout_s,
                silent=True,
                console="off",
                save_code=False,
                x_disable_stats=True,
            ),
        )


def _wandb() -> Any:
    """The library: 60 MB and a second, so only when something is logged."""
    # W&B's own usage reports would wait for its server when this process ends, in offline mode too.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    return wandb


def curves(line: Mapping[str, Any]) -> Iterator[tuple[str, float | int | str | bool]]:
    """A line of a training's metrics under `<student>/<kind>/<figure>`; lists by position k = 1, 2, ..."""
    head = f"{line['student']}/{line['kind']}/"
    for key, value in line.items():
        if key in ("student", "kind", "step"):
            continue
        if isinstance(value, list):
            yield from ((f"{head}{key}/{k}", item) for k, item in enumerate(value, start=1) if item is not None)
        elif value is not None:
            yield f"{head}{key}", value


def scalars(summary: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float | int | str | bool]]:
    """The summary's single values under names joined by "/"; lists and missing values are left out."""
    for key, value in summary.items():
        name = f"{prefix}{key}"
        plain = to_jsonable(value)
        if isinstance(plain, dict):
            yield from scalars(plain, f"{name}/")
        elif plain is not None and not isinstance(plain, list):
            yield name, plain


def acceptance_rows(summary: Mapping[str, Any], rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Per-position rates as one row per scope and position k = 1, 2, ...; missing rates are None.

    Args:
        summary: may hold RATES lists at any depth; the path to them is the scope, "all" at the top.
        rows: one row per task; its columns named as RATES, if any, hold lists, and its `task` is the scope.
    """
    found = list(_rate_lists(to_jsonable(summary), ""))
    if any(rate in rows.columns for rate in RATES):
        records = to_jsonable(rows.to_dict(orient="records"))
        found += [(str(record.get("task")), {rate: record.get(rate) or [] for rate in RATES}) for record in records]
    table: list[dict[str, Any]] = []
    for scope, lists in found:
        for position in range(max(map(len, lists.values()))):
            rates = {rate: values[position] if position < len(values) else None for rate, values in lists.items()}
            table.append({"scope": scope, "k": position + 1, **rates})
    return table


def _rate_lists(node: Mapping[str, Any], path: str) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    lists = {rate: node[rate] if isinstance(node.get(rate), list) else [] for rate in RATES}
    if any(lists.values()):
        yield path or "all", lists
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _rate_lists(value, f"{path}/{key}" if path else str(key))


def _table(wandb: Any, rows: list[dict[str, Any]]) -> Any:
    if not rows:
        return None
    columns = list(dict.fromkeys(name for row in rows for name in row))
    data = [[row.get(name) for name in columns] for row in rows]
    return wandb.Table(columns=columns, data=data, allow_mixed_types=True)


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (list, dict)) else value


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
