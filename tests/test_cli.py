"""The dispatcher end to end over a stand-in for `dispark.bench`: lines, exit codes, sweeps, launchers, interrupts."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dispark
from dispark.cli import COMMANDS, main

# Stands for the real job; what it does is chosen by drafter.mode. It keeps a line in calls.txt per real piece of work.
FAKE_BENCH = """
import errno, os, pathlib, time
from dispark.config import choices, resolve, slug, sweep_dir
from dispark.runs.store import RunStore, run_key

def run_bench(cfg):
    resolved = resolve(cfg)
    mode = cfg.drafter.mode
    if mode == "early":
        raise KeyError("before the run has a folder")
    store = RunStore(cfg.paths.runs, run_key(resolved), slug(resolved))
    with store.attempt(resolved, overwrite=cfg.overwrite) as is_needed:
        if is_needed:
            with open("calls.txt", "a") as calls:
                calls.write(f"{choices()['drafter']} {cfg.seed}\\n")
            if mode == "crash":
                raise RuntimeError("kaboom\\nsecond line")
            if mode == "mistake":
                raise ValueError("drafter.size=9: must be below 5")
            if mode == "full":
                raise OSError(errno.ENOSPC, "No space left on device")
            if mode == "flood":
                print("x" * 100000)
            if mode == "hang" and not os.environ.get("GO_ON"):
                time.sleep(60)
            store.write_run({"summary": {"matl": 2.5}, "sweep": str(sweep_dir()), "group": cfg.tracker.get("group")})
            store.mark_done()
    print("a table")
    return {"drafter": choices()["drafter"], "seed": cfg.seed, "matl": store.read().run["summary"]["matl"]}
"""

# Makes child processes import the stand-in too.
SITE = """
import importlib.abc, importlib.util, os, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "dispark.bench":
            here = os.path.dirname(os.path.abspath(__file__))
            return importlib.util.spec_from_file_location(name, os.path.join(here, "fake_bench.py"))

sys.meta_path.insert(0, Finder())
"""
STUBBED = ("target", "drafter", "verifier", "scheduler", "sampling", "task", "meter")

# Files of the user's that no YAML reader takes, or that hold no node.
BROKEN = {
    "scanner": b"_target_: a.b\n  size: [\n", "double": b"size: 1\nsize: 2\n", "control": b"size: \x01\n",
    "latin": b"_target_: \xff\n", "sequence": b"- a\n- b\n", "text": b"words\n", "empty": b"",
}  # fmt: skip


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Config groups of our own, so that these tests don't hang on anybody else's YAMLs, and the stand-in's source."""
    folder = tmp_path_factory.mktemp("stubs")
    for group in STUBBED:
        (folder / group).mkdir()
        (folder / group / "stub.yaml").write_text("_target_: builtins.dict\nmode: ok\nsize: 3\n")
    for mode in ("ngram", "other", "crash", "mistake", "early", "full", "flood", "hang"):
        (folder / "drafter" / f"{mode}.yaml").write_text(f"_target_: builtins.dict\nmode: {mode}\n")
    (folder / "drafter" / "incomplete.yaml").write_text("_target_: builtins.dict\nmode: ???\n")
    (folder / "scheduler" / "absent.yaml").write_text("_target_: no.such.Thing\n")
    for name, text in BROKEN.items():
        (folder / "verifier" / f"{name}.yaml").write_bytes(text)
    (folder / "fake_bench.py").write_text(FAKE_BENCH)
    (folder / "sitecustomize.py").write_text(SITE)
    return folder


def bench(stubs: Path, *more: str) -> list[str]:
    """The words of a bench command over the stubs; a group named in `more` is left to it."""
    given = {word.split("=")[0] for word in more}
    return ["bench", "--config-dir", str(stubs), *(f"{name}=stub" for name in STUBBED if name not in given), *more]


@pytest.fixture
def here(
    stubs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs_dir: Path, clean_logging: None
) -> Iterator[Path]:
    """An empty working directory, with the stand-in in place of `dispark.bench`."""
    spec = importlib.util.spec_from_file_location("dispark.bench", stubs / "fake_bench.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "dispark.bench", module)
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("DISPARK_DEBUG", raising=False)
    return folder


Run = Callable[..., tuple[int, str, list[str]]]


@pytest.fixture
def run(here: Path, stubs: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `dispark bench` with the stubs in this process; gives the exit code, stdout and the error lines."""

    def call(*more: str) -> tuple[int, str, list[str]]:
        capsys.readouterr()
        code = main(bench(stubs, *more))
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, [line for line in err.splitlines() if line.startswith("dispark: ")]

    return call


def child(stubs: Path, *command: str, stdout: Any = subprocess.PIPE, **env: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(stubs), "OMP_NUM_THREADS": "1", **env}
    return subprocess.Popen(
        [sys.executable, "-m", "dispark", *command],
        env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def last_json(out: str) -> Any:
    return json.loads(out.rstrip("\n").split("\n")[-1])


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dispark {dispark.__version__}\n"


def test_no_command_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage: dispark COMMAND" in err


def test_unknown_command_suggests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bnech"]) == 2
    assert capsys.readouterr().err.startswith("dispark: error: bnech: no such command; did you mean bench? allowed: ")


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_a_primary_config(name: str, repo: Path) -> None:
    assert (repo / "conf" / f"{name}.yaml").is_file()


def test_a_run_ends_with_json_and_leaves_only_its_folder(run: Run, here: Path, runs_dir: Path) -> None:
    code, out, errors = run("seed=3")
    assert (code, errors) == (0, [])
    assert out.startswith("a table\n")
    assert last_json(out) == {"drafter": "stub", "seed": 3, "matl": 2.5}
    assert [path.name for path in here.iterdir()] == ["calls.txt"]
    assert [path.parent.relative_to(runs_dir).parts[:3] for path in runs_dir.rglob("done")] == [
        ("stub", "stub", "stub")
    ]


def test_a_second_run_is_skipped_until_overwritten(run: Run, here: Path) -> None:
    assert run()[0] == 0
    assert last_json(run()[1])["matl"] == 2.5
    assert run("name=label", "tracker=wandb")[0] == 0  # neither is part of a run's identity
    assert (here / "calls.txt").read_text() == "stub 0\n"
    assert run("overwrite=true")[0] == 0
    assert (here / "calls.txt").read_text() == "stub 0\n" * 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("drafter=othre", "drafter=othre: no such option; did you mean other? allowed: "),
        ("sed=4", "sed=4: no such setting; did you mean seed? allowed: "),
        ("draftr=stub", "draftr=stub: no such setting; did you mean drafter?"),
        ("drafter.sise=4", "drafter.sise=4: no such setting; did you mean drafter.size? allowed: drafter.mode, "),
        ("seed=abc", "seed=abc: must be a whole number"),
        ("seed=null", "seed=null: must be a whole number"),
        ("drafter=5", "drafter=5: a group takes the name of one of its options"),
        ("drafter={a: 1}", "drafter={a: 1}: a group takes the name of one of its options"),
        ("drafter=stub,other", "drafter=stub,other: several values need -m: dispark bench -m drafter=stub,other"),
        ("drafter=[stub,other]", "drafter=[stub,other]: takes one option; several need -m: dispark bench -m drafter=s"),
        ("drafter=[stub,absent]", "drafter=[stub,absent]: takes one option; several need -m: dispark bench "),
        ("seed=1,2", "seed=1,2: several values need -m: dispark bench -m seed=1,2; a list is written 'seed=[1,2]', a"),
        ("seed=range(1,3)", "seed=range(1,3): several values need -m: dispark bench -m 'seed=range(1,3)'"),
        ("verifier=scanner", "{stubs}/verifier/scanner.yaml, line 2: is not valid YAML (mapping values are not "),
        ("verifier=double", "{stubs}/verifier/double.yaml, line 2: is not valid YAML (found duplicate key size)"),
        ("verifier=control", "{stubs}/verifier/control.yaml: is not valid YAML (special characters are not allowed)"),
        ("verifier=latin", "{stubs}/verifier/latin.yaml: is not UTF-8 text (byte 10)"),
        ("verifier=sequence", "verifier=[a, b]: {stubs}/verifier/sequence.yaml (verifier=sequence) must hold a ma"),
        ("verifier=text", "verifier: has no _target_; {stubs}/verifier/text.yaml (verifier=text) must name a class"),
        ("verifier=empty", "verifier: has no _target_; {stubs}/verifier/empty.yaml (verifier=empty) must name a class"),
        ("drafter=null", "drafter=null: a group takes the name of one of its options"),
        ("max_new_tokens=-3", "max_new_tokens=-3: must be a whole number >= 1"),
        ("drafter=incomplete", "drafter.mode: must be given"),
        ("drafter.size=${nowhere}", "drafter.size: Interpolation key 'nowhere' not found"),
        ("scheduler=absent", "scheduler._target_=no.such.Thing: module no cannot be imported (ModuleNotFoundError: No"),
        ("drafter=full", "{runs}: No space left on device"),
        ("name=\udcc3", "name=\\udcc3: holds letters that this locale can't read; set LC_ALL=C.UTF-8"),
        ("drafter=mistake", "drafter.size=9: must be below 5"),
        ("drafter=[[", "drafter=[[: cannot be read"),
        ("stray", "stray: is not a setting; write key=value"),
        ("--drafter", "--drafter: no such option; settings are written key=value (drafter=...)"),
        ("--cfg", "--cfg: needs a value"),
        ("--config-dir=/no/such/folder", "Additional config directory '/no/such/folder' not found"),
        ("paths.runs=calls.txt/x", "paths.runs=calls.txt/x/"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(
    run: Run, here: Path, stubs: Path, runs_dir: Path, override: str, message: str
) -> None:
    message = message.replace("{stubs}", str(stubs)).replace("{runs}", str(runs_dir))
    (here / "calls.txt").touch()
    code, out, errors = run(override)
    assert code == 2
    assert out == ""
    assert len(errors) == 1
    assert errors[0].startswith(f"dispark: error: {message}")


def test_an_unexpected_error_says_where_its_traceback_is(run: Run, runs_dir: Path) -> None:
    code, _, errors = run("drafter=crash")
    assert code == 1
    assert errors[0].startswith("dispark: error: RuntimeError: kaboom second line (full traceback: ")
    (file,) = runs_dir.rglob("error.txt")
    assert str(file) in errors[0]
    assert "Traceback" in file.read_text()


def test_an_error_before_the_run_keeps_its_traceback_elsewhere(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, _, errors = run("drafter=early")
    assert code == 1
    (file,) = tmp_path.glob("dispark-error-*.txt")
    assert str(file) in errors[0]
    assert "KeyError" in file.read_text()


def test_debug_prints_the_traceback(
    here: Path, stubs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISPARK_DEBUG", "1")
    assert main(bench(stubs, "drafter=mistake")) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_cfg_job_shows_the_config(run: Run, here: Path) -> None:
    code, out, _ = run("--cfg", "job", "seed=5")
    assert code == 0
    assert "\nseed: 5\n" in out
    assert "hydra:" not in out
    assert list(here.iterdir()) == []


def test_command_help_lists_groups_and_keys(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.startswith("drafter: ")]
    assert {"ngram", "crash"} <= set(line.removeprefix("drafter: ").split(", "))
    assert "max_new_tokens: 128" in out


def test_a_sweep_goes_on_after_a_failure(run: Run, runs_dir: Path) -> None:
    code, out, errors = run("-m", "drafter=stub,crash,mistake,other", "seed=1", "tracker=wandb")
    assert code == 1
    assert [line.split(":")[2][:6] for line in errors] == [" job 1", " job 2"]
    assert "drafter=crash seed=1 tracker=wandb)" in errors[0]
    final = last_json(out)
    assert [row["drafter"] for row in final["runs"]] == ["stub", "other"]
    assert [row["error"] for row in final["failed"]] == [
        "RuntimeError: kaboom second line",
        "drafter.size=9: must be below 5",
    ]
    assert len(list(runs_dir.rglob("error.txt"))) == 2
    stored = json.loads(next(runs_dir.rglob("run.json")).read_text())
    assert stored["sweep"] == final["sweep"]
    assert stored["group"] == Path(final["sweep"]).name


def test_a_mistake_in_a_sweep_is_found_before_the_first_job(run: Run, here: Path, runs_dir: Path) -> None:
    code, out, errors = run("-m", "drafter=stub,othre")
    assert (code, out) == (2, "")
    assert len(errors) == 1
    assert "drafter=othre: no such option; did you mean other?" in errors[0]
    assert not (here / "calls.txt").exists()
    assert list((runs_dir / "sweeps").iterdir()) == []


def test_a_sweep_into_an_unwritable_folder_is_one_line(run: Run, here: Path) -> None:
    (here / "file").touch()
    code, out, errors = run("-m", "drafter=stub,other", "paths.runs=file/x")
    assert (code, out) == (2, "")
    assert errors == ["dispark: error: paths.runs=file/x: Not a directory"]


def test_compare_takes_folders_without_a_key(
    monkeypatch: pytest.MonkeyPatch, clean_logging: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    class Stand:
        @staticmethod
        def run_compare(paths: list[str], **rest: Any) -> dict[str, Any]:
            seen.append((paths, rest))
            return {"rows": []}

    monkeypatch.setitem(sys.modules, "dispark.runs.compare", Stand)
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "a/b", "it's", "c d", "baseline=ngram", "csv=x.csv"]) == 0
    assert main(["compare", "paths.runs=elsewhere"]) == 0
    rest = {"baseline": "ngram", "force": False, "csv": "x.csv", "markdown": None}
    assert seen[0] == (["a/b", "it's", "c d"], rest)
    assert seen[1][0] == ["elsewhere"]
    assert last_json(capsys.readouterr().out) == {"rows": []}


def test_fetch_reports(
    monkeypatch: pytest.MonkeyPatch, clean_logging: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["fetch", "target=tiny"]) == 0
    assert last_json(capsys.readouterr().out)["status"] == "present"


def test_joblib_jobs_report_to_the_parent(here: Path, stubs: Path) -> None:
    launcher = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    process = child(stubs, *bench(stubs, "-m", "drafter=stub,crash", *launcher))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in err
    final = last_json(out)
    assert [row["drafter"] for row in final["runs"]] == ["stub"]
    assert [row["error"] for row in final["failed"]] == ["RuntimeError: kaboom second line"]


def test_ctrl_c_is_130(here: Path, stubs: Path) -> None:
    process = child(stubs, *bench(stubs, "drafter=hang"))
    wait_for(process, here / "calls.txt")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "dispark: error: interrupted"
    assert "Traceback" not in err


@pytest.mark.parametrize("words", [["--help"], [], ["drafter=flood"], ["-m", "drafter=stub,flood"]])
def test_a_closed_pipe_is_silent(here: Path, stubs: Path, words: list[str]) -> None:
    process = child(stubs, *bench(stubs, *words, "hydra.verbose=false"))
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(30) == 141
    assert process.stderr is not None
    said = process.stderr.read()
    assert "rror" not in said
    assert "-m" in words or said == ""


def test_output_on_a_full_disk_is_one_line(here: Path, stubs: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    for words in ([], ["drafter=flood"]):
        with Path("/dev/full").open("w") as full:
            process = child(stubs, *bench(stubs, *words), stdout=full)
            _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (2, "dispark: error: stdout: No space left on device\n")


def test_a_locale_without_the_letters_of_a_setting(here: Path, stubs: Path) -> None:
    (stubs / "paths").mkdir(exist_ok=True)
    (stubs / "paths" / "letters.yaml").write_text("runs: r\u00fcns\n", encoding="utf-8")
    for words in (["name='r\u00fcns'"], ["paths=letters"]):
        process = child(stubs, *bench(stubs, *words), LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2
        assert err.count("\n") == 1
        assert "set LC_ALL=C.UTF-8" in err


def test_a_killed_sweep_resumes(here: Path, stubs: Path) -> None:
    command = bench(stubs, "-m", "drafter=stub,hang,other")
    process = child(stubs, *command)
    wait_for(process, here / "calls.txt", "hang 0")
    process.kill()
    process.communicate(timeout=30)
    process = child(stubs, *command, GO_ON="1")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert len(last_json(out)["runs"]) == 3
    assert (here / "calls.txt").read_text().split("\n") == ["stub 0", "hang 0", "hang 0", "other 0", ""]


def test_a_checkout_works_without_installation(here: Path, stubs: Path, repo: Path) -> None:
    bare = here / "bare"
    for name in ("dispark", "conf"):
        shutil.copytree(repo / name, bare / name, ignore=shutil.ignore_patterns("__pycache__", "prompts"))
    # -S hides an editable installation.
    packages = os.pathsep.join([str(stubs), *(path for path in sys.path if path.endswith("site-packages"))])
    command = [
        sys.executable,
        "-S",
        "-m",
        "dispark",
        *bench(stubs, "--cfg", "job"),
    ]
    done = subprocess.run(
        command, cwd=bare, env={**os.environ, "PYTHONPATH": packages}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "max_new_tokens: 128" in done.stdout
    shutil.rmtree(bare / "conf")
    done = subprocess.run(
        command, cwd=bare, env={**os.environ, "PYTHONPATH": packages}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("dispark: error: the package dispark.conf is missing")
    assert done.stderr.count("\n") == 1


def wait_for(process: subprocess.Popen[str], path: Path, text: str = "", seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not (path.is_file() and text in path.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.02)
