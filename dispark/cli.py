"""The console script: `dispark COMMAND key=value ...`. Hydra composes the config, a command does the work.

A new command is one line in `COMMANDS` and a primary YAML of the same name. stdout carries tables and, as its last
line, one JSON object with the headline figures; everything else goes to stderr and to the run's log.txt. A user's
mistake is one line and exit code 2; anything else that fails is one line with the place of its traceback and exit code
1. A failed job of a sweep lets the others go on and makes the exit code 1. DISPARK_DEBUG=1 prints the tracebacks.

Nothing heavy is imported before a command runs, so that help and mistakes are quick.
"""

from __future__ import annotations

import difflib
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dispark import __version__
from dispark.checks import check_groups, check_top_level, validate
from dispark.config import build
from dispark.jobs import BROKEN_PIPE, OUTCOMES, SWEEPS, Command, complain, failed_outcome, finish_sweep, report
from dispark.runs.files import dumps

# Hydra's own flags, without and with a value behind them; other dashed words are mistakes for key=value.
# fmt: off
_SWITCHES = (
    "--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m", "--info", "-i",
    "--shell-completion", "-sc",
)
_VALUED = (
    "--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd",
    "--experimental-rerun",
)
# fmt: on


def _bench(cfg: DictConfig) -> dict[str, Any]:
    check_groups(validate(cfg))
    from dispark.bench import run_bench

    return run_bench(cfg)


def _fetch(cfg: DictConfig) -> dict[str, Any]:
    check_groups(check_top_level(cfg, "fetch"))
    from dispark.targets.spec import fetch

    spec = build(cfg.target)
    done = fetch(spec)
    print(f"target {spec.name}: {done.status} ({done.folder or 'made from a seed, nothing to keep'})")
    return {"target": spec.name, **done.as_dict()}


def _data(cfg: DictConfig) -> dict[str, Any]:
    check_top_level(cfg, "data")
    from dispark.training.data import run_data

    return run_data(cfg)


def _train(cfg: DictConfig) -> dict[str, Any]:
    check_top_level(cfg, "train")
    from dispark.training.train import run_train

    return run_train(cfg)


def _compare(cfg: DictConfig) -> dict[str, Any]:
    plain = check_top_level(cfg, "compare")
    from dispark.runs.compare import run_compare

    return run_compare(plain["runs"], **{key: plain[key] for key in ("baseline", "force", "csv", "markdown")})


def _figures(cfg: DictConfig) -> dict[str, Any]:
    plain = check_top_level(cfg, "figures")
    from dispark.figures.command import run_figures

    return run_figures(plain["runs"], **{key: plain[key] for key in ("figure", "out", "formats")})


def _profile(cfg: DictConfig) -> dict[str, Any]:
    check_top_level(cfg, "profile")
    from dispark.schedulers.profiling import run_profile

    return run_profile(cfg)


def _calibrate(cfg: DictConfig) -> dict[str, Any]:
    check_groups(check_top_level(cfg, "calibrate"))
    from dispark.schedulers.calibrating import run_calibrate

    return run_calibrate(cfg)


def _serve(cfg: DictConfig) -> dict[str, Any]:
    check_top_level(cfg, "serve")
    from dispark.serving.serve import run_serve

    return run_serve(cfg)


def _simulate(cfg: DictConfig) -> dict[str, Any]:
    check_top_level(cfg, "simulate")
    from dispark.serving.simulating import run_simulate

    return run_simulate(cfg)


def _audit(cfg: DictConfig) -> dict[str, Any]:
    plain = check_top_level(cfg, "audit")
    from dispark.audit.command import run_audit

    keys = ("schedulers", "verifiers", "drafters", "num_tokens", "num_worlds", "seed", "tolerance")
    return run_audit(**{key: plain[key] for key in keys})


COMMANDS = {
    command.name: command
    for command in (
        Command("bench", _bench, "measure a drafter against autoregressive decoding, in one loop"),
        Command("serve", _serve, "measure drafters and schedulers under load, with requests that come and go"),
        Command("simulate", _simulate, "the same under a cost model, for hardware that is not here"),
        Command("audit", _audit, "prove by enumeration which schedulers and verifiers keep the target's law"),
        Command("calibrate", _calibrate, "fit the temperatures that make a drafter's confidences true"),
        Command("profile", _profile, "measure what a step of the target costs here, for load-aware schedulers"),
        Command("data", _data, "make training data: prompts, and the target's answers to them"),
        Command("train", _train, "train drafters side by side on such data"),
        Command("fetch", _fetch, "download, check and cache a target's weights"),
        Command("compare", _compare, "tabulate finished runs side by side", positional="runs"),
        Command("figures", _figures, "draw a figure of the paper from finished runs", positional="runs"),
    )
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code.

    Args:
        argv: the words after the program's name; the process's own by default.
    """
    for stream in (sys.stdout, sys.stderr):  # a locale without UTF-8 must not end a run at its first print
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
    try:
        code = _main(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # somebody closed our output, as `| head` does
        _abandon_output()
        return BROKEN_PIPE
    except OSError as error:  # our output is a file on a full disk
        code = complain(f"{error.filename or 'stdout'}: {error.strerror or error}", 2)
        _abandon_output()
        return code


def _abandon_output() -> None:
    """Lets Python's last flush go nowhere, else it complains."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _main(words: list[str]) -> int:
    if words and words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if words == ["--version"]:
        print(f"dispark {__version__}")
        return 0
    if not words:
        print(_usage(), file=sys.stderr)
        return 2
    if words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        return complain(f"{words[0]}: no such command; {hint}allowed: {', '.join(COMMANDS)}", 2)
    command = COMMANDS[words[0]]
    try:
        arguments = _arguments(command, words[1:])
    except ValueError as error:
        return complain(str(error), 2)
    if importlib.util.find_spec("dispark.conf") is None:
        return complain("the package dispark.conf is missing; install dispark again: python -m pip install -e .", 1)
    return _run(command, arguments)


def _run(command: Command, arguments: list[str]) -> int:
    """Hands over to Hydra, which reads sys.argv, and turns what comes back into lines and an exit code."""
    OUTCOMES.clear()
    SWEEPS.clear()
    saved_argv, saved_flag = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [f"dispark {command.name}", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise what it would otherwise print
    code = 0
    try:
        hydra.main(version_base="1.3", config_path="pkg://dispark.conf", config_name=command.name)(command)()
    except KeyboardInterrupt:
        code = complain("interrupted", 130)
    except BrokenPipeError:
        raise
    except SystemExit as stop:  # argparse has printed its reason
        return stop.code if isinstance(stop.code, int) else 2
    except Exception as error:
        code = report(failed_outcome(error, command.name, 0, _overrides(arguments)))
    finally:
        HydraConfig.instance().cfg = None  # Hydra leaves its last job's settings behind
        sys.argv = saved_argv
        if saved_flag is None:
            os.environ.pop("HYDRA_FULL_ERROR", None)
        else:
            os.environ["HYDRA_FULL_ERROR"] = saved_flag
    if SWEEPS:
        return finish_sweep(SWEEPS[-1], code)
    for outcome in OUTCOMES:
        code = code or report(outcome)
        if outcome.result is not None:
            print(dumps(outcome.result), flush=True)
    return code


def _arguments(command: Command, words: Sequence[str]) -> list[str]:
    """Checks dashed words against Hydra's flags and gathers plain words under the command's positional key.

    Settings come before flags in the result: Hydra's parser takes them in one piece only.

    Raises:
        ValueError: a flag that does not exist, a plain word where only key=value is allowed, or a word that is no text.
    """
    for word in words:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            word = word.encode("ascii", "backslashreplace").decode()
            raise ValueError(f"{word}: holds letters that this locale can't read; set LC_ALL=C.UTF-8, or PYTHONUTF8=1")
    flags: list[str] = []
    settings: list[str] = []
    plain: list[str] = []
    rest = iter(words)
    for word in rest:
        flag = word.split("=", 1)[0]
        if word.startswith("-"):
            known = [
                name
                for name in (*_SWITCHES, *_VALUED)
                if name == flag or (flag.startswith("--") and name.startswith(flag))
            ]
            if not known:
                raise ValueError(f"{word}: no such option; settings are written key=value ({flag.lstrip('-')}=...)")
            flags.append(word)
            if known[0] in _VALUED and "=" not in word:
                if (value := next(rest, None)) is None:
                    raise ValueError(f"{word}: needs a value")
                flags.append(value)
        elif "=" in word or word.startswith("~") or command.positional is None:
            settings.append(word)
        else:
            plain.append(word)
    if plain:
        quoted = ",".join("'" + word.replace("\\", "\\\\").replace("'", "\\'") + "'" for word in plain)
        settings.append(f"{command.positional}=[{quoted}]")
    return [*settings, *flags]


def _overrides(arguments: Sequence[str]) -> list[str]:
    """The key=value words; a folder given by --config-dir joins them as Hydra's search path."""
    words = [word for word in arguments if "=" in word and not word.startswith("-")]
    folders = [value for flag, value in pairwise(arguments) if flag in ("--config-dir", "-cd")]
    folders += [word.partition("=")[2] for word in arguments if word.startswith("--config-dir=")]
    return [*words, *(f"hydra.searchpath=[file://{Path(folder).resolve()}]" for folder in folders)]


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS.values()]
    head = "usage: dispark COMMAND key=value ...        (dispark COMMAND --help lists the keys)"
    return "\n".join([head, "", *lines])
