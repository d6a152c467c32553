"""`dispark audit`: schedulers, verifiers, drafters and samplings in every composition, by enumeration.

Schedulers and verifiers are tried on random tables with both proposal types, and then with real drafters.

A composition passes if its output law is the target's to rounding and its scheduler doesn't anticipate. One that claims
to be lossless and isn't fails the command, and so does a negative control that passes: then the audit is blind.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from hydra.utils import get_class
from omegaconf import OmegaConf

from dispark.audit import controls
from dispark.audit.anticipation import find_anticipation
from dispark.audit.drafters import audit_drafters
from dispark.audit.output_law import distance, output_law, target_law
from dispark.audit.world import RandomWorld, World
from dispark.checks import check_seed
from dispark.config import build, make_conf_importable
from dispark.interfaces import Scheduler, Verifier
from dispark.runs.table import to_text
from dispark.types import Sampling
from dispark.verifiers.rejection import RejectionVerifier

Make = Callable[[], Scheduler]
Proposal = Literal["sampled", "deterministic"]

SAMPLINGS = {
    "T=1": Sampling(1.0),
    "T=0.6 top_p=0.9": Sampling(0.6, top_p=0.9),
    "T=2 top_k=2": Sampling(2.0, top_k=2),
    "greedy": Sampling(0.0),
}
PROPOSALS: tuple[Proposal, ...] = ("sampled", "deterministic")
# Step costs with dents, so that load-aware schedulers have something to decide.
COST = {
    "_target_": "dispark.schedulers.step_cost.StepCost",
    "num_tokens": [1, 2, 3, 4, 5, 6],
    "seconds": [1.0, 1.3, 1.35, 2.0, 2.05, 2.6],
}


def options(group: str) -> list[str]:
    """The names of a group's YAMLs."""
    return sorted(path.stem for path in _folder(group).glob("*.yaml"))


# What learns slowly learns at once in an audit, which looks at a few rounds only.
HURRIED = {
    "window": 1,
    "probe_every": 2,
    "learns": True,
    "pace": {"_target_": "dispark.schedulers.round_memory.Pace", "first": 1, "alone": 1, "probe_every": 2},
}


def make_schedulers(name: str) -> list[Make]:
    """Makers of a YAML's scheduler: as it is, and one in a hurry if it has anything to hurry with."""
    node: Any = OmegaConf.load(_folder("scheduler") / f"{name}.yaml")
    known = inspect.signature(get_class(node["_target_"])).parameters
    hurried = {key: value for key, value in HURRIED.items() if key in known}
    return [make_scheduler(name), *([make_scheduler(name, hurried)] if hurried else [])]


def make_scheduler(name: str, settings: Mapping[str, Any] | None = None) -> Make:
    """A maker of fresh schedulers of a YAML with some settings; one that reads a profile gets `COST` instead, and none
    has telemetry."""
    plain = OmegaConf.to_container(OmegaConf.load(_folder("scheduler") / f"{name}.yaml"))
    assert isinstance(plain, dict)
    plain.update(settings or {})
    if "profile" in plain:
        plain |= {"profile": None, "cost": COST}
    if "telemetry" in plain:
        plain["telemetry"] = None
    return lambda: build(dict(plain), "scheduler")


def worlds_of(sampling: Sampling, proposal: Proposal, num_worlds: int, seed: int) -> list[World]:
    """One row with a longer draft, and two rows that share a budget, in turns."""
    found: list[World] = []
    for i in range(num_worlds):
        vocab_size, num_rows = (3, 1) if i % 2 == 0 else (2, 2)
        found.append(RandomWorld(vocab_size, 2, num_rows, sampling, proposal, seed=seed + i))
    return found


def examine(make: Make, verifier: Verifier, worlds: Sequence[World], num_tokens: int) -> tuple[float, bool]:
    """The largest distance from the target's law, and whether the scheduler anticipates anywhere."""
    furthest, anticipates = 0.0, False
    for world in worlds:
        law = output_law(world, make, verifier, num_tokens)
        furthest = max(furthest, distance(law, target_law(world, num_tokens)))
        anticipates = anticipates or find_anticipation(world, make) is not None
    return furthest, anticipates


def run_audit(
    schedulers: Sequence[str] | None = None,
    verifiers: Sequence[str] | None = None,
    drafters: Sequence[str] | None = None,
    num_tokens: int = 3,
    num_worlds: int = 3,
    seed: int = 0,
    tolerance: float = 1e-12,
) -> dict[str, Any]:
    """Prints a row a scheduler and verifier, and the controls; returns them.

    Args:
        schedulers, verifiers, drafters: names of YAMLs; None takes all.
        num_tokens: first tokens of each row whose joint law is compared.
        num_worlds: random worlds for each composition.
        seed: of the worlds.
        tolerance: largest difference of a probability that passes.

    Raises:
        ValueError: an unknown name, or a number out of range.
        RuntimeError: a composition is not what it claims, or a control was not found.
    """
    for key, value in (("num_tokens", num_tokens), ("num_worlds", num_worlds)):
        if value < 1:
            raise ValueError(f"{key}={value}: must be a whole number >= 1")
    check_seed(seed)
    if not 0.0 < tolerance < 1.0:
        raise ValueError(f"tolerance={tolerance}: must lie between 0 and 1")
    rows, wrong = [], []
    for name in _names("schedulers", schedulers, "scheduler"):
        for verifier_name in _names("verifiers", verifiers, "verifier"):
            row = _audit(name, verifier_name, num_tokens, num_worlds, seed, tolerance)
            rows.append(row)
            if row["claims lossless"] and not row["is lossless"]:
                wrong.append(f"{name} with {verifier_name} claims to be lossless and is not")
    found = _controls(num_tokens, seed)
    wrong += [f"the control {row['scheduler']} was not found" for row in found if not row["is found"]]
    print(to_text(pd.DataFrame(rows, dtype=object), {"distance": ".1e"}))
    print(to_text(pd.DataFrame(found, dtype=object), {"distance": ".1e"}))
    real = _audit_drafters(_names("drafters", drafters, "drafter", may_be_none=True), rows, tolerance)
    claimed = {row["scheduler"] for row in rows if row["claims lossless"]}
    wrong += [
        f"{row['drafter']} with {row['scheduler']} is not lossless"
        for row in real
        if row["is lossless"] is False and row["scheduler"] in claimed
    ]
    if real:
        print(to_text(pd.DataFrame(real, dtype=object), {"distance": ".1e"}))
    if wrong:
        raise RuntimeError(f"audit: {'; '.join(wrong)}")
    result = {"compositions": rows, "controls": found, "drafters": real}
    return result | {"tolerance": tolerance, "num_worlds": num_worlds, "seed": seed}


def _audit_drafters(names: Sequence[str], rows: Sequence[dict[str, Any]], tolerance: float) -> list[dict[str, Any]]:
    """Real drafters with the schedulers and verifiers of these compositions, as far as those were audited."""
    audited = [row for row in rows if row["distance"] is not None]
    schedulers = {row["scheduler"]: make_scheduler(row["scheduler"]) for row in audited}
    folder = _folder("verifier")
    verifiers = {
        row["verifier"]: build(dict(OmegaConf.load(folder / f"{row['verifier']}.yaml")), "verifier") for row in audited
    }
    drafting = [name for name in names if name != "none"]
    return audit_drafters(drafting, schedulers, verifiers, SAMPLINGS, tolerance) if drafting else []


def _audit(
    name: str, verifier_name: str, num_tokens: int, num_worlds: int, seed: int, tolerance: float
) -> dict[str, Any]:
    verifier: Verifier = build(dict(OmegaConf.load(_folder("verifier") / f"{verifier_name}.yaml")), "verifier")
    node: Any = OmegaConf.load(_folder("scheduler") / f"{name}.yaml")
    if any(OmegaConf.is_missing(node, key) for key in node):
        kind: Any = get_class(node["_target_"])
        return _not_audited(name, verifier_name, kind.is_lossless and verifier.is_lossless)
    makes = make_schedulers(name)
    furthest, anticipates, served = 0.0, False, 0
    for sampling in SAMPLINGS.values():
        for proposal in PROPOSALS:
            try:
                verifier.check(sampling, proposal)
            except ValueError:
                continue
            served += 1
            worlds = worlds_of(sampling, proposal, num_worlds, seed)
            for make in makes:
                far, knows = examine(make, verifier, worlds, num_tokens)
                furthest, anticipates = max(furthest, far), anticipates or knows
    return {
        "scheduler": name,
        "verifier": verifier_name,
        "samplings x proposals": served,
        "distance": furthest,
        "anticipates": anticipates,
        "claims lossless": bool(makes[0]().is_lossless and verifier.is_lossless),
        "is lossless": furthest < tolerance and not anticipates,
    }


def _not_audited(name: str, verifier_name: str, is_claimed: bool) -> dict[str, Any]:
    """The row of a scheduler that needs a file of its own, as the oracle does; it counts as not lossless."""
    row = {"scheduler": name, "verifier": verifier_name, "samplings x proposals": 0, "distance": None}
    return row | {"anticipates": None, "claims lossless": bool(is_claimed), "is lossless": False}


def _controls(num_tokens: int, seed: int) -> list[dict[str, Any]]:
    """Faulty compositions, and whether both checks see them."""
    world = controls.AppendixAWorld()

    def without_stop() -> Scheduler:
        return controls.WithoutStopScheduler(cost=controls.APPENDIX_A_COST)

    law = output_law(world, without_stop, RejectionVerifier(), 1)
    first = tuple(round(law[((token,),)], 12) for token in (0, 1))
    far, knows = examine(without_stop, RejectionVerifier(), [world], num_tokens)
    rows = [
        {
            "scheduler": "hardware_aware without its stop (Appendix A)",
            "distance": far,
            "anticipates": knows,
            "first token": f"{first} instead of {controls.APPENDIX_A_RIGHT}",
            "is found": first == controls.APPENDIX_A_WRONG and knows,
        }
    ]
    worlds = [RandomWorld(vocab_size=2, num_rows=2, seed=seed + i) for i in range(3)]
    far, knows = examine(controls.RetrospectiveScheduler, RejectionVerifier(), worlds, 2)
    row = {"scheduler": "sorted by retrospective survival", "distance": far, "anticipates": knows, "first token": None}
    return [*rows, row | {"is found": far > 1e-6 and knows}]


def _names(key: str, wanted: Sequence[str] | None, group: str, may_be_none: bool = False) -> list[str]:
    """The wanted options, or all. Raises ValueError for one that there isn't."""
    known = options(group)
    for name in wanted or ():
        if name not in known:
            raise ValueError(f"{key}=[{name}]: must be of {', '.join(known)}")
    if wanted is not None and not wanted and not may_be_none:
        raise ValueError(f"{key}=[]: must name at least one of {', '.join(known)}, or null for all")
    return known if wanted is None else list(wanted)


def _folder(group: str) -> Path:
    make_conf_importable()
    return Path(next(iter(importlib.import_module("dispark.conf").__path__))) / group
