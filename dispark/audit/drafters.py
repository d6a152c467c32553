"""Every drafter with every scheduler and verifier on a small random target in float64, by enumeration.

The drafters have random weights, of which nothing hangs on their quality: what is looked at is whether the law they
report is the one they draw from, and what comes out of it with each scheduler and verifier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra import compose
from omegaconf import DictConfig, ListConfig, OmegaConf

from dispark.audit.drafter_world import DrafterWorld
from dispark.audit.output_law import distance, output_law, target_law
from dispark.config import build
from dispark.decoding.target import TargetModel
from dispark.interfaces import Drafter, Scheduler, Verifier
from dispark.targets.model import wrap
from dispark.targets.spec import load
from dispark.types import Sampling

NUM_TOKENS = 2
PROMPT = (0, 1, 2, 0, 1, 2, 0)  # a period, so that lookups find something
_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "initializer_range": 0.3,
    "vocab_size": 3,
}


def audit_drafters(
    drafters: Sequence[str],
    schedulers: Mapping[str, Callable[[], Scheduler]],
    verifiers: Mapping[str, Verifier],
    samplings: Mapping[str, Sampling],
    tolerance: float,
) -> list[dict[str, Any]]:
    """A row a drafter and scheduler: the largest distance from the target's law over verifiers and samplings, and how
    many of those it serves.

    Args:
        drafters: options of the group, without any that never drafts.
        schedulers, verifiers, samplings: by name.
        tolerance: largest difference of a probability that passes.
    """
    target = small_target()
    rows = []
    for name in drafters:
        worlds = [world for sampling in samplings.values() if (world := world_of(name, target, sampling)) is not None]
        furthest, served = dict.fromkeys(schedulers, 0.0), dict.fromkeys(schedulers, 0)
        for world in worlds:
            due = target_law(world, NUM_TOKENS)
            for verifier in verifiers.values():
                try:
                    verifier.check(world.sampling, world.proposal)
                except ValueError:
                    continue
                for scheduler, make in schedulers.items():
                    try:
                        law = output_law(world, make, verifier, NUM_TOKENS)
                    except ValueError:  # it needs a confidence that the drafter doesn't give
                        continue
                    served[scheduler] += 1
                    furthest[scheduler] = max(furthest[scheduler], distance(law, due))
        for scheduler in schedulers:
            is_served = served[scheduler] > 0
            rows.append(
                {
                    "drafter": name,
                    "scheduler": scheduler,
                    "verifiers x samplings": served[scheduler],
                    "distance": furthest[scheduler] if is_served else None,
                    "is lossless": furthest[scheduler] < tolerance if is_served else None,
                }
            )
    return rows


def world_of(name: str, target: TargetModel, sampling: Sampling) -> DrafterWorld | None:
    """A drafter's world, or None where it doesn't serve the sampling."""
    node: Any = compose("bench", overrides=["target=tiny", f"drafter={name}", "target.dtype=float64"]).drafter
    OmegaConf.set_struct(node, False)
    for spec in _specs(node):
        _shrink(spec, seed=1)
    if "confidence" in node and node.confidence is None:
        node.confidence = "peak"
    drafter: Drafter = build(node)
    try:
        return DrafterWorld(target, drafter, sampling, PROMPT, NUM_TOKENS)
    except ValueError:
        if sampling.is_greedy:
            raise
        return None


def small_target() -> TargetModel:
    """Three tokens, two layers, float64."""
    node = compose("bench", overrides=["target=tiny", "target.dtype=float64", "target.device=cpu"]).target
    OmegaConf.set_struct(node, False)
    _shrink(node, seed=0)
    return wrap(load(build(node)))


def _shrink(spec: Any, seed: int) -> None:
    """Makes a target's spec that of a small random model."""
    spec.sources = {"random": compose("bench", overrides=["target=tiny"]).target.sources.random}
    OmegaConf.set_struct(spec, False)
    spec.source, spec.dtype, spec.device = "random", "float64", "cpu"
    spec.sources.random.tokenizer = None
    spec.sources.random.seed = seed
    spec.sources.random.config = {**spec.sources.random.config, **_SMALL}


def _specs(node: Any) -> list[Any]:
    """Every target's spec inside a node."""
    if isinstance(node, DictConfig):
        if node.get("_target_") == "dispark.targets.spec.TargetSpec":
            return [node]
        return [spec for key in node for spec in _specs(node[key])]
    if isinstance(node, ListConfig):
        return [spec for each in node for spec in _specs(each)]
    return []
