# %% [markdown]
# # What does sending layer by layer save?
#
# **Question.** On a slow network, KV follows its forward and is part of TTFT. How much of the transfer disappears
# when layers are sent while later ones are computed, and how many groups of layers does it take? Qwen3.5-397B, TP8,
# 809 MB/s of TCP for each rank.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
from setting import EXPERIMENTS

from pdsim import load_scenario, simulate

SCENARIO = EXPERIMENTS / "layerwise-tcp" / "scenario.yaml"
PROMPT_TOKENS = (3500, 16000)
GROUPS = (1, 2, 4, 15, 60)


def exposed_ms(prompt_tokens, groups):
    """What of the transfer comes after the forward."""
    changes = [f"prefill.layer_groups={groups}", f"workload.input_tokens={prompt_tokens}", "workload.num_requests=5"]
    requests = simulate(load_scenario(SCENARIO, changes)).requests
    return ((requests["transfer_end_ns"] - requests["prefill_end_ns"]) / 1e6).mean()


# %%
figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
exposed = {}
for tokens in PROMPT_TOKENS:
    exposed[tokens] = [exposed_ms(tokens, groups) for groups in GROUPS]
    axes.plot(GROUPS, exposed[tokens], marker="o", label=f"{tokens:,} tokens")
axes.set_xscale("log")
axes.set_xticks(GROUPS, GROUPS)
axes.minorticks_off()
axes.set_xlabel("groups of layers")
axes.set_ylabel("transfer behind the forward, ms")
axes.set_ylim(0)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# **Reading.** What remains is the last group, which nothing can hide: with *n* groups about one *n*-th of the whole,
# as long as the network is faster than compute. Four groups take most of the gain; measured results and the fit are
# in [the study](../experiments/layerwise-tcp/README.md).

# %%
for of_prompt in exposed.values():
    for groups, remaining in zip(GROUPS, of_prompt, strict=True):
        assert abs(remaining - of_prompt[0] / groups) < 0.1 * of_prompt[0]
