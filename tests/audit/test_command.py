"""The command: every YAML passes, and what is wrong makes it fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dispark.audit import command
from dispark.audit.controls import RetrospectiveScheduler
from dispark.cli import main
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
    monkeypatch.setattr(command, "make_scheduler", lambda name: Boaster)
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
