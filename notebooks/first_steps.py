# %% [markdown]
# # First steps
#
# **Question.** Llama-3.1-8B on two H100s, 48 users, prompts of 16,000 shared and about 1,000 own tokens. Where does
# the time of a request go, and what does a second GPU for prefill change?

# %%
# %matplotlib inline
from setting import FAST

from pdsim import Observation, load_scenario, simulate
from pdsim.metrics.plots import comparison

# %% [markdown]
# A scenario is a file; changes are written as `--set` takes them. `levels` also records how full each instance is.

# %%
short = ["workload.num_requests=100"] if FAST else []
runs = {
    name: simulate(load_scenario("first.yaml", [*short, *changes]), Observation(levels=True))
    for name, changes in {"one prefill": [], "two prefill": ["prefill.instances=2"]}.items()
}

# %% [markdown]
# The requests of a run are a DataFrame: a row each, times in ns since the run began, latencies in ms.

# %%
one, two = (run.requests for run in runs.values())
one[["num_prompt_tokens", "num_output_tokens", "num_prefill_cached_tokens", "ttft_ms", "tpot_ms", "e2e_ms"]].describe()

# %%
comparison({name: run.summary() for name, run in runs.items()}, {name: run.records for name, run in runs.items()})

# %% [markdown]
# **Reading.** Prefill holds the shared prefixes in its cache, so that it computes little of a prompt. Most of the
# TTFT is not computing but `decode_bootstrap`: prefill starts when decode has pages for the request, and decode has
# none left. A second prefill GPU therefore hardly changes TTFT; memory on decode would.

# %%
waiting = ((one["admitted_ns"] - one["routed_ns"]) / 1e6).mean()
print(f"of {one['ttft_ms'].mean():,.0f} ms TTFT, {waiting:,.0f} ms wait for pages on decode")
assert waiting > 0.5 * one["ttft_ms"].mean()
assert two["ttft_ms"].median() > 0.7 * one["ttft_ms"].median()
