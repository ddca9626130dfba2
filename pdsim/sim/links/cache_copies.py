"""Copies of cached KV in simulated time, between GPU, host memory and storage."""

from collections import deque
from collections.abc import Callable
from typing import Literal

from pdsim.core import messages as m
from pdsim.core.decode.decode_instance import DecodeInstance
from pdsim.core.invariants import AnyInstance
from pdsim.core.memory.page_store import PageStore
from pdsim.core.memory.prefetch_queue import BATCH_PAGES, PrefetchQueue, Reading
from pdsim.core.vllm.vllm_prefill_instance import VllmPrefillInstance
from pdsim.cost.copies import SLEEP_NS, HostLink, StorageCosts, end_behind_load, end_of_saves
from pdsim.dataclass import dataclass
from pdsim.metrics.records import HostCopyRecord
from pdsim.sim.bus import Bus, Timeline
from pdsim.sim.links.network import Flows
from pdsim.system.transport import Path


@dataclass(slots=True, eq=False)
class Batch:
    """Pages that are read from or written to storage together."""

    client: "StorageClient"
    """Storage threads of the instance whose pages move. The threads go on when all bytes have moved."""
    kind: Literal["read", "store"]
    """read: from storage to host memory. store: from host memory to storage."""
    num_pages: int
    num_bytes: int
    """Bytes over all ranks of the instance."""
    start_ns: int
    """Time in ns when the read or write began."""


class Storage:
    """The KV storage of a cluster: one store per server or one shared store, and the links to the stores. shared: True:
    one store for all servers. page_size: tokens per page. record: called with the record of each copy. tell: called
    with messages to instances.
    """

    def __init__(
        self,
        timeline: Timeline,
        costs: StorageCosts,
        *,
        shared: bool,
        page_size: int,
        record: Callable[[HostCopyRecord], None],
        tell: Callable[[m.Tell], None],
    ) -> None:
        self.timeline = timeline
        self.costs = costs
        self.page_size = page_size
        self.record = record
        self.tell = tell
        self.flows = Flows(timeline, {}, lambda batch: batch.client.on_moved(batch))
        self._shared = shared
        self._stores: dict[str, PageStore] = {}

    def store_of(self, server: str) -> tuple[str, PageStore]:
        """Returns the name of a server's store (empty: all servers share one store), and its pages. A store survives
        restarts of instances.
        """
        name = "" if self._shared else server
        if name not in self._stores:
            self._stores[name] = PageStore(self.costs.num_pages, self.page_size)
            links = {"read": self.costs.read_bandwidth, "store": self.costs.write_bandwidth}
            links["objects"] = self.costs.objects_per_s
            self.flows.set_capacity({f"{link} {name}": capacity for link, capacity in links.items()})
        return name, self._stores[name]


class StorageClient:
    """The storage threads of one instance. One thread looks up prompts, one reads batches, and one writes nodes of the
    prefix tree. Each thread handles one request at a time.
    """

    def __init__(self, storage: Storage, instance_id: str, server: str) -> None:
        self._storage = storage
        self._timeline = storage.timeline
        self._costs = storage.costs
        self._instance_id = instance_id
        name, self._store = storage.store_of(server)
        self._paths: dict[str, Path] = {}
        for kind in ("read", "store"):
            own = f"{kind} by {instance_id}"
            storage.flows.set_capacity({own: self._costs.client_bandwidth})
            links = ((f"{kind} {name}", 1.0), (f"objects {name}", self._costs.objects_per_byte(kind)), (own, 1.0))
            self._paths[kind] = links
        self.prefetches = PrefetchQueue(self._look_up, self._read, self._tell)
        self._writes: deque[m.StoreKv] = deque()
        self._is_dead = False

    def kill(self) -> None:
        self._is_dead = True
        self._storage.flows.drop(lambda batch: batch.client is self)

    # Writing.

    def store(self, command: m.StoreKv, due_ns: int) -> None:
        """Queues a write to storage. The write begins at due_ns or later, and after earlier writes."""
        self._timeline.after(due_ns - self._timeline.now_ns, self._enqueue, command)

    def _enqueue(self, command: m.StoreKv) -> None:
        self._writes.append(command)
        if len(self._writes) == 1:
            self._begin_write()

    def _begin_write(self) -> None:
        """Begins the first queued write that has pages which storage lacks. Removes the writes before it from the
        queue, because storage has all their pages.
        """
        while self._writes and not self._is_dead:
            command = self._writes[0]
            if num_pages := self._store.num_missing(command.sequence, command.start_tokens, self._stop(command)):
                self._begin("store", num_pages)
                return
            self._writes.popleft()

    def _stop(self, command: m.StoreKv) -> int:
        return command.start_tokens + len(command.host_pages) * self._storage.page_size

    # Reading.

    def _look_up(self, reading: Reading) -> None:
        """Looks up a prompt's pages, batch by batch, until a batch has a missing page. When the lookup ends, the queue
        of prefetches gets the number of pages that were found.
        """
        num_pages = reading.command.most_pages
        num_found = min(num_pages, self._num_there(reading))
        num_batches = min(num_found // BATCH_PAGES + 1, -(-num_pages // BATCH_PAGES))
        self._timeline.after(num_batches * self._costs.latency_ns, self._on_looked_up, num_found)

    def _on_looked_up(self, num_found: int) -> None:
        if not self._is_dead:
            self.prefetches.on_looked_up(num_found)

    def _num_there(self, reading: Reading) -> int:
        return self._store.num_found(reading.command.prompt, reading.command.start_tokens)

    def _read(self, reading: Reading, num_pages: int) -> bool:
        """Reads the next num_pages pages of a prompt, or fewer if storage has evicted some since the lookup. Returns
        False if none is left.
        """
        num_pages = min(num_pages, self._num_there(reading) - reading.num_read)
        if num_pages > 0:
            self._begin("read", num_pages)
        return num_pages > 0

    def _tell(self, message: m.Prefetched) -> None:
        self._storage.tell(m.Tell(self._instance_id, message))

    # Moving.

    def _begin(self, kind: Literal["read", "store"], num_pages: int) -> None:
        page_bytes = self._costs.read_page_bytes if kind == "read" else self._costs.write_page_bytes
        batch = Batch(self, kind, num_pages, num_pages * page_bytes, self._timeline.now_ns)
        latency_ns = -(-num_pages // BATCH_PAGES) * self._costs.latency_ns
        self._timeline.after(latency_ns, self._move, batch)

    def _move(self, batch: Batch) -> None:
        if not self._is_dead:
            self._storage.flows.begin(batch, batch.num_bytes, self._paths[batch.kind])

    def on_moved(self, batch: Batch) -> None:
        span_ns = batch.start_ns, self._timeline.now_ns
        self._storage.record(HostCopyRecord(self._instance_id, batch.kind, *span_ns, batch.num_pages, batch.num_bytes))
        if batch.kind == "read":
            self.prefetches.on_read(batch.num_pages)
        else:
            command = self._writes.popleft()
            self._store.write(command.sequence, command.start_tokens, self._stop(command))
            self._begin_write()


class CacheCopies:
    """Copies KV between one instance's GPU pages, its host cache and storage.

    A forward waits for loads of pages that it reads. The instance's loop waits for writes that must end before their
    pages are overwritten.
    """

    def __init__(self, bus: Bus, instance: AnyInstance, storage: StorageClient | None) -> None:
        """bus: delivers a message when KV is loaded. Decode instances and vLLM's instances get this message. Prefill
        and aggregated instances of SGLang get none, because their forward waits on the GPU. storage: None: there is no
        storage behind host memory.
        """
        self.blocked_until_ns = 0
        """Time in ns until which the instance's loop waits for copies."""
        self._sleeps_until_ns = 0
        self._timeline = bus.timeline
        self._instance_id = instance.instance_id
        self._link = HostLink(bus.cluster.host_links[instance.instance_id])
        self._num_layers = bus.cluster.num_layers
        self._record = bus.recorder.on_host_copy
        self._tell = bus.deliver if isinstance(instance, DecodeInstance | VllmPrefillInstance) else None
        chunks = instance.cache.chunks
        self._is_layerwise = chunks is not None and chunks.is_layerwise
        self._is_dead = False
        self._storage = storage
        self._written_ns = 0
        """Time in ns at which the last write to host memory ends."""
        self._saves: list[m.SaveChunks] = []
        """Copies to host memory that follow the next step."""
        self._load: tuple[int, int] | None = None
        """Start and end in ns of the loads that the next forward waits for. None: no load."""

    def begin(self, commands: list[m.Command]) -> list[m.Command]:
        """Begins all copies among the commands. Returns the other commands."""
        others: list[m.Command] = []
        for command in commands:
            if isinstance(command, m.WriteBackup):
                _, self._written_ns = self._copy("write", len(command.pages))
                if command.blocks:
                    self._block_until(self._written_ns)
            elif isinstance(command, m.SaveChunks):
                self._saves.append(command)
            elif isinstance(command, m.Sleep):
                self._sleeps_until_ns = (
                    max(self.blocked_until_ns, self._timeline.now_ns) + command.num_sleeps * SLEEP_NS
                )
                self._block_until(self._sleeps_until_ns)
            elif isinstance(command, m.LoadChunks) and self._is_layerwise:
                self._wait_by_layer(*self._copy("load", len(command.pages)))
            elif isinstance(command, m.LoadChunks):
                self._block_until(self._copy("load", len(command.pages), self.blocked_until_ns)[1])
            elif isinstance(command, m.LoadRetracted):
                self._block_until(self._copy("load", len(command.pages))[1])
            elif isinstance(command, m.LoadBack):
                self._on_load(command, *self._copy("load", len(command.pages)))
            elif isinstance(command, m.Offload):
                self._tell_at(self._copy("write", len(command.pages))[1], m.Offloaded(command.store))
            elif isinstance(command, m.StoreKv | m.PrefetchKv | m.StopPrefetch):
                self._on_storage(command)
            else:
                others.append(command)
        return others

    @property
    def sleeps(self) -> bool:
        """True while the instance's loop sleeps, as the instance asked (m.Sleep). When the loop wakes, it chooses a
        step, whether messages have come or not.
        """
        return self._sleeps_until_ns > self._timeline.now_ns

    def _block_until(self, time_ns: int) -> None:
        self.blocked_until_ns = max(self.blocked_until_ns, time_ns)

    def kill(self) -> None:
        self._is_dead = True
        if self._storage is not None:
            self._storage.kill()

    def forward_end_ns(self, start_ns: int, duration_ns: int) -> int:
        """Returns the end in ns of a forward that begins at start_ns. The forward waits for loads that began since the
        last forward. Copies to host memory that were decided since then follow the forward, and delay its end.
        """
        num_layers = self._num_layers
        load = self.take_load() or (start_ns, start_ns)
        end_ns = end_behind_load(start_ns, duration_ns, load, num_layers)
        saves, self._saves = self._saves, []
        if saves and self._is_layerwise:
            first_ns = max(start_ns, load[0] + (load[1] - load[0]) // num_layers) + duration_ns // num_layers
            num_pages = sum([len(save.pages) for save in saves])
            return end_of_saves(end_ns, self._copy("write", num_pages, first_ns), num_layers)
        for save in saves:
            end_ns = self._copy("write", len(save.pages), end_ns)[1]
            if save.store is not None:
                assert self._storage is not None
                self._storage.store(save.store, end_ns)
        return end_ns

    def take_load(self) -> tuple[int, int] | None:
        """Returns the start of the first and the end of the last load, in ns, for which the layers of the next forward
        wait one by one (_wait_by_layer), and forgets them. None: no such load began since the last call.
        """
        load, self._load = self._load, None
        return load

    def _on_storage(self, command: m.StoreKv | m.PrefetchKv | m.StopPrefetch) -> None:
        assert self._storage is not None
        if isinstance(command, m.StoreKv):
            self._storage.store(command, max(self._written_ns, self._timeline.now_ns))
        elif isinstance(command, m.PrefetchKv):
            self._storage.prefetches.prefetch(command)
        else:
            self._storage.prefetches.stop(command)

    def _on_load(self, command: m.LoadBack, start_ns: int, end_ns: int) -> None:
        if self._tell is None:
            self._wait_by_layer(start_ns, end_ns)
        else:
            self._tell_at(end_ns, m.LoadedBack(command.request_id))

    def _wait_by_layer(self, start_ns: int, end_ns: int) -> None:
        """Makes the next forward wait layer by layer: a layer is computed only after the load has copied the layer's
        KV. start_ns, end_ns: start and end of the load.
        """
        self._load = (start_ns if self._load is None else self._load[0], end_ns)

    def _tell_at(self, time_ns: int, message: m.Message) -> None:
        self._timeline.after(time_ns - self._timeline.now_ns, self._on_copied, message)

    def _on_copied(self, message: m.Message) -> None:
        if self._tell is not None and not self._is_dead:
            self._tell(m.Tell(self._instance_id, message))

    def _copy(self, kind: Literal["load", "write"], num_pages: int, begin_ns: int = 0) -> tuple[int, int]:
        """Begins a copy now, or at begin_ns if that is later. kind: `load` copies pages from host memory to the GPU,
        `write` from the GPU to host memory. Returns the copy's start and end in ns.
        """
        start_ns, end_ns = self._link.copy(kind, num_pages, max(begin_ns, self._timeline.now_ns))
        num_bytes = self._link.num_bytes(num_pages)
        self._record(HostCopyRecord(self._instance_id, kind, start_ns, end_ns, num_pages, num_bytes))
        return start_ns, end_ns
