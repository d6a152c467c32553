"""The card of a trained drafter: what it was trained on, with what budget, and how it did, beside its weights.

It knows nothing of training but what a run wrote down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dispark.runs.files import write_text

_CURVE_POINTS = 12


def write_card(folder: Path, name: str, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
    """Writes README.md into a checkpoint's folder.

    Args:
        folder: of the checkpoint.
        name: of the student.
        run: as run.json has it.
        lines: of metrics.jsonl, of this student.
    """
    config, data, totals = run["config"], run["data"], run["totals"]
    trained = [line for line in lines if line["kind"] == "train"]
    held_out = [line for line in lines if line["kind"] == "held_out"]
    target = config["target"].get("name", "the target")
    kinds = ", ".join(f"{num} {kind}" for kind, num in data["num_by_kind"].items())
    text = [
        f"# {name}, a drafter for {target}",
        "",
        f"Trained by `dispark train` for {run['step']} of {config['steps']} steps; it drafts for this target alone, "
        "and decoding with it is lossless whatever its quality.",
        "",
        "## Data",
        f"{data['num_rows']} rows ({kinds}), {data['num_prompt_tokens']:,} prompt and {data['num_answer_tokens']:,} "
        f"answer tokens, answers by the target; fingerprint `{data['fingerprint'][:16]}`. {config['held_out']} rows "
        "held out.",
        "",
        "## Budget",
        f"{int(totals[f'anchors/{name}']):,} anchors, {int(totals['tokens']):,} tokens seen, batches of "
        f"{config['batch_rows']} rows, {totals['seconds'] / 3600:.2f} hours of steps for all drafters of the run "
        f"({', '.join(config['students'])}){_extensions(run)}; the draft vocabulary covers "
        f"{run['draft_coverage'][name]:.2%} of the answers.",
        "",
        f"{_recipe(config['students'][name])}",
        "",
        "## Curve",
        *_table(_thin(trained), ("step", "anchors", "loss", "expected_matl")),
        "",
        "## Held-out rows",
        *_table(held_out[-_CURVE_POINTS:], ("step", "loss", "expected_matl", "parity/loop_matl")),
        "",
    ]
    if held_out:
        last = held_out[-1]
        accept = ", ".join(f"{value:.3f}" for value in last["accept_at"])
        text += [
            f"Chance that a sampled draft is accepted, by position, given the text before: {accept}. `expected_matl` "
            "is what these make at temperature 1; `loop_matl` was measured in greedy decoding of "
            f"{config['parity_rows']} held-out prompts.",
            "",
        ]
    write_text(folder / "README.md", "\n".join(text))


def _extensions(run: Mapping[str, Any]) -> str:
    """How the schedule of the learning rate changed on the way."""
    return "".join(f", planned with {each['steps']} steps until step {each['until']}" for each in run["extended"])


def _recipe(student: Mapping[str, Any]) -> str:
    """Factors of the loss, and whatever else the student's settings say in a number or a list."""
    loss = ", ".join(f"{key} {value}" for key, value in student["loss"].items() if key != "_target_")
    plain = {key: value for key, value in student.items() if key not in ("_target_", "drafter", "loss")}
    return f"Loss: {loss}. " + ", ".join(f"{key} {value}" for key, value in plain.items()) + "."


def _thin(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Some lines, the last among them."""
    every = max(1, len(lines) // _CURVE_POINTS)
    return list(lines[::-1][::every][::-1])


def _table(lines: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    rows = [f"| {' | '.join(keys)} |", f"|{'---|' * len(keys)}"]
    for line in lines:
        cells = [
            f"{line[key]:.4g}" if isinstance(line[key], float) and line[key] < 1e4 else f"{int(line[key]):,}"
            for key in keys
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows
