"""One job of a command, and how a process learns what became of its jobs, wherever they ran.

Hydra's launchers give no results back to the console script, and a failing job must not stop a sweep. So a `Command`
never raises: it keeps an `Outcome`, in this process for a single run, as a small file in the sweep's folder for a job
of a sweep. It knows nothing about what a command does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dispark import errors
from dispark.config import job_words, sweep_dir
from dispark.runs.files import TRACEBACK_NOTE, dumps, write_text

log = logging.getLogger(__name__)

# What a process running one command learns from Hydra's callbacks, which can't return anything.
OUTCOMES: list[Outcome] = []
SWEEPS: list[Path] = []

# A write that fails for want of room doesn't say where it went; what a job writes lies under paths.runs.
_FULL = (errno.ENOSPC, errno.EDQUOT)
BROKEN_PIPE = 141  # as a shell reports a process that SIGPIPE ended


class SweepWatch(Callback):
    """Hydra callback: remembers the folder of the sweep that this process started."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        with contextlib.suppress(OmegaConfBaseException):  # the sweeper meets the same error and reports it
            SWEEPS.append(Path(str(config.hydra.sweep.dir)))


@dataclass(frozen=True)
class Outcome:
    """How one job ended. `error` is None for success, else one line; `traceback_file` says where the rest is."""

    job: int
    overrides: list[str]
    result: dict[str, Any] | None = None
    error: str | None = None
    exit_code: int = 0
    traceback_file: str | None = None


@dataclass(frozen=True)
class Command:
    """A subcommand: Hydra's task function for its primary config, picklable for launchers that start processes.

    Args:
        name: the word on the command line and the name of the primary YAML.
        work: takes the composed config, prints its table, returns the headline figures ready for JSON.
        summary: one line for the help.
        positional: key of the list that words without "=" go to; None refuses such words.
    """

    name: str
    work: Callable[[DictConfig], dict[str, Any]]
    summary: str
    positional: str | None = None

    def __call__(self, cfg: DictConfig) -> None:
        """One job. How it ended is kept, for a sweep in the sweep's folder; an error doesn't stop the other jobs.

        Raises:
            SystemExit: nobody reads the output any more, as after `| head`; for Hydra that is no error to report.
        """
        number, overrides = int(OmegaConf.select(cast(Any, HydraConfig.get()), "job.num") or 0), job_words()
        logging.captureWarnings(True)
        try:
            outcome = Outcome(number, overrides, result=self.work(cfg))
            sys.stdout.flush()
        except BrokenPipeError:
            raise SystemExit(BROKEN_PIPE) from None
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
                error.filename = "stdout" if _was_printing(error) else str(OmegaConf.select(cfg, "paths.runs"))
            outcome = failed_outcome(error, self.name, number, overrides)
        finally:
            logging.captureWarnings(False)
        folder = sweep_dir()
        if folder is None:
            OUTCOMES.append(outcome)
            return
        if outcome.error:
            log.error("job %d failed (%s): %s", number, " ".join(overrides), outcome.error)
        (folder / "jobs").mkdir(parents=True, exist_ok=True)
        write_text(folder / "jobs" / f"{number}.json", dumps(asdict(outcome)))


def finish_sweep(folder: Path, code: int) -> int:
    """One line per failed job, then the JSON of all; from the records on disk, as the jobs may have run elsewhere."""
    files = sorted(folder.glob("jobs/*.json"), key=lambda path: int(path.stem))
    outcomes = [Outcome(**json.loads(path.read_text(encoding="utf-8"))) for path in files]
    failed = [outcome for outcome in outcomes if outcome.error]
    for outcome in failed:
        place = f" ({TRACEBACK_NOTE}{outcome.traceback_file})" if outcome.traceback_file else ""
        words = " ".join(outcome.overrides)
        print(f"dispark: error: job {outcome.job} failed ({words}): {outcome.error}{place}", file=sys.stderr)
    if not outcomes:  # refused before the first job
        with contextlib.suppress(OSError):
            (folder / "multirun.yaml").unlink()
            folder.rmdir()
    else:
        runs = [outcome.result for outcome in outcomes if outcome.result is not None]
        lost = [{"job": o.job, "overrides": o.overrides, "error": o.error} for o in failed]
        print(dumps({"runs": runs, "failed": lost, "sweep": str(folder)}), flush=True)
    return code or (1 if failed else 0)


def failed_outcome(error: Exception, config_name: str, job: int, overrides: list[str]) -> Outcome:
    """Describes a failure and makes sure that an unexpected one leaves its traceback somewhere."""
    is_users = errors.is_users(error)
    notes = getattr(error, "__notes__", [])
    place = next((note.removeprefix(TRACEBACK_NOTE) for note in notes if note.startswith(TRACEBACK_NOTE)), None)
    if os.environ.get("DISPARK_DEBUG") == "1":
        traceback.print_exception(error)
    elif place is None and not is_users:
        place = _keep_traceback(error)
    line = errors.explain(error, config_name, overrides)
    return Outcome(job, overrides, error=line, exit_code=2 if is_users else 1, traceback_file=place)


def report(outcome: Outcome) -> int:
    if outcome.error is None:
        return 0
    is_known = outcome.exit_code == 2 or outcome.traceback_file is None
    return complain(
        outcome.error + ("" if is_known else f" ({TRACEBACK_NOTE}{outcome.traceback_file})"), outcome.exit_code
    )


def _was_printing(error: Exception) -> bool:
    """Whether the last line of Python before an error was a print; the stream forgets what it failed to write."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and re.search(r"\bprint\(|stdout", frames[-1].line or "") is not None


def _keep_traceback(error: Exception) -> str | None:
    """For an error outside any run's folder; None where there is no room for it."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    path = Path(tempfile.gettempdir()) / f"dispark-error-{stamp}-{os.getpid()}.txt"
    try:
        path.write_text("".join(traceback.format_exception(error)), encoding="utf-8", errors="backslashreplace")
    except OSError:
        return None
    return str(path)


def complain(message: str, code: int) -> int:
    print(f"dispark: error: {message}", file=sys.stderr)
    return code
