#!/usr/bin/env python
"""Checks the loop on a CUDA device and measures it there; README.md says what each figure means.

python experiments/gpu_check/run.py --out DIR

Needs this repository and the installed packages only: no network, no Hydra, nothing downloaded. Without a CUDA device
it says so and ends at once. The last line of stdout is one JSON object, which also goes to DIR/gpu_check.json, after
each section, so that a killed run leaves what it had. Exit code 1: a check failed, a section broke, or nothing was run;
2: a wrong argument.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

for folder in (Path(__file__).resolve().parents[2], Path(__file__).resolve().parents[1]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

if TYPE_CHECKING:
    import torch

    from gpu_check.common import Budget, Sizes, Subject

BUDGET_S = 440.0
NO_DEVICE = "no CUDA device"
Section = tuple[str, float, Callable[[], dict[str, Any]]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script and returns its exit code.

    Args:
        argv: the words after the script's name; the process's own by default.
    """
    started_s = time.monotonic()
    arguments = _parse(argv)
    out = _open_folder(arguments.out)
    import torch

    if arguments.device == "auto" and not torch.cuda.is_available():
        print(f"gpu_check: {NO_DEVICE} here (torch {torch.__version__}), so nothing was checked or measured")
        finish({"experiment": "gpu_check", "status": NO_DEVICE, "torch": torch.__version__}, out)
        return 0

    from dispark.types import pick_device
    from gpu_check.common import QUICK, Budget, Sizes, find_subject

    try:
        device, subject = pick_device(arguments.device), find_subject(arguments.target)
    except ValueError as error:
        print(f"gpu_check: error: {error}", file=sys.stderr)
        return 2
    if device.index is not None:
        torch.cuda.set_device(device)  # graphs are captured on the current device
    budget = Budget(arguments.budget_s - (time.monotonic() - started_s))
    sizes = QUICK if arguments.quick else Sizes()
    result = run_sections(sections(subject, device, sizes, budget), budget, head(subject, device, arguments), out)
    finish(result, out)
    return 0 if result["status"] == "ok" else 1


def head(subject: Subject, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the result starts with: the target, loudly if it is not the real one, and where all this ran."""
    from dispark.measure.provenance import collect

    if subject.note:
        print(f"*** {subject.note} ***", flush=True)
    return {
        "experiment": "gpu_check",
        "status": "running",
        "target": subject.spec.name,
        "weights": subject.weights,
        "note": subject.note,
        "arguments": {key: value for key, value in vars(arguments).items() if key != "out"},
        "provenance": collect(device, "float32 and bfloat16"),
    }


def sections(subject: Subject, device: torch.device, sizes: Sizes, budget: Budget) -> list[Section]:
    """(name, seconds that it takes on a data-centre GPU, what runs it), in order of importance."""
    from gpu_check.correctness import run_correctness
    from gpu_check.energy import run_board, run_energy
    from gpu_check.speed import run_large, run_speed
    from gpu_check.syncs import run_syncs

    def on_cuda(work: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        reason = f"needs a CUDA device, not {device}"
        return work if device.type == "cuda" else lambda: {"status": "skipped", "reason": reason}

    is_quick = sizes.energy_s < 1
    parts: list[Section] = [
        ("board", 5.0, functools.partial(run_board, device)),
        ("correctness", 90.0, functools.partial(run_correctness, subject, device, sizes)),
        ("syncs", 15.0, on_cuda(functools.partial(run_syncs, subject, device, sizes))),
        ("speed", 60.0, functools.partial(run_speed, subject, device, sizes, budget)),
        ("energy", 75.0, on_cuda(functools.partial(run_energy, subject, device, sizes))),
        ("speed_large", 60.0, on_cuda(functools.partial(run_large, device, sizes, budget))),
    ]
    return [(name, 0.0 if is_quick else need_s, work) for name, need_s, work in parts]


def run_sections(parts: Sequence[Section], budget: Budget, result: dict[str, Any], out: Path | None) -> dict[str, Any]:
    """Runs what the budget allows; a section that breaks leaves its error and lets the others go on.

    Returns:
        `result` with a dict for each section (`status` "ok", "fail", "skipped" or "error") and the overall `status`.
    """
    result["sections"] = {}
    for name, need_s, work in parts:
        started_s = time.monotonic()
        section: dict[str, Any]
        if reason := budget.refuse(need_s):
            section = {"status": "skipped", "reason": reason}
        else:
            try:
                section = work()
                section.setdefault("status", "fail" if section.get("is_ok") is False else "ok")
            except Exception as error:
                traceback.print_exc()
                section = {"status": "error", "reason": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        section["seconds"] = time.monotonic() - started_s
        _free_memory()
        result["sections"][name] = section
        reason = f": {section['reason']}" if section.get("reason") else ""
        print(f"{name}: {section['status']} ({section['seconds']:.1f} s){reason}", flush=True)
        _write(result, out)
    statuses = {section["status"] for section in result["sections"].values()}
    result["status"] = next((word for word in ("error", "fail", "ok") if word in statuses), "skipped")
    return result


def finish(result: dict[str, Any], out: Path | None) -> None:
    """Writes the file and prints the line that everything ends with."""
    _write(result, out)
    print(_dumps(result), flush=True)


def rounded(value: Any) -> Any:
    """The same with floats at six significant digits, so that the line stays readable."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _free_memory() -> None:
    """Gives a finished section's models back, so that the next one's peak is its own."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Checks and measures the decoding loop on a CUDA device.")
    parser.add_argument("--out", type=Path, help="folder for gpu_check.json; nothing is written without it")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds; what does not fit is skipped")
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:N, or cpu for a dry run")
    parser.add_argument("--target", default="smollm2_135m", help="a name in conf/target")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that everything runs, measures nothing")
    return parser.parse_args(argv)


def _open_folder(out: Path | None) -> Path | None:
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            print(f"gpu_check: error: --out={out}: can't be written ({error.strerror or error})", file=sys.stderr)
            raise SystemExit(2) from error
    return out


def _write(result: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        (out / "gpu_check.json").write_text(_dumps(result) + "\n", encoding="utf-8")


def _dumps(result: dict[str, Any]) -> str:
    from dispark.runs.files import dumps  # strict JSON: what is not finite becomes null

    return dumps(rounded(result))


if __name__ == "__main__":
    raise SystemExit(main())
