"""Whether the emitted texts are the target's own: the verdict that stands beside every result.

Greedy texts are checked after the fact: each one is teacher-forced through the target, and every token that is not the
argmax is classed by how far its logit lies below the best one. A packed verify of several tokens runs other kernels
than a single-token step, so in low precision two nearly equal logits may swap; that is a near tie, not an error.
Sampled texts can't be checked one by one: there the verifier is run on a small vocabulary over a grid of its random
numbers, which gives the exact law of what it emits.

It does not know which drafter made the texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dispark.decoding.target import TargetModel
from dispark.interfaces import Verifier
from dispark.types import Draft, RequestRecord, Sampling

# A token is a near tie if its logit is at most this many units in the last place below the best one. The unit is taken
# at the largest |logit| of the position: rounding errors come with the hidden state, and follow the size of the whole
# row of logits even where the best one happens to be small.
NEAR_TIE_ULPS = {torch.float64: 64.0, torch.float32: 64.0, torch.bfloat16: 4.0, torch.float16: 4.0}
_ROWS = 8


def ulp(value_M: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 [M]: the spacing of numbers of the dtype at each value's magnitude (0.125 for bfloat16 in [16, 32))."""
    _, exponent_M = torch.frexp(value_M.double().abs().clamp_min(torch.finfo(dtype).tiny))
    return torch.ldexp(torch.full_like(value_M, torch.finfo(dtype).eps, dtype=torch.float64), exponent_M - 1)


@dataclass(frozen=True)
class Gaps:
    """Teacher-forced comparison of one text: how far each emitted token lies below the argmax.

    num_near_tie and num_real count tokens that are not the argmax; max_gap_ulps is the widest gap in units in the last
    place, 0 where every token is the argmax.
    """

    num_tokens: int
    num_near_tie: int
    num_real: int
    max_gap_ulps: float


@torch.inference_mode()
def teacher_force(target: TargetModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Gaps]:
    """Compares texts with the target's argmaxes.

    Args:
        target: opened afresh; no row may be active that is still needed.
        texts: (prompt ids, output ids) pairs, outputs not empty.
    """
    results: list[Gaps] = []
    for batch in (texts[i : i + _ROWS] for i in range(0, len(texts), _ROWS)):
        longest = max(len(prompt) + len(output) for prompt, output in batch)
        target.open(len(batch), longest)
        rows = list(range(len(batch)))
        logits_BV, _ = target.prefill(rows, [prompt for prompt, _ in batch])
        for row, (_, output) in zip(rows, batch, strict=True):
            logits_NV = logits_BV[row : row + 1]
            if len(output) > 1:  # one row a call bounds the logits in memory
                tokens_N = torch.tensor(output[:-1]).to(target.device)
                logits_NV = torch.cat([logits_NV, target.forward([row], tokens_N, [len(output) - 1])[0]])
            results.append(_gaps(logits_NV, output, target.dtype))
    return results


def _gaps(logits_NV: Tensor, output: Sequence[int], dtype: torch.dtype) -> Gaps:
    best_N, argmax_N = logits_NV.max(-1)
    token_N = torch.tensor(list(output), device=logits_NV.device)
    own_N = logits_NV.gather(1, token_N.unsqueeze(1)).squeeze(1)
    gap_N = (best_N.double() - own_N.double()) / ulp(logits_NV.abs().amax(-1), dtype)
    is_off_N = argmax_N != token_N
    is_real_N = is_off_N & (gap_N > NEAR_TIE_ULPS[dtype])
    num_real, num_off = int(is_real_N.sum()), int(is_off_N.sum())
    return Gaps(len(output), num_off - num_real, num_real, float(gap_N[is_off_N].max()) if num_off else 0.0)


def greedy_verdicts(target: TargetModel, records: dict[str, list[RequestRecord]], baseline: str) -> dict[str, Any]:
    """One verdict per arm for temperature 0.

    Args:
        target: the target that decoded.
        records: the finished requests of each arm, all repeats.
        baseline: the arm whose texts the others are compared with.

    Returns:
        By arm: `verdict` ("lossless", "near_tie" or "real"), counts of near ties and real differences over the arm's
        distinct texts, `num_identical` of `num_texts` texts equal to the baseline's, `is_repeatable`, and the bound.
    """
    texts = {(r.request.prompt_ids, tuple(r.output_ids)) for arm in records.values() for r in arm}
    ordered = sorted(texts, key=lambda text: (len(text[0]) + len(text[1]), text))
    distinct = dict(zip(ordered, teacher_force(target, ordered), strict=True))
    own = {r.request.request_id: r for r in records.get(baseline, [])}
    # In fp32 on a CPU packed calls round alike, so two arms may not even differ by a near tie.
    must_equal = target.dtype == torch.float32 and target.device.type == "cpu"
    verdicts: dict[str, Any] = {}
    for arm, arm_records in records.items():
        mine = {(r.request.prompt_ids, tuple(r.output_ids)) for r in arm_records}
        gaps = [distinct[text] for text in mine]
        pairs = [(r, own[r.request.request_id]) for r in arm_records if r.request.request_id in own]
        num_same = sum(_is_same(a, b) for a, b in pairs)
        num_near, num_real = sum(g.num_near_tie for g in gaps), sum(g.num_real for g in gaps)
        is_real = num_real > 0 or (must_equal and num_same < len(pairs))
        verdicts[arm] = {
            "mode": "greedy",
            "verdict": "real" if is_real else "near_tie" if num_near or num_same < len(pairs) else "lossless",
            "num_tokens": sum(g.num_tokens for g in gaps),
            "num_near_tie": num_near,
            "num_real": num_real,
            "max_gap_ulps": max((g.max_gap_ulps for g in gaps), default=0.0),
            "near_tie_ulps": NEAR_TIE_ULPS[target.dtype],
            "num_texts": len(pairs),
            "num_identical": num_same,
            "is_repeatable": len({(r.request.request_id, tuple(r.output_ids)) for r in arm_records})
            == len({r.request.request_id for r in arm_records}),
        }
    return verdicts


def _is_same(a: RequestRecord, b: RequestRecord) -> bool:
    return a.request.prompt_ids == b.request.prompt_ids and a.output_ids == b.output_ids


# -- sampling -----------------------------------------------------------------------------------------------------


class _Grid:
    """Stands in for the rows' generators: given uniforms instead of drawn ones."""

    def __init__(self, accept_BG: Tensor, recover_B1: Tensor) -> None:
        self._values = {"accept": accept_BG, "recover": recover_B1}

    def uniform(self, purpose: str, num: int) -> Tensor:
        return self._values[purpose][:, :num]


def exact_law_error(verifier: Verifier, proposal: str) -> float:
    """Largest deviation between the law of what a verifier emits and the target's, on three tokens and two drafts.

    p and q are chosen so that every acceptance and recovery threshold is a multiple of 1/12; a grid of midpoints of
    that width then integrates over the random numbers exactly. Compared are the law of the first token, and that of
    the second given the first wherever the first draft was accepted.
    """
    p_TV = torch.tensor([[6, 3, 3], [3, 6, 3], [4, 4, 4]], dtype=torch.float64) / 12
    q_GV = torch.tensor([[3, 3, 6], [3, 3, 6]], dtype=torch.float64) / 12
    u = (torch.arange(12, dtype=torch.float64) + 0.5) / 12
    tokens = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    index = torch.cartesian_prod(torch.arange(len(tokens)), *[torch.arange(12)] * 3)
    drafts_BG = tokens[index[:, 0]]
    weight_B = torch.ones(len(index), dtype=torch.float64) / 12**3
    if proposal == "sampled":
        weight_B = weight_B * q_GV[0, drafts_BG[:, 0]] * q_GV[1, drafts_BG[:, 1]]
    else:  # a point mass on (1, 0)
        weight_B = weight_B * ((drafts_BG[:, 0] == 1) & (drafts_BG[:, 1] == 0))
    probs = q_GV.float().expand(len(index), 2, 3) if proposal == "sampled" else None
    verdict = verifier.accept(
        Draft(drafts_BG, [2] * len(index), probs),
        p_TV.log().float().repeat(len(index), 1),
        [2] * len(index),
        Sampling(1.0),
        _Grid(u[index[:, 1:3]], u[index[:, 3:4]]),  # type: ignore[arg-type]
    )
    first_B, second_B = verdict.tokens_BT[:, 0], verdict.tokens_BT[:, 1]
    law_V = torch.zeros(3, dtype=torch.float64).index_add_(0, first_B, weight_B)
    error = float((law_V - p_TV[0]).abs().max())
    goes_on_B = verdict.num_accepted_B >= 1
    joint_VV = torch.zeros(9, dtype=torch.float64)
    joint_VV.index_add_(0, (first_B * 3 + second_B)[goes_on_B], weight_B[goes_on_B])
    for row_V in joint_VV.view(3, 3):
        if row_V.sum() > 0:
            error = max(error, float((row_V / row_V.sum() - p_TV[1]).abs().max()))
    return error


def sampling_verdict(
    verifier: Verifier, proposal: str, is_scheduler_lossless: bool, is_drafter_tested: bool = True
) -> dict[str, Any]:
    """The verdict for temperatures above 0: the verifier's exact law on a toy, and the scheduler's word.

    That a drafter reports the law it drew from can't be seen in a run; for the project's own the tests prove it. With
    any other the verdict is "unproved", which also leaves open whether it tampers with what it is shown.
    """
    error = exact_law_error(verifier, proposal)
    is_exact = error < 1e-6
    is_lossless = is_exact and verifier.is_lossless and is_scheduler_lossless
    return {
        "mode": "sampling",
        "verdict": "not lossless" if not is_lossless else "lossless" if is_drafter_tested else "unproved",
        "is_drafter_tested": is_drafter_tested,
        "exact_law_error": error,
        "is_verifier_lossless": verifier.is_lossless and is_exact,
        "is_scheduler_lossless": is_scheduler_lossless,
    }
