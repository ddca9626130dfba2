# %% [markdown]
# # Does a radix cache on decode pay?
#
# **Question.** Prefill always keeps the KV of shared prefixes. When is it worth it that decode keeps them too, and
# what does it cost?

# %%
# %matplotlib inline
from tempfile import mkdtemp

import matplotlib.pyplot as plt
from setting import FAST

from pdsim import sweep

# %% [markdown]
# [`radix.yaml`](radix.yaml) has the points: a pool of few or many prefixes, with the cache and without it. All have
# the same seed, so that a difference is none of the load. A sweep's table has a row for each point and seed.

# %%
short = ["workload.num_requests=80"] if FAST else []
runs = sweep("radix.yaml", out=mkdtemp(), changes=short, jobs=1).table
assert (runs["status"] == "ok").all()
METRICS = [
    "decode_cache_hit_rate",
    "mean_running_requests_per_step",
    "request_throughput",
    "median_ttft_ms",
    "mean_itl_ms",
]
found = runs.set_index(["workload.num_prefixes", "decode.radix_cache"])[METRICS]
found

# %%
figure, panels = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
titles = {"request_throughput": "requests/s", "median_ttft_ms": "median TTFT, ms", "mean_itl_ms": "mean ITL, ms"}
for panel, (metric, title) in zip(panels, titles.items(), strict=True):
    for has_cache, values in found[metric].unstack().items():
        panel.plot(values.index, values, marker="o", label="with cache" if has_cache else "without")
    panel.set_xscale("log")
    panel.set_xticks(values.index, values.index)
    panel.minorticks_off()
    panel.set_xlabel("prefixes")
    panel.set_ylabel(title)
    panel.set_ylim(0)
panels[0].legend(frameon=False)
plt.show()

# %% [markdown]
# **Reading.** With few prefixes, decode holds each once for all requests: more of them fit, and TTFT falls from
# seconds of waiting for pages. A larger batch takes longer to decode: each shared token is read once in a
# [wave of attention](../docs/behaviour/decode-steps.md), not once for all, and ITL rises.
# With more prefixes than either pool can hold, the cache finds little, and changes little.

# %%
few, many = (found.loc[prefixes] for prefixes in (4, 64))
assert few.loc[True, "request_throughput"] > 1.4 * few.loc[False, "request_throughput"]
assert few.loc[True, "mean_running_requests_per_step"] > few.loc[False, "mean_running_requests_per_step"]
assert few.loc[True, "mean_itl_ms"] > few.loc[False, "mean_itl_ms"]
assert many.loc[True, "request_throughput"] < 1.2 * many.loc[False, "request_throughput"]
