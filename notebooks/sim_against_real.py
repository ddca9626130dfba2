# %% [markdown]
# # Simulated against real
#
# **Question.** `pdreal` ran scenarios on H200s, and left run folders. The same scenarios simulated, with a profile
# of microbenchmarks and single served requests: how far apart are the steps, and how far apart is what clients saw?

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import pandas as pd
from setting import FAST, REAL

from pdsim import StoredRun, load_scenario, simulate

RUNS = ("c1", "c16") if FAST else ("c1", "c16", "c32", "c64", "in512_c16", "in4k_c8")

# %% [markdown]
# A run folder, real or simulated, has the same tables as a run that was just simulated.

# %%
real = {name: StoredRun(REAL / "data" / name) for name in RUNS}
PROFILE = (REAL / "profile.yaml").resolve()
KNOWN = [
    f"cost={{profile: {PROFILE}}}",
    f"network={{transport: mooncake-nvlink, profile: {PROFILE}}}",
    f"front_end={{profile: {PROFILE}}}",
]
simulated = {name: simulate(load_scenario(run.folder / "scenario.yaml", KNOWN)) for name, run in real.items()}


def of_tokens(run, kind, unit):
    """Time of all forwards, without the first of a process, by what they count: tokens of prompts, or decode steps."""
    steps = run.steps[run.steps["kind"] == kind].iloc[1:]
    return steps["duration_ns"].sum() / steps[unit].sum()


def figures(run):
    return {
        "prefill, us a token": of_tokens(run, "prefill", "num_tokens") / 1e3,
        "decode step, ms": of_tokens(run, "decode", "num_steps") / 1e6,
        "median TPOT, ms": run.requests["tpot_ms"].median(),
        "median TTFT, ms": run.requests["ttft_ms"].median(),
    }


sides = {"real": real, "simulated": simulated}
table = pd.concat(
    {side: pd.DataFrame({name: figures(run) for name, run in runs.items()}).T for side, runs in sides.items()}, axis=1
)
table.round(2)

# %%
figure, panels = plt.subplots(1, 4, figsize=(13, 3.4), layout="constrained")
for panel, quantity in zip(panels, table["real"], strict=True):
    x, y = table["real"][quantity], table["simulated"][quantity]
    ends = [0, 1.15 * max(x.max(), y.max())]
    panel.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color="0.9", label="±10 %")
    panel.plot(ends, ends, color="gray", linewidth=0.8)
    panel.scatter(x, y)
    for name in table.index:
        panel.annotate(name, (x[name], y[name]), textcoords="offset points", xytext=(4, -8), fontsize=7)
    panel.set(xlim=ends, ylim=ends, xlabel="real", ylabel="simulated", title=quantity)
panels[0].legend(frameon=False)
plt.show()

# %% [markdown]
# **Reading.** Forwards lie near the line: microbenchmarks know what they cost, and TPOT follows. With one client some
# of twenty were launched late by the host. TTFT needs more, for single milliseconds decide how many requests meet in
# one prefill; over many requests of drawn lengths that evens out.
# [What is known of the errors](../docs/fidelity.md).

# %%
error = table["simulated"] / table["real"] - 1
assert error["prefill, us a token"].drop("c1").abs().max() < 0.15
assert error["prefill, us a token"].abs().max() < 0.2
assert error["decode step, ms"].abs().max() < 0.1
assert error["median TPOT, ms"].abs().max() < 0.15
