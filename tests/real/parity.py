"""Parity with Hugging Face's own code, a table: python -m tests.real.parity [--tokens 500] [--model NAME]...

For each family, transport and pair of tensor-parallel sizes a real cluster continues prompts greedily; a token is wrong
if transformers, with the same random weights and the tokens before it, would have another by more than a rounding.
"""

import argparse
import sys
import tempfile
from functools import cache
from itertools import product
from pathlib import Path

import torch
from pdreal.clients import Tokens
from pdreal.model.config import from_catalog
from pdreal.model.weights import RandomWeights
from pdreal.transports.protocol import UnavailableError, open_transport

from pdsim.workload.request_spec import Streams
from tests.real import clusters
from tests.real.models import CPU
from tests.real.test_model import save

FAMILIES = ("tiny-llama", "tiny-qwen3", "tiny-qwen3-moe", "tiny-deepseek-v3")
TRANSPORTS = ("shared-memory", "mooncake-tcp", "nixl-cma")
TP_PAIRS = ((1, 1), (2, 1), (1, 2), (2, 2))
_ROUNDING = 1e-3
"""Of logits, whose deviation is near one: two that are nearer are equally good."""


@cache
def oracle(name):
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        save(from_catalog(name), Path(folder), RandomWeights(0, CPU))
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def wrong_tokens(name, prompt, output):
    with torch.inference_mode():
        logits = oracle(name)(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    return int((logits.max(dim=-1).values - chosen > _ROUNDING).sum())


def run(name, transport, prefill_tp, decode_tp, num_tokens, num_prompts):
    """Tokens that were checked, and those of them that are wrong; transport: None for one instance."""
    changes = {
        "model": name,
        "workload__num_requests": num_prompts,
        "workload__output_tokens": num_tokens,
        "client__concurrency": num_prompts,
    }
    pool = {"gpu": "h100", "pool_tokens": 4096, "max_running_requests": 8}
    if transport is None:
        aggregated = {**pool, "tp": prefill_tp, "chunked_prefill_tokens": 64}
        changes |= {"prefill": None, "decode": None, "aggregated": aggregated}
    else:
        changes |= {"network__transport": transport, "prefill__tp": prefill_tp, "decode__tp": decode_tp}
    real, resolved = clusters.run(clusters.scenario(**changes))
    assert real.failure is None, real.failure
    assert not real.leaks, real.leaks
    prompts = Tokens(from_catalog(name).vocab_size)
    specs = resolved.workload.requests(Streams(resolved.seed))
    outputs = [(prompts.ids(spec.prompt).ids(), real.outputs[spec.request_id]) for spec in specs]
    return sum(len(output) for _, output in outputs), sum(wrong_tokens(name, *each) for each in outputs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=500, help="of each prompt")
    parser.add_argument("--prompts", type=int, default=2, help="of each run")
    parser.add_argument("--model", action="append", choices=FAMILIES, help="all if not given")
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="all that are here if not given")
    parser.add_argument("--tp", action="append", help="as 2:1, of prefill and decode; all pairs if not given")
    given = parser.parse_args()
    torch.set_num_threads(1)
    pairs = [tuple(map(int, pair.split(":"))) for pair in given.tp or ()] or TP_PAIRS
    columns = [f"{prefill} to {decode}" for prefill, decode in pairs]
    print(f"| model | transport | {' | '.join(f'TP {column}' for column in columns)} |")
    print("|---|---|" + "---|" * len(columns), flush=True)
    total = 0
    for name, transport in product(given.model or FAMILIES, [None, *(given.transport or TRANSPORTS)]):
        if transport is not None:
            try:
                open_transport(transport, CPU).close()
            except UnavailableError as missing:
                print(f"{transport}: {missing}", file=sys.stderr)
                continue
        cells = []
        for prefill_tp, decode_tp in pairs:
            if transport is None and prefill_tp != decode_tp:
                cells.append("")
                continue
            checked, wrong = run(name, transport, prefill_tp, decode_tp, given.tokens, given.prompts)
            total += wrong
            cells.append(f"{wrong} of {checked}")
        print(f"| {name} | {transport or 'aggregated'} | {' | '.join(cells)} |", flush=True)
    raise SystemExit(bool(total))


if __name__ == "__main__":
    main()
