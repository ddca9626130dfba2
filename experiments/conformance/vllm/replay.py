"""Hold pdsim's vLLM instance to what vLLM's Scheduler did: python replay.py [SEED ...]

The instance is told what its twin was told, before the same step. Then each step must compute the same tokens of the
same requests, preempt the same ones, and leave as many blocks free.
"""

import gzip
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draws import Load, random_load

from pdsim.core import messages as m
from pdsim.core.decode_limits import DecodeLimits
from pdsim.core.engine_rules import VLLM_0_33
from pdsim.core.kv_cache import KvCache
from pdsim.core.page_pool import PagePool
from pdsim.core.radix_cache import RadixCache
from pdsim.core.sequence import TokenIds
from pdsim.core.vllm_instances import TokenBudget, VllmDecodeInstance
from pdsim.policy.pages import FreePages, LastArrivedFirst, LeastRecentlyUsed

LOGS = Path(__file__).parent / "logs"
Row = dict[str, Any]


@dataclass
class Outcome:
    num_compared: int = 0
    difference: str = ""
    """The first one."""
    num_left: int = 0
    """Decisions behind it."""


def twin(load: Load) -> VllmDecodeInstance:
    settings = load.settings
    pool, size = PagePool(settings.num_blocks), settings.block_size
    radix = RadixCache(pool, size, LeastRecentlyUsed()) if settings.enable_prefix_caching else None
    return VllmDecodeInstance(
        "aggregated-0",
        cache=KvCache(pool, size, radix),
        limits=DecodeLimits(rules=VLLM_0_33, max_running_requests=settings.max_num_seqs),
        budget=TokenBudget(
            step_tokens=settings.max_num_batched_tokens, prompt_tokens=settings.long_prefill_token_threshold or None
        ),
        admission_policy=FreePages(),
        preemption_policy=LastArrivedFirst(),
    )


class Replay:
    def __init__(self, load: Load) -> None:
        self.load, self.instance = load, twin(load)

    def run(self, rows: list[Row]) -> Outcome:
        outcome = Outcome()
        for place, row in enumerate(rows):
            outcome.difference = self.iterate(row)
            if outcome.difference:
                outcome.difference = f"step {row['step']}: {outcome.difference}"
                outcome.num_left = sum(_num_decisions(later) for later in rows[place:])
                break
            outcome.num_compared += _num_decisions(row)
        return outcome

    def iterate(self, row: Row) -> str:
        now_ns = row["step"] * 1000
        for i in row["new"]:
            request = self.load.requests[i]
            prompt, name = TokenIds(request.prompt), self.instance.instance_id
            new = m.NewRequest(i, now_ns + i, prompt, len(request.output), name, name)
            if any(isinstance(command, m.Failed) for command in self.instance.on_message(new, now_ns)):
                return f"{i} is refused"
        for i in row["abort"]:
            self.instance.on_message(m.Cancel(i, "aborted by the client"), now_ns)
        held = {request.request_id for request in self.instance.holding()}
        step, _ = self.instance.next_step(now_ns)
        found = {
            "computed": sorted(self.computed(step)),
            "preempted": sorted(held - {request.request_id for request in self.instance.holding()}),
            "free": self.instance.cache.num_available_pages,
        }
        said = {"computed": sorted(row["computed"]), "preempted": row["preempted"], "free": row["free"]}
        for what, expected in said.items():
            if found[what] != expected:
                return f"{what}: vLLM {expected}, pdsim {found[what]}"
        if not isinstance(step, m.Wait):
            chosen = [i for i, *_ in row["computed"]]
            ended = tuple((i, TokenIds(self.load.requests[i].output)) for i in sorted(row["ended"], key=chosen.index))
            self.instance.on_step_done(step, m.StepResult(1, ended), now_ns)
        return ""

    def computed(self, step: m.Step | m.Wait) -> list[list[int]]:
        """Request, tokens before, and tokens of each that the step computes."""
        prefill = step.prefill if isinstance(step, m.MixedStep) else step
        found = []
        if isinstance(prefill, m.PrefillStep):
            found = [[chunk.request_id, chunk.num_context_tokens, chunk.num_tokens] for chunk in prefill.chunks]
        if isinstance(step, m.MixedStep | m.DecodeStep):
            found += [[request.request_id, request.num_kv_tokens, 1] for request in self.instance.batch.requests()]
        return found


def _num_decisions(row: Row) -> int:
    return len(row["computed"]) + len(row["preempted"]) + 1


def compare(seed: int) -> Outcome:
    rows = [json.loads(line) for line in gzip.decompress((LOGS / f"{seed}.jsonl.gz").read_bytes()).splitlines()]
    return Replay(random_load(seed)).run(rows)


def main() -> None:
    print("| load | decisions compared | behind the first difference |")
    print("|---|---|---|")
    for seed in [int(seed) for seed in sys.argv[1:]] or sorted(int(p.name.partition(".")[0]) for p in LOGS.iterdir()):
        outcome = compare(seed)
        print(f"| {seed} | {outcome.num_compared} | {outcome.num_left} |")
        if outcome.difference:
            print("   ", random_load(seed).settings, outcome.difference[:600])


if __name__ == "__main__":
    main()
