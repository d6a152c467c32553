"""Where a number came from: versions, source state, hardware and settings, as one plain dict; and a config's identity.

Nothing here raises: what can't be read is None or, for a whole section, {"reason": why}. The host's name, the user and
paths are left out on purpose, so that a result can be published. What it does not know: whether the hardware was quiet
during the run (it notes the load at one moment), firmware settings, and anything that only the caller has, such as
weights hashes or attention backends; those come in as `extra`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dispark
from dispark.measure.nvml import device_state

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "hydra-core",
    "omegaconf",
    "datasets",
    "numpy",
    "pandas",
    "pyarrow",
    "safetensors",
    "gguf",
    "accelerate",
    "wandb",
    "nvidia-ml-py",
)
ENVIRONMENT = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "GOMP_CPU_AFFINITY",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "TOKENIZERS_PARALLELISM",
    "HF_HUB_OFFLINE",
)
DEFAULT_EXCLUDE = ("tracker", "paths", "hydra")
GIT_TIMEOUT_S = 10.0


def collect(
    device: torch.device | str,
    dtype: torch.dtype | str,
    repo_dir: str | Path | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything about here and now that a number may depend on.

    Args:
        device, dtype: where and in what the target runs.
        repo_dir: a folder of the checkout to describe; None takes the checkout that the package was imported from.
        extra: what only the caller knows (attention and linear backends, weights hash); made JSON-serialisable.

    Returns:
        A dict that json.dumps accepts, with the sections package, git, versions, platform, cpu, gpu, settings,
        environment and extra beside `timestamp_utc`, `device` and `dtype`. Never raises.
    """
    sections: dict[str, Callable[[], Any]] = {
        "git": lambda: git_state(repo_dir),
        "versions": lambda: {name: _version(name) for name in PACKAGES},
        "platform": _platform,
        "cpu": _cpu,
        "gpu": lambda: _gpu(torch.device(device)),
        "settings": _settings,
        "environment": lambda: {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "extra": lambda: plain(extra or {}),
    }
    found: dict[str, Any] = {
        "timestamp_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "package": {"name": "dispark", "version": dispark.__version__},
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
    }
    for name, read in sections.items():
        try:
            found[name] = plain(read())
        except Exception as error:
            found[name] = {"reason": _why(error)}
    return found


def hardware(device: torch.device | str) -> dict[str, Any]:
    """What decides how long a step takes here, and nothing that moves: processor, threads, accelerator, torch."""
    chosen = torch.device(device)
    cpu, gpu = _cpu(), _gpu(chosen)
    found: dict[str, Any] = {"device": chosen.type, "torch": torch.__version__}
    if gpu is not None:
        return found | {"gpu": gpu["name"], "cuda": gpu["cuda"]}
    return found | {key: cpu[key] for key in ("model", "num_usable_cores", "num_threads", "capability")}


def git_state(repo_dir: str | Path | None = None) -> dict[str, Any]:
    """Commit and dirtiness of a checkout: `sha`, `is_dirty`, `num_changed`, `num_untracked`, `reason`.

    Untracked files count as dirt, since a new module changes what runs; ignored ones do not. An installed package is
    not taken for the checkout of the project in whose folder its virtual environment happens to lie.
    """
    state: dict[str, Any] = dict.fromkeys(("sha", "is_dirty", "num_changed", "num_untracked"))
    home = Path(dispark.__file__).resolve().parent.parent
    folder = home if repo_dir is None else Path(repo_dir)
    try:
        top = Path(_git(folder, "rev-parse", "--show-toplevel").strip()).resolve()
        if repo_dir is None and top != home:
            return {**state, "reason": "the package does not run from a checkout of its own"}
        sha = _git(folder, "rev-parse", "HEAD").strip()
        lines = _git(folder, "status", "--porcelain", "--untracked-files=normal").splitlines()
    except Exception as error:
        return {**state, "reason": _why(error).replace(str(folder), "<folder>")}
    num_untracked = sum(line.startswith("??") for line in lines)
    return {
        "sha": sha,
        "is_dirty": bool(lines),
        "num_changed": len(lines) - num_untracked,
        "num_untracked": num_untracked,
        "reason": None,
    }


def config_hash(resolved: Mapping[str, Any], exclude: Sequence[str] = DEFAULT_EXCLUDE) -> str:
    """Twelve hex digits that name a resolved config: SHA-256 of a canonical JSON text, so stable across key order.

    Lists keep their order and equal tuples. 1, 1.0, True and "1" are four different values: the config's types are part
    of its meaning, and a config that spells 1.0 as 1 counts as another run. Only top-level keys are excluded.

    Args:
        resolved: plain containers (OmegaConf.to_container(cfg, resolve=True)).
        exclude: top-level keys that say where results go, not what is computed.

    Raises:
        ValueError: `exclude` is a string, or a value is no plain container, text, number, bool or None.
    """
    if isinstance(exclude, str):
        raise ValueError(f"exclude={exclude!r}: must be a list of top-level keys, not one text")
    kept = {key: value for key, value in resolved.items() if key not in exclude}
    return hashlib.sha256(_canonical(kept, "config").encode()).hexdigest()[:12]


def plain(value: Any) -> Any:
    """A JSON-serialisable copy: text keys, lists for sets and tuples, text for non-finite floats and other types."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [plain(item) for item in value]
    return str(value).removeprefix("torch.")


def _canonical(value: Any, path: str) -> str:
    """JSON with sorted keys; unlike json.dumps, a key 1 stays apart from a key "1"."""
    if value is None or isinstance(value, bool | int | float | str):
        return json.dumps(value)
    if isinstance(value, Mapping):
        items = (f"{_canonical(key, path)}:{_canonical(item, f'{path}.{key}')}" for key, item in value.items())
        return "{" + ",".join(sorted(items)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_canonical(item, f"{path}[{i}]") for i, item in enumerate(value)) + "]"
    raise ValueError(f"{path}: a {type(value).__name__} can't be hashed; allowed: dict, list, text, number, bool, null")


def _git(folder: Path, *arguments: str) -> str:
    # A hook's GIT_DIR would point at another repository; optional locks would write into this one.
    environ = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environ |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        raise RuntimeError("git is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"git took over {GIT_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[0] if lines else f"git ended with status {done.returncode}")
    return done.stdout


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _platform() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
    }


def _cpu() -> dict[str, Any]:
    has_affinity, has_load = hasattr(os, "sched_getaffinity"), hasattr(os, "getloadavg")
    return {
        "model": _field(Path("/proc/cpuinfo"), "model name") or platform.processor() or None,
        "num_cores": os.cpu_count(),
        "num_usable_cores": len(os.sched_getaffinity(0)) if has_affinity else None,
        "num_threads": torch.get_num_threads(),
        "num_interop_threads": torch.get_num_interop_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "governor": _first_line(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        "memory_bytes": _kibibytes(_field(Path("/proc/meminfo"), "MemTotal")),
        "load_average": list(os.getloadavg()) if has_load else None,
    }


def _gpu(device: torch.device) -> dict[str, Any] | None:
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "num_devices": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "state": device_state(device),
    }


def _settings() -> dict[str, Any]:
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cuda_matmul_fp32_precision": getattr(torch.backends.cuda.matmul, "fp32_precision", None),
        "is_deterministic": torch.are_deterministic_algorithms_enabled(),
        "is_cudnn_benchmark": torch.backends.cudnn.benchmark,
        "has_mkldnn": torch.backends.mkldnn.is_available(),
        "default_dtype": torch.get_default_dtype(),
    }


def _field(path: Path, key: str) -> str | None:
    """The text behind the first "key: ..." line of a procfs file."""
    try:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, colon, text = line.partition(":")
            if colon and name.strip() == key:
                return text.strip()
    except OSError:
        return None
    return None


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip() or None
    except OSError:
        return None


def _kibibytes(text: str | None) -> int | None:
    number = (text or "").split(" ")[0]
    return int(number) * 1024 if number.isdigit() else None


def _why(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
