"""Opens transfer engines by their names."""

import torch

from pdreal.settings.host import LOOPBACK
from pdreal.transports.protocol import Transport, UnavailableError
from pdsim.system.catalog import hint

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
    "push",
    "shared-memory",
)


def open_transport(name: str, device: torch.device, address: str = LOOPBACK) -> Transport:
    """Returns the engine of this name. The engine's module is imported only here. address: where peers reach this host;
    only Mooncake needs it. Raises UnavailableError if no engine has this name, or this machine cannot run the engine.
    """
    if name == "push":  # the sender's own work, in memory that these map
        name = "cuda-ipc" if device.type == "cuda" else "shared-memory"
    match name:
        case "mooncake-tcp" | "mooncake-nvlink" | "mooncake-rdma" | "mooncake-mnnvl":
            from pdreal.transports.mooncake import MooncakeTransport, kind_of  # noqa: PLC0415

            return MooncakeTransport(kind_of(name), device, address)
        case "nixl-cma" | "nixl-cuda-ipc" | "nixl-cuda-ipc-sglang" | "nixl-rdma":
            from pdreal.transports.nixl import NixlTransport  # noqa: PLC0415

            return NixlTransport(device)
        case "cuda-ipc":
            from pdreal.transports.cuda_ipc import CudaIpcTransport  # noqa: PLC0415

            return CudaIpcTransport(device)
        case "shared-memory":
            from pdreal.transports.shared_memory import SharedMemoryTransport  # noqa: PLC0415

            return SharedMemoryTransport(device)
    raise UnavailableError(f"no engine for transport {name!r}; there are {', '.join(NAMES)}{hint(name, NAMES)}")
