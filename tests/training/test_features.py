"""The feature stream: what the target made of rows, from memory and from disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conformance.toolbox import open_tiny

from dispark.decoding.target import FINAL
from dispark.drafters.vocabulary import DraftVocabulary
from dispark.training import feature_cache
from dispark.training.feature_cache import CachedFeatures
from dispark.training.features import FeatureStream
from dispark.training.rows import TrainingRow
from dispark.training.teacher import Teacher

LAYERS = (2, 0)
IDENTITY = {"weights_sha256": "abc"}


def row(number: int, num_prompt: int = 3, num_answer: int = 5) -> TrainingRow:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(1, 250, (num_prompt + num_answer,), generator=generator).tolist()
    return TrainingRow(f"r/{number}", "math", "p", tokens[:num_prompt], tokens[num_prompt:], "stop")


ROWS = [row(i, 2 + i % 4, 1 + i) for i in range(9)]


def stream(max_tokens: int = 12) -> FeatureStream:
    return FeatureStream(open_tiny("tiny"), LAYERS, max_tokens)


def test_a_batch_is_what_the_target_says_of_each_row_alone() -> None:
    target = open_tiny("tiny")
    found = FeatureStream(target, LAYERS, 12)
    rows = [ROWS[5], ROWS[1], ROWS[8]]
    batch = found.batch(rows, 14)
    assert batch.tokens_BT.shape == (3, 14)
    assert batch.row_ids == ["r/5", "r/1", "r/8"]
    head = target.model.get_output_embeddings().weight
    for i, one in enumerate(rows):
        text = one.tokens[:12]
        num = len(text)
        target.open(1, num, (*LAYERS, FINAL))
        target.admit(0)
        logits, features = target.forward([0], torch.tensor(text), [num])
        assert features.hidden_NF is not None
        wanted = features.hidden_NF.chunk(3, dim=-1)
        torch.testing.assert_close(batch.features((0, 2))[i, :num], torch.cat([wanted[1], wanted[0]], -1))
        torch.testing.assert_close(batch.states[FINAL][i, :num], wanted[2])
        assert batch.tokens_BT[i].tolist() == text + [0] * (14 - num)
        assert batch.is_real_BT[i].tolist() == [True] * num + [False] * (14 - num)
        assert batch.loss_mask_BT[i, :num].tolist() == one.loss_mask[:12]
        # The teacher knows the law after the last prompt token and after each of the answer's.
        first = len(one.prompt_ids) - 1
        positions = torch.arange(first, num).unsqueeze(0).expand(3, -1)
        index = batch.teacher.index(positions)[i]
        assert bool((index >= 0).all())
        torch.testing.assert_close(batch.teacher.laws(None).probs_MV[index], logits[first:].softmax(-1))
        assert head.grad is None
    assert int(batch.teacher.index(torch.zeros(3, 1, dtype=torch.int64))[0]) == -1


def test_what_comes_from_disk_is_what_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_cache, "_SHARD_ROWS", 4)
    monkeypatch.setattr(feature_cache, "_CALL_TOKENS", 20)
    online = stream()
    cached = CachedFeatures(online, tmp_path / "c", IDENTITY)
    cached.fill(ROWS)
    assert len(list((tmp_path / "c").glob("shard-*.bin"))) == 3
    size = sum(path.stat().st_size for path in (tmp_path / "c").glob("shard-*.bin"))
    assert size == sum(min(12, len(one.tokens)) for one in ROWS) * 3 * 64 * 2
    rows = [ROWS[8], ROWS[0], ROWS[4]]
    both = online.batch(rows), cached.batch(rows)
    for layer in (*LAYERS, FINAL):
        wanted = both[0].states[layer].bfloat16().float()
        torch.testing.assert_close(both[1].states[layer], wanted, rtol=1e-2, atol=1e-6)
    assert torch.equal(both[0].tokens_BT, both[1].tokens_BT)


def test_laws_of_a_reduced_vocabulary_from_two_numbers_a_position(tmp_path: Path) -> None:
    online = stream()
    cached = CachedFeatures(online, tmp_path, IDENTITY)
    cached.fill(ROWS)
    vocabulary = DraftVocabulary(torch.tensor([3, 17, 90, 200]), 262)
    both = [one.batch(ROWS[4:7]).teacher.laws(vocabulary) for one in (online, cached)]
    torch.testing.assert_close(both[1].probs_MV, both[0].probs_MV, rtol=5e-2, atol=1e-4)
    torch.testing.assert_close(both[1].outside_M, both[0].outside_M, rtol=1e-3, atol=1e-3)
    # From the very states that are kept they are exact.
    batch = cached.batch(ROWS[4:7])
    needed = batch.loss_mask_BT.clone()
    needed[:, :-1] |= batch.loss_mask_BT[:, 1:]
    exact = Teacher(batch.states[FINAL], needed, online.ends).laws(vocabulary)
    for name in ("probs_MV", "outside_M"):
        torch.testing.assert_close(getattr(both[1], name), getattr(exact, name), rtol=1e-4, atol=1e-6)
    assert torch.equal(both[1].top_M, exact.top_M)
    assert torch.equal(both[1].best_M, exact.best_M)


def test_a_cache_is_of_one_dtype_and_of_layers_in_any_order(tmp_path: Path) -> None:
    target = open_tiny("tiny")
    first = CachedFeatures(FeatureStream(target, (2, 0), 12), tmp_path, IDENTITY)
    first.fill(ROWS)
    second = CachedFeatures(FeatureStream(target, (0, 2), 12), tmp_path, IDENTITY)
    second.read_index()
    both = [one.batch(ROWS[2:4]).features((0, 2)) for one in (first, second)]
    assert torch.equal(*both)
    other = open_tiny("tiny", "target.dtype=bfloat16")
    with pytest.raises(ValueError, match=r"feature_cache=.*: holds the states of another run \(computed_in\)"):
        CachedFeatures(FeatureStream(other, (2, 0), 12), tmp_path, IDENTITY)


def test_a_killed_pass_goes_on_behind_the_last_whole_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_cache, "_SHARD_ROWS", 3)
    online = stream()
    states, count = online.states, [0]

    def counted(rows: list[TrainingRow]) -> list[torch.Tensor]:
        count[0] += len(rows)
        if count[0] > 6:
            raise KeyboardInterrupt
        return states(rows)

    monkeypatch.setattr(online, "states", counted)
    with pytest.raises(KeyboardInterrupt):
        CachedFeatures(online, tmp_path, IDENTITY).fill(ROWS)
    assert len(list(tmp_path.glob("shard-*.json"))) == 2
    count[0] = -1000
    cached = CachedFeatures(online, tmp_path, IDENTITY)
    cached.fill(ROWS)
    assert count[0] == -1000 + 3
    cached.fill(ROWS)
    assert count[0] == -1000 + 3
    torch.testing.assert_close(cached.states([ROWS[7]])[0], states([ROWS[7]])[0], rtol=1e-2, atol=1e-2)


def test_a_data_set_that_has_grown_adds_to_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    online = stream()
    cached = CachedFeatures(online, tmp_path, IDENTITY)
    cached.fill(ROWS[3:6])
    before = (tmp_path / "shard-00000.bin").read_bytes()
    cached.fill(ROWS)
    assert (tmp_path / "shard-00000.bin").read_bytes() == before
    for one in ROWS:
        torch.testing.assert_close(cached.states([one])[0], online.states([one])[0], rtol=1e-2, atol=1e-2)
    # The same name with other tokens is another row.
    other = TrainingRow("r/3", "math", "p", [9, 8], [7, 6, 5], "stop")
    cached.fill([other])
    torch.testing.assert_close(cached.states([other])[0], online.states([other])[0], rtol=1e-2, atol=1e-2)


def test_a_cache_serves_those_who_read_fewer_layers(tmp_path: Path) -> None:
    CachedFeatures(stream(), tmp_path, IDENTITY).fill(ROWS)
    fewer = FeatureStream(open_tiny("tiny"), (0,), 12)
    cached = CachedFeatures(fewer, tmp_path, IDENTITY)
    cached.fill(ROWS)
    both = fewer.batch(ROWS[:2]), cached.batch(ROWS[:2])
    for layer in (0, FINAL):
        torch.testing.assert_close(both[1].states[layer], both[0].states[layer], rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match=r"holds the states of another run \(layers\)"):
        CachedFeatures(FeatureStream(open_tiny("tiny"), (1,), 12), tmp_path, IDENTITY)


def test_a_cache_of_something_else_is_refused(tmp_path: Path) -> None:
    CachedFeatures(stream(), tmp_path, IDENTITY).fill(ROWS[:2])
    for online, identity in ((stream(), {"weights_sha256": "other"}), (stream(11), IDENTITY)):
        with pytest.raises(ValueError, match=r"feature_cache=.*: holds the states of another run"):
            CachedFeatures(online, tmp_path, identity)


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10, 5, 5))
    with pytest.raises(ValueError, match=r"feature_cache=.*: needs 0.0 GB, 0.0 are free"):
        CachedFeatures(stream(), tmp_path, IDENTITY).fill(ROWS)
