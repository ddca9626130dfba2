# %% [markdown]
# # A policy of your own
#
# **Question.** Prefill computes prompts in the order of their arrival. Short prompts wait behind long ones. What
# changes if the prompt with the fewest tokens goes first, but nobody waits for ever?
#
# A policy is a dataclass with one method. It gets a read-only view, and answers with what comes next. Nothing is
# registered.

# %%
# %matplotlib inline
from collections.abc import Iterable
from dataclasses import dataclass

import matplotlib.pyplot as plt
from setting import FAST

from pdsim import load_scenario, simulate
from pdsim.metrics.plots import draw_ttft_cdf
from pdsim.policy.protocols import Pick
from pdsim.policy.views import PrefillView, QueuedPrefill


@dataclass
class FewestTokensFirst:
    """Fewest prompt tokens first; those who have waited for patience_ns come before all others."""

    patience_ns: int = 2_000_000_000

    def select(self, view: PrefillView) -> Iterable[Pick]:
        def rank(request: QueuedPrefill) -> tuple[bool, int, int]:
            is_patient = view.now_ns - request.arrival_ns <= self.patience_ns
            return (is_patient, request.num_prompt_tokens if is_patient else 0, request.request_id)

        return [Pick(request.request_id) for request in sorted(view.waiting, key=rank)]


# %% [markdown]
# A scenario names it by import path. Here that is this notebook, `__main__`; in a file, the file's name.
# `patience_ns` is written with its unit.

# %%
LOAD = [
    "workload={use: random_lengths, num_requests: 600, output_tokens: 100}",
    "workload.input_tokens={use: uniform, low: 200, high: 12000}",
    "client={use: open_loop, arrivals: {use: poisson, rate: 5.5/s}}",
]
if FAST:
    LOAD.append("workload.num_requests=150")
POLICIES = {
    "fcfs": "fcfs",
    "fewest tokens first": "__main__:FewestTokensFirst",
    "... patience of 0.5 s": "{use: '__main__:FewestTokensFirst', patience: 500 ms}",
}
runs = {
    name: simulate(load_scenario("first.yaml", [*LOAD, f"prefill.policy={policy}"]))
    for name, policy in POLICIES.items()
}

# %%
figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
draw_ttft_cdf(axes, {name: run.records.requests for name, run in runs.items()})
plt.show()

# %%
ttft = {name: run.requests["ttft_ms"] for name, run in runs.items()}
for name, values in ttft.items():
    print(f"{name:24} median {values.median():6,.0f} ms, p99 {values.quantile(0.99):6,.0f} ms")

# %% [markdown]
# **Reading.** Serving the shortest first halves no work, but most clients have less in front of them: the median
# falls. The longest prompts pay for it in the tail, and patience says how much. The same class runs on real GPUs
# (`pdreal run`), and `pdsim replay` tells whether it depends on anything but its view.

# %%
assert ttft["fewest tokens first"].median() < ttft["fcfs"].median()
