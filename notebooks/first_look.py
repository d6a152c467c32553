# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A first look at a run
#
# Measures prompt lookup against autoregressive decoding on a tiny model with random weights, then reads the run back.
# It takes seconds and downloads nothing; the model's texts mean nothing, the shape of the results is that of any run.
# To look at a run of your own, set `DISPARK_NOTEBOOK_RUNS` to a folder of runs. METRICS.md defines every figure.

# %%
import os
import tempfile

import matplotlib.pyplot as plt
import pandas as pd

from dispark.cli import main
from dispark.runs.compare import compare_arms
from dispark.runs.loaded import load_runs

# %% [markdown]
# ## Measure
# The words are those of the command line: `dispark bench target=tiny drafter=ngram ...`. Narrower weights than the
# YAML's make the text fall into loops now and then, so that prompt lookup finds something.

# %%
runs = os.environ.get("DISPARK_NOTEBOOK_RUNS")
if runs is None:
    folder = tempfile.TemporaryDirectory(prefix="dispark-first-look-")  # gone when this process ends
    runs = folder.name
    words = [
        "target=tiny",
        "target.device=cpu",
        "target.sources.random.config.initializer_range=0.12",
        "drafter=ngram",
        "task=smoke",
        "on_overlong=skip",
        "max_new_tokens=32",
        "meter=none",
        f"paths.runs='{runs}'",
    ]
    assert main(["bench", *words]) == 0

# %% [markdown]
# ## Read back
# A run holds its raw rounds, steps and requests; every figure below is computed from them.

# %%
found = load_runs([runs])
run = next((one for one in found if one.arm != "none"), found[0])
summary = run.summary()
table = compare_arms(run)
columns = ["drafter", "matl", "throughput_tokens_per_s", "speedup", "speedup_ci", "losslessness", "degenerate_share"]
table[columns]

# %% [markdown]
# ## Acceptance by position
# `acceptance_at[k]`: the share of rounds that accepted positions 1..k; `conditional_acceptance_at[k]`: of those that
# accepted 1..k-1, the share that accepted k as well. A position that no round verified is missing, not 0.

# %%
rates = ("acceptance_at", "conditional_acceptance_at")
positions = pd.Index(range(1, summary["draft_length"] + 1), name="position")
acceptance = pd.DataFrame({name: summary[name] for name in rates}, index=positions, dtype=float)
acceptance.round(3)

# %% [markdown]
# ## Where a round's time goes
# Shares of the wall time of all rounds. `host` is what the phases leave over.

# %%
arms = ["none", run.arm] if run.arm != "none" else ["none"]
phases = pd.DataFrame({arm: run.summary(arm=arm)["phase_share"] for arm in arms}).T.rename_axis("arm")
phases.round(3)

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
if len(acceptance):
    acceptance.plot(ax=left, marker="o", ylim=(0, 1.05), ylabel="share of rounds", title=f"{run.arm}: acceptance")
phases.plot.barh(ax=right, stacked=True, xlabel="share of a round", title="phases")
right.legend(fontsize="small", ncols=2)
plt.show()
