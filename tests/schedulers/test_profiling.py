"""The measurement on a small target, and the command around it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conformance.toolbox import make_drafter, open_tiny

from dispark.cli import main
from dispark.schedulers.profile import Profile
from dispark.schedulers.profiling import measure, measure_drafts

pytestmark = pytest.mark.usefixtures("clean_logging")


def test_every_kind_of_step_is_timed() -> None:
    profile = measure(open_tiny(), (1, 3), (1, 2, 4), context=8, repeats=2)
    samples = profile.verify.samples_s
    assert [[len(cell) for cell in row] for row in samples] == [[2, 2, 2]] * 2
    assert all(second > 0 for row in samples for cell in row for second in cell)
    assert {len(each) for each in profile.prefill.values()} == {2}
    assert list(profile.prefill) == [16, 64, 256]
    assert profile.cost(2).num_tokens == (2, 4, 8)


@pytest.mark.parametrize("name", ["dispark", "eagle3", "medusa", "draft_model", "ngram"])
def test_drafts_are_timed_by_rows_and_length(name: str) -> None:
    drafter = make_drafter(name, "tiny", draft_length=3)
    table = measure_drafts(open_tiny(), drafter, (1, 3), context=8, repeats=2)
    assert (table.rows, table.tokens) == ((1, 3), (1, 2, 3))
    assert all(len(cell) == 2 and min(cell) > 0 for row in table.samples_s for cell in row)


def test_one_file_holds_several_drafters(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    words = ["profile", "target=tiny", "rows=[1,2]", "tokens=[1,2]", "context=8", "repeats=1", f"out={out}"]
    for name in ("dispark", "medusa", "none"):
        assert main([*words, f"drafter={name}"]) == 0
    found = Profile.load(out, "k")
    assert set(found.drafts) == set(found.drafters) == {"dispark", "medusa"}
    assert found.drafters["medusa"]["settings"]["checkpoint"] == "random"
    assert main([*words, "drafter=ngram", "context=9"]) == 0  # times at another context say nothing beside these
    assert set(Profile.load(out, "k").drafts) == {"ngram"}
    assert main([*words, "target.sources.random.seed=1", "target.dtype=bfloat16"]) == 0  # of another dtype: all anew
    assert not Profile.load(out, "k").drafts


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "p.json"
    words = ["profile", "target=tiny", "rows=[1,2]", "tokens=[1,2]", "context=8", "repeats=1", f"out={out}"]
    assert main(words) == 0
    headline = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert headline["out"] == str(out)
    assert [step["tokens"] for step in headline["steps"]] == [1, 2, 2, 4]
    Profile.load(out, "k").check(open_tiny(), "k")
    # A scheduler finds it, and says what to do where it doesn't.
    bench = ["bench", "target=tiny", "drafter=dispark", "scheduler=hardware_aware", "task.limit=1", "max_new_tokens=8"]
    bench += [f"paths.runs={tmp_path / 'runs'}"]
    assert main([*bench, f"scheduler.profile={out}"]) == 0
    capsys.readouterr()
    assert main([*bench, f"scheduler.profile={tmp_path / 'none.json'}"]) == 2
    assert "there is no such file; 'dispark profile' measures one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("rows=[2,1]", "rows=[2, 1]: must be ascending whole numbers"),
        ("tokens=[]", "tokens=[]: must be ascending whole numbers"),
        ("rows=[0,1]", "rows=[0, 1]: must be ascending whole numbers"),
        ("context=0", "context=0: must be a whole number >= 1"),
        ("repeats=-1", "repeats=-1: must be a whole number >= 1"),
        ("context=100000", "context=100000: with 8 tokens a row more than"),
        ("out=.", "out=.: is a folder; must name a file"),
        ("out=/proc/x/p.json", "out=/proc/x: cannot be written"),
    ],
)
def test_bad_settings(word: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["profile", "target=tiny", *([] if word.startswith("out=") else [f"out={tmp_path / 'p.json'}"]), word]
    assert main(words) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error
