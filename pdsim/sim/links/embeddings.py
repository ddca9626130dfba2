"""Moves embeddings from encode instances to the servers that compute the prompts."""

from collections import defaultdict
from math import inf

from pdsim.core import messages as m
from pdsim.core.encode.media_item import MediaKey
from pdsim.core.routing.router import request_of
from pdsim.dataclass import dataclass
from pdsim.scenario.building.encoding import Encoding, encoded_modalities
from pdsim.sim.bus import Bus
from pdsim.sim.links.network import Flows


@dataclass(slots=True, eq=False)
class EmbeddingMove:
    """A move of embeddings to the server that waits for them: of one part of a request's media, which one encode
    instance has encoded. A move may share links with transfers of KV.
    """

    moves: "EmbeddingMoves"
    """The object that began the move. `arrived` tells it that the move has ended."""
    sent: m.SendEmbeddings
    """The command that asked for the move."""
    encode_start_ns: int
    """Time in ns at which encoding the part began. With vLLM: at which the server began to read."""
    encode_end_ns: int
    """Time in ns at which encoding the part ended. With vLLM: at which the server began to read."""

    def arrived(self) -> None:
        self.moves.on_arrived(self)


class EmbeddingMoves:
    def __init__(self, bus: Bus, encoding: Encoding, flows: Flows) -> None:
        """bus: tells agents when embeddings have arrived. encoding: the encode instances and their links. flows: the
        flows of bytes that share links, also those of KV transfers. The links of embeddings are added; a link that KV
        transfers use, too, keeps its bandwidth.
        """
        self._bus = bus
        self._encoding = encoding
        self._flows = flows
        flows.add_links(encoding.topology.capacity)

    def begin(self, sent: m.SendEmbeddings, start_ns: int, end_ns: int) -> None:
        """Sends embeddings. start_ns, end_ns: begin and end of encoding."""
        transport = self._encoding.transport
        setup_ns = transport.batch_ns + round(transport.posting_each_ns)
        self._bus.timeline.after(setup_ns, self._move, EmbeddingMove(self, sent, start_ns, end_ns))

    def _move(self, move: EmbeddingMove) -> None:
        sent, least_ns = move.sent, self._encoding.transport.moving_each_ns
        limit = 1e9 * sent.num_bytes / least_ns if least_ns else inf
        topology = self._encoding.topology
        path = topology.ways_out[sent.source] + topology.ways_in[sent.target]
        self._flows.begin(move, sent.num_bytes, path, limit)

    def on_arrived(self, move: EmbeddingMove) -> None:
        """Tells the server that waits for the embeddings."""
        sent, now_ns = move.sent, self._bus.timeline.now_ns
        self._bus.recorder.on_embeddings(sent.request_id, sent.source, move.encode_start_ns, move.encode_end_ns, now_ns)
        self._bus.tell_agent(m.embeddings_of(sent.target), m.EmbeddingsArrived(sent.request_id, sent.part))


class EmbeddingReads(EmbeddingMoves):
    """Moves embeddings with vLLM: its servers read them from the host memory of encode instances."""

    def __init__(self, bus: Bus, encoding: Encoding, flows: Flows) -> None:
        super().__init__(bus, encoding, flows)
        encoded = encoded_modalities(bus.cluster.scenario)
        self._media = {
            spec.request_id: [item for item in spec.media if item.modality in encoded]
            for spec in bus.cluster.requests
            if spec.media
        }
        """The images and audio clips that encode instances encode, by the id of their request."""
        self._sharing: dict[MediaKey, set[int]] = defaultdict(set)
        """Ids of the requests with an item, by modality and media_id."""
        for request_id, media in self._media.items():
            for item in media:
                self._sharing[item.key].add(request_id)

    def read(self, command: m.SendEmbeddings) -> None:
        now_ns = self._bus.timeline.now_ns
        self.begin(command, now_ns, now_ns)

    def on_arrived(self, move: EmbeddingMove) -> None:
        """Tells the server that its read has ended. Requests that need the same item wait for the same read."""
        sent = move.sent
        item = self._media[request_of(sent.request_id)][sent.part]
        self._bus.recorder.on_embeddings_read(self._sharing[item.key], sent.target, self._bus.timeline.now_ns)
        self._bus.deliver(m.Tell(sent.target, m.EmbeddingsArrived(sent.request_id, sent.part)))
