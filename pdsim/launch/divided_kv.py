"""Chooses the attention backend of SGLang servers whose GPUs divide the KV of requests."""

from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.servers import ServerSettings
from pdsim.system.catalog import load_model
from pdsim.system.model import LatentAttention


def attention_backend(scenario: Scenario, servers: ServerSettings) -> str | None:
    """Name of the backend that the scenario gives. If the scenario gives none, and GPUs divide the KV of attention that
    is not sparse: flashinfer or triton, which can read divided KV. fa3, SGLang's choice on Hopper, cannot (0.5.23,
    arg_groups/model_override_base.py:338). None: SGLang chooses. Sparse attention has backends of its own.
    """
    attention = load_model(scenario.model).attention
    if servers.attention_backend is not None or servers.split.dcp == 1 or attention.index_token_bytes:
        return servers.attention_backend
    return "flashinfer" if isinstance(attention, LatentAttention) else "triton"
