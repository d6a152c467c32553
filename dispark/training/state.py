"""Training states on disk: everything that the next step depends on, written atomically, old ones pruned.

A state is a folder `step-<number>` with one safetensors file per student and state.json. It is filled under another
name and renamed when complete, so a killed process leaves either a whole state or none. Random draws hang on seed and
step alone and need no state.

It knows nothing of networks and optimizers but their tensors' names.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dispark.runs.files import dumps

_META, _CHECKED = "state.json", "checked"


class StateStore:
    """States of one run.

    Args:
        folder: made with the first state.
        keep: newest states that stay.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self._keep = folder, keep

    def steps(self) -> list[int]:
        """Steps of the states that are there, ascending."""
        return sorted(int(path.parent.name.removeprefix("step-")) for path in self.folder.glob(f"step-*/{_META}"))

    def is_checked(self, step: int) -> bool:
        """Whether `mark_checked` was called for a state."""
        return (self.path(step) / _CHECKED).is_file()

    def mark_checked(self, step: int) -> None:
        """What goes with a state is complete: checkpoints, held-out figures, parity."""
        (self.path(step) / _CHECKED).touch()

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, step: int, meta: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Writes a state and prunes older ones."""
        temporary = self.folder / ".writing"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, state in tensors.items():
            save_file(
                {key: value.detach().cpu().contiguous() for key, value in state.items()},
                temporary / f"{name}.safetensors",
            )
        (temporary / _META).write_text(dumps({"step": step, **meta}, indent=1) + "\n", encoding="utf-8")
        final = self.path(step)
        shutil.rmtree(final, ignore_errors=True)
        temporary.replace(final)
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(self.path(old), ignore_errors=True)

    def load(self, step: int, names: list[str]) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        """(meta, tensors by student) of a state.

        Raises:
            ValueError: a file is missing or damaged.
        """
        folder = self.path(step)
        meta: dict[str, Any] = json.loads((folder / _META).read_text(encoding="utf-8"))
        tensors = {}
        for name in names:
            try:
                tensors[name] = load_file(folder / f"{name}.safetensors")
            except (OSError, SafetensorError) as error:
                raise ValueError(
                    f"out: the state {folder} can't be read ({error}); remove it to go on from the one before"
                ) from error
        return meta, tensors
