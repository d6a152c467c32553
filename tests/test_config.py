"""`build` and its messages, and that every YAML composes and fits the constructor it names."""

from __future__ import annotations

import inspect
import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dispark import config
from dispark.checks import validate
from dispark.config import build, resolve, slug
from dispark.nodes import check_node
from dispark.schema import BenchConfig
from dispark.targets.spec import CALL_OPTIONS, TargetSpec

CONF = Path(__file__).resolve().parent.parent / "conf"
GROUPS = ("target", "drafter", "verifier", "scheduler", "sampling", "task", "meter", "tracker", "paths")
OPTIONS = [(path.parent.name, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]


@dataclass
class Part:
    """Stands for any class that a YAML may name."""

    size: int
    names: list[str] = field(default_factory=list)
    inner: Any = None

    def __post_init__(self) -> None:
        if self.size == 13:
            raise ValueError(f"drafter.size={self.size}: must not be 13")
        if self.size == 14:
            raise ValueError("bad luck")
        if self.size == 15:
            raise RuntimeError("out of memory")


def untyped(size):  # type: ignore[no-untyped-def]
    """Stands for a class whose constructor says nothing about its types."""
    return size + 1


PART, UNTYPED = f"{__name__}.Part", f"{__name__}.untyped"


def composed(*overrides: str) -> DictConfig:
    with initialize_config_module("dispark.conf", version_base="1.3"):
        return compose("bench", overrides=list(overrides))


def test_every_target_has_the_shared_keys_with_the_class_s_defaults() -> None:
    shared = OmegaConf.load(CONF / "target_base" / "default.yaml")
    defaults = inspect.signature(TargetSpec).parameters
    assert sorted(shared) == sorted([*CALL_OPTIONS, "stop_strings"])
    assert all(shared[key] == defaults[key].default for key in CALL_OPTIONS)
    cfg = composed("drafter=draft_model", "target.token_bucket=8", "drafter.model.prefill_chunk=64")
    assert (cfg.target.token_bucket, cfg.target.prefill_chunk) == (8, 512)
    assert (cfg.drafter.model.token_bucket, cfg.drafter.model.prefill_chunk) == (None, 64)
    for path in (CONF / "target").glob("*.yaml"):
        target = composed(f"target={path.stem}").target
        assert [target[key] for key in CALL_OPTIONS] == ["auto", None, None, 512]
        assert target.stop_strings == (["User:"] if path.stem == "gemma3_270m" else [])


def test_bench_composes_with_the_documented_defaults() -> None:
    cfg = composed()
    validate(cfg)
    assert (cfg.seed, cfg.max_new_tokens, cfg.batch_size, cfg.repeats, cfg.chunk) == (0, 128, 1, 1, None)
    assert cfg.sampling.temperature == 0
    assert cfg.paths.runs == "results/runs"
    assert cfg.tracker._target_ == "dispark.runs.tracking.NullTracker"
    assert set(cfg) == set(BenchConfig.__dataclass_fields__)


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes_and_fits_its_constructor(group: str, option: str) -> None:
    plain = OmegaConf.to_container(composed(f"{group}={option}")[group], resolve=False)
    assert isinstance(plain, dict)
    if group == "paths":
        return
    parameters = inspect.signature(get_object(plain.pop("_target_"))).parameters
    given = {key for key in plain if not key.startswith("_")}
    assert given <= set(parameters)
    if "???" not in plain.values():
        check_node(OmegaConf.to_container(composed(f"{group}={option}")[group], resolve=True), group)
    required = {name for name, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    assert required <= given


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONF)))
def test_yamls_are_short_and_commented(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("#") for line in lines)
    if path.parent != CONF:  # a primary config lists every key of its command
        assert len(lines) <= 40


def test_build_gives_plain_containers_and_nested_objects() -> None:
    cfg = OmegaConf.create(
        {"drafter": {"_target_": PART, "size": 1, "names": ["a"], "inner": {"_target_": PART, "size": 2}}}
    )
    part = build(cfg.drafter)
    assert type(part.names) is list
    assert part.inner == Part(2)
    assert build({"_target_": PART, "size": 1}, names=["b"]).names == ["b"]


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": PART, "size": 1, "siz": 2}, "drafter.siz: .*did you mean size.*allowed: inner, names, size"),
        ({"_target_": PART}, "drafter.size: must be given"),
        ({"_target_": PART, "size": "???"}, "drafter.size: must be given"),
        ({"_target_": PART, "size": 13}, "^drafter.size=13: must not be 13$"),
        ({"_target_": PART, "size": 14}, "^drafter: bad luck$"),
        ({"_target_": PART, "size": 1, "inner": {"_target_": PART, "x": 2}}, "drafter.inner.x: .*no such setting"),
        ({"_target_": PART, "size": "${no.where}"}, "drafter.size: "),
        ({"_target_": PART, "size": "abc"}, "^drafter.size=abc: must be a whole number$"),
        ({"_target_": PART, "size": 1, "names": "abc"}, "^drafter.names=abc: must be a list of strings$"),
        ({"_target_": PART, "size": 1, "inner": {"_target_": PART, "size": 13}}, "^drafter.inner.size=13: must not be"),
        ({"_target_": PART, "size": 1, "inner": {"_target_": PART, "size": 14}}, "^drafter.inner: bad luck$"),
        (
            {"_target_": PART, "size": 1, "inner": {"a": [{"_target_": PART, "size": 14}]}},
            r"^drafter.inner.a\[0\]: bad",
        ),
        ({"_target_": "no.such.module", "size": 1}, "drafter._target_=no.such.module: module no cannot be imported"),
        ({"_target_": "builtins.len", "size": 1}, "^drafter.size: builtins.len has no such setting"),
        ({"_target_": UNTYPED, "size": "abc"}, "^drafter: .*untyped cannot use these settings .TypeError: .*, line "),
        ({"size": 1}, "drafter: has no _target_"),
    ],
)
def test_build_names_the_key(node: dict[str, Any], message: str) -> None:
    cfg = OmegaConf.create({"drafter": node})
    with pytest.raises(ValueError, match=message) as caught:
        build(cfg.drafter)
    assert "\n" not in str(caught.value)


def test_build_leaves_other_errors_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        build({"_target_": PART, "size": 15})


@pytest.mark.parametrize("node", [None, [1], "text"])
def test_build_refuses_what_is_no_node(node: Any) -> None:
    with pytest.raises(ValueError, match=r"^drafter: has no _target_"):
        build(node, "drafter")
    with pytest.raises(ValueError, match=r"^drafter: has no _target_"):
        build(OmegaConf.create({"drafter": [1]}).drafter)


def test_a_plain_node_is_named_by_the_group_given() -> None:
    node = {"_target_": PART, "size": 1, "inner": {"a": {"_target_": PART, "size": "abc"}}}
    for group, key in (("target", "target.inner.a.size=abc: "), ("", "inner.a.size=abc: ")):
        with pytest.raises(ValueError) as caught:
            build(node, group)
        assert str(caught.value).startswith(key)
        with pytest.raises(ValueError) as caught:
            build(node | {"inner": {"a": {"_target_": PART, "size": 13}}}, group)
        assert str(caught.value) == f"{key.partition('=')[0]}=13: must not be 13"


def test_objects_that_are_built_already_pass() -> None:
    built = Path("a")
    assert build({"_target_": PART, "size": built, "inner": built}) == Part(built, inner=built)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, "", " ", 5, [], ["a"]])
def test_the_folder_of_runs_is_a_path(value: Any) -> None:
    assert config.check_runs_folder("a") == "a"
    with pytest.raises(ValueError, match=r"^paths.runs=.*: must be the path of a folder"):
        config.check_runs_folder(value)
    cfg = OmegaConf.create({"runs": value, "dir": "${dispark.runs_folder:${runs}}/x"})
    with pytest.raises(OmegaConfBaseException) as caught:
        _ = cfg.dir
    assert config.omegaconf_message(caught.value).startswith("paths.runs=")


def test_resolve_returns_plain_containers() -> None:
    plain = resolve(OmegaConf.create({"a": {"b": [1, "${c}"]}, "c": 2}))
    assert plain == {"a": {"b": [1, 2]}, "c": 2}
    assert type(plain["a"]) is dict
    assert type(plain["a"]["b"]) is list


@pytest.mark.parametrize(
    ("resolved", "chosen", "expected"),
    [
        ({"seed": 3}, {"target": "tiny", "task": "chat", "drafter": "ngram"}, "tiny/chat/ngram/s3"),
        ({"seed": 0}, {"target": "a/b c", "task": "../x", "drafter": "n"}, "a_b_c/x/n/s0"),
        ({"target": {"name": "tiny"}, "task": {}, "drafter": None}, {}, "tiny/task/drafter/s0"),
        ({}, {"target": "...", "task": "x" * 300, "drafter": "d"}, f"unnamed/{'x' * 60}/d/s0"),
    ],
)
def test_slug_is_a_safe_path(resolved: dict[str, Any], chosen: dict[str, str], expected: str) -> None:
    assert slug(resolved, chosen) == expected


def test_outside_hydra_there_are_no_choices_and_no_sweep() -> None:
    assert config.choices() == {}
    assert config.sweep_dir() is None
    assert composed("tracker=wandb").tracker.group is None


def test_the_top_levels_checkpoint_is_that_of_the_learned_drafter(tmp_path: Path, monkeypatch: Any) -> None:
    from dispark import config

    def composed(*words: str) -> Any:
        with initialize_config_module("dispark.conf", version_base="1.3"):
            return compose("bench", overrides=["target=tiny", "drafter=dflash", *words])

    assert composed().drafter.checkpoint == "random"
    assert composed(f"checkpoint={tmp_path}").drafter.checkpoint == str(tmp_path)
    assert composed("checkpoint=/a", "drafter.checkpoint=/b").drafter.checkpoint == "/b"
    run = tmp_path / "run"
    (run / "dflash").mkdir(parents=True)
    (run / "dflash" / "config.json").write_text("{}")
    assert composed(f"checkpoint={run}").drafter.checkpoint == str(run / "dflash")
    assert composed(f"checkpoint={run / 'dflash'}").drafter.checkpoint == str(run / "dflash")
    with pytest.raises(ValueError, match=r"checkpoint=.*run: has no checkpoint of medusa; there are: dflash"):
        build(composed(f"checkpoint={run}", "drafter=medusa").drafter)
    monkeypatch.setattr(config, "SHIPPED_CHECKPOINTS", tmp_path)
    folder = tmp_path / "tiny" / "eagle3"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert composed("checkpoint=shipped", "drafter=eagle3").drafter.checkpoint == str(folder)
    with pytest.raises(ValueError, match=r"checkpoint=shipped: there is none of dflash for target tiny; .*tiny/eagle3"):
        build(composed("checkpoint=shipped").drafter)


EXPERIMENTS = sorted((CONF / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_composes_into_distinct_jobs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command is the one that it names, every axis is a setting that exists, and no two jobs share a folder."""
    text = path.read_text(encoding="utf-8")
    found = re.search(r"# dispark (\w+) -m experiment=(\w+)", text)
    assert found is not None
    assert found.group(2) == path.stem
    command = found.group(1)
    axes = OmegaConf.create(text).hydra.sweeper.params
    jobs = list(
        itertools.product(*([f"{key}={value}" for value in str(values).split(",")] for key, values in axes.items()))
    )
    assert len(jobs) > 1
    outs = set()
    for words in jobs:
        with initialize_config_module("dispark.conf", version_base="1.3"):
            cfg = compose(command, overrides=[f"experiment={path.stem}", *words])
        if command == "train":
            outs.add(str(cfg.out))
            plain = OmegaConf.to_container(cfg.students, resolve=True)
            assert isinstance(plain, dict)
            for name, node in plain.items():
                check_node(node, f"students.{name}")
    assert command != "train" or len(outs) == len(jobs)
