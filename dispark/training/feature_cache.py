"""A feature stream that reads what the target made of the rows from disk, after one pass that wrote it there.

Pays where rows are visited more than once, or several runs train on the same data. Hidden states are kept, not logits,
in bfloat16, all tapped layers of a token side by side, and two numbers of each position's logits (see teacher.py), so
that a reduced vocabulary's laws don't need the others' logits. The pass writes shards of so many rows; a shard counts
once its index is there, so a killed pass goes on behind the last whole one, and a data set that has grown adds shards.
Size and room are told before anything is written.

It knows neither drafters nor losses.
"""

from __future__ import annotations

import hashlib
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

from dispark.decoding.target import FINAL
from dispark.runs.files import dumps, write_atomic, write_text
from dispark.training.features import FeatureStream
from dispark.training.rows import TrainingRow
from dispark.training.teacher import summarise

log = logging.getLogger(__name__)

_META = "cache.json"
_SHARD_ROWS = 128
_CALL_TOKENS = 2048  # of the target's forwards that fill the cache
_BYTES = 2


class CachedFeatures(FeatureStream):
    """Reads rows from a folder.

    Args:
        online: makes the states. A folder with more layers than it reads serves as well.
        folder: of the cache, made where absent.
        identity: what decides the states beside layers, tokens and the dtype of the target: its weights.

    Raises:
        ValueError: the folder holds the states of something else.
    """

    def __init__(self, online: FeatureStream, folder: Path, identity: Mapping[str, Any]) -> None:
        note = folder / _META
        found = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else None
        if found is not None and set(online.layers) <= set(found["layers"]) and list(online.layers) != found["layers"]:
            online = FeatureStream(online.target, found["layers"], online.max_tokens)
        super().__init__(online.target, online.layers, online.max_tokens)
        self.online, self.folder = online, folder
        computed = str(online.target.dtype).removeprefix("torch.")
        whole = {**identity, "layers": list(online.layers), "max_tokens": online.max_tokens}
        whole |= {"computed_in": computed, "kept_in": "bfloat16"}
        self._identity = json.loads(dumps(whole))
        self._width = len(online.layers) * online.target.hidden_size
        self._places: dict[str, tuple[int, int, int]] = {}  # row: shard, first token, tokens
        self._shards: dict[int, np.ndarray] = {}
        self._norms: dict[int, np.ndarray] = {}
        if found is not None and found != self._identity:
            keys = [key for key in sorted({*found, *self._identity}) if found.get(key) != self._identity.get(key)]
            raise ValueError(
                f"feature_cache={folder}: holds the states of another run ({', '.join(keys)}); choose another folder"
            )

    def fill(self, rows: Sequence[TrainingRow]) -> None:
        """Writes the rows that are missing, in shards behind those that are there.

        Raises:
            ValueError: the disk has no room for them.
        """
        self.read_index()
        missing = [row for row in rows if self._name(row) not in self._places]
        if missing:
            self._fill(missing)
        for shard in range(self._num_shards()):
            if not self._path(shard).with_suffix(".norms").is_file():
                self._summarise(shard)

    def _fill(self, missing: Sequence[TrainingRow]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / _META, dumps(self._identity, indent=1) + "\n")
        num_tokens = sum(self.num_tokens([row]) for row in missing)
        size, free = num_tokens * self._width * _BYTES, shutil.disk_usage(self.folder).free
        log.info(
            "features: %d tokens to go, %.1f GB in %s (%.1f GB free)", num_tokens, size / 1e9, self.folder, free / 1e9
        )
        if size > free:
            raise ValueError(f"feature_cache={self.folder}: needs {size / 1e9:.1f} GB, {free / 1e9:.1f} are free")
        first = self._num_shards()
        starts = range(0, len(missing), _SHARD_ROWS)
        for k, low in enumerate(tqdm(starts, desc="features", unit="shard", mininterval=5)):
            self._write(first + k, missing[low : low + _SHARD_ROWS])
        self.read_index()

    def _summarise(self, shard: int) -> None:
        """Writes the two numbers of each position of a shard, of the states as they are kept."""
        final = self.layers.index(FINAL) * self.target.hidden_size
        kept = torch.from_numpy(np.array(self._shard(shard)[:, final : final + self.target.hidden_size]))
        states = kept.view(torch.bfloat16).to(self.target.device, self.target.dtype)
        flat = summarise(states, self.ends).cpu().numpy()
        write_atomic(self._path(shard).with_suffix(".norms"), lambda path: flat.tofile(path))

    def summaries(self, rows: Sequence[TrainingRow]) -> list[Tensor]:
        """See FeatureStream."""
        found = []
        for row in rows:
            shard, first, num = self._places[self._name(row)]
            if shard not in self._norms:
                path = self._path(shard).with_suffix(".norms")
                self._norms[shard] = np.fromfile(path, dtype=np.float32).reshape(-1, 2)
            found.append(torch.from_numpy(self._norms[shard][first : first + num]).to(self.target.device))
        return found

    def read_index(self) -> None:
        """Takes in what is on disk, also what another process wrote."""
        for shard in range(self._num_shards()):
            first = 0
            for name, num in json.loads(self._path(shard).with_suffix(".json").read_text(encoding="utf-8")):
                self._places[name] = (shard, first, num)
                first += num

    def states(self, rows: Sequence[TrainingRow]) -> list[Tensor]:
        """See FeatureStream; rows have to be in the cache."""
        found = []
        for row in rows:
            shard, first, num = self._places[self._name(row)]
            part = torch.from_numpy(np.array(self._shard(shard)[first : first + num]))
            found.append(part.view(torch.bfloat16).to(self.target.device, self.target.dtype))
        return found

    def _shard(self, shard: int) -> np.ndarray:
        if shard not in self._shards:
            self._shards[shard] = np.memmap(self._path(shard), dtype=np.int16, mode="r").reshape(-1, self._width)
        return self._shards[shard]

    def _name(self, row: TrainingRow) -> str:
        """Of a row as it is cut, by its tokens."""
        return hashlib.sha256(np.asarray(row.tokens[: self.max_tokens], dtype=np.int64).tobytes()).hexdigest()[:32]

    def _path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05d}.bin"

    def _num_shards(self) -> int:
        """Whole shards from the first on."""
        num = 0
        while self._path(num).with_suffix(".json").is_file():
            num += 1
        return num

    def _write(self, shard: int, rows: Sequence[TrainingRow]) -> None:
        made: list[Tensor] = []
        call: list[TrainingRow] = []
        for row in rows:
            if call and sum(len(one.tokens) for one in [*call, row]) > _CALL_TOKENS:
                made += self.online.states(call)
                call = []
            call.append(row)
        made += self.online.states(call)
        flat = torch.cat(made).to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy()
        write_atomic(self._path(shard), lambda path: flat.tofile(path))
        contents = [[self._name(row), self.num_tokens([row])] for row in rows]
        write_text(self._path(shard).with_suffix(".json"), dumps(contents))
