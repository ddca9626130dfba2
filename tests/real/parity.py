"""Compares outputs with those of Hugging Face's own code, and prints a table:
python -m tests.real.parity [--tokens 500] [--model NAME]...

For each model family, transport and pair of tensor-parallel sizes, a real cluster continues prompts with the likeliest
tokens. A token is wrong if transformers, in float32 with the same random weights and the same tokens before, prefers
another token by more than a rounding error. Models with experts are left out in bfloat16, because rounding may choose
other experts and thus other tokens.
"""

import argparse
import sys
import tempfile
from functools import cache, partial
from pathlib import Path

import torch
from pdreal.clients import Tokens
from pdreal.model.weights import RandomWeights
from pdreal.settings.model import from_catalog
from pdreal.settings.options import Options
from pdreal.transports.opening import open_transport
from pdreal.transports.protocol import UnavailableError

from pdsim.workload.request_spec import Streams
from tests.real import clusters
from tests.real.models import CPU
from tests.real.test_model import save

FAMILIES = (
    *("tiny-llama", "tiny-qwen3", "tiny-mistral", "tiny-windows"),
    *("tiny-hybrid", "tiny-qwen3-moe", "tiny-deepseek-v3"),
)
DENSE = FAMILIES[:4]
TRANSPORTS = {
    "cpu": ("shared-memory", "push", "mooncake-tcp", "nixl-cma"),
    "cuda": ("cuda-ipc", "push", "mooncake-nvlink", "nixl-cuda-ipc"),
}
TP_PAIRS = ((1, 1), (2, 1), (1, 2), (2, 2))
_ROUNDING = {"float32": 1e-3, "bfloat16": 0.05}
"""Tokens count as equally good if their logits differ by at most this. The standard deviation of logits is near 1."""


class RoundedWeights(RandomWeights):
    """Random weights that are rounded to bfloat16, so that both sides compute with the same numbers."""

    def whole(self, name, shape):
        return super().whole(name, shape).bfloat16().float()


@cache
def oracle(checkpoint):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def wrong_tokens(options, prompt, output):
    with torch.inference_mode():
        logits = oracle(options.weights)(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    return int((logits.max(dim=-1).values - chosen > _ROUNDING[options.dtype]).sum())


def run(name, options, transport, prefill_tp, decode_tp, num_tokens, num_prompts, *, whole_experts=False, a2a="none"):
    """Number of checked tokens, and number of wrong ones among them. transport: None: one aggregated instance."""
    has_experts = (whole_experts or a2a != "none") and from_catalog(name).experts is not None
    prefill, decode = (
        {"tp": tp, "ep": tp, "moe_a2a_backend": a2a if tp > 1 else "none"} if has_experts else {"tp": tp}
        for tp in (prefill_tp, decode_tp)
    )
    changes = {
        "model": name,
        "workload__num_requests": num_prompts,
        "workload__output_tokens": num_tokens,
        "client__concurrency": num_prompts,
    }
    pool = {"gpu": "h100", "pool_tokens": 4096, "max_running_requests": 8}
    if transport is None:
        aggregated = {**pool, **prefill, "chunked_prefill_tokens": 64}
        changes |= {"prefill": None, "decode": None, "aggregated": aggregated}
    else:
        servers = {"prefill": {**pool, **prefill, "chunked_prefill_tokens": 64}, "decode": {**pool, **decode}}
        changes |= {"network__transport": transport, **servers}
    real, resolved = clusters.run(clusters.scenario(**changes), options=options)
    assert real.failure is None, real.failure
    assert not real.leaks, real.leaks
    prompts = Tokens(from_catalog(name).vocab_size)
    specs = resolved.workload.requests(Streams(resolved.seed))
    outputs = [(prompts.ids(spec.prompt).ids(), real.outputs[spec.request_id]) for spec in specs]
    return sum(len(output) for _, output in outputs), sum(wrong_tokens(options, *each) for each in outputs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=500, help="of each prompt")
    parser.add_argument("--prompts", type=int, default=2, help="of each run")
    parser.add_argument("--model", action="append", choices=FAMILIES, help="all that suit the dtype if not given")
    parser.add_argument("--transport", action="append", help="all that are here if not given")
    parser.add_argument("--tp", action="append", help="as 2:1, of prefill and decode; all pairs if not given")
    parser.add_argument("--ep", action="store_true", help="each rank holds whole experts")
    parser.add_argument("--moe-a2a-backend", choices=["none", "deepep"], default="none", help="deepep: with --ep")
    parser.add_argument("--device", choices=TRANSPORTS, default="cpu")
    parser.add_argument("--dtype", choices=_ROUNDING, default="float32", help="what the cluster computes in")
    given = parser.parse_args()
    torch.set_num_threads(1)
    pairs = [tuple(map(int, pair.split(":"))) for pair in given.tp or ()] or TP_PAIRS
    transports = [None, *filter(partial(is_here, given.device), given.transport or TRANSPORTS[given.device])]
    columns = [f"{prefill} to {decode}" for prefill, decode in pairs]
    print(f"| model | transport | {' | '.join(f'TP {column}' for column in columns)} |")
    print("|---|---|" + "---|" * len(columns), flush=True)
    total = 0
    for name in given.model or (FAMILIES if given.dtype == "float32" else DENSE):
        with tempfile.TemporaryDirectory() as checkpoint:
            save(from_catalog(name), Path(checkpoint), RoundedWeights(0, CPU))
            options = Options(check_kv=True, device=given.device, dtype=given.dtype, weights=checkpoint)
            for transport in transports:
                cells = []
                for prefill_tp, decode_tp in pairs:
                    if prefill_tp != decode_tp and (transport is None or name == "tiny-hybrid"):
                        cells.append("")
                        continue
                    sizes = prefill_tp, decode_tp, given.tokens, given.prompts
                    experts = {"whole_experts": given.ep, "a2a": given.moe_a2a_backend}
                    checked, wrong = run(name, options, transport, *sizes, **experts)
                    total += wrong
                    cells.append(f"{wrong} of {checked}")
                print(f"| {name} | {transport or 'aggregated'} | {' | '.join(cells)} |", flush=True)
    raise SystemExit(bool(total))


def is_here(device, transport):
    try:
        open_transport(transport, torch.device(device)).close()
    except UnavailableError as missing:
        print(f"{transport}: {missing}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    main()
