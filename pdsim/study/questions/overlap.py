"""Does sending KV while it is computed pay: chunk by chunk, or layer by layer?"""

from pdsim.scenario.loading import Changes
from pdsim.scenario.sizing import layout_of
from pdsim.study.questions.base import Base
from pdsim.study.questions.question import Arm, Question, Verdict
from pdsim.study.questions.study import Study
from pdsim.study.questions.words import change, is_told_apart, milliseconds
from pdsim.system.catalog import load_model

_WHOLE, _CHUNKS, _SMALL = "whole prompt", "each chunk", "each chunk of 2,048"
_SMALL_TOKENS = 2048
_GROUPS = (2, 4)


def arms(base: Base) -> list[Arm]:
    """Layers need equal sizes on both sides, or latent KV."""
    scenario = base.scenario
    prefill, decode = layout_of(scenario, "prefill"), layout_of(scenario, "decode")
    chunks: Changes = {"prefill.transfer": "every_chunk", "prefill.layer_groups": 0}
    made = [
        Arm(_WHOLE, {"prefill.transfer": "whole_prompt", "prefill.layer_groups": 0}),
        Arm(_CHUNKS, chunks),
        Arm(_SMALL, {**chunks, "prefill.chunked_prefill_tokens": _SMALL_TOKENS * scenario.pair.prefill.dp}),
    ]
    if prefill.tp == decode.tp and prefill.pp == prefill.cp == 1:
        layers = load_model(scenario.model).num_layers
        made += [Arm(f"{n} groups of layers", {**chunks, "prefill.layer_groups": n}) for n in (*_GROUPS, layers)]
    return made


def verdict(study: Study) -> Verdict:
    labels = study.steady(study.labels())
    if _WHOLE not in labels:
        best = study.best(study.labels())
        return Verdict(best, f"Send by '{best}'", "the load is more than sending whole prompts can take.")
    meeting = [label for label in labels if study.meets(label)]
    best = min(meeting or labels, key=lambda label: study.metric(label, "mean_ttft_ms").mean)
    gain = study.ratio(best, _WHOLE, "mean_ttft_ms")
    exposed = {label: milliseconds(study.metric(label, "mean_prefill_transfer_kv_cache_ms")) for label in labels}
    if best == _WHOLE or not is_told_apart(gain):
        text = f"sent after the whole prompt, {exposed[_WHOLE]} of its transfer are exposed"
        text += ", and no other way has a mean TTFT that can be told apart."
        return Verdict(_CHUNKS if _CHUNKS in labels else best, "It hardly matters", text)
    text = f"mean TTFT is {change(gain)} than with whole prompts, since "
    text += f"{exposed[best]} instead of {exposed[_WHOLE]} of a transfer are not hidden by compute."
    return Verdict(best, f"Send by '{best}'", text, _others(study, best))


def _others(study: Study, best: str) -> list[str]:
    """Says what of it chunks alone bring."""
    if best == _CHUNKS or _CHUNKS not in study.steady(study.labels()):
        return []
    gain = study.ratio(_CHUNKS, _WHOLE, "mean_ttft_ms")
    if not is_told_apart(gain):
        return ["Sent chunk by chunk, SGLang's way, mean TTFT cannot be told from that of whole prompts."]
    return [f"Chunk by chunk, SGLang's way, mean TTFT is {change(gain)} than with whole prompts."]


QUESTION = Question(
    asks="Does sending KV while it is computed pay, by chunk or by layer?",
    columns=("attained", "ttft", "tail_ttft", "transfer", "forward", "rate"),
    arms=arms,
    verdict=verdict,
)
