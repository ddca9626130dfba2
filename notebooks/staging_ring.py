# %% [markdown]
# # How large must the staging ring be?
#
# **Question.** Where prefill and decode lay out heads differently, KV goes through staging memory on decode.
# Qwen3.5-397B on GB200, 12 prefill instances for one decode instance: which ring is too small, and why?

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
from setting import EXPERIMENTS, FAST

from pdsim import load_scenario, simulate

SCENARIO = EXPERIMENTS / "staging-ring-gb200" / "scenario.yaml"
CONCURRENCY = 256 if FAST else 1024
LOAD = [
    "prefill.instances=12",
    "prefill.chunked_prefill_tokens=4096",
    "workload.output_tokens=60",
    f"workload.num_requests={2 * CONCURRENCY}",
    f"client.concurrency={CONCURRENCY}",
]
RINGS_MIB = (64, 512, 1024) if FAST else (64, 128, 256, 512, 1024)

# %%
slices = simulate(load_scenario(SCENARIO, LOAD))
staged = {mib: simulate(load_scenario(SCENARIO, [*LOAD, f"network.staging={{ring: {mib} MiB}}"])) for mib in RINGS_MIB}

# %% [markdown]
# A transfer unit waits from when it is planned until a worker takes it: for its turn, and for room in the ring.

# %%
throughput = [run.summary()["output_throughput"] for run in staged.values()]
waits_ms = [((run.transfers["start_ns"] - run.transfers["queued_ns"]) / 1e6).mean() for run in staged.values()]

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
left.plot(RINGS_MIB, throughput, marker="o", label="staging")
left.axhline(slices.summary()["output_throughput"], color="gray", linestyle="--", label="slices, without staging")
left.set_ylabel("output tokens/s")
left.set_ylim(0)
left.legend(frameon=False)
right.plot(RINGS_MIB, waits_ms, marker="o")
right.set_yscale("log")
right.set_ylabel("a unit waits, ms")
for panel in (left, right):
    panel.set_xscale("log")
    panel.set_xticks(RINGS_MIB, RINGS_MIB)
    panel.minorticks_off()
    panel.set_xlabel("ring of one decode rank, MiB")
plt.show()

# %% [markdown]
# **Reading.** Any ring beats slices by far: one descriptor instead of 30,720. A ring must hold as many cells as
# requests arrive within one decode step, because decode gives places back between steps. Beyond that, a larger one
# buys nothing.

# %%
assert min(throughput) > 3 * slices.summary()["output_throughput"]
assert waits_ms[0] > 3 * waits_ms[-1]
assert abs(throughput[-1] / throughput[-2] - 1) < 0.05
