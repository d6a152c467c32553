"""A tiny model in the place of the default target, for the experiments' own code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from dispark.targets.tokenizer import ByteTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

from gpu_check.common import Subject, make_requests, read_spec


@pytest.fixture(scope="module")
def tiny():
    return Subject(read_spec("tiny"), "random")


@pytest.fixture(scope="module")
def target(tiny):
    return tiny.open(torch.device("cpu"))


@pytest.fixture(scope="module")
def requests():
    return make_requests(ByteTokenizer(), 3, 8)
