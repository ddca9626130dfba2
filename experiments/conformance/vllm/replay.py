"""Hold pdsim's vLLM instance to what vLLM's Scheduler did: python replay.py [LOAD ...]

The instance is told what its twin was told, before the same step. Then each step must compute the same tokens of the
same requests, preempt the same ones, and leave as many blocks free.
"""

import gzip
import json
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draws import STAGE_NS, Load, Settings, arrival_ns, load_of

from pdsim.core import messages as m
from pdsim.core.decode.decode_limits import DecodeLimits
from pdsim.core.engine_rules import VLLM_0_33
from pdsim.core.memory.block_cache import BlockCache
from pdsim.core.memory.kv_cache import KvCache
from pdsim.core.memory.radix_cache import PagePool
from pdsim.core.memory.vllm_hybrid_cache import VllmHybridCache
from pdsim.core.pipeline.staged_instances import StagedVllmInstance
from pdsim.core.prefill.prefill_limits import PrefillLimits
from pdsim.core.sequence import TokenIds
from pdsim.core.transfer.send_planner import RankPairLayout, SendPlanner
from pdsim.core.vllm.vllm_decode_instance import VllmDecodeInstance
from pdsim.core.vllm.vllm_forward_builder import TokenBudget
from pdsim.core.vllm.vllm_prefill_instance import VllmPrefillInstance
from pdsim.policy.pages import FreePages, LastAdmittedFirst, LeastRecentlyUsed, LowestPriorityFirst
from pdsim.policy.prefill import EveryChunk, FirstComeFirstServed, HighestPriorityFirst

LOGS = Path(__file__).parent / "logs"
Row = dict[str, Any]


@dataclass
class Outcome:
    num_compared: int = 0
    difference: str = ""
    """The first one."""
    num_left: int = 0
    """Decisions behind it."""


def _cache(settings: Settings) -> KvCache:
    pool, size = PagePool(settings.num_blocks), settings.block_size
    radix = BlockCache(pool, size, LeastRecentlyUsed()) if settings.enable_prefix_caching else None
    if settings.mamba_groups:
        return VllmHybridCache(pool, size, radix, settings.mamba_groups, computes=settings.kv_role != "kv_consumer")
    return KvCache(pool, size, radix)


def _budget(settings: Settings) -> TokenBudget:
    return TokenBudget(
        step_tokens=settings.max_num_batched_tokens,
        prompt_tokens=settings.long_prefill_token_threshold or None,
        has_fair_shares=settings.long_prefill_token_threshold_adaptive,
    )


class Replay:
    """An instance that computes and decodes, and what it is told."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.instance = self.make(load.settings)
        self.unseen: set[int] = set()
        """Preempted by steps that compute nothing."""

    def make(self, settings: Settings) -> Any:
        by_priority, stages = settings.policy == "priority", {}
        if settings.num_stages > 1:
            stages = {"num_stages": settings.num_stages}
        return (StagedVllmInstance if stages else VllmDecodeInstance)(
            "aggregated-0",
            cache=_cache(settings),
            limits=DecodeLimits(rules=VLLM_0_33, max_running_requests=settings.max_num_seqs),
            budget=_budget(settings),
            admission_policy=FreePages(),
            preemption_policy=LowestPriorityFirst(last_arrived=True) if by_priority else LastAdmittedFirst(),
            policy=HighestPriorityFirst() if by_priority else FirstComeFirstServed() if stages else None,
            **stages,
        )

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
            if any(isinstance(command, m.Failed) for command in self.begin(i, now_ns)):
                return f"{i} is refused"
        for i in row["abort"]:
            self.cancel(i, now_ns)
        for i in row.get("read", ()):
            self.end_read(i, now_ns)
        if row["preempted"] and not row["computed"]:
            self.unseen |= set(row["preempted"])
            return ""  # it takes no time: pdsim looks again at once
        unseen, self.unseen = self.unseen, set()
        held = self.holding()
        step, commands = self.instance.next_step(now_ns)
        found = {
            "computed": sorted(self.computed(step)),
            "preempted": sorted(held - self.holding() - unseen),
            "free": self.instance.cache.num_available_pages,
            "reads": self.reads(commands),
        }
        said = {"computed": sorted(row["computed"]), "preempted": row["preempted"], "free": row["free"]}
        said |= {"reads": row["reads"]} if self.load.settings.kv_role == "kv_consumer" else {}
        for what, expected in said.items():
            if found[what] != expected:
                return f"{what}: vLLM {expected}, pdsim {found[what]}"
        if not isinstance(step, m.Wait):
            chosen = [i for i, *_ in row["computed"]]
            ended = tuple((i, self.output(i)) for i in sorted(row["ended"], key=chosen.index))
            self.instance.on_step_done(step, m.StepResult(1, ended), now_ns)
        return ""

    def begin(self, i: int, now_ns: int) -> list[m.Command]:
        request, name = self.load.requests[i], self.instance.instance_id
        num_output_tokens = len(request.output)
        prompt = TokenIds(request.prompt)
        new = m.NewRequest(i, now_ns + i, prompt, num_output_tokens, name, name, priority=-request.priority)
        return self.instance.on_message(new, now_ns)

    def cancel(self, i: int, now_ns: int) -> list[m.Command]:
        return self.instance.on_message(m.Cancel(i, "aborted by the client"), now_ns)

    def end_read(self, i: int, now_ns: int) -> None:
        raise NotImplementedError

    def output(self, i: int) -> TokenIds:
        return TokenIds(self.load.requests[i].output)

    def holding(self) -> set[int]:
        return {request.request_id for request in self.instance.holding()}

    def reads(self, commands: list[m.Command]) -> list[int]:
        """Requests whose KV the instance reads from now on."""
        return []

    def computed(self, step: m.Step | m.Wait) -> list[list[int]]:
        """Request, tokens before, and tokens of each that the step computes."""
        prefill = step.prefill if isinstance(step, m.MixedStep) else step
        found = []
        if isinstance(prefill, m.PrefillStep):
            found = [[chunk.request_id, chunk.num_context_tokens, chunk.num_tokens] for chunk in prefill.chunks]
        if isinstance(step, m.MixedStep | m.DecodeStep):
            found += [[request.request_id, request.num_kv_tokens, 1] for request in self.instance.batch.requests()]
        return found


class PrefillReplay(Replay):
    """Decode's grant comes when it has read all."""

    def make(self, settings: Settings) -> Any:
        limits = PrefillLimits(
            max_running_requests=settings.max_num_seqs,
            chunked_prefill_tokens=settings.max_num_batched_tokens,
            max_prefill_tokens=settings.max_num_batched_tokens,
            overlap=False,
            optimistic_attempts=1,
            rules=VLLM_0_33,
        )
        layout = RankPairLayout(page_size=settings.block_size, page_bytes=1, num_planes=1)
        return VllmPrefillInstance(
            "prefill-0",
            cache=_cache(settings),
            limits=limits,
            policy=FirstComeFirstServed(),
            planner=SendPlanner("prefill-0", layout, EveryChunk()),
            budget=_budget(settings),
            hold_timeout_ns=None,
        )

    def cancel(self, i: int, now_ns: int) -> list[m.Command]:
        """Nothing is under way."""
        commands = super().cancel(i, now_ns)
        if any(isinstance(command, m.Tell) for command in commands):
            self.instance.on_message(m.KvSent(i), now_ns)
        return commands

    def end_read(self, i: int, now_ns: int) -> None:
        num_pages = -(-len(self.load.requests[i].prompt) // self.load.settings.block_size)
        self.instance.on_message(m.KvGranted(i, 0, tuple(range(1, num_pages + 1))), now_ns)
        self.instance.on_message(m.KvSent(i), now_ns)

    def holding(self) -> set[int]:
        """Those that may be preempted."""
        return super().holding() - set(self.instance.sending)


class DecodeReplay(Replay):
    """vLLM computes a prompt's last token again: here that is the token which comes with the KV."""

    def begin(self, i: int, now_ns: int) -> list[m.Command]:
        request, name = self.load.requests[i], self.instance.instance_id
        prompt = TokenIds(request.prompt[:-1])
        new = m.NewRequest(i, now_ns + i, prompt, len(request.output) + 1, "prefill-0", name)
        return self.instance.on_message(new, now_ns)

    def end_read(self, i: int, now_ns: int) -> None:
        self.instance.on_message(m.KvArrived(i, first_token_ends=False), now_ns)

    def output(self, i: int) -> TokenIds:
        request = self.load.requests[i]
        return TokenIds([*request.prompt[-1:], *request.output])

    def reads(self, commands: list[m.Command]) -> list[int]:
        sent = [command.message for command in commands if isinstance(command, m.Send)]
        return sorted(message.request_id for message in sent if isinstance(message, m.KvGranted))


class StagedReplay(Replay):
    """An instance with pipeline stages, on the clock of stages.py. vLLM chooses a batch when the batch before the
    oldest one has ended, pdsim when the oldest one has ended. So batches are compared in their order, without times.
    """

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self.num_made = [0] * len(load.requests)
        self.under_way: deque[tuple[int, m.Step, list[int]]] = deque()
        """End in ns, step, and the requests that get a token, of each step, the oldest first."""
        self.free_ns = [0] * load.settings.num_stages
        arrivals = [(arrival_ns(i, one.at_step), i, self.begin) for i, one in enumerate(load.requests)]
        aborts = [(i, one.abort_at_step) for i, one in enumerate(load.requests) if one.abort_at_step is not None]
        gone = [(arrival_ns(i, at_step), i, self.cancel) for i, at_step in aborts]
        self.events = deque(sorted([*arrivals, *gone], key=lambda event: event[:2]))

    def run(self, rows: list[Row]) -> Outcome:
        outcome, batches = Outcome(), self.batches()
        for place, row in enumerate(rows):
            found, expected = next(batches, []), sorted(row["computed"])
            if found != expected:
                outcome.difference = f"batch {place}: vLLM {expected}, pdsim {found}"
                outcome.num_left = sum(_num_decisions(later) for later in rows[place:])
                break
            outcome.num_compared += _num_decisions(row)
        return outcome

    def batches(self) -> Iterator[list[list[int]]]:
        """What each step computes."""
        now_ns, most = 0, self.load.settings.num_stages
        while True:
            while self.events and self.events[0][0] <= now_ns:
                _, i, tell = self.events.popleft()
                tell(i, now_ns)
            step, _ = self.instance.next_step(now_ns)
            if not isinstance(step, m.Wait):
                yield sorted(self.computed(step))
                self._start(step, now_ns)
            elif not self.under_way:
                if not self.events:
                    return
                now_ns = self.events[0][0]
                continue
            if isinstance(step, m.Wait) or len(self.under_way) == most:
                end_ns, oldest, tokens = self.under_way.popleft()
                now_ns = max(now_ns, end_ns)
                self.instance.on_step_done(oldest, m.StepResult(1, tuple(self._ended(tokens))), now_ns)

    def computed(self, step: m.Step | m.Wait) -> list[list[int]]:
        decode, prompts = _decoded(step), super().computed(step.prefill if isinstance(step, m.MixedStep) else step)
        done = [[i, len(self.load.requests[i].prompt) + self.num_made[i] - 1, 1] for i in decode]
        return done if isinstance(step, m.DecodeStep) else [*prompts, *done]

    def _start(self, step: m.Step, now_ns: int) -> None:
        prefill = step.prefill if isinstance(step, m.MixedStep) else step
        chunks = prefill.chunks if isinstance(prefill, m.PrefillStep) else ()
        tokens = [*(chunk.request_id for chunk in chunks if chunk.is_last), *_decoded(step)]
        end_ns = now_ns
        for stage, free_ns in enumerate(self.free_ns):
            self.free_ns[stage] = end_ns = max(end_ns, free_ns) + STAGE_NS
        self.under_way.append((end_ns, step, tokens))

    def _ended(self, tokens: list[int]) -> Iterator[tuple[int, TokenIds]]:
        for i in tokens:
            self.num_made[i] += 1
            if self.num_made[i] == len(self.load.requests[i].output):
                yield i, self.output(i)


def _decoded(step: m.Step | m.Wait) -> tuple[int, ...]:
    """Requests that decode in a step of a micro-batch."""
    decode = step.decode if isinstance(step, m.MixedStep) else step
    return decode.joined if isinstance(decode, m.DecodeStep) else ()


REPLAYS = {None: Replay, "kv_producer": PrefillReplay, "kv_consumer": DecodeReplay}


def _num_decisions(row: Row) -> int:
    return len(row["computed"]) + len(row["preempted"]) + 1


def compare(name: str) -> Outcome:
    rows = [json.loads(line) for line in gzip.decompress((LOGS / f"{name}.jsonl.gz").read_bytes()).splitlines()]
    load = load_of(name)
    replay = StagedReplay if load.settings.num_stages > 1 else REPLAYS[load.settings.kv_role]
    return replay(load).run(rows)


def names() -> list[str]:
    """All loads that have a log, by kind and seed."""
    found = [path.name.partition(".")[0] for path in LOGS.iterdir()]
    return sorted(found, key=lambda name: (name.rpartition("-")[0], int(name.rpartition("-")[2])))


def main() -> None:
    print("| load | decisions compared | behind the first difference |")
    print("|---|---|---|")
    for name in sys.argv[1:] or names():
        outcome = compare(name)
        print(f"| {name} | {outcome.num_compared} | {outcome.num_left} |")
        if outcome.difference:
            print("   ", load_of(name).settings, outcome.difference[:600])


if __name__ == "__main__":
    main()
