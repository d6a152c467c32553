"""Are the texts of every drafter those of autoregressive decoding? On every shipped prompt, at temperature 0.

In float32 on a CPU the token ids have to be the same; in lower precision differences are classed by teacher-forcing.
Prints a table and, as its last line, one JSON object; `--out FILE` keeps it. Exit code 1 if an arm is not lossless.

    python experiments/greedy_equality/run.py --dtype float32 --out results/greedy_equality_float32.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module

import dispark.config
from dispark.config import build
from dispark.decoding.loop import DecodingLoop
from dispark.measure import provenance
from dispark.measure.losslessness import greedy_verdicts
from dispark.schedulers.fixed import FixedScheduler
from dispark.targets.model import wrap
from dispark.targets.spec import load
from dispark.tasks.conversation import ConversationSource, context_need, render_fingerprint
from dispark.types import Sampling
from dispark.verifiers.rejection import RejectionVerifier

BASELINE = "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2_135m", help="an option of the target group")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16")
    parser.add_argument("--task", default="all", help="an option of the task group")
    parser.add_argument("--drafters", default="ngram,draft_model,draft_target", help="options of the drafter group")
    parser.add_argument("--tokens", type=int, default=32, help="tokens per answer")
    parser.add_argument("--batch", type=int, default=16, help="rows decoded at a time")
    parser.add_argument("--limit", type=int, help="the first so many prompts")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    options = parser.parse_args()
    dispark.config.make_conf_importable()
    names = [BASELINE, *options.drafters.split(",")]
    with initialize_config_module("dispark.conf", version_base="1.3"):
        words = [f"target={options.target}", f"target.dtype={options.dtype}", f"task={options.task}"]
        cfg = compose("bench", overrides=words)
        loaded = load(build(cfg.target))
        prompts = build(cfg.task).prompts()[: options.limit]
        drafters = {name: build(compose("bench", overrides=[*words, f"drafter={name}"]).drafter) for name in names}
    target = wrap(loaded)
    context = min(loaded.max_context, max(context_need(prompt, loaded.tokenizer, options.tokens) for prompt in prompts))
    records, rows = {}, []
    for name, drafter in drafters.items():
        source = ConversationSource(prompts, loaded.tokenizer, options.tokens, 0, max_context=context)
        loop = DecodingLoop(
            target,
            drafter,
            FixedScheduler(),
            RejectionVerifier(),
            Sampling(),
            decode=loaded.tokenizer.decode,
            batch_size=options.batch,
            num_slots=context + drafter.draft_length + 1,
            max_context=context,
        )
        start = time.perf_counter()
        trace = loop.run(source)
        records[name] = trace.records
        rounds = trace.rounds
        uncut = [row for row in rounds if row["end"] is None]
        rows.append(
            {
                "drafter": name,
                "matl": sum(row["num_emitted"] for row in rounds) / len(rounds),
                "matl_uncut": sum(row["num_accepted_raw"] + 1 for row in rounds) / len(rounds),
                "num_uncut_rounds": len(uncut),
                "min_accepted_uncut": min(row["num_accepted_raw"] for row in uncut),
                "draft_length": drafter.draft_length,
                "seconds": time.perf_counter() - start,
            }
        )
        print(f"{name}: {len(trace.records)} texts, {rows[-1]['seconds']:.0f} s", file=sys.stderr, flush=True)
    verdicts = greedy_verdicts(target, records, BASELINE)
    for row in rows:
        row |= verdicts[row["drafter"]]
        print(
            f"{row['drafter']:14s} {row['verdict']:9s} identical {row['num_identical']}/{row['num_texts']}  "
            f"near ties {row['num_near_tie']}, real {row['num_real']} of {row['num_tokens']} tokens, "
            f"widest gap {row['max_gap_ulps']:.2f} ulp, MATL {row['matl']:.3f}"
        )
    result: dict[str, Any] = {"target": loaded.name, "dtype": options.dtype, "task": options.task}
    result |= {"num_prompts": len(prompts), "tokens": options.tokens, "batch_size": options.batch}
    source = ConversationSource(prompts, loaded.tokenizer, options.tokens, 0)
    result |= {"fingerprint": render_fingerprint(source.rendered), "weights_sha256": loaded.weights_sha256}
    result |= {"arms": rows, "provenance": provenance.collect(target.device, target.dtype)}
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key != "provenance"}))
    return int(any(row["verdict"] == "real" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
