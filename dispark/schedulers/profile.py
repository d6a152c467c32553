"""A target's measured step costs as a file, and the hardware they hold for.

Steps were measured for some numbers of rows, with equally many tokens in each row. Between two numbers of rows the time
is interpolated at the same tokens a row, beyond the most it goes on with the last slope; for one number of rows that
makes the table by tokens that schedulers ask. Drafting is kept likewise, by rows and by tokens drafted in each, for
every drafter that was profiled, and prefilling by tokens; simulations ask for those.

It knows neither how to measure (profiling.py) nor what the costs are used for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dispark.decoding.target import TargetModel
from dispark.measure import provenance
from dispark.runs.files import dumps, write_text
from dispark.schedulers.step_cost import StepCost

_VERSION = 3
Samples = tuple[tuple[tuple[float, ...], ...], ...]


@dataclass(frozen=True)
class Table:
    """Times by rows and by tokens in each of them.

    Args:
        rows, tokens: ascending.
        samples_s: [rows][tokens][repeats] seconds.

    Raises:
        ValueError: numbers that aren't ascending, or samples that don't fit them.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    samples_s: Samples

    def __post_init__(self) -> None:
        for key, values in (("rows", self.rows), ("tokens", self.tokens)):
            check_ascending(key, values)
        shape = [len(self.samples_s), {len(row) for row in self.samples_s}]
        if shape != [len(self.rows), {len(self.tokens)}] or not all(cell for row in self.samples_s for cell in row):
            raise ValueError(
                f"profile: its samples are not those of {len(self.rows)} x {len(self.tokens)} kinds of steps"
            )

    def cost(self, num_rows: int) -> StepCost:
        """Median seconds by tokens in all for so many rows."""
        table_RT = np.array([[float(np.median(cell)) for cell in row] for row in self.samples_s])
        by_rows = [StepCost(self.rows, tuple(column)) for column in table_RT.T]
        seconds = tuple(float(each.seconds_at(num_rows)) for each in by_rows)
        return StepCost(tuple(num_rows * num for num in self.tokens), seconds)

    def as_dict(self) -> dict[str, Any]:
        return {"rows": list(self.rows), "tokens": list(self.tokens), "samples_s": self.samples_s}

    @staticmethod
    def of(plain: Mapping[str, Any]) -> Table:
        """What `as_dict` made."""
        samples = tuple(tuple(tuple(map(float, cell)) for cell in row) for row in plain["samples_s"])
        return Table(tuple(plain["rows"]), tuple(plain["tokens"]), samples)


@dataclass(frozen=True)
class Profile:
    """Measured times of one target.

    Args:
        identity: what they hold for, see `identity_of`.
        context: tokens that each row held.
        verify: of the target's steps.
        prefill: seconds of a prompt by its tokens, one row; empty where it wasn't measured.
        drafts: by drafter, of drafting so many tokens in each row and taking in what one round gave.
        drafters: by drafter, what its times hold for: settings, weights.
    """

    identity: Mapping[str, Any]
    context: int
    verify: Table
    prefill: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    drafts: Mapping[str, Table] = field(default_factory=dict)
    drafters: Mapping[str, Any] = field(default_factory=dict)

    def cost(self, num_rows: int) -> StepCost:
        """Seconds of a step by its tokens for so many rows."""
        return self.verify.cost(num_rows)

    def check(self, target: TargetModel, key: str) -> None:
        """Raises ValueError, naming the key, if the times were measured for another target or on other hardware."""
        here = identity_of(target)
        differs = [name for name in sorted({*here, *self.identity}) if here.get(name) != self.identity.get(name)]
        if differs:
            name = differs[0]
            raise ValueError(
                f"{key}: was measured for {name} {self.identity.get(name)}, here it is {here.get(name)}; "
                f"'dispark profile target={target.name}' measures again"
            )

    def save(self, path: Path) -> None:
        """Writes the file, its folder with it."""
        plain = {"version": _VERSION, "identity": dict(self.identity), "context": self.context}
        plain |= {"verify": self.verify.as_dict(), "prefill": self.prefill}
        plain |= {"drafts": {name: table.as_dict() for name, table in self.drafts.items()}}
        plain |= {"drafters": dict(self.drafters)}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, dumps(plain, indent=1) + "\n")

    @staticmethod
    def load(path: Path, key: str) -> Profile:
        """Reads a file.

        Raises:
            ValueError: there is none, or it isn't a profile; the message names the key.
        """
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"{key}: there is no such file; 'dispark profile' measures one") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{key}: cannot be read as JSON ({error})") from error
        try:
            if plain["version"] != _VERSION:
                raise ValueError(f"version {plain['version']}")
            prefill = {int(num): tuple(map(float, samples)) for num, samples in plain["prefill"].items()}
            drafts = {name: Table.of(table) for name, table in plain["drafts"].items()}
            return Profile(
                plain["identity"], int(plain["context"]), Table.of(plain["verify"]), prefill, drafts, plain["drafters"]
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{key}: is not a profile of dispark ({error!r})") from error


class StepCosts:
    """What schedulers ask: the step cost for a number of rows.

    Args:
        profile: a file of `dispark profile`, read and checked by `bind`.
        cost: instead, one table for any number of rows, or a function that gives one; for audits and simulations.

    Raises:
        ValueError: both or neither.
    """

    def __init__(self, profile: str | None = None, cost: StepCost | Callable[[int], StepCost] | None = None) -> None:
        if (profile is None) == (cost is None):
            raise ValueError(
                f"scheduler.profile={profile}: must be a file that 'dispark profile' wrote"
                + ("" if cost is None else ", or a cost, not both")
            )
        self._path, self._fixed = profile, cost
        self._profile: Profile | None = None
        self._kept: dict[int, StepCost] = {}

    def bind(self, target: TargetModel) -> None:
        """Reads the file. Raises ValueError if it is none, or one of another target or other hardware."""
        if self._path is None:
            return
        key = f"scheduler.profile={self._path}"
        self._profile = Profile.load(Path(self._path).expanduser(), key)
        self._profile.check(target, key)
        self._kept = {}

    def of(self, num_rows: int) -> StepCost:
        """Seconds by tokens of steps with so many rows."""
        if self._fixed is not None:
            return self._fixed if isinstance(self._fixed, StepCost) else self._fixed(num_rows)
        if num_rows not in self._kept:
            assert self._profile is not None, "bind comes first"
            self._kept[num_rows] = self._profile.cost(num_rows)
        return self._kept[num_rows]


def identity_of(target: TargetModel) -> dict[str, Any]:
    """What decides a target's step costs here."""
    own = {"target": target.name, "dtype": str(target.dtype).removeprefix("torch.")}
    return own | {"linear_backend": target.linear_backend} | provenance.hardware(target.device)


def check_ascending(key: str, values: tuple[int, ...]) -> None:
    """Raises ValueError unless there are whole numbers from 1, each above the one before."""
    is_whole = all(type(value) is int and value >= 1 for value in values)
    if not values or not is_whole or list(values) != sorted(set(values)):
        raise ValueError(f"{key}={list(values)}: must be ascending whole numbers, at least one, from 1")
