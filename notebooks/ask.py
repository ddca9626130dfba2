# %% [markdown]
# # How many of the GPUs should prefill?
#
# **Compared.** Every split of the GPUs, with two routers unless the scenario names one.
#
# `name`, `scenario` and `options` are those of `pdsim ask`: another question, a scenario file of yours, and its flags,
# with underscores, such as `{"trace": "mine.csv", "changes": ["page_size=16"], "slo": "ttft p99 < 500 ms"}`. The first
# line of the answer says what it is about.

# %%
# %matplotlib inline
from pdsim import ask
from pdsim.metrics.plots import overview

name = "pd-ratio"
scenario = None
options = {}
answer = ask(name, scenario, **options)
answer

# %% [markdown]
# The same as a figure: whiskers are 95 % intervals, and the recommended way is filled.

# %%
answer.figure

# %% [markdown]
# The means are a DataFrame. Here each way against the recommended one, as multiples of it.

# %%
means = answer.table.drop(columns="remark")
(means / means.loc[answer.winner]).round(2)

# %% [markdown]
# ## The recommended way
#
# One run of it. Its requests are a DataFrame: a row each, times in ns since the run began, latencies in ms.

# %%
requests = answer.run.requests
requests[["num_prompt_tokens", "num_output_tokens", "ttft_ms", "tpot_ms", "e2e_ms"]].describe()

# %% [markdown]
# Where their time goes, and how full the instances are meanwhile.

# %%
overview(answer.run.records)

# %% [markdown]
# ## Ask again
#
# Does the answer hold with 16 requests at a time, and users who expect a TTFT of 500 ms?

# %%
changes = [*options.get("changes", []), "client={use: closed_loop, concurrency: 16}"]
again = ask(name, scenario, **options | {"changes": changes, "slo": "ttft < 500 ms and tpot < 50 ms for 90 %"})
again
