"""Which engine a scenario's `network.transport` names."""

from difflib import get_close_matches

import torch

from pdreal.transports.protocol import Transport, UnavailableError

NAMES = (
    "mooncake-tcp",
    "mooncake-nvlink",
    "mooncake-rdma",
    "mooncake-mnnvl",
    "nixl-cma",
    "nixl-cuda-ipc",
    "nixl-cuda-ipc-sglang",
    "nixl-rdma",
    "cuda-ipc",
    "shared-memory",
)


def open_transport(name: str, device: torch.device) -> Transport:
    """Each engine is imported only here. Raises UnavailableError if this machine cannot run it."""
    match name:
        case "mooncake-tcp" | "mooncake-nvlink" | "mooncake-rdma" | "mooncake-mnnvl":
            from pdreal.transports.mooncake import MooncakeTransport, kind_of  # noqa: PLC0415

            return MooncakeTransport(kind_of(name), device)
        case "nixl-cma" | "nixl-cuda-ipc" | "nixl-cuda-ipc-sglang" | "nixl-rdma":
            from pdreal.transports.nixl import NixlTransport  # noqa: PLC0415

            return NixlTransport(device)
        case "cuda-ipc":
            from pdreal.transports.cuda_ipc import CudaIpcTransport  # noqa: PLC0415

            return CudaIpcTransport(device)
        case "shared-memory":
            from pdreal.transports.shared_memory import SharedMemoryTransport  # noqa: PLC0415

            return SharedMemoryTransport(device)
    nearest = "".join(f" (did you mean {match}?)" for match in get_close_matches(name, NAMES, 1))
    raise UnavailableError(f"no engine for transport {name!r}{nearest}; there are {', '.join(NAMES)}")
