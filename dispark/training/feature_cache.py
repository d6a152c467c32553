"""A feature stream that reads what the target made of the rows from disk, after one pass that wrote it there.

Pays where rows are visited more than once, or several runs train on the same data. Hidden states are kept, not logits,
in bfloat16, all tapped layers of a token side by side. The pass writes shards of so many rows; a shard counts once its
index is there, so a killed pass goes on behind the last whole one. Size and room are told before anything is written.

It knows neither drafters nor losses.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dispark.runs.files import dumps, write_atomic, write_text
from dispark.training.features import FeatureStream
from dispark.training.rows import TrainingRow

log = logging.getLogger(__name__)

_META = "cache.json"
_SHARD_ROWS = 128
_CALL_TOKENS = 2048  # of the target's forwards that fill the cache
_BYTES = 2


class CachedFeatures(FeatureStream):
    """Reads rows from a folder; what isn't a row of the data goes through `online`.

    Args:
        online: makes the states; the same layers and cut of rows.
        folder: of the cache, made where absent.
        identity: what decides the states beside the layers: data and weights.

    Raises:
        ValueError: the folder holds the states of something else.
    """

    def __init__(self, online: FeatureStream, folder: Path, identity: Mapping[str, Any]) -> None:
        super().__init__(online.target, online.layers, online.max_tokens)
        self.online, self.folder = online, folder
        self._identity = json.loads(
            dumps({**identity, "layers": list(online.layers), "max_tokens": online.max_tokens, "dtype": "bfloat16"})
        )
        self._width = len(online.layers) * online.target.hidden_size
        self._places: dict[str, tuple[int, int, int]] = {}  # row id: shard, first token, tokens
        self._shards: dict[int, np.ndarray] = {}
        note = folder / _META
        if note.is_file():
            found = json.loads(note.read_text(encoding="utf-8"))
            if found != self._identity:
                keys = [key for key in sorted({*found, *self._identity}) if found.get(key) != self._identity.get(key)]
                raise ValueError(
                    f"feature_cache={folder}: holds the states of another run ({', '.join(keys)}); "
                    "choose another folder"
                )

    def fill(self, rows: Sequence[TrainingRow]) -> None:
        """Writes the shards that are missing.

        Raises:
            ValueError: the disk has no room for them.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / _META, dumps(self._identity, indent=1) + "\n")
        groups = [rows[i : i + _SHARD_ROWS] for i in range(0, len(rows), _SHARD_ROWS)]
        missing = [k for k, group in enumerate(groups) if not self._is_whole(k, group)]
        if missing:
            num_tokens = sum(self.num_tokens([row]) for k in missing for row in groups[k])
            size, free = num_tokens * self._width * _BYTES, shutil.disk_usage(self.folder).free
            log.info(
                "features: %d tokens to go, %.1f GB in %s (%.1f GB free)",
                num_tokens,
                size / 1e9,
                self.folder,
                free / 1e9,
            )
            if size > free:
                raise ValueError(f"feature_cache={self.folder}: needs {size / 1e9:.1f} GB, {free / 1e9:.1f} are free")
        for k in tqdm(missing, desc="features", unit="shard", mininterval=5, disable=not missing):
            self._write(k, groups[k])
        for k, group in enumerate(groups):
            self._index(k, group)

    def states(self, rows: Sequence[TrainingRow]) -> list[Tensor]:
        """See FeatureStream."""
        found = []
        for row in rows:
            shard, first, num = self._places[row.row_id]
            if shard not in self._shards:
                self._shards[shard] = np.memmap(self._path(shard), dtype=np.int16, mode="r").reshape(-1, self._width)
            part = torch.from_numpy(np.array(self._shards[shard][first : first + num]))
            found.append(part.view(torch.bfloat16).to(self.target.device, self.target.dtype))
        return found

    def _path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05d}.bin"

    def _is_whole(self, shard: int, rows: Sequence[TrainingRow]) -> bool:
        note = self._path(shard).with_suffix(".json")
        return note.is_file() and json.loads(note.read_text(encoding="utf-8")) == self._contents(rows)

    def _contents(self, rows: Sequence[TrainingRow]) -> list[list[Any]]:
        return [[row.row_id, self.num_tokens([row])] for row in rows]

    def _write(self, shard: int, rows: Sequence[TrainingRow]) -> None:
        made: list[Tensor] = []
        call: list[TrainingRow] = []
        for row in [*rows, None]:
            if row is None or sum(len(r.tokens) for r in [*call, row]) > _CALL_TOKENS:
                if call:
                    made += self.online.states(call)
                call = []
            if row is not None:
                call.append(row)
        flat = torch.cat(made).to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy()
        write_atomic(self._path(shard), lambda path: flat.tofile(path))
        write_text(self._path(shard).with_suffix(".json"), dumps(self._contents(rows)))

    def _index(self, shard: int, rows: Sequence[TrainingRow]) -> None:
        first = 0
        for row in rows:
            num = self.num_tokens([row])
            self._places[row.row_id] = (shard, first, num)
            first += num
