"""Whether the loop on a device emits what the target on a CPU would: greedy, low precision, sampling, ragged calls.

Greedy texts in float32 are compared token by token with those of the CPU. Where they differ, both models judge the
text: the device's own packed calls and the CPU's, since a fault of the device would agree with itself.

It does not know how fast anything is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dispark.decoding.random import RowGenerators
from dispark.decoding.rows import Trace
from dispark.decoding.sampling import probabilities
from dispark.decoding.target import TargetModel
from dispark.measure.losslessness import NEAR_TIE_ULPS, greedy_verdicts, teacher_force, ulp
from dispark.targets.model import wrap
from dispark.types import Request, RequestRecord, Sampling
from gpu_check.common import DRAFTERS, Sizes, Subject, decode, first_difference, make_requests, read_spec

CPU = torch.device("cpu")
REFERENCE = "cpu_none"
ROWS = 8
# A cut-off tail keeps the draws away from the thousands of boundaries between tokens that have no mass to speak of.
WARM = Sampling(0.8, 50, 0.95)
MAX_RELATIVE_ERROR = 1e-4
CDF_TOLERANCE = 1e-4
ARCHITECTURES = ("tiny", "tiny_qwen3", "tiny_gemma3", "tiny_gemma4")
PROMPT_LENGTHS = (1, 5, 17, 40)
VERIFY_LENGTHS = (3, 1, 8, 2)


def run_correctness(subject: Subject, device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """All of this file's checks; the float32 ones with TF32 off, which is put back afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        loaded = subject.load(CPU)
        requests = make_requests(loaded.tokenizer, sizes.num_requests, sizes.new_tokens)
        cpu = wrap(loaded)
        target_loaded = subject.load(device)
        target = wrap(target_loaded)
        bucketed = wrap(target_loaded, token_bucket=8, slot_bucket=64)
        result: dict[str, Any] = {
            "greedy_fp32_against_cpu": greedy_against_cpu(cpu, target, bucketed, requests),
            "sampling_fp32": sampling(target, requests),
            "ragged_against_stock": {subject.spec.name: ragged(target)},
        }
        for name in ARCHITECTURES:
            if name != subject.spec.name:
                tiny = Subject(read_spec(name), "random").open(device)
                result["ragged_against_stock"][name] = ragged(tiny)
        result["ragged_against_cpu"] = between_devices(cpu, target)
        for dtype in ("bfloat16", "float16"):
            result[f"greedy_{dtype}"] = low_precision(
                subject.open(device, dtype), requests, subject.weights == "random"
            )
    finally:
        torch.set_float32_matmul_precision(before)
    parts = [part for key, part in result.items() if key != "ragged_against_stock"]
    parts += list(result["ragged_against_stock"].values())
    return {**result, "is_ok": all(part["is_ok"] for part in parts)}


def greedy_against_cpu(
    cpu: TargetModel, target: TargetModel, bucketed: TargetModel, requests: Sequence[Request]
) -> dict[str, Any]:
    """Every drafter at batch 1 and 8, and once with padded shapes, against autoregressive decoding on the CPU."""
    reference = decode(cpu, "none", requests, ROWS).records
    arms: dict[str, list[RequestRecord]] = {}
    for drafter in DRAFTERS:
        for rows in (1, ROWS):
            arms[f"{drafter}_b{rows}"] = decode(target, drafter, requests, rows).records
    arms[f"ngram_b{ROWS}_bucketed"] = decode(bucketed, "ngram", requests, ROWS).records
    return compare_with_cpu(cpu, target, reference, arms)


def compare_with_cpu(
    cpu: TargetModel,
    target: TargetModel,
    reference: list[RequestRecord],
    arms: dict[str, list[RequestRecord]],
) -> dict[str, Any]:
    """Verdicts of the device and of the CPU on each arm's texts."""
    verdicts = greedy_verdicts(target, {REFERENCE: reference, **arms}, REFERENCE)
    own = {record.request.request_id: record for record in reference}
    result: dict[str, Any] = {}
    for arm, records in arms.items():
        places = {
            r.request.request_id: first_difference(r.output_ids, own[r.request.request_id].output_ids) for r in records
        }
        differing = [r for r in records if places[r.request.request_id] is not None]
        gaps = teacher_force(cpu, [(r.request.prompt_ids, r.output_ids) for r in differing])
        verdict = {k: v for k, v in verdicts[arm].items() if k not in ("mode", "near_tie_ulps")}
        result[arm] = verdict | {
            "first_differences": {name: at for name, at in places.items() if at is not None},
            "num_near_tie_by_cpu": sum(gap.num_near_tie for gap in gaps),
            "num_real_by_cpu": sum(gap.num_real for gap in gaps),
        }
    is_ok = all(part["verdict"] != "real" and part["num_real_by_cpu"] == 0 for part in result.values())
    return {"arms": result, "is_ok": is_ok and verdicts[REFERENCE]["num_real"] == 0}


def low_precision(target: TargetModel, requests: Sequence[Request], is_random: bool) -> dict[str, Any]:
    """Verdicts in bfloat16 or float16: differences are allowed, as long as each is a near tie.

    The framework's bound for near ties is made for trained models, and deep random weights are noisier. For those a gap
    also passes that is no wider than twice what the model's own logits move by between the packed and the stock calls
    (`noise_ulps`); the verdicts are the framework's all the same.
    """
    arms = [("none", 1), ("none", ROWS), ("ngram", 1), ("ngram", ROWS), ("draft_target", ROWS)]
    records = {f"{drafter}_b{rows}": decode(target, drafter, requests, rows).records for drafter, rows in arms}
    verdicts = greedy_verdicts(target, records, "none_b1")
    prompts, drafts = _ragged_tokens(target.vocab_size, 0)
    noise = noise_ulps(ragged_logits(target, prompts, drafts), stock_logits(target, prompts, drafts), target.dtype)
    bound = max(NEAR_TIE_ULPS[target.dtype], 2 * noise if is_random else 0.0)
    widest = max(verdict["max_gap_ulps"] for verdict in verdicts.values())
    return {"arms": verdicts, "noise_ulps": noise, "bound_ulps": bound, "is_ok": widest <= bound}


def sampling(target: TargetModel, requests: Sequence[Request]) -> dict[str, Any]:
    """Same request and seed, same tokens: twice at batch 8, and at batch 1 and 8.

    A draw that falls within CDF_TOLERANCE of the border between two tokens may go either way when another batch rounds
    the logits differently. For autoregressive decoding each difference is looked up; for the others, which make more
    draws, up to a quarter of the texts may differ.
    """
    result: dict[str, Any] = {}
    for drafter in DRAFTERS:
        one = _by_id(decode(target, drafter, requests, 1, WARM))
        many = _by_id(decode(target, drafter, requests, ROWS, WARM))
        again = _by_id(decode(target, drafter, requests, ROWS, WARM))
        differing = [name for name in one if one[name] != many[name]]
        part: dict[str, Any] = {
            "num_texts": len(one),
            "num_identical_b1_b8": len(one) - len(differing),
            "num_identical_repeated": sum(many[name] == again[name] for name in many),
        }
        is_ok = part["num_identical_repeated"] == len(many)
        if drafter == "none":
            by_id = {request.request_id: request for request in requests}
            part["border_distances"] = [border_distance(target, by_id[n], one[n], many[n]) for n in differing]
            is_ok = is_ok and all(distance <= CDF_TOLERANCE for distance in part["border_distances"])
        else:
            is_ok = is_ok and len(differing) <= len(one) // 4
        result[drafter] = part | {"is_ok": is_ok}
    return {"drafters": result, "sampling": str(WARM), "is_ok": all(part["is_ok"] for part in result.values())}


@torch.inference_mode()
def border_distance(target: TargetModel, request: Request, a: Sequence[int], b: Sequence[int]) -> float:
    """How far the draw at the first difference of two autoregressive texts lies from the border between the tokens.

    Returns:
        Distance as a share of the unit interval; 1.0 where one text is merely the beginning of the other.
    """
    place = first_difference(a, b)
    if place is None or place >= min(len(a), len(b)):
        return 1.0
    prefix = [*request.prompt_ids, *a[:place]]
    target.open(1, len(prefix) + 1)
    logits_1V, _ = target.prefill([0], [prefix])
    cdf_V = probabilities(logits_1V, WARM)[0].double().cumsum(0)
    # Token 0 comes from prefill; round r of the loop draws token r.
    purpose = "first" if place == 0 else "recover"
    uniform = float(RowGenerators([request.seed], [place], target.device).uniform(purpose, 1)[0, 0])
    low, high = sorted((a[place], b[place]))
    borders_M = cdf_V[low:high] / cdf_V[-1]
    return float((borders_M - uniform).abs().min())


def ragged(target: TargetModel, seed: int = 0) -> dict[str, Any]:
    """Packed ragged prefill and verify against the stock model, row by row, in the target's dtype."""
    prompts, drafts = _ragged_tokens(target.vocab_size, seed)
    own_MV, stock_MV = ragged_logits(target, prompts, drafts), stock_logits(target, prompts, drafts)
    return _error(own_MV, stock_MV)


def between_devices(cpu: TargetModel, target: TargetModel, seed: int = 0) -> dict[str, Any]:
    """The same packed calls on the CPU and on the device."""
    prompts, drafts = _ragged_tokens(target.vocab_size, seed)
    return _error(ragged_logits(target, prompts, drafts), ragged_logits(cpu, prompts, drafts))


@torch.inference_mode()
def ragged_logits(target: TargetModel, prompts: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]]) -> Tensor:
    """float32 [B + N, V] on the CPU: after each prompt, then after each drafted token, row after row."""
    rows = list(range(len(prompts)))
    target.open(len(rows), max(len(p) + len(d) for p, d in zip(prompts, drafts, strict=True)))
    first_BV, _ = target.prefill(rows, prompts)
    tokens = torch.tensor([token for draft in drafts for token in draft]).to(target.device)
    later_NV, _ = target.forward(rows, tokens, [len(draft) for draft in drafts])
    return torch.cat([first_BV, later_NV]).float().cpu()


@torch.inference_mode()
def stock_logits(target: TargetModel, prompts: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]]) -> Tensor:
    """The same numbers out of the untouched model, one row a call."""
    firsts, laters = [], []
    with target.stock() as model:
        for prompt, draft in zip(prompts, drafts, strict=True):
            ids = torch.tensor([[*prompt, *draft]], device=target.device)
            logits_SV = model(input_ids=ids, use_cache=False).logits[0].float().cpu()
            firsts.append(logits_SV[len(prompt) - 1 : len(prompt)])
            laters.append(logits_SV[len(prompt) :])
    return torch.cat([*firsts, *laters])


def _ragged_tokens(vocab_size: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(num: int) -> list[int]:
        return torch.randint(vocab_size, (num,), generator=generator).tolist()

    return [draw(num) for num in PROMPT_LENGTHS], [draw(num) for num in VERIFY_LENGTHS]


def _error(a_MV: Tensor, b_MV: Tensor) -> dict[str, Any]:
    """Largest difference, and that over the largest logit. NaN is never ok."""
    max_abs, scale = float((a_MV - b_MV).abs().max()), float(b_MV.abs().max())
    relative = max_abs / scale
    return {"max_abs_error": max_abs, "max_relative_error": relative, "is_ok": relative <= MAX_RELATIVE_ERROR}


def noise_ulps(a_MV: Tensor, b_MV: Tensor, dtype: torch.dtype) -> float:
    """Largest difference of two ways to compute the same logits, in units in the last place of each row's best."""
    widest_M = (a_MV - b_MV).abs().amax(-1)
    return float((widest_M / ulp(b_MV.amax(-1), dtype)).max())


def _by_id(trace: Trace) -> dict[str, list[int]]:
    return {record.request.request_id: record.output_ids for record in trace.records}
