# %% [markdown]
# # Does a radix cache on decode pay, and what does it cost?
#
# **Compared.** Off, on, and on with half and a quarter of the clients in the decode batch.
#
# `asked` has the flags of `pdsim ask decode-cache`, with underscores, such as
# `{"gpus": 8, "input_tokens": "2000-8000", "changes": ["page_size=16"]}`. What is not in it has its default; the first
# line of the answer says what it is about.

# %%
# %matplotlib inline
from pdsim import ask
from pdsim.metrics.plots import overview

asked = {}
answer = ask("decode-cache", **asked)
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
# Any flag may be another one. Does the answer hold with 16 requests at a time, and users who expect a TTFT of 500 ms?

# %%
again = ask("decode-cache", **asked | {"rate": None, "concurrency": 16, "ttft_ms": 500})
again
