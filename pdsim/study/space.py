"""The clusters from which a plan chooses: combinations of roles, GPUs, parallel sizes, numbers of instances, and
settings.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import chain, product
from typing import Any, NamedTuple

from pdsim.dataclass import dataclass
from pdsim.metrics.summary_rows import counted
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.building.wiring import wire_of
from pdsim.scenario.loading import Changes
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.servers import Split
from pdsim.scenario.yaml_file import ConfigError
from pdsim.study.base import Base
from pdsim.study.points.tasks import described
from pdsim.study.servers import Server, label_of
from pdsim.system.catalog import load_gpu, load_model
from pdsim.system.model import LatentAttention

ROLES = {1: ("aggregated",), 2: ("prefill", "decode")}
"""Names of a cluster's roles, by the number of roles. 1: an aggregated cluster. 2: prefill and decode."""
_OF_SERVERS = {f"{role}.{field}" for role in chain(*ROLES.values()) for field in ("gpu", "tp", "instances", "dp")}
SPLITS = {"prefill": ("pp", "cp"), "decode": ("pp", "dcp"), "aggregated": ("pp", "cp", "dcp")}
"""Parallel sizes of a server besides tp, by role."""
_OF_SERVERS |= {f"{role}.{size}" for role, sizes in SPLITS.items() for size in sizes} | {"encode.instances"}
"""Scenario fields in which clusters differ in every plan. The user can ask to try further fields."""


class Encoders(NamedTuple):
    """Encode instances of a cluster. Each has one GPU."""

    gpu: str
    """Name of the GPU in the catalog. Empty in NO_ENCODERS."""
    number: int
    """Number of encode instances. 0: there are none."""

    @property
    def words(self) -> str:
        """The part of a cluster's label that names the encode instances, such as ", 2 encoders on h100". Empty: there
        are no encode instances.
        """
        return f", {counted(self.number, 'encoder')} on {self.gpu}" if self.number else ""


NO_ENCODERS = Encoders("", 0)


@dataclass(frozen=True)
class CandidateCluster:
    """A cluster that a plan may choose."""

    label: str
    """Name of the cluster in tables and texts, such as "3P1D of TP4"."""
    family: str = field(compare=False)
    """Name of the cluster's family. Clusters of one family differ only in their numbers of instances."""
    servers: tuple[Server, ...] = field(compare=False)
    """GPU and parallel sizes of the servers, one entry per role."""
    counts: tuple[int, ...] = field(compare=False)
    """Number of instances of each role: prefill and decode, or aggregated."""
    num_gpus: int = field(compare=False)
    """Number of GPUs of all servers and encode instances."""
    price_per_h: float = field(compare=False)
    """Price of one hour of the cluster's GPUs. If the user gave no prices: the number of GPUs."""
    changes: Changes = field(compare=False, repr=False)
    """Changes that turn the base scenario into a scenario with this cluster."""
    encoders: Encoders = field(default=NO_ENCODERS, compare=False)
    """The encode instances of the cluster."""
    setting: tuple[str, Any] | None = field(default=None, compare=False)
    """Path and value of the setting by which `with_other_settings` made this cluster. None: the cluster keeps the
    settings of the scenario and of --try.
    """

    @property
    def kw(self) -> float | None:
        """Maximum power of all GPU boards in kW. None: the catalog lacks the power of a GPU."""
        encoders = self.encoders
        if not encoders.number:
            return kilowatts(self.servers, self.counts)
        return kilowatts((*self.servers, Server(encoders.gpu, Split(1))), (*self.counts, encoders.number))

    @property
    def is_aggregated(self) -> bool:
        return len(self.counts) == 1

    @property
    def roles(self) -> tuple[str, ...]:
        return ROLES[len(self.counts)]

    @property
    def numbers(self) -> dict[str, int]:
        """Number of instances of each role, and of encode instances if there are any."""
        encode = {"encode": self.encoders.number} if self.encoders.number else {}
        return dict(zip(self.roles, self.counts, strict=True)) | encode

    def is_part_of(self, other: "CandidateCluster") -> bool:
        """True if both clusters have the same family, and the other has at least as many instances of each role."""
        return self.family == other.family and all(count <= other.numbers[role] for role, count in self.numbers.items())


@dataclass(frozen=True)
class Space:
    """Limits of a plan's search: the GPUs with their prices per hour, the number of GPUs, and the fields to try."""

    prices: Mapping[str, float]
    """Price of one hour of each GPU that servers may use, by its name in the catalog. If the user gave no prices: 1 for
    each GPU of the scenario's servers.
    """
    max_gpus: int
    """Maximum number of GPUs of a cluster."""
    tried: Mapping[str, Sequence[Any]]
    """Values to try of further scenario fields, by the field's path."""
    encoder_price: float = 1.0
    """Price per hour of the GPU of an encode instance."""

    def candidates(self, base: Base) -> list[CandidateCluster]:
        """All clusters within the limits, by price. Raises ConfigError if none is possible, or if a size to try is
        impossible.
        """
        found: list[CandidateCluster] = []
        possible: set[tuple[str, int]] = set()
        reasons: dict[tuple[str, int], str] = {}
        servers = {role: list(self._servers(role, _own_split(base, role))) for role in chain(*ROLES.values())}
        for roles in chain.from_iterable(product(*map(servers.__getitem__, names)) for names in ROLES.values()):
            try:
                scenario = resolve(base.changed(cluster(base, roles, (1,) * len(roles))))
            except ConfigError as impossible:
                for path_and_size in _sizes_of(roles):
                    reasons.setdefault(path_and_size, str(impossible))
                continue
            possible.update(_sizes_of(roles))
            is_tried = any(path.startswith("network.staging") for path in self.tried)
            found += self._of(base, roles, staging=not is_tried and needs_staging(base, scenario))
        for (path, size), reason in reasons.items():
            if path in self.tried and (path, size) not in possible:
                raise ConfigError(f"--try {path}: no cluster can have {size}; {reason}")
        if not found:
            reason = ["nothing that is tried fits", *reasons.values()][-1]
            raise ConfigError(f"{base.where}: no cluster of up to {self.max_gpus} GPUs is possible; {reason}")
        return by_price(found)

    def _servers(self, role: str, own: Split) -> Iterator[Server]:
        """Yields the servers to try for a role: each GPU type of `prices` with each TP size that the user asks to try,
        or else with the sizes 1, 2, 4 and 8 that fit a server. pp, cp and dcp have the sizes that the user asks to try,
        or else those of the scenario's server. own: parallel sizes of the scenario's server.
        """
        names = SPLITS[role]
        others = [self.tried.get(f"{role}.{name}", (getattr(own, name),)) for name in names]
        for gpu in self.prices:
            for tp, *sizes in product(self.tried.get(f"{role}.tp", tp_sizes(gpu)), *others):
                yield Server(gpu, Split(tp, **dict(zip(names, sizes, strict=True))))

    def _counts(self, role: str, server: Server) -> Sequence[int]:
        return self.tried.get(f"{role}.instances", range(1, self.max_gpus // server.num_gpus + 1))

    def _encoders(self, base: Base) -> list[Encoders]:
        """Encode instances to try. If the scenario has encode instances: the numbers that the user gives, else 0 (the
        servers encode media themselves) and powers of two. Otherwise: one entry without instances.
        """
        if (settings := base.scenario.encode) is None:
            return [NO_ENCODERS]
        powers = [1 << n for n in range(max(1, self.max_gpus - 1).bit_length())]
        return [Encoders(settings.gpu, number) for number in self.tried.get("encode.instances", (0, *powers))]

    def own(self, base: Base) -> CandidateCluster | None:
        """The cluster that the scenario itself describes, as a candidate. None: the cluster has a GPU that has no
        price.
        """
        given = base.scenario if base.own_aggregated is None else base.changed(base.aggregated)
        servers = tuple(Server(one.gpu, one.split) for one in given.roles.values())
        counts = tuple(one.instances for one in given.roles.values())
        if any(server.gpu not in self.prices for server in servers):
            return None
        settings = given.encode
        encoders = NO_ENCODERS if settings is None else Encoders(settings.gpu, settings.instances)
        label = label_of(servers, counts, names_gpu=len(self.prices) > 1) + encoders.words
        price = price_per_h(self.prices, servers, counts) + encoders.number * self.encoder_price
        changes = {} if base.own_aggregated is None else base.aggregated
        return CandidateCluster(label, label, servers, counts, given.num_gpus, price, changes, encoders)

    def _of(self, base: Base, roles: tuple[Server, ...], *, staging: bool) -> Iterator[CandidateCluster]:
        """Yields the clusters of these kinds of servers: every number of instances to try within the maximum number of
        GPUs, with all settings to try. Leaves out clusters with encode instances whose servers that compute prompts
        have more than one data-parallel attention rank, which pdsim does not model. roles: one kind of server for each
        role. staging: True: KV goes through staging memory.
        """
        ranks = f"{ROLES[len(roles)][0]}.dp"
        all_counts = product(*map(self._counts, ROLES[len(roles)], roles))
        for counts, encoders in product(all_counts, self._encoders(base)):
            num_gpus = sum(count * server.num_gpus for count, server in zip(counts, roles, strict=True))
            num_gpus += encoders.number
            if num_gpus > self.max_gpus:
                continue
            price = price_per_h(self.prices, roles, counts) + encoders.number * self.encoder_price
            label, family = (label_of(roles, numbers, names_gpu=len(self.prices) > 1) for numbers in (counts, ()))
            parts = (
                cluster(base, roles, counts) | ({"network.staging": {}} if staging else {}) | _encode(base, encoders)
            )
            for settings in self._settings(base, roles, counts, encoders):
                if encoders.number and settings.get(ranks, 1) > 1:
                    continue
                words = described(settings).replace("router=", "") if settings else ""
                suffix = (", staged" if staging else "") + (f", {words}" if words else "")
                yield CandidateCluster(
                    label + encoders.words + suffix,
                    family + (", encoders" if encoders.number else "") + suffix,
                    roles,
                    counts,
                    num_gpus,
                    price,
                    {**parts, **settings},
                    encoders,
                )

    def _settings(
        self, base: Base, servers: Sequence[Server], counts: Sequence[int], encoders: Encoders
    ) -> Iterator[Changes]:
        """Yields the changes of settings to try for a cluster: values of --try for fields that the cluster has, numbers
        of data-parallel attention ranks, and routers if neither the scenario nor --try names the router.

        The router is not changed if each role has a single instance and no ranks are tried, because all routers then
        act alike. servers, counts: kind and number of the servers of each role.
        """
        roles = ROLES[len(counts)]
        present = {*roles, *(("network",) if len(roles) > 1 else ()), *(("encode",) if encoders.number else ())}
        absent = {*chain(*ROLES.values()), "network", "encode"} - present
        tried = {
            path: list(values)
            for path, values in self.tried.items()
            if path.partition(".")[0] not in absent and path not in _OF_SERVERS
        }
        has_router = base.names("router") or any(path.partition(".")[0] == "router" for path in tried)
        ranks = [self._ranks(base, role, server) for role, server in zip(roles, servers, strict=True)]
        for values, chosen in product(product(*tried.values()), product(*ranks)):
            settings = dict(zip(tried, values, strict=True)) | {path: dp for one in chosen for path, dp in one.items()}
            is_routed = max(counts) > 1 or any(dp > 1 for one in chosen for dp in one.values())
            for router in base.router_names if is_routed and not has_router else ("",):
                yield {**settings, "router": router} if router else settings

    def _ranks(self, base: Base, role: str, server: Server) -> list[dict[str, int]]:
        """Numbers of data-parallel attention ranks to try for a server, each as a change of the field ROLE.dp: those of
        --try that divide the TP size, or else the scenario's number (an empty change).

        One rank per GPU is tried, too, if neither scenario nor --try gives a number, the model has latent attention,
        and TP is the server's only parallel size above 1. Without ranks, all GPUs of the server would then hold the
        same KV.
        """
        path, tp = f"{role}.dp", server.split.tp
        if path in self.tried:
            return [{path: dp} for dp in self.tried[path] if tp % dp == 0]
        is_latent = isinstance(load_model(base.scenario.model).attention, LatentAttention)
        has_ranks = is_latent and server.split == Split(tp) and tp > 1 and not base.names(path)
        return [{}, {path: tp}] if has_ranks else [{}]


_SETTINGS: Mapping[str, Sequence[Any]] = {
    "aggregated.chunked_prefill_tokens": (2048, 4096, 8192, 16384),
    "aggregated.max_running_requests": (32, 64, 128, 256),
    "prefill.chunked_prefill_tokens": (2048, 4096, 8192, 16384),
    "decode.max_running_requests": (32, 64, 128, 256),
    "decode.radix_cache": (True, False),
    "page_size": (1, 16, 64),
}
"""Values of settings that cost nothing and may let a cluster meet an SLO that the cluster otherwise misses."""


def by_price(candidates: Iterable[CandidateCluster]) -> list[CandidateCluster]:
    """The clusters, the cheapest first, and clusters of one price by their labels."""
    return sorted(candidates, key=lambda one: (one.price_per_h, one.label))


def with_other_settings(base: Base, one: CandidateCluster) -> Iterator[CandidateCluster]:
    """Yields copies of the cluster `one`, in each of which one setting of _SETTINGS has another value. Settings to
    which the scenario or --try gives a value, and settings of roles that the cluster lacks, are not changed.
    """
    for path, values in _SETTINGS.items():
        role, _, field = path.rpartition(".")
        if (role and role not in one.roles) or base.names(path) or path in one.changes:
            continue
        own = resolve(base.changed(one.changes))
        now = getattr(getattr(own, role) if role else own, field)
        for value in values:
            if value != now:
                yield _with_setting(one, path, value)


def with_setting_of(changed: CandidateCluster, candidates: Iterable[CandidateCluster]) -> Iterator[CandidateCluster]:
    """Yields copies of those candidates that have the setting by which `with_other_settings` made the cluster
    `changed`. In each copy this setting has the same value as in `changed`. Yields nothing if no setting was changed.
    """
    if changed.setting is None:
        return
    path, value = changed.setting
    role = path.rpartition(".")[0]
    for one in candidates:
        if not role or role in one.roles:
            yield _with_setting(one, path, value)


def _with_setting(one: CandidateCluster, path: str, value: Any) -> CandidateCluster:
    """A copy of the cluster `one` in which the setting at `path` has this value."""
    words, changes = f", {described({path: value})}", {**one.changes, path: value}
    return replace(one, label=one.label + words, family=one.family + words, changes=changes, setting=(path, value))


def needs_staging(base: Base, scenario: Scenario) -> bool:
    """True if prefill would send slices of each token's heads, staging can avoid the slices, and the user has not set
    network.staging.
    """
    prefill = scenario.prefill
    is_whole = prefill is not None and prefill.pp == prefill.cp == 1
    return is_whole and not base.names("network.staging") and wire_of(scenario).slices


def price_per_h(prices: Mapping[str, float], servers: Sequence[Server], counts: Sequence[int]) -> float:
    return sum(prices[one.gpu] * one.num_gpus * count for one, count in zip(servers, counts, strict=True))


def kilowatts(roles: Sequence[Server], counts: Sequence[int]) -> float | None:
    """Maximum power of all GPU boards of a cluster in kW. None: the catalog lacks the power of a GPU. roles: the
    servers of each role. counts: number of servers of each role, in the same order.
    """
    watts = [load_gpu(server.gpu).board_power_w for server in roles]
    pairs = zip(watts, roles, counts, strict=True)
    found = [w * server.num_gpus * count / 1e3 for w, server, count in pairs if w is not None]
    return sum(found) if len(found) == len(roles) else None


def _sizes_of(roles: Sequence[Server]) -> Iterator[tuple[str, int]]:
    """Yields the path in the scenario, and the value, of each parallel size of a cluster's servers."""
    for role, server in zip(ROLES[len(roles)], roles, strict=True):
        for name, size in server.split._asdict().items():
            yield f"{role}.{name}", size


def tp_sizes(gpu: str) -> list[int]:
    return [tp for tp in (1, 2, 4, 8) if tp <= load_gpu(gpu).gpus_per_server]


def cluster(base: Base, roles: Sequence[Server], counts: Sequence[int]) -> Changes:
    """Changes of the scenario that make a cluster of these servers. One kind of server makes an aggregated cluster; two
    kinds are for prefill and decode. roles: the kinds of servers. counts: number of servers of each kind, in the same
    order.
    """
    if len(roles) == 1:
        changes = base.aggregated
        settings = {"gpu": roles[0].gpu, "tp": roles[0].split.tp, "instances": counts[0]}
        sizes = _new_sizes(base, "aggregated", roles[0].split)
        return {**changes, "aggregated": {**changes["aggregated"], **settings, **sizes}}
    changes = {}
    for role, server, count in zip(("prefill", "decode"), roles, counts, strict=True):
        changes |= {f"{role}.instances": count, f"{role}.gpu": server.gpu, f"{role}.tp": server.split.tp}
        changes |= {f"{role}.{name}": size for name, size in _new_sizes(base, role, server.split).items()}
    return changes


def _encode(base: Base, encoders: Encoders) -> Changes:
    """Changes of the scenario that give it the number of encode instances in `encoders`; 0 removes the section
    `encode`. Empty: the scenario has no encode instances to change.
    """
    if base.scenario.encode is None:
        return {}
    return {"encode.instances": encoders.number} if encoders.number else {"encode": None}


def _own_split(base: Base, role: str) -> Split:
    """The parallel sizes of the scenario's servers of this role. If the user has no aggregated servers, all sizes of
    the role `aggregated` are 1.
    """
    if role != "aggregated":
        split: Split = getattr(base.scenario, role).split
        return split
    own = base.changed(base.aggregated).aggregated if base.own_aggregated else None
    return Split(1) if own is None else own.split


def _new_sizes(base: Base, role: str, split: Split) -> dict[str, int]:
    """Parallel sizes besides tp, by name, in which `split` differs from the scenario's servers of this role."""
    own = _own_split(base, role)
    return {name: size for name in SPLITS[role] if (size := getattr(split, name)) != getattr(own, name)}
