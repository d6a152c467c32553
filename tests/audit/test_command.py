"""The command: every YAML passes, and what is wrong makes it fail."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dispark.audit import command
from dispark.audit.anticipation import find_anticipation
from dispark.audit.controls import RetrospectiveScheduler
from dispark.audit.world import RandomWorld
from dispark.cli import main
from dispark.types import Draft, Load, Outcome
from dispark.verifiers.greedy import GreedyVerifier

pytestmark = pytest.mark.usefixtures("clean_logging")


class Boaster(RetrospectiveScheduler):
    is_lossless = True


def test_every_yaml_keeps_what_it_claims(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "num_worlds=1", "drafters=[dispark,ngram]"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = {(row["scheduler"], row["verifier"]) for row in result["compositions"]}
    names = [[path.stem for path in (repo / "conf" / group).glob("*.yaml")] for group in ("scheduler", "verifier")]
    assert found == {(scheduler, verifier) for scheduler in names[0] for verifier in names[1]}
    claims = [row for row in result["compositions"] if row["claims lossless"]]
    assert claims
    assert all(row["is lossless"] and row["distance"] < 1e-12 for row in claims)
    assert [row["is found"] for row in result["controls"]] == [True, True]
    real = {(row["drafter"], row["scheduler"]): row for row in result["drafters"]}
    assert len(real) == 2 * (len(names[0]) - 1)  # all but the oracle, which needs a recorded run
    assert all(row["is lossless"] in (True, None) for row in real.values())
    assert real["dispark", "hardware_aware"]["is lossless"]
    assert real["ngram", "threshold"]["is lossless"] is None  # there is no confidence to look at
    assert result["controls"][0]["first token"] == "(0.85, 0.15) instead of (0.7, 0.3)"


def test_a_false_claim_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "make_schedulers", lambda name: [Boaster])
    with pytest.raises(RuntimeError, match="audit: fixed with rejection claims to be lossless and is not"):
        command.run_audit(["fixed"], ["rejection"], [], num_worlds=2)
    assert "retrospective" in capsys.readouterr().out  # the tables come first


def test_an_audit_that_misses_its_controls_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_anticipation", lambda world, make: None)
    with pytest.raises(RuntimeError, match=r"the control hardware_aware without its stop .* was not found"):
        command.run_audit(["fixed"], ["greedy"], [], num_worlds=1)


def test_greedy_serves_temperature_0_only(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = command.run_audit(["threshold"], ["greedy"], [], num_worlds=1)["compositions"]
    assert row["samplings x proposals"] == 2
    assert GreedyVerifier.is_lossless


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["schedulers=[nope]"], "schedulers=[nope]: must be of fixed, hardware_aware"),
        (["verifiers=[]"], "verifiers=[]: must name at least one of greedy, rejection"),
        (["num_tokens=0"], "num_tokens=0: must be a whole number >= 1"),
        (["tolerance=0"], "tolerance=0.0: must lie between 0 and 1"),
    ],
)
def test_bad_settings(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *words]) == 2
    assert message in capsys.readouterr().err


class Late:
    """Looks at the draft itself, but only once it has learned from a round."""

    is_lossless = True

    def __init__(self, window: int = 4) -> None:
        self.window, self.num_rounds = window, 0

    def bind(self, target: Any) -> None: ...

    def draft_limit(self, load: Load) -> None: ...

    def choose(self, draft: Draft, load: Load) -> list[int]:
        tokens = draft.tokens_BG.tolist()
        is_late = self.num_rounds >= self.window
        return [min(n, row[0]) if is_late and n else n for n, row in zip(draft.lengths, tokens, strict=True)]

    def observe(self, outcome: Outcome, verify_lengths: Sequence[int], seconds: float) -> None:
        self.num_rounds += 1


@pytest.mark.parametrize("window", [1, 4])
def test_a_fault_that_comes_with_what_was_learned_is_found(window: int) -> None:
    world = RandomWorld(vocab_size=2, draft_length=2, seed=1)
    found = find_anticipation(world, lambda: Late(window))
    assert found is not None
    assert found.k == 1


def test_schedulers_that_learn_slowly_are_audited_in_a_hurry_too() -> None:
    makes = command.make_schedulers("load_adaptive")
    assert [make()._window for make in makes] == [4, 1]  # type: ignore[attr-defined]
    slow, hurried = (make() for make in command.make_schedulers("hardware_aware"))
    assert (slow._pace, hurried._pace.probe_every) == (None, 2)  # type: ignore[attr-defined]
    assert len(command.make_schedulers("fixed")) == 1
