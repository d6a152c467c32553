"""Objects against the protocols."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from baselines.autoregressive import AutoregressiveDrafter
from baselines.ngram import NgramDrafter
from dispark import interfaces
from dispark.measure.energy import AutoMeter, NullMeter
from dispark.protocols import check_protocol
from dispark.runs.tracking import NullTracker, WandbTracker
from dispark.schedulers.fixed import FixedScheduler
from dispark.schedulers.threshold import ThresholdScheduler
from dispark.tasks.suite import JsonlSuite
from dispark.verifiers.greedy import GreedyVerifier
from dispark.verifiers.rejection import RejectionVerifier


@pytest.mark.parametrize(
    ("obj", "protocol", "group"),
    [
        (AutoregressiveDrafter(), interfaces.Drafter, "drafter"),
        (NgramDrafter(), interfaces.Drafter, "drafter"),
        (GreedyVerifier(), interfaces.Verifier, "verifier"),
        (RejectionVerifier(), interfaces.Verifier, "verifier"),
        (FixedScheduler(), interfaces.Scheduler, "scheduler"),
        (ThresholdScheduler(0.5), interfaces.Scheduler, "scheduler"),
        (AutoMeter(), interfaces.EnergyMeter, "meter"),
        (NullMeter(), interfaces.EnergyMeter, "meter"),
        (NullTracker(), interfaces.Tracker, "tracker"),
        (WandbTracker(), interfaces.Tracker, "tracker"),
        (JsonlSuite("a.jsonl"), interfaces.TaskSuite, "task"),
    ],
)
def test_the_shipped_ones_pass(obj: Any, protocol: type, group: str) -> None:
    check_protocol(obj, protocol, group)


class Half:
    draft_length = 4
    proposal = "sampled"
    begin = "not a method"

    def bind(self, target: Any, num_rows: int, num_slots: int) -> None: ...

    def propose(self, *args: Any) -> None: ...


def test_everything_missing_is_named_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        check_protocol(Half(), interfaces.Drafter, "drafter")
    assert str(caught.value) == (
        f"drafter._target_={__name__}.Half: lacks feature_layers, begin(), update(), drop(); "
        "a drafter needs what dispark.interfaces.Drafter lists"
    )


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("draft_length", -1, "draft_length=-1: must be a whole number >= 0"),
        ("draft_length", 1.5, "draft_length=1.5: must be a whole number >= 0"),
        ("draft_length", True, "draft_length=true: must be a whole number >= 0"),
        ("draft_length", None, "draft_length=null: must be a whole number >= 0"),
        ("feature_layers", [1], "feature_layers=[1]: must be a tuple of whole numbers"),
        ("feature_layers", (1.0,), "feature_layers=[1.0]: must be a tuple of whole numbers"),
        ("feature_layers", None, "feature_layers=null: must be a tuple of whole numbers"),
        ("proposal", "random", "proposal=random: must be one of sampled, deterministic"),
    ],
)
def test_attributes_are_what_the_protocol_says(name: str, value: Any, line: str) -> None:
    drafter: Any = AutoregressiveDrafter()
    setattr(drafter, name, value)
    with pytest.raises(ValueError) as caught:
        check_protocol(drafter, interfaces.Drafter, "drafter")
    assert str(caught.value) == f"drafter._target_=baselines.autoregressive.AutoregressiveDrafter: its {line}"


def test_numpy_integers_are_whole_numbers() -> None:
    drafter: Any = AutoregressiveDrafter()
    drafter.draft_length, drafter.feature_layers = np.int64(3), (np.int64(1),)
    check_protocol(drafter, interfaces.Drafter, "drafter")


def test_a_property_may_wait_for_bind() -> None:
    class Later(AutoregressiveDrafter):
        @property
        def feature_layers(self) -> tuple[int, ...]:  # type: ignore[override]
            return self._config.layers  # type: ignore[attr-defined, no-any-return]

    check_protocol(Later(), interfaces.Drafter, "drafter")


def test_booleans_and_strings_of_other_protocols() -> None:
    scheduler: Any = FixedScheduler()
    scheduler.is_lossless = "yes"
    with pytest.raises(ValueError, match="its is_lossless=yes: must be true or false"):
        check_protocol(scheduler, interfaces.Scheduler, "scheduler")
