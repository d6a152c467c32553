"""From composed configs to objects: the one place that instantiates, and what a job knows about its composition.

Hydra's `_target_` is the registry. The top level has a schema (schema.py); below it the constructors of the classes
are the truth: `build` checks the settings against their annotations (nodes.py) and turns their own complaints into one
line that names the key. Importing this module registers the schemas and makes `dispark.conf` importable in a checkout
that was never installed.

It does not know what the classes do, and it reads no file but the YAMLs that Hydra composes.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dispark import schema  # noqa: F401  (registers the schemas, without which nothing composes)
from dispark.hints import shown
from dispark.nodes import check_node, join, readable


def make_conf_importable() -> None:
    """Maps the checkout's conf/ to `dispark.conf` where no installation has done it; does nothing elsewhere."""
    if importlib.util.find_spec("dispark.conf") is not None:
        return
    init = Path(__file__).resolve().parent.parent / "conf" / "__init__.py"
    spec = importlib.util.spec_from_file_location("dispark.conf", init, submodule_search_locations=[str(init.parent)])
    if init.is_file() and spec is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["dispark.conf"] = sys.modules["dispark"].__dict__["conf"] = module


make_conf_importable()


def build(node: Any, group: str = "", /, **kwargs: Any) -> Any:
    """Instantiates a config node that has a `_target_`; containers inside arrive as plain dicts and lists.

    Args:
        node: a group of the composed config, or a plain dict.
        group: where a plain dict stands in the config, for messages; a composed node knows its place.
        **kwargs: extra settings, plain values only. What exists at run time (a model, a device) goes through `bind`.

    Raises:
        ValueError: a setting is missing, unknown, of the wrong type or refused; the message starts with its key.
    """
    own_key = str(node._get_full_key("")) if isinstance(node, (DictConfig, ListConfig)) else ""
    group = own_key or group
    if not isinstance(node, (Mapping, DictConfig)) or "_target_" not in node:
        raise ValueError(f"{group or 'config'}: has no _target_; choose an option of the group")
    try:
        if isinstance(node, DictConfig) and (missing := sorted(OmegaConf.missing_keys(node))):
            raise ValueError(f"{join(group, missing[0])}: must be given")
        plain: Any = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
        plain = {**plain, **kwargs}
        check_node(plain, group)
        return instantiate(node, _convert_="all", **kwargs)
    except InstantiationException as error:
        raise readable(error, plain, group, own_key) from error
    except OmegaConfBaseException as error:
        raise ValueError(omegaconf_message(error, group)) from error


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain containers with every interpolation resolved; this is what is stored and hashed.

    Raises:
        ValueError: a value is missing or an interpolation leads nowhere; the message names the key.
    """
    try:
        if missing := sorted(OmegaConf.missing_keys(cfg)):
            raise ValueError(f"{missing[0]}: must be given ({missing[0]}=...)")
        plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ValueError(omegaconf_message(error)) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def check_runs_folder(value: Any) -> str:
    """Returns the value of `paths.runs` if it is the path of a folder, else raises ValueError.

    A resolver in YAMLs too, as Hydra makes the folder of a sweep below it before any job looks at its settings.
    """
    if not isinstance(value, str) or not value.strip():
        value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        raise ValueError(f"paths.runs={shown(value)}: must be the path of a folder; the default is results/runs")
    return value


OmegaConf.register_new_resolver("dispark.runs_folder", check_runs_folder, replace=True)


SHIPPED_CHECKPOINTS = Path(__file__).resolve().parent.parent / "results" / "checkpoints"


def checkpoint_of(drafter: str, *, _root_: Any) -> str:
    """The value of a learned drafter's `checkpoint`, in YAMLs `${dispark.checkpoint:NAME}`: the top level's, or random.

    `shipped` is the one that comes with the project for this target; of a folder of checkpoints, as `dispark train`
    makes it, it is the drafter's own.

    Raises:
        ValueError: none was shipped, or the folder has none.
    """
    value = OmegaConf.select(_root_, "checkpoint")
    if value is None:
        return "random"
    if value != "shipped":
        return _own_checkpoint(str(value), drafter)
    target = OmegaConf.select(_root_, "target.name")
    folder = SHIPPED_CHECKPOINTS / str(target) / drafter
    if not (folder / "config.json").is_file():
        there = sorted("/".join(p.parent.parts[-2:]) for p in SHIPPED_CHECKPOINTS.glob("*/*/config.json"))
        raise ValueError(
            f"checkpoint=shipped: there is none of {drafter} for target {target}; in {SHIPPED_CHECKPOINTS} are: "
            f"{', '.join(there) or 'none'}"
        )
    return str(folder)


def _own_checkpoint(value: str, drafter: str) -> str:
    """A checkpoint, or the drafter's own in a folder of checkpoints."""
    folder = Path(value)
    if (folder / "config.json").is_file():
        return value
    names = sorted(path.parent.name for path in folder.glob("*/config.json"))
    if not names:
        return value
    if drafter not in names:
        raise ValueError(f"checkpoint={value}: has no checkpoint of {drafter}; there are: {', '.join(names)}")
    return str(folder / drafter)


OmegaConf.register_new_resolver("dispark.checkpoint", checkpoint_of, replace=True)


def choices() -> dict[str, str]:
    """The option chosen per config group, for example {"drafter": "ngram"}; empty outside a Hydra job."""
    if not HydraConfig.initialized():
        return {}
    chosen = HydraConfig.get().runtime.choices
    return {str(k): str(v) for k, v in chosen.items() if v is not None and not str(k).startswith("hydra/")}


def job_words() -> list[str]:
    """The key=value words of the running Hydra job, as they were written; empty outside one."""
    if not HydraConfig.initialized():
        return []
    settings: Any = HydraConfig.get()  # typed as a dataclass, in truth a DictConfig
    words = OmegaConf.to_container(settings.overrides.task, resolve=False)  # a word may hold ${...}
    assert isinstance(words, list)
    return [str(word) for word in words]


def sweep_dir() -> Path | None:
    """The folder of the sweep that this job belongs to, or None for a single run."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    return Path(str(HydraConfig.get().sweep.dir))


def sweep_name() -> str | None:
    """The sweep's name, in YAMLs `${dispark.sweep:}`; None for a single run."""
    folder = sweep_dir()
    return None if folder is None else folder.name


OmegaConf.register_new_resolver("dispark.sweep", sweep_name, replace=True)


def names_of(node: Any) -> str:
    """The keys of a part of the config joined by "+", in YAMLs `${dispark.names:${students}}`."""
    return "+".join(map(str, node))


OmegaConf.register_new_resolver("dispark.names", names_of, replace=True)


def slug(resolved: Mapping[str, Any], chosen: Mapping[str, str] | None = None) -> str:
    """A readable name for a run, `target/task/drafter/s<seed>`; the hash beside it tells runs apart, not this.

    Args:
        resolved: the resolved config.
        chosen: option per group; the default is those of the running Hydra job.
    """
    names = choices() if chosen is None else chosen
    parts = [names.get(group) or _own_name(resolved.get(group)) or group for group in ("target", "task", "drafter")]
    return "/".join([*(_safe(part) for part in parts), f"s{resolved.get('seed', 0)}"])


def omegaconf_message(error: OmegaConfBaseException, group: str = "") -> str:
    """OmegaConf's several lines as one: the key, then its first sentence; what a resolver of ours says, as it is."""
    key = str(error.full_key or group or "config")
    first = str(error.msg or error).strip().splitlines()[0]
    ours = re.match(r"ValueError raised while resolving interpolation: ((?:paths\.runs|checkpoint)=.*)", first)
    return ours.group(1) if ours else f"{key}: {first}"


def _own_name(node: Any) -> str | None:
    return str(node["name"]) if isinstance(node, Mapping) and node.get("name") else None


def _safe(part: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", part).strip("._")[:60] or "unnamed"
