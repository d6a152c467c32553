"""From composed configs to objects: the schema of the top level, its checks, and the one place that instantiates.

Hydra's `_target_` is the registry. The schema covers the top level only, so that a misspelt key or a word where a
number belongs is refused when the config is composed; below it the constructors of the classes are the truth, and
`build` turns their complaints into one line that names the key. Importing this module registers the schema and makes
`dispark.conf` importable in a checkout that was never installed.

It does not know what the classes do, and it reads no file but the YAMLs that Hydra composes.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import get_object, instantiate
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

ON_OVERLONG = ("error", "skip")


@dataclass
class BenchConfig:
    """Top level of `dispark bench`; what each key means stands above it in conf/bench.yaml."""

    target: Any = MISSING
    drafter: Any = MISSING
    verifier: Any = MISSING
    scheduler: Any = MISSING
    sampling: Any = MISSING
    task: Any = MISSING
    meter: Any = MISSING
    tracker: Any = MISSING
    paths: Any = MISSING
    seed: int = 0
    max_new_tokens: int = 128
    batch_size: int = 1
    repeats: int = 1
    chunk: int = 4
    warmup: int = 1
    stop_strings: list[str] = field(default_factory=list)
    on_overlong: str = "error"
    generate_baseline: bool = False
    check_losslessness: bool = True
    name: str | None = None
    overwrite: bool = False


ConfigStore.instance().store(name="bench_schema", node=BenchConfig)


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


def build(node: Any, **kwargs: Any) -> Any:
    """Instantiates a config node that has a `_target_`; containers inside arrive as plain dicts and lists.

    Args:
        node: a group of the composed config, or a plain dict.
        **kwargs: extra settings, plain values only. What exists at run time (a model, a device) goes through `bind`.

    Raises:
        ValueError: a setting is missing, unknown or refused; the message starts with its key.
    """
    group = str(node._get_full_key("")) if isinstance(node, DictConfig) else ""
    if node is None or "_target_" not in node:
        raise ValueError(f"{group or 'config'}: has no _target_; choose an option of the group")
    try:
        if isinstance(node, DictConfig) and (missing := sorted(OmegaConf.missing_keys(node))):
            raise ValueError(f"{_join(group, missing[0])}: must be given")
        return instantiate(node, _convert_="all", **kwargs)
    except InstantiationException as error:
        raise _readable(error, node, group) from error
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


def validate(cfg: DictConfig) -> None:
    """Checks the ranges that types can't express, before anything expensive starts.

    Raises:
        ValueError: one line with the key, the value and what is allowed.
    """
    resolve(cfg)
    for key in ("max_new_tokens", "batch_size", "repeats", "chunk"):
        if cfg[key] < 1:
            raise ValueError(f"{key}={cfg[key]}: must be a whole number >= 1")
    if cfg.warmup < 0:
        raise ValueError(f"warmup={cfg.warmup}: must be a whole number >= 0")
    if not 0 <= cfg.seed < 2**63:
        raise ValueError(f"seed={cfg.seed}: must lie in 0 .. 2**63 - 1")
    if cfg.on_overlong not in ON_OVERLONG:
        raise ValueError(f"on_overlong={cfg.on_overlong}: must be one of {', '.join(ON_OVERLONG)}")
    if "" in cfg.stop_strings:
        raise ValueError("stop_strings=['']: an empty string stops every text at once; give at least one character")
    if cfg.name is not None and not cfg.name.strip():
        raise ValueError("name='': must be null or a label of at least one character")


def choices() -> dict[str, str]:
    """The option chosen per config group, for example {"drafter": "ngram"}; empty outside a Hydra job."""
    if not HydraConfig.initialized():
        return {}
    chosen = HydraConfig.get().runtime.choices
    return {str(k): str(v) for k, v in chosen.items() if v is not None and not str(k).startswith("hydra/")}


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


def slug(resolved: Mapping[str, Any], chosen: Mapping[str, str] | None = None) -> str:
    """A readable name for a run, `target/task/drafter/s<seed>`; the hash beside it tells runs apart, not this.

    Args:
        resolved: the resolved config.
        chosen: option per group; the default is those of the running Hydra job.
    """
    names = choices() if chosen is None else chosen
    parts = [names.get(group) or _own_name(resolved.get(group)) or group for group in ("target", "task", "drafter")]
    return "/".join([*(_safe(part) for part in parts), f"s{resolved.get('seed', 0)}"])


def suggest(name: str, allowed: Iterable[str]) -> str:
    """The tail of an error message: the nearest allowed word, if one is near, and all of them."""
    words = sorted(set(allowed))
    near = difflib.get_close_matches(name, words, n=1)
    return f"{f'did you mean {near[0]}? ' if near else ''}allowed: {', '.join(words) or 'nothing'}"


def omegaconf_message(error: OmegaConfBaseException, group: str = "") -> str:
    """OmegaConf's several lines as one: the key, then its first sentence."""
    key = str(error.full_key or group or "config")
    first = str(error.msg or error).strip().splitlines()[0]
    return f"{key}: {first}"


def _readable(error: InstantiationException, node: Any, group: str) -> Exception:
    """The exception to raise instead of Hydra's: the user's mistake as a ValueError, anything else as it was."""
    found = re.search(r"full_key: (\S+)", str(error))
    key = found.group(1) if found else group
    inner = OmegaConf.select(node, key.removeprefix(f"{group}.")) if key != group else node
    target = str((inner if isinstance(inner, DictConfig) else node).get("_target_"))
    label = key or target
    root = error.__cause__
    if root is None:
        return ValueError(f"{label}: {' '.join(str(error).split())}")
    if isinstance(root, ImportError):
        return ValueError(f"{_join(label, '_target_')}={target}: cannot be imported ({str(root).splitlines()[-1]})")
    if isinstance(root, TypeError):
        return ValueError(_signature_message(root, target, label))
    if isinstance(root, ValueError):
        message = " ".join(str(root).split())
        has_key = re.match(rf"{re.escape(label.split('.')[0])}\b", message)
        return ValueError(message if has_key else f"{label}: {message}")
    return root if isinstance(root, Exception) else error


def _signature_message(error: TypeError, target: str, key: str) -> str:
    """Says which setting a constructor does not know or lacks; other type errors are quoted."""
    text = str(error)
    if unknown := re.search(r"unexpected keyword argument '(\w+)'", text):
        allowed = [name for name in inspect.signature(get_object(target)).parameters if name != "self"]
        return f"{_join(key, unknown.group(1))}: {target} has no such setting; {suggest(unknown.group(1), allowed)}"
    if missing := re.search(r"missing \d+ required .*arguments?: '(\w+)'", text):
        return f"{_join(key, missing.group(1))}: must be given, {target} needs it"
    return f"{key}: {target} cannot use these settings ({' '.join(text.split())})"


def _own_name(node: Any) -> str | None:
    return str(node["name"]) if isinstance(node, Mapping) and node.get("name") else None


def _safe(part: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", part).strip("._")[:60] or "unnamed"


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
