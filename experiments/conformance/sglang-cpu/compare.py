"""Hold pdsim's instances and router to what SGLang's did: python compare.py [LOAD ...]

Each instance is told what its twin was told, in the same iteration of its loop, and steps last as long as in the log.
Then all that it decides must be the same, in order and in the same iteration: who is admitted, resumed, merged,
retracted, which tokens of which prompts a forward computes, who is in a decode step, and how many pages are free and
evictable beside it. What comes behind a first difference follows from it, and is not compared.
"""

import gzip
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from loads import LOADS, Load, Request, Role, Servers
from random_loads import BEYOND, DrawnRequest, drawn_load

from pdsim.core.aggregated_instance import AggregatedInstance
from pdsim.core.aggregated_limits import AggregatedLimits
from pdsim.core.decode.decode_instance import DecodeInstance
from pdsim.core.decode.decode_limits import DecodeLimits
from pdsim.core.engine_rules import SGLANG_0_5_12, SGLANG_0_5_23
from pdsim.core.memory.kv_cache import KvCache
from pdsim.core.memory.radix_cache import PagePool, RadixCache
from pdsim.core.messages import (
    Abort,
    Arrival,
    AskOutput,
    Cancel,
    Command,
    DecodeStep,
    Failed,
    Finished,
    FirstToken,
    KvArrived,
    KvGranted,
    KvSent,
    LoadKv,
    MixedStep,
    NewRequest,
    PrefillDone,
    PrefillStep,
    PutOut,
    Retracted,
    Send,
    Step,
    StepResult,
    Tell,
    Wait,
)
from pdsim.core.prefill.prefill_instance import PrefillInstance
from pdsim.core.prefill.prefill_limits import PrefillLimits
from pdsim.core.routing.role_router import RoleRouter
from pdsim.core.routing.router import Router
from pdsim.core.sequence import TokenIds
from pdsim.core.transfer.send_planner import RankPairLayout, SendPlanner
from pdsim.policy.pages import FewestOutputsFirst, LeastRecentlyUsed, ReserveDecodeTokens
from pdsim.policy.prefill import (
    DepthFirst,
    EveryChunk,
    FirstComeFirstServed,
    HighestPriorityFirst,
    HighestResponseRatioFirst,
    LongestOutputFirst,
    LongestPrefixFirst,
    ShortestPrefillFirst,
)
from pdsim.policy.protocols import PrefillPolicy
from pdsim.policy.routing import RoundRobin

LOGS = Path(__file__).parent / "logs"
Instance = PrefillInstance | DecodeInstance | AggregatedInstance
Row = list[Any]
RULES = {"0.5.12": SGLANG_0_5_12, "0.5.23": SGLANG_0_5_23}
"""Of the recorded release, but for those that server/sitecustomize.py gives it."""
CHECKS = 1_000_000
"""Ids of requests with which the server looks whether it is well."""
FEW = 32
"""With so few running requests, decode of SGLang 0.5.12 has slots for twice as many more."""


@dataclass
class Outcome:
    num_compared: int = 0
    num_differing: int = 0
    difference: str = ""
    """The first one."""
    num_left: int = 0
    """Decisions behind the first difference."""


class DifferenceError(Exception):
    pass


def load_of(name: str) -> Load:
    return drawn_load(name) if name.startswith("drawn") else LOADS[name]


@dataclass
class Log:
    load: Load
    sent: list[Row]
    instances: dict[str, list[Row]] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str) -> "Log":
        text = gzip.decompress((LOGS / f"{name}.jsonl.gz").read_bytes()).decode()
        for i, check in enumerate(dict.fromkeys(re.findall(r"HEALTH_CHECK_[\d.]+", text))):
            text = text.replace(check, f"r{CHECKS + i}")
        rows = [json.loads(line) for line in text.splitlines()]
        log = cls(load_of(name), [row[1:] for row in rows if row[0] == "request"])
        for instance, of_one in groupby((row for row in rows if row[0] != "request"), key=lambda row: row[0]):
            log.instances[instance] = [row[1:] for row in of_one]
        return log

    def requests(self) -> list[Request]:
        return self.load.requests(random.Random(7))

    def prompts(self) -> list[TokenIds]:
        return [TokenIds(request.prompt) for request in self.requests()]


def cache(role: Role, servers: Servers) -> KvCache:
    pool, page_size = PagePool(role.max_total_tokens // servers.page_size), servers.page_size
    tree = RadixCache(pool, page_size, LeastRecentlyUsed()) if role.radix else None
    return KvCache(pool, page_size, tree, splits_at_prompt=RULES[servers.release].splits_at_prompt)


ORDERS: dict[str, type[PrefillPolicy]] = {
    "lpm": LongestPrefixFirst,
    "lof": LongestOutputFirst,
    "hrrn": HighestResponseRatioFirst,
    "dfs-weight": DepthFirst,
    "shortest-prefill-first": ShortestPrefillFirst,
}


def policy(role: Role) -> PrefillPolicy:
    first_come = HighestPriorityFirst if role.preempts else FirstComeFirstServed
    return ORDERS.get(role.policy, first_come)()


class Decode(DecodeInstance):
    """A decode instance of 0.5.12, which frees what aborted transfers hold when it looks at transfers."""

    stopped: list[int]
    """Requests whose transfers were aborted since."""

    def _admit(self, commands: list[Command]) -> None:
        super()._admit(commands)
        while self.stopped:
            self.on_message(Abort(self.stopped.pop(), "stopped"), self.now_ns)


def twin(name: str, servers: Servers) -> Instance:
    """The instance of that name, with the settings of its server."""
    page_size, role = servers.page_size, servers.prefill
    if name.startswith("decode"):
        assert servers.decode is not None
        role = servers.decode
        decode = (Decode if servers.release == "0.5.12" else DecodeInstance)(
            name,
            cache=cache(role, servers),
            limits=DecodeLimits(
                rules=RULES[servers.release],
                max_running_requests=role.max_running_requests,
                extra_slots=2 * role.max_running_requests if role.max_running_requests <= FEW else 0,
                saves_retracted=True,
            ),
            admission_policy=ReserveDecodeTokens(role.num_reserved_decode_tokens),
            preemption_policy=FewestOutputsFirst(),
        )
        if isinstance(decode, Decode):
            decode.stopped = []
        return decode
    if name.startswith("prefill"):
        layout = RankPairLayout(page_size=page_size, page_bytes=page_size, num_planes=4)
        return PrefillInstance(
            name,
            cache=cache(role, servers),
            limits=PrefillLimits(
                rules=RULES[servers.release],
                max_running_requests=role.max_running_requests,
                chunked_prefill_tokens=role.chunked_prefill_size,
                max_prefill_tokens=role.max_prefill_tokens,
                overlap=role.overlap,
            ),
            policy=policy(role),
            planner=SendPlanner(name, layout, EveryChunk()),
        )
    return AggregatedInstance(
        name,
        cache=cache(role, servers),
        limits=AggregatedLimits(
            rules=RULES[servers.release],
            max_running_requests=role.max_running_requests,
            chunked_prefill_tokens=role.chunked_prefill_size,
            max_prefill_tokens=role.max_prefill_tokens,
            overlap=False,
            preemption_threshold=10 if role.preempts else None,
            mixed_chunk=role.mixed,
        ),
        policy=policy(role),
        preemption_policy=FewestOutputsFirst(),
    )


DECISIONS = ("admitted", "resumed", "merged", "retracted", "failed")


class Replay:
    """One instance, and the log of its twin."""

    def __init__(self, name: str, log: Log) -> None:
        self.rows = log.instances[name]
        self.instance = twin(name, log.load.servers)
        self.requests = log.requests()
        self.outcome = Outcome()
        self.is_decode = isinstance(self.instance, DecodeInstance)
        self.new: dict[str, NewRequest] = {}
        self.made: dict[str, list[Any]] = {what: [] for what in DECISIONS}
        """Decisions of the instance in this iteration."""
        self.outputs = {rid: output for row in self.rows if row[2] == "ended" for rid, output in row[3]}
        self.ends_at_once = {rid for row in self.rows if row[2] == "merged" for rid, ends in row[3] if ends}
        self.unended = self.ends_at_once | {rid for row in self.rows if row[2] == "abort" for rid in row[3]}
        """Requests whose last token does not end them: they end as they join, or as they are given up."""
        self.sent = {rid for row in self.rows if row[2] == "sent" for rid in row[3]}
        self.aborted = {rid for row in self.rows if self.is_decode and row[2] == "abort" for rid in row[3]}
        """Requests of a decode instance that the client aborted: the router has told the client."""
        self.given_up: set[str] = set()
        """Requests that the client has aborted until now."""
        self.unseen: Step | Wait = Wait()
        """With overlap: the step whose result is not processed yet."""
        self.preempted: list[str] = []
        """Requests that gave way in this iteration: they come to the queue again."""
        self.back: set[str] = set()
        """Requests that were retracted."""

    def run(self) -> Outcome:
        iterations = [(i, list(rows)) for i, rows in groupby(self.rows, key=lambda row: row[0])]
        last = -1
        try:
            for i, rows in iterations:
                for _ in range(self.num_between(last, i)):
                    self.iterate([])
                self.iterate(rows)
                last = i
        except DifferenceError as difference:
            self.outcome.num_differing = 1
            self.outcome.difference = f"iteration {i}: {difference}"
            self.outcome.num_left = sum(_num_decisions(row) for row in self.rows if row[0] > i)
        return self.outcome

    def num_between(self, last: int, i: int) -> int:
        """Iterations that are not in the log: all that count, or one of a server, which goes on while it is idle."""
        num = i - last - 1 if last >= 0 else 0
        return num if isinstance(self.requests[0], DrawnRequest) else min(num, 1)

    def iterate(self, rows: list[Row]) -> None:
        now_ns = round(rows[0][1] * 1e9) if rows else 0
        said = [row for row in rows if row[2] in {"prefill", "decode"}]
        self.preempted = []
        for row in rows:
            self.tell(row, now_ns)
        step, commands = self.choose(now_ns)
        self.carry_out(commands, now_ns)
        self.check(rows)
        self.check_step(step, said[0] if said else None)
        if isinstance(self.instance, PrefillInstance) and self.instance.limits.overlap:
            self.unseen, step = step, self.unseen  # the result of the step before comes behind the choice of this one
        if not isinstance(step, Wait):
            ended = [(rid, output) for row in rows if row[2] == "ended" for rid, output in row[3]]
            if all(rid in self.unended for rid, _ in ended):
                ended = []  # of those that are given up, the instance asks for the outputs
            ended = [(int(rid[1:]), TokenIds(output)) for rid, output in ended if rid not in self.ends_at_once]
            commands = self.instance.on_step_done(step, StepResult(ended=tuple(ended)), now_ns)
            self.carry_out([command for command in commands if not isinstance(command, FirstToken)], now_ns)
        for row in rows:
            if row[2] == "sent":
                for rid in row[3]:
                    self.instance.on_message(KvSent(int(rid[1:])), now_ns)

    def choose(self, now_ns: int) -> tuple[Step | Wait, list[Command]]:
        """Of one iteration of SGLang's loop, which begins another if it has no step."""
        if isinstance(self.instance, PrefillInstance):
            return self.instance.next_step(now_ns)
        commands: list[Command] = []
        return self.instance.look(commands) or Wait(), commands

    def carry_out(self, commands: list[Command], now_ns: int) -> None:
        for command in commands:
            if isinstance(command, AskOutput):
                self.instance.on_message(self.put_out(command.request_id, command.num_tokens), now_ns)
            else:
                self.note(command)

    def put_out(self, request_id: int, num_tokens: int) -> PutOut:
        """The outputs of a request, which it may have lost before it was given up."""
        output = self.outputs.get(f"r{request_id}")
        if output is None:
            drawn = self.requests[request_id]
            assert isinstance(drawn, DrawnRequest)
            output = [*drawn.output, *[BEYOND] * num_tokens]
        return PutOut(request_id, TokenIds(output[:num_tokens]))

    def tell(self, row: Row, now_ns: int) -> None:
        """Pass on what its twin was told before it chose a step."""
        what, told = row[2], row[3]
        if what == "new" and told in self.new:
            self.preempted.append(told)
        elif what == "new":
            i = int(told[1:])
            request = Request(0, [0] * row[4], row[5]) if i >= CHECKS else self.requests[i]
            prompt, arrival_ns = TokenIds(request.prompt), now_ns + len(self.new)
            self.new[told] = NewRequest(
                i, arrival_ns, prompt, row[5], "prefill", "decode", request.priority, request.ignore_eos
            )
            if not self.is_decode:
                self.instance.on_message(self.new[told], now_ns)
        elif what == "met":
            for rid in told:
                self.instance.on_message(self.new[rid], now_ns)
        elif what == "abort":
            self.given_up |= set(told)
            for rid in told:
                commands = self.instance.on_message(Cancel(int(rid[1:]), "aborted by the client"), now_ns)
                self.stop_sending(int(rid[1:]), commands, now_ns)
        elif what == "granted":
            for rid in told:
                num_pages = -(-len(self.new[rid].prompt) // self.instance.page_size)
                self.instance.on_message(KvGranted(int(rid[1:]), 0, tuple(range(1, num_pages + 1))), now_ns)
        elif what == "stopped":
            for rid in told:
                self.instance.on_message(Abort(int(rid[1:]), "stopped"), now_ns)
        elif what == "arrived":
            for rid in told:
                self.instance.on_message(KvArrived(int(rid[1:]), rid in self.ends_at_once), now_ns)

    def stop_sending(self, request_id: int, commands: list[Command], now_ns: int) -> None:
        """The sender stops at once, unless the log says when."""
        if isinstance(self.instance, Decode):
            self.instance.stopped.append(request_id)
        for command in commands:
            if isinstance(command, Tell) and f"r{request_id}" not in self.sent:
                self.instance.on_message(KvSent(request_id), now_ns)

    def note(self, command: Command) -> None:
        match command:
            case Send(_, KvGranted(i, num_cached_tokens, _)):
                self.made["admitted"].append([f"r{i}", num_cached_tokens])
            case LoadKv(i, _):
                self.made["resumed"].append(f"r{i}")
            case FirstToken(i) if self.is_decode:
                self.made["merged"].append(f"r{i}")
            case Retracted(i):
                self.made["retracted"].append(f"r{i}")
            case Failed(i):
                self.made["failed"].append(f"r{i}")

    def check(self, rows: list[Row]) -> None:
        """Compare an iteration's decisions. Who comes back is not among those merged, but in the batch of the step."""
        said: dict[str, list[Any]] = {what: [] for what in DECISIONS}
        for row in rows:
            if row[2] == "failed":
                said["failed"] += [] if row[3] in self.aborted else [row[3]]
            elif row[2] == "admitted":  # of those given up before, 0.5.12 stops the transfers in the same iteration
                said["admitted"] += [[rid, num_cached] for rid, num_cached in row[3] if rid not in self.given_up]
            elif row[2] == "merged":
                said["merged"] += [rid for rid, _ in row[3] if rid not in self.back]
            elif row[2] in DECISIONS:
                said[row[2]] += row[3]
        said["retracted"] += self.preempted
        self.back |= set(said["retracted"])
        for what, expected in said.items():
            self.outcome.num_compared += len(expected)
            if self.made[what] != expected:
                raise DifferenceError(f"{what}: SGLang {expected}, pdsim {self.made[what]}")
            self.made[what] = []

    def check_step(self, step: Step | Wait, said: Row | None) -> None:
        what, expected = ("nothing", []) if said is None else (said[2], said[3])
        found, members = "nothing", []
        if isinstance(step, PrefillStep | MixedStep):
            found = "prefill"
            chunks = step.chunks if isinstance(step, PrefillStep) else step.prefill.chunks
            members = [[f"r{c.request_id}", c.num_context_tokens, c.num_tokens] for c in chunks]
            if isinstance(step, MixedStep):
                assert not isinstance(self.instance, PrefillInstance)
                members += [[f"r{r.request_id}", r.num_kv_tokens, 1] for r in self.instance.batch.requests()]
        elif isinstance(step, DecodeStep):
            assert not isinstance(self.instance, PrefillInstance)
            found, members = "decode", [f"r{request.request_id}" for request in self.instance.batch.requests()]
        self.outcome.num_compared += said is not None
        if (found, members) != (what, expected):
            raise DifferenceError(f"SGLang {what} {expected}, pdsim {found} {members}")
        if said is not None:
            self.outcome.num_compared += 1
            page_size = self.instance.page_size
            _, evictable, free = self.instance.cache.levels()
            found_tokens = [free * page_size, evictable * page_size]
            if found_tokens != said[4:]:
                raise DifferenceError(f"free and evictable: SGLang {said[4:]}, pdsim {found_tokens}")


class Routes:
    """The router of pairs, and whom SGLang's chose. Its first choice is where turns begin."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.chosen = {row[3]: {} for rows in log.instances.values() for row in rows if row[2] == "new"}
        for instance, rows in log.instances.items():
            for row in rows:
                if row[2] == "new":
                    self.chosen[row[3]][instance.partition("-")[0]] = instance
        self.policies: dict[str, RoundRobin] = {}
        for role in ("prefill", "decode"):
            self.policies[role] = RoundRobin()
        self.roles = {
            role: RoleRouter([name for name in log.instances if name.startswith(role)], policy)
            for role, policy in self.policies.items()
        }
        self.router = Router(prefill=self.roles["prefill"], decode=self.roles["decode"])

    def run(self) -> Outcome:
        outcome, prompts = Outcome(), self.log.prompts()
        events = [(sent_s, 1, int(rid[1:])) for rid, sent_s, _, _ in self.log.sent]
        events += [(end_s, 0, int(rid[1:])) for rid, _, end_s, _ in self.log.sent]
        for time_s, comes, i in sorted(events):
            now_ns = round(time_s * 1e9)
            if not comes:
                self.router.on_message(PrefillDone(i), now_ns)
                self.router.on_message(Finished(i), now_ns)
                continue
            chosen = self.chosen[f"r{i}"]
            if not outcome.num_compared:
                for role, policy in self.policies.items():
                    for _ in range(int(chosen[role].partition("-")[2])):
                        policy.pick(prompts[i], self.roles[role])
            (to_decode, _) = self.router.on_message(Arrival(i, prompts[i], 1), now_ns)
            assert isinstance(to_decode, Send)
            new = to_decode.message
            assert isinstance(new, NewRequest)
            outcome.num_compared += 2
            found = {"prefill": new.prefill_id, "decode": new.decode_id}
            if found != chosen:
                outcome.num_differing += 1
                outcome.difference = outcome.difference or f"r{i}: SGLang {chosen}, pdsim {found}"
        return outcome


def _num_decisions(row: Row) -> int:
    if row[2] in {"prefill", "decode"}:
        return 2
    return len(row[3]) if row[2] in DECISIONS else 0


def compare(name: str) -> Iterator[tuple[str, Outcome]]:
    log = Log.of(name)
    for instance in log.instances:
        yield instance, Replay(instance, log).run()
    if log.load.comes_in_order:
        yield "router", Routes(log).run()


def compared() -> list[str]:
    """Kept logs, but for those of the overlap schedule, which pdsim does not model (overlap.py)."""
    names = [path.name.removesuffix(".jsonl.gz") for path in sorted(LOGS.iterdir())]
    return [name for name in names if not name.startswith("drawn-overlap-")]


def main() -> None:
    print("| load | instance | decisions compared | differing | not compared |")
    print("|---|---|---|---|---|")
    for name in sys.argv[1:] or compared():
        for instance, outcome in compare(name):
            print(f"| {name} | {instance} | {outcome.num_compared} | {outcome.num_differing} | {outcome.num_left} |")
            if outcome.difference:
                print("   ", outcome.difference)


if __name__ == "__main__":
    main()
