"""Provenance never raises and always serialises; a config's hash follows its meaning, not its key order."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import datetime
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dispark
from dispark.measure import provenance
from dispark.measure.provenance import collect, config_hash, git_state, plain

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)


def nested(inner: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)


CONFIGS = st.dictionaries(st.text(max_size=5), st.recursive(SCALARS, nested, max_leaves=6), max_size=5)


def git(folder: Path, *arguments: str) -> str:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environ |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    names = ("-c", "user.name=Nobody", "-c", "user.email=nobody@example.org")
    done = subprocess.run(["git", "-C", folder, *names, *arguments], env=environ, capture_output=True, check=True)
    return done.stdout.decode().strip()


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout"
    folder.mkdir()
    try:
        git(folder, "init", "-q")
    except FileNotFoundError:
        pytest.skip("git is not installed")
    (folder / "code.py").write_text("1\n")
    (folder / ".gitignore").write_text("ignored\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_collect_has_every_section_and_serialises():
    found = collect("cpu", torch.bfloat16, extra={"attention": "sdpa", "weights": {"sha256": "ab"}})
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["device"] == "cpu"
    assert found["dtype"] == "bfloat16"
    assert found["package"] == {"name": "dispark", "version": dispark.__version__}
    assert found["versions"]["torch"] == torch.__version__
    assert found["cpu"]["num_threads"] == torch.get_num_threads()
    assert found["cpu"]["num_cores"] == os.cpu_count()
    assert found["gpu"] is None
    assert found["settings"]["float32_matmul_precision"] == torch.get_float32_matmul_precision()
    assert found["extra"]["weights"]["sha256"] == "ab"
    assert datetime.fromisoformat(found["timestamp_utc"]).utcoffset().total_seconds() == 0


def test_collect_keeps_host_and_user_out(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cr3t")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = collect("cpu", "float32")
    text = json.dumps(found)
    assert "s3cr3t" not in text
    assert os.uname().nodename not in found["platform"].values()
    assert str(Path.home()) not in json.dumps(found["git"])
    assert found["environment"]["OMP_NUM_THREADS"] == "7"
    assert "CUDA_VISIBLE_DEVICES" not in found["environment"]


def test_collect_never_raises(monkeypatch):
    def fail(*_):
        raise RuntimeError("broken\n sensor")

    monkeypatch.setattr(provenance, "_cpu", fail)
    monkeypatch.setattr(provenance, "_version", fail)
    loop: dict = {}
    loop["self"] = loop
    found = collect("no such device", 3, repo_dir="/no/such/folder", extra=loop)
    assert found["cpu"] == {"reason": "broken sensor"}
    assert found["versions"] == {"reason": "broken sensor"}
    assert found["gpu"]["reason"]
    assert found["extra"]["reason"]
    assert found["git"]["sha"] is None
    json.dumps(found, allow_nan=False)


def test_gpu_section(monkeypatch):
    properties = SimpleNamespace(name="Fake Board", total_memory=2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(provenance, "device_state", lambda device: {"power_limit_w": 700.0, "reason": None})
    gpu = collect("cuda:0", "bfloat16")["gpu"]
    assert (gpu["name"], gpu["capability"], gpu["memory_bytes"]) == ("Fake Board", "9.0", 2**30)
    assert gpu["state"]["power_limit_w"] == 700.0


def test_absent_package_is_none(monkeypatch):
    monkeypatch.setattr(provenance, "PACKAGES", ("no-such-package-here",))
    assert collect("cpu", "float32")["versions"] == {"no-such-package-here": None}


def test_git_clean_changed_and_untracked(checkout):
    head = git(checkout, "rev-parse", "HEAD")
    clean = {"sha": head, "is_dirty": False, "num_changed": 0, "num_untracked": 0, "reason": None}
    assert git_state(checkout) == clean
    (checkout / "ignored").write_text("")
    assert git_state(checkout) == clean
    (checkout / "code.py").write_text("2\n")
    assert git_state(checkout) == {**clean, "is_dirty": True, "num_changed": 1}
    git(checkout, "checkout", "-q", "code.py")
    (checkout / "new.py").write_text("")
    assert git_state(checkout) == {**clean, "is_dirty": True, "num_untracked": 1}


def test_git_looks_at_the_folder_whatever_a_hook_has_set(checkout, monkeypatch, tmp_path):
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert git_state(checkout)["sha"] == git(checkout, "rev-parse", "HEAD")


def test_no_checkout_no_commit_no_folder_no_git(tmp_path, checkout, monkeypatch):
    outside = git_state(tmp_path)
    assert outside["sha"] is None
    assert outside["is_dirty"] is None
    assert "not a git repository" in outside["reason"]
    empty = tmp_path / "empty"
    empty.mkdir()
    git(empty, "init", "-q")
    assert git_state(empty)["sha"] is None
    absent = git_state(tmp_path / "absent")
    assert str(tmp_path) not in absent["reason"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(checkout)["reason"] == "git is not installed"


def test_slow_git_is_a_reason(checkout, monkeypatch):
    def hang(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(provenance.subprocess, "run", hang)
    assert git_state(checkout)["reason"] == "git took over 10 s"


def test_an_install_inside_someone_elses_checkout_is_not_ours(checkout, monkeypatch):
    package = checkout / "venv" / "site-packages" / "dispark"
    package.mkdir(parents=True)
    monkeypatch.setattr(dispark, "__file__", str(package / "__init__.py"))
    assert git_state()["reason"] == "the package does not run from a checkout of its own"
    package = checkout / "dispark"
    package.mkdir()
    monkeypatch.setattr(dispark, "__file__", str(package / "__init__.py"))
    assert git_state()["sha"] == git(checkout, "rev-parse", "HEAD")


def test_plain_makes_everything_serialisable():
    value = {
        1: (1, 2.5, None, True),
        "set": {"b", "a"},
        "nan": float("nan"),
        "numpy": [np.int64(3), np.float32(0.5), np.float64("inf"), np.bool_(True)],
        "dtype": torch.bfloat16,
        "path": Path("a") / "b",
        "bytes": b"x",
        "proxy": MappingProxyType({"k": [range(2)]}),
    }
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == {
        "1": [1, 2.5, None, True],
        "set": ["a", "b"],
        "nan": "nan",
        "numpy": [3, 0.5, "inf", True],
        "dtype": "bfloat16",
        "path": "a/b",
        "bytes": "b'x'",
        "proxy": {"k": [[0, 1]]},
    }


def test_hash_is_pinned():
    # SHA-256 of {"seed":4,"task":{"name":"chat","turns":[1,2]}}. A change here renames every stored run.
    assert config_hash({"seed": 4, "task": {"name": "chat", "turns": [1, 2]}}) == "44cdd20ff0c3"


def test_hash_ignores_order_and_excluded_keys():
    one = {"a": 1, "b": {"x": [1, 2], "y": None}}
    other = {"b": {"y": None, "x": (1, 2)}, "a": 1}
    assert config_hash(one) == config_hash(other)
    assert config_hash({**one, "tracker": {"a": 1}, "paths": 3, "hydra": {}}) == config_hash(one)
    assert config_hash({**one, "tracker": 1}, exclude=()) != config_hash(one, exclude=())
    assert config_hash({"b": {"tracker": 1}}) != config_hash({"b": {}})


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), (1, True), (1, "1"), (None, "null"), ([1, 2], [2, 1]), ({}, []), (0.0, -0.0), ({1: 2}, {"1": 2})],
)
def test_hash_tells_types_apart(one, other):
    assert config_hash({"value": one}) != config_hash({"value": other})


def test_hash_refuses_what_has_no_canonical_text():
    with pytest.raises(ValueError, match=r"^config\.a\.b\[1\]: a Path|^config\.a\.b\[1\]: a PosixPath"):
        config_hash({"a": {"b": [1, Path("x")]}})
    with pytest.raises(ValueError, match="must be a list of top-level keys"):
        config_hash({}, exclude="tracker")


def test_hash_of_infinity_and_empty():
    assert config_hash({"x": float("inf")}) != config_hash({"x": float("-inf")})
    assert len(config_hash({})) == 12
    assert int(config_hash({}), 16) >= 0


@settings(max_examples=40, deadline=None)
@given(CONFIGS, st.randoms())
def test_hash_does_not_depend_on_key_order(config, random):
    keys = list(config)
    random.shuffle(keys)
    assert config_hash({key: config[key] for key in keys}) == config_hash(config)


@settings(max_examples=40, deadline=None)
@given(CONFIGS, st.text(max_size=5), SCALARS, SCALARS)
def test_hash_follows_every_value(config, key, one, other):
    if key in provenance.DEFAULT_EXCLUDE or json.dumps(one) == json.dumps(other):
        return
    assert config_hash({**config, key: one}) != config_hash({**config, key: other})
