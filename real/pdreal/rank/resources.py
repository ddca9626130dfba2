"""The resources of a rank: model, KV cache, and the mover that sends or receives KV."""

from dataclasses import dataclass, field
from typing import Any

import torch

from pdreal.memory.mover import DecodeMover, PeerMemory, PrefillMover, decode_mover, prefill_mover
from pdreal.memory.state_slots import num_slots
from pdreal.memory.states import StatePool
from pdreal.memory.stored_kv import StoredKv
from pdreal.model.draft import DraftHead
from pdreal.model.parallel import TensorParallel
from pdreal.model.transformer import Transformer
from pdreal.model.weights import weight_source
from pdreal.rank.drafting import Drafter
from pdreal.rank.runner import ModelRunner
from pdreal.settings.host import LOOPBACK, free_host_bytes
from pdreal.settings.model import model_config
from pdreal.settings.rank import RankSpec
from pdreal.transports.mooncake_store import MooncakeStore
from pdreal.transports.opening import open_transport
from pdreal.transports.protocol import Transport
from pdreal.transports.streams import compute_stream, copy_stream
from pdsim.scenario.building import wiring
from pdsim.scenario.building.sizing import layout_of, num_host_pages
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.model import StateDtype

_STATE_DTYPES: dict[StateDtype, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class RankResources:
    runner: ModelRunner
    device: torch.device
    compute_stream: torch.cuda.Stream | None
    """Stream of the GPU on which the model is loaded, and on which its forwards run. None: the rank runs on a CPU."""
    end_tokens: tuple[int, ...]
    """Ids of the tokens that end a sequence."""
    mover: PrefillMover | DecodeMover | None = None
    """Sends KV from this rank, or receives KV. None: the rank exchanges no KV with other instances."""
    num_workers: int = 0
    """Number of threads that transfer KV."""
    memory: dict[str, Any] = field(default_factory=dict)
    """Addresses that peers need in order to write to this rank."""
    stored: StoredKv | None = None
    """KV in storage. None: the host memory has no storage behind it."""

    def enter_compute(self) -> None:
        """Makes the compute stream the current stream of this thread."""
        if self.compute_stream is not None:
            torch.cuda.set_stream(self.compute_stream)

    def enter_copies(self) -> None:
        """Makes the copy stream the current stream of this thread."""
        if self.device.type == "cuda":
            torch.cuda.set_stream(copy_stream(self.device))

    def connect(self, instance_id: str, rank: int, memory: dict[str, Any]) -> None:
        """Connects to a rank of another instance, if this rank sends to it. Raises TransferError if that rank is gone.
        memory: addresses of that rank's memory (fields of PeerMemory). Empty: that rank receives no KV.
        """
        if isinstance(self.mover, PrefillMover) and memory:
            self.mover.connect(instance_id, rank, PeerMemory(**memory))


def build_rank_resources(spec: RankSpec) -> RankResources:
    """Makes the model, cache and mover of a rank. Raises ModelError, UnavailableError or ConfigError if the model or
    the machine cannot run the scenario.
    """
    device = _device(spec)
    if device.type == "cpu":
        return _resources(spec, device, None)
    stream = compute_stream(device)
    with torch.cuda.stream(stream):
        resources = _resources(spec, device, stream)
    stream.synchronize()  # other threads and peers do not wait for it
    return resources


def _resources(spec: RankSpec, device: torch.device, stream: torch.cuda.Stream | None) -> RankResources:
    model = _model(spec, device)
    where = device, stream, model.config.end_tokens
    address = LOOPBACK if spec.network is None else spec.network.address
    if spec.role == "aggregated":
        runner = _runner(spec, model, None)
        return RankResources(runner, *where, stored=_stored(spec, runner, address))
    transport = open_transport(spec.scenario.network.transport, device, address)
    runner = _runner(spec, model, transport)
    planes, stored = runner.kv.planes, _stored(spec, runner, address)
    states = () if runner.states is None else runner.states.planes
    if spec.role == "prefill":
        sender = prefill_mover(spec.scenario, spec.rank, planes, transport, states)
        return RankResources(runner, *where, sender, wiring.transport(spec.scenario).num_queues, stored=stored)
    receiver = decode_mover(spec.scenario, spec.rank, planes, transport, states)
    return RankResources(runner, *where, receiver, memory=receiver.describe()._asdict(), stored=stored)


def _stored(spec: RankSpec, runner: ModelRunner, address: str) -> StoredKv | None:
    if spec.store is None or runner.host is None:
        return None
    store = MooncakeStore(spec.store, address, runner.model.device)
    return StoredKv(runner.host, store, spec.rank, is_same=runner.model.config.planes_per_layer == 1)


def _runner(spec: RankSpec, model: Transformer, transport: Transport | None) -> ModelRunner:
    """Makes the runner. Its cache lies in memory that the transport allocates, if there is a transport."""
    settings = spec.settings
    assert settings.pool_tokens is not None, "the scenario is not resolved"
    return ModelRunner(
        model,
        num_pages=settings.pool_tokens // spec.scenario.page_size,
        page_size=spec.scenario.page_size,
        allocate=None if transport is None else transport.allocate,
        layer_groups=spec.scenario.pair.prefill.layer_groups if spec.role == "prefill" else 0,
        max_running_requests=0 if spec.role == "prefill" else settings.resolved_max_running,
        num_host_pages=_num_host_pages(spec),
        prefills=spec.role != "decode",
        kv_dtype=torch.float8_e4m3fn if spec.options.kv_cache_dtype == "fp8" else None,
        records_experts=spec.options.record_experts and (spec.rank == 0 or model.tp.sends_to_experts),
        drafter=_drafter(spec, model),
        states=_states(spec, model, transport),
    )


def _states(spec: RankSpec, model: Transformer, transport: Transport | None) -> StatePool | None:
    """Makes the memory of linear-attention states. None: the model has none."""
    if model.config.llama.delta is None:
        return None
    return StatePool(
        model.config,
        model.tp.size,
        num_slots=num_slots(spec.scenario, spec.role),
        dtype=model.dtype,
        state_dtype=_STATE_DTYPES[spec.scenario.state_dtype],
        device=model.device,
        allocate=None if transport is None else transport.allocate,
    )


def _drafter(spec: RankSpec, model: Transformer) -> Drafter | None:
    """Makes the draft head of the scenario's decode steps. None: they use no drafts."""
    if (acceptance := spec.scenario.acceptance) is None:
        return None
    max_running = 0 if spec.role == "prefill" else spec.settings.resolved_max_running
    return Drafter(DraftHead(model), acceptance.draft_tokens, max_running)


def _num_host_pages(spec: RankSpec) -> int:
    host_bytes = spec.settings.host_cache_bytes
    if host_bytes is not None and host_bytes > (free_bytes := free_host_bytes()):
        raise ConfigError(
            f"{spec.role}.host_cache: each rank needs {host_bytes / 1e9:.1f} GB; "
            f"this host has {free_bytes / 1e9:.1f} GB of free memory"
        )
    return num_host_pages(spec.scenario, spec.role)


def _model(spec: RankSpec, device: torch.device) -> Transformer:
    options = spec.options
    rendezvous = f"file://{spec.sockets}/{spec.instance_id}.{spec.life}.ranks"
    return Transformer.load(
        model_config(options, spec.scenario.model),
        weight_source(options.weights, device, options.quantization),
        dtype=getattr(torch, options.dtype),
        device=device,
        tp=TensorParallel.join(
            spec.rank,
            spec.settings.tp,
            rendezvous,
            device,
            has_whole_experts=spec.settings.has_whole_experts,
            sends_to_experts=layout_of(spec.scenario, spec.role).sends_to_experts,
        ),
    )


def _device(spec: RankSpec) -> torch.device:
    if spec.options.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here")
    device = torch.device("cuda", spec.slot % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
