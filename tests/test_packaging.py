"""The wheel: built from a copy of the sources, installed beside nothing, and run from an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

SOURCES = ("dispark", "baselines", "conf", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built offline from a copy, so that the checkout gets no build folder."""
    repo = Path(__file__).resolve().parent.parent
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (repo / name).is_dir():
            shutil.copytree(repo / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(repo / name, source / name)
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(source / "dist"),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (path,) = (source / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel installed without its dependencies into a folder of its own; they come from this environment."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(target)]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True)
    return target


def run(installed: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_everything_shipped_is_in_the_wheel(wheel: Path, repo: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"dispark/conf/{path.relative_to(repo / 'conf')}" for path in (repo / "conf").rglob("*.yaml")}
    for package in ("dispark", "baselines"):
        expected |= {str(path.relative_to(repo)) for path in (repo / package).rglob("*.py")}
    expected |= {str(path.relative_to(repo)) for path in (repo / "dispark").rglob("*.jsonl")}
    expected |= {"dispark/py.typed", "dispark/conf/__init__.py"}
    assert any(name.endswith(".jsonl") for name in expected)
    assert sorted(expected - names) == []
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {"baselines", "dispark"}


def test_every_package_folder_is_declared(repo: Path) -> None:
    declared = tomllib.loads((repo / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {path.parent for package in ("dispark", "baselines") for path in (repo / package).rglob("__init__.py")}
    assert sorted(declared) == sorted({".".join(path.relative_to(repo).parts) for path in found} | {"dispark.conf"})


def test_the_script_runs_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    script = str(installed / "bin" / "dispark")
    done = run(installed, tmp_path, sys.executable, script, "--help")
    assert done.returncode == 0, done.stderr
    assert "bench" in done.stdout
    done = run(installed, tmp_path, sys.executable, script, "bench", "--cfg", "job", "target=tiny")
    assert done.returncode == 0, done.stderr
    assert "name: tiny" in done.stdout
    assert "max_new_tokens: 128" in done.stdout
    done = run(installed, tmp_path, sys.executable, script, "bench", "target=tny")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dispark: error: target=tny: no such option; did you mean tiny?")
    assert list(tmp_path.iterdir()) == []


def test_the_installed_copy_is_the_one_that_ran(installed: Path, tmp_path: Path) -> None:
    code = "import dispark, dispark.conf, dispark.config; print(dispark.__file__); print(dispark.conf.__file__)"
    done = run(installed, tmp_path, sys.executable, "-c", code)
    assert done.stdout.split() == [str(installed / "dispark/__init__.py"), str(installed / "dispark/conf/__init__.py")]
