"""What a calibration's file holds, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from dispark.schedulers.calibration import Calibration
from dispark.schedulers.calibration_file import Fit, choose, load, save
from dispark.types import Sampling

T1 = Sampling(1.0)


def a_fit(kind: str = "head", sampling: Sampling = T1, first: float = 2.0, drafter: str | None = "d") -> Fit:
    return Fit(kind, sampling, Calibration((first, 0.5)), drafter, "t", {"num_prompts": 3})


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "calibration.json"
    fits = [a_fit(), a_fit("peak", Sampling(0.6, top_p=0.9))]
    save(path, fits)
    assert load(path, "k") == fits
    assert choose(fits, "peak", Sampling(0.6, top_p=0.9), "k") is fits[1]


def test_a_second_fit_replaces_its_own_kind_only(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    save(path, [a_fit(), a_fit("peak")])
    save(path, [a_fit(first=3.0)])
    assert load(path, "k") == [a_fit("peak"), a_fit(first=3.0)]


def test_fits_of_other_weights_go(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    save(path, [a_fit("peak", drafter="old")])
    save(path, [a_fit(drafter="new")])
    assert [fit.drafter_sha256 for fit in load(path, "k")] == ["new"]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"k: holds no calibration of peak at temperature 0; it has head at temper"):
        choose([a_fit()], "peak", Sampling(), "k")
    with pytest.raises(ValueError, match=r"k: there is no file .*none\.json; 'dispark calibrate' writes one"):
        load(tmp_path / "none.json", "k")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2, "fits": []}', '{"version": 1, "fits": [{}]}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="is no calibration of this version"):
        load(path, "k")
    with pytest.raises(ValueError, match="is no calibration of this version"):
        save(path, [a_fit()])
