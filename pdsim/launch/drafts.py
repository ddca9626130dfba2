"""Writes options for speculative decoding. Servers of both roles need them with SGLang, because prefill sends the KV of
the draft model.
"""

from pdsim.launch.commands import Launch
from pdsim.launch.words import Flags
from pdsim.scenario.schema import Scenario
from pdsim.system.catalog import load_model


def draft_flags(made: Launch, scenario: Scenario) -> Flags:
    """SGLang's options for speculative decoding. Empty: the scenario has no speculative decoding. Adds a note to `made`
    if the user must name the draft model's checkpoint.
    """
    decoding = scenario.servers[1]
    if decoding.acceptance is None:
        return []
    algorithm = decoding.speculative_algorithm or ("EAGLE" if scenario.num_draft_layers else "NGRAM")
    has_own_layers = algorithm in ("EAGLE", "NEXTN") and load_model(scenario.model).num_nextn_layers
    note = f"speculative_algorithm {algorithm}: the draft model is not in the scenario; "
    if not has_own_layers and algorithm != "NGRAM" and note not in " ".join(made.notes):
        named = decoding.speculative_draft_model
        made.notes.append(f"{note}give --speculative-draft-model-path{f' of {named}' if named else ''}")
    is_eagle = algorithm in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
    return [
        ("speculative-algorithm", algorithm),
        ("speculative-num-steps", decoding.num_draft_steps if is_eagle else None),
        ("speculative-eagle-topk", (decoding.speculative_eagle_topk or 1) if is_eagle else None),
        ("speculative-num-draft-tokens", decoding.speculative_draft_tokens),
    ]
