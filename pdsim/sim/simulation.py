"""Runs a scenario in simulated time. The simulation carries out commands of instances; it makes no decisions itself."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from simpy.events import EventPriority

from pdsim.core import messages as m
from pdsim.core.instance import Levels
from pdsim.core.invariants import check_all_idle
from pdsim.core.journal.calls import Entry
from pdsim.core.pipeline.staged_decode import StagedDecodeInstance
from pdsim.core.pipeline.staged_instances import StagedAggregatedInstance, StagedVllmInstance
from pdsim.core.vllm.vllm_decode_instance import VllmDecodeInstance
from pdsim.dataclass import dataclass
from pdsim.garbage import garbage_collection_paused
from pdsim.metrics.own_gaps import OwnGaps
from pdsim.metrics.recorder import Recorder
from pdsim.metrics.records import RequestRecord
from pdsim.policy.views import TokenSequence
from pdsim.scenario.building.caches import stored_page_tokens
from pdsim.scenario.building.cluster import Cluster, build
from pdsim.scenario.building.sizing import server_of
from pdsim.scenario.schema import Scenario
from pdsim.sim.bus import CHOICES, Bus
from pdsim.sim.clients import Clients
from pdsim.sim.faults import FaultInjector
from pdsim.sim.instances.actor import Actor, Parts
from pdsim.sim.instances.encoding import EncodeActor, LanguageActor
from pdsim.sim.instances.executor import Executor, RecomputingExecutor, SpeculativeExecutor
from pdsim.sim.instances.lockstep import Lockstep, Rank
from pdsim.sim.instances.stages import MicroBatchExecutor
from pdsim.sim.instances.turns import StagedRank, Turns
from pdsim.sim.links.cache_copies import CacheCopies, Storage, StorageClient
from pdsim.sim.links.embeddings import EmbeddingMoves, EmbeddingReads
from pdsim.sim.links.host_exchange import ServerNics
from pdsim.sim.links.network import Flows, Transfers
from pdsim.sim.lives import Lives
from pdsim.sim.result import RunResult
from pdsim.sim.scaling import Scaling
from pdsim.sim.scraping import Scraping
from pdsim.workload.request_spec import Streams


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Observers of a run. They cannot change the run."""

    journal: Callable[[Entry], None] | None = None
    """Function that is called with every call into an instance. None: no journal."""
    levels: bool = False
    """True: records how full an instance is each time its loop chooses a step."""
    progress: Callable[[int], None] | None = None
    """Function that is called from time to time with the number of ended requests. None: no reports."""
    ended: Callable[[RequestRecord], None] | None = None
    """Function that is called with each ended request. An exception that it raises ends the run. None: no calls."""
    own_itl: bool = False
    """True: computes ITL percentiles of each single request."""


UNOBSERVED = Observation()


def simulate(scenario: Scenario, observation: Observation = UNOBSERVED, *, single_steps: bool = False) -> RunResult:
    """Simulates a scenario to its end. observation: observers of the run, which do not change the run. single_steps:
    True: simulates each decode step alone, which is slower and gives the same result.
    """
    return Simulation(build(scenario), observation, single_steps=single_steps).run()


def _own_gaps(scenario: Scenario, observation: Observation) -> OwnGaps | None:
    """Returns the recorder of each request's ITLs. None: the run needs no recorder, because the observation does not
    ask for ITLs of single requests and the client receives each token at once (stream_interval 1).
    """
    interval = scenario.servers[1].stream_interval
    if not observation.own_itl and interval == 1:
        return None
    return OwnGaps(interval, has_percentiles=observation.own_itl)


class Simulation(Bus):
    """A cluster on a timeline. Connects drivers, clients, links and faults to the bus, and runs them to the end."""

    def __init__(self, cluster: Cluster, observation: Observation = UNOBSERVED, *, single_steps: bool = False) -> None:
        super().__init__(cluster, Recorder(_own_gaps(cluster.scenario, observation)), observation.journal)
        self._on_levels = self.record_levels if observation.levels else None
        """Function that is called with each instance that chooses a step. None: levels are not recorded."""
        self._single_steps = single_steps
        self._clients = Clients(self, observation.progress, observation.ended)
        self.commands |= self._clients.commands
        self._transfers = None if cluster.interconnect is None else Transfers(self, cluster.interconnect)
        if self._transfers is not None:
            self.commands |= self._transfers.commands
        self._flows = self._make_flows()
        """Flows over the links between instances and hosts."""
        self._storage = self._make_storage()
        self._locksteps = self._make_locksteps()
        self.drivers |= {instance.instance_id: self._driver(instance) for instance in cluster.instances}
        self.drivers |= self._encode_drivers()
        self._scaling = None if cluster.autoscaler is None else Scaling(self, cluster.autoscaler, self._clients)
        self._lives = Lives(self, self._transfers, self._driver, self._on_levels)
        if cluster.router.asked_caches:
            self._clients.cached = self._cached_tokens
        health = cluster.scenario.health
        self._faults = None
        if health is not None:
            self._faults = FaultInjector(self, health, self._clients, self._transfers, self._lives)

    def tell_router(self, message: m.Message) -> None:
        self._clients.tell_router(message)

    def _driver(self, instance: Any) -> Actor:
        """Returns a driver for a new or restarted instance. A restarted instance gets an empty host memory. If the
        scenario models cold servers (cost.cold_kernels, cost.cold_start), the instance is cold again.
        """
        lockstep = self._locksteps.get(server_of(instance.instance_id))
        parts = Parts(
            executor=self._executor_of(instance),
            cache_copies=self._cache_copies_of(instance),
            on_choice=self._on_levels,
            single_steps=self._single_steps or self._is_looked_at,
        )
        if isinstance(lockstep, Turns):
            return StagedRank(self, instance, parts, lockstep)
        if lockstep is not None:
            return Rank(self, instance, parts, lockstep)
        waits = m.embeddings_of(instance.instance_id) in self.agents
        return LanguageActor(self, instance, parts) if waits else Actor(self, instance, parts)

    def _encode_drivers(self) -> dict[str, EncodeActor]:
        if (encoding := self.cluster.encoding) is None:
            return {}
        if self.cluster.scenario.engine == "vllm":
            moves: EmbeddingMoves = (reads := EmbeddingReads(self, encoding, self._flows))
            self.commands[m.SendEmbeddings] = reads.read
        else:
            moves = EmbeddingMoves(self, encoding, self._flows)
        found = {}
        for number, instance in enumerate(encoding.instances, start=len(self.order)):
            order = EventPriority(CHOICES + number)
            found[instance.instance_id] = EncodeActor(self, instance, encoding.times, moves, order)
        return found

    def _make_flows(self) -> Flows:
        if self._transfers is not None:
            return self._transfers.network.flows
        return Flows(self.timeline, self.cluster.host_nics.capacity, lambda owner: owner.arrived())

    def _make_locksteps(self) -> dict[str, Lockstep]:
        """Returns the object through which all ranks of a server begin their steps together, by the server's name. Only
        for servers with data-parallel attention or over several hosts.
        """
        num_ranks = Counter(server_of(instance_id) for instance_id in self.order)
        last = EventPriority(CHOICES + len(self.order))
        found = {server: Lockstep(self.timeline, num, last) for server, num in num_ranks.items() if num > 1}
        for server, pipeline in {server_of(i): times for i, times in self.cluster.pipelines.items()}.items():
            if server in found:
                found[server] = Turns(self.timeline, num_ranks[server], last, pipeline)
        nics = self.cluster.host_nics
        if not nics.traffic:
            return found
        between = ServerNics(self.timeline, self._flows, nics)
        for server in dict.fromkeys(map(server_of, nics.traffic)):
            found[server] = Lockstep(self.timeline, num_ranks[server], last, between)
        return found

    def _cache_copies_of(self, instance: Any) -> CacheCopies | None:
        instance_id, storage = instance.instance_id, self._storage
        if instance_id not in self.cluster.host_links:
            return None
        client = None if storage is None else StorageClient(storage, instance_id, server_of(instance_id))
        return CacheCopies(self, instance, client)

    def _make_storage(self) -> Storage | None:
        settings, costs = self.cluster.scenario.storage, self.cluster.storage
        if settings is None or costs is None:
            return None
        return Storage(
            self.timeline,
            costs,
            shared=settings.shared,
            page_size=stored_page_tokens(self.cluster.scenario),
            record=self.recorder.on_host_copy,
            tell=self.deliver,
        )

    def _executor_of(self, instance: Any) -> Executor:
        acceptance, streams = self.cluster.scenario.acceptance, Streams(self.cluster.scenario.seed)
        if isinstance(instance, StagedAggregatedInstance | StagedVllmInstance | StagedDecodeInstance):
            return MicroBatchExecutor(self.outputs)
        if isinstance(instance, VllmDecodeInstance):
            return RecomputingExecutor(self.outputs, self._clients.local)
        if acceptance is None:
            return Executor(self.outputs)
        return SpeculativeExecutor(self.outputs, lambda i: acceptance.stream(streams.named(f"accepted/{i}")))

    def run(self) -> RunResult:
        for driver in self.drivers.values():
            driver.start()
        self._clients.start()
        if self._faults is not None:
            self._faults.start()
        if self._scaling is not None:
            self._scaling.start()
        interval_ns = self.cluster.router.metrics_interval_ns
        Scraping(self.timeline, interval_ns, self._living_levels, self._tell_metrics).start()
        with garbage_collection_paused():
            self.timeline.run_all()
        return self.result()

    def result(self) -> RunResult:
        """Returns the result so far. The run may have been interrupted."""
        ran_dry = self.timeline.has_ended
        stall: list[str] = []
        if ran_dry and self._clients.num_ended < len(self.cluster.requests):
            stall = [line for driver in self.drivers.values() for line in driver.instance.waiting_for()]
        elif ran_dry:
            check_all_idle(self.machines())
        num_primes = sum(spec.primes for spec in self.cluster.requests)
        return RunResult(self.cluster.scenario, self.recorder.records, self.timeline.num_events, stall, num_primes)

    def machines(self) -> list[Any]:
        """All living state machines: instances, senders and receivers, and the router."""
        living = [self.instance(name) for name in self.drivers if name not in self._lives.dead]
        agents = [getattr(agent, "inner", agent) for agent in self.agents.values()]
        return [*living, *agents, self.cluster.router]

    def _living_levels(self) -> dict[str, Levels] | None:
        """Returns the levels of living instances by id. None: all requests have ended."""
        if self._clients.num_ended == len(self.cluster.requests):
            return None
        return {name: self.instance(name).levels() for name in self.order if name not in self._lives.dead}

    @property
    def _is_looked_at(self) -> bool:
        """True: the router reads metrics of instances at intervals, or asks aggregated instances for cached tokens, so
        each decode step is simulated alone.
        """
        router = self.cluster.router
        return router.metrics_interval_ns > 0 or ("aggregated" in router.roles and bool(router.asked_caches))

    def _cached_tokens(self, prompt: TokenSequence) -> tuple[m.CachedTokens, ...]:
        """Numbers of a prompt's tokens that each living instance has cached. Instances with none are left out."""
        living = [name for name in self.cluster.router.asked_caches if name not in self._lives.dead]
        found = [m.CachedTokens(name, *self.instance(name).cache.tier_tokens(prompt)) for name in living]
        return tuple([one for one in found if one.num_device_tokens or one.num_host_tokens])

    def _tell_metrics(self, seen: m.MetricsSeen) -> None:
        self.send(m.Send(self.cluster.router.instance_id, seen))
