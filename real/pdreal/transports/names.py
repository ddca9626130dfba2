"""Names of transfer engines."""

LOOPBACK = "127.0.0.1"
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


BETWEEN_HOSTS = ("mooncake-rdma", "nixl-rdma", "mooncake-mnnvl", "mooncake-tcp")
