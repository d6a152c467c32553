"""Noise is kept away, settings are put back, errors still come through."""

from __future__ import annotations

import sys
import warnings

import pytest
from transformers.utils import logging as hf_logging

from dispark.targets.quiet import first_line, quiet_transformers


def test_noise_is_swallowed_and_settings_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    hf_logging.set_verbosity_warning()
    hf_logging.enable_progress_bar()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with quiet_transformers():
            print("bar 50 %", file=sys.stderr)
            warnings.warn("advice", stacklevel=1)
            assert not hf_logging.is_progress_bar_enabled()
            assert hf_logging.get_verbosity() == hf_logging.ERROR
    assert capsys.readouterr().err == ""
    assert not caught
    assert hf_logging.get_verbosity() == hf_logging.WARNING
    assert hf_logging.is_progress_bar_enabled()


def test_settings_come_back_after_an_error() -> None:
    hf_logging.set_verbosity_info()
    with pytest.raises(KeyError), quiet_transformers():
        raise KeyError("x")
    assert hf_logging.get_verbosity() == hf_logging.INFO
    hf_logging.set_verbosity_error()


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("one", "one"),
        ("\n one\ntwo", "one"),
        ("Failed for 'x':\n  because", "Failed for 'x': because"),
        ("", "ValueError"),
        ("a" * 400, "a" * 297 + "..."),
    ],
)
def test_first_line(message: str, line: str) -> None:
    assert first_line(ValueError(message)) == line
