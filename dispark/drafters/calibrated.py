"""A drafter whose confidences are calibrated on their way out; its drafts are what they were.

It does not know what the confidences are used for, nor how temperatures were fitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dispark.decoding.random import RowGenerators
from dispark.decoding.target import TargetModel
from dispark.interfaces import Drafter
from dispark.schedulers import calibration_file
from dispark.schedulers.calibration import EPSILON
from dispark.types import Draft, Sampling


def calibration_path(drafter: Mapping[str, Any], value: str | None) -> str | None:
    """The file that a key `calibration` names.

    Args:
        drafter: resolved settings of the drafter.
        value: a path, "checkpoint" for the file beside the drafter's checkpoint, or None.

    Raises:
        ValueError: "checkpoint", where the drafter has no folder that could hold one.
    """
    if value != "checkpoint":
        return value
    folder = drafter.get("checkpoint")
    if folder is None or not (Path(folder) / "config.json").is_file():
        raise ValueError(f"calibration=checkpoint: drafter.checkpoint={folder} is no folder; give calibration=FILE")
    return str(Path(folder) / calibration_file.NAME)


class CalibratedDrafter:
    """Passes everything on to a drafter and divides the logit of each confidence by its position's temperature.

    Args:
        inner: the drafter.
        path: of the calibration.
        confidence: the kind of confidence that the drafter gives.
        sampling: of the rounds to come.
        target_sha256: of the target's weights.

    Raises:
        ValueError: the drafter gives no confidence, or the file has no calibration of that kind, sampling and target.
    """

    def __init__(
        self, inner: Drafter, path: Path, confidence: str | None, sampling: Sampling, target_sha256: str
    ) -> None:
        key = f"calibration={path}"
        if confidence is None:
            raise ValueError(f"{key}: this drafter gives no confidence; choose a drafter.confidence")
        self.uncalibrated, self._key = inner, key
        self._fit = calibration_file.choose(calibration_file.load(path, key), confidence, sampling, key)
        if self._fit.target_sha256 != target_sha256:
            raise ValueError(f"{key}: was fitted for a target of other weights; fit it anew: dispark calibrate")
        self._temperature_G: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["uncalibrated"], name)

    def bind(self, target: TargetModel, num_rows: int, num_slots: int) -> None:
        """Binds the drafter. Raises ValueError if the calibration was fitted for other weights than it has."""
        self.uncalibrated.bind(target, num_rows, num_slots)
        here = (getattr(self.uncalibrated, "description", None) or {}).get("weights_sha256")
        if here != self._fit.drafter_sha256:
            raise ValueError(
                f"{self._key}: was fitted for a drafter of other weights; 'dispark calibrate' fits it anew"
            )
        temperatures = self._fit.calibration.at(self.uncalibrated.draft_length)
        self._temperature_G = torch.tensor(temperatures, dtype=torch.float32, device=target.device)

    def propose(
        self,
        rows: Sequence[int],
        anchors_B: Tensor,
        sampling: Sampling,
        generators: RowGenerators,
        limit: int | None = None,
    ) -> Draft:
        """The drafter's draft with calibrated confidences."""
        draft = self.uncalibrated.propose(rows, anchors_B, sampling, generators, limit)
        if draft.confidence_BG is None:
            return draft
        assert self._temperature_G is not None, "bind() comes first"
        logit_BG = draft.confidence_BG.float().clamp(EPSILON, 1 - EPSILON).logit()
        scaled_BG = (logit_BG / self._temperature_G[: logit_BG.shape[1]]).sigmoid()
        return replace(draft, confidence_BG=scaled_BG)
