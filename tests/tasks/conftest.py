"""Shared by the task tests: where the reference data folder is, if it is there at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder with deepspec/ and specbench/, named by DISPARK_DATA."""
    folder = Path(os.environ.get("DISPARK_DATA") or REPO / ".." / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no reference data at {folder}: set DISPARK_DATA")
    return folder


@pytest.fixture(scope="session")
def conf_task() -> Path:
    """The folder of the task YAMLs."""
    return REPO / "conf" / "task"
