"""What every test shares: no network, no tracker, few threads, results in a temporary folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

# Before anything imports torch, transformers or datasets: they read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["WANDB_MODE"] = "disabled"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import settings

# Property tests draw the same cases each time, so that a verdict is about the code; the profile explore draws new ones.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture
def repo() -> Path:
    """The checkout."""
    return REPO


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh folder that `paths.runs` points to in this test, in child processes as well."""
    folder = tmp_path / "runs"
    monkeypatch.setenv("DISPARK_RUNS", str(folder))
    return folder


@pytest.fixture
def clean_logging() -> Iterator[None]:
    """Puts the root logger back as it was; Hydra replaces its handlers."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
