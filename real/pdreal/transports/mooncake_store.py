"""Mooncake's distributed store: memory that processes lend, and a master that knows which objects lie there."""

import logging
from collections.abc import Sequence
from time import sleep
from types import ModuleType
from typing import Any
from uuid import uuid4

import torch

from pdreal.settings.host import LOOPBACK
from pdreal.transports.mooncake import apply_settings, hide_from_the_network, wheel_for
from pdreal.transports.protocol import UnavailableError, load_engine

_LOG = logging.getLogger("pdreal")
_BUFFER_BYTES = 16 << 20
"""Size of the buffer that Mooncake's client allocates for itself, SGLang's default. Copies to and from registered
memory do not need this buffer (SGLang 0.5.23, mem_cache/storage/mooncake_store/mooncake_store.py:31,
DEFAULT_LOCAL_BUFFER_SIZE).
"""
_WARM_UPS = 20
"""Maximum number of attempts at a client's first write, which may fail at first. SGLang makes up to 10 attempts, one
per second (SGLang 0.5.23, mem_cache/storage/mooncake_store/mooncake_store.py:721, warmup).
"""
_WARM_UP_DELAY_S = 0.25
"""Delay in s after each failed attempt at a client's first write."""
_IS_THERE = 1
_CPU = torch.device("cpu")


class MooncakeStore:
    """A client of Mooncake's store, which keeps objects in memory that processes lend to it. Data moves over TCP.
    Several threads may use the client at a time. A call that fails ends within seconds.
    """

    def __init__(self, master: str, address: str, device: torch.device, *, lent_bytes: int = 0) -> None:
        """master: address of the store's master. address: address at which other clients reach this host. device:
        decides whether the message of an error names Mooncake's package for CPUs or for GPUs. lent_bytes: memory that
        this process lends to the store. Raises UnavailableError if the store cannot be loaded, or its master takes no
        client.
        """
        apply_settings()
        self._store: Any = load_store(device).MooncakeDistributedStore()
        self._failures: set[str] = set()
        if code := self._store.setup(address, "P2PHANDSHAKE", lent_bytes, _BUFFER_BYTES, "tcp", "", master):
            raise UnavailableError(f"Mooncake's master at {master} takes no client (code {code})")
        if address == LOOPBACK:
            hide_from_the_network()

    def register(self, memory: torch.Tensor) -> None:
        """Registers memory for reads and writes. Then writes a small test object, because the first writes of a new
        client may fail. Raises UnavailableError if the store refuses the memory, or still refuses the object after
        several attempts.
        """
        if code := self._store.register_buffer(memory.data_ptr(), memory.nbytes):
            raise UnavailableError(f"Mooncake's store refuses memory of {memory.nbytes} bytes (code {code})")
        for _ in range(_WARM_UPS):
            if (code := self._store.put(f"warm-up-{uuid4()}", b"0")) == 0:
                return
            sleep(_WARM_UP_DELAY_S)
        raise UnavailableError(f"Mooncake's store takes no object (code {code})")

    def num_there(self, names: Sequence[str]) -> int:
        """Returns how many of the objects with these names the store has, counted from the first name up to the first
        object that is missing or could not be looked up.
        """
        found = self._store.batch_is_exist(list(names))
        self._note_failure("lookup", min(found))
        return _num_first([code == _IS_THERE for code in found])

    def missing(self, names: Sequence[str]) -> list[int]:
        """Returns the indices in `names` of all objects that the store lacks or could not look up."""
        return [i for i, code in enumerate(self._store.batch_is_exist(list(names))) if code != _IS_THERE]

    def read(self, names: Sequence[str], begins: Sequence[int], num_bytes: int) -> int:
        """Copies objects of num_bytes bytes each from the store to the addresses `begins` in registered memory. names:
        names of the objects, in the order of `begins`. Returns how many objects were read, counted from the first one
        up to the first one that failed.
        """
        codes = self._store.batch_get_into(list(names), list(begins), [num_bytes] * len(names))
        self._note_failure("read", min(codes))
        return _num_first([code == num_bytes for code in codes])

    def write(self, names: Sequence[str], begins: Sequence[int], num_bytes: int) -> bool:
        """Copies objects of num_bytes bytes each from the addresses `begins` in registered memory to the store. names:
        names of the objects, in the order of `begins`. Returns False if an object is not written, for example because
        the store is full.
        """
        codes = self._store.batch_put_from(list(names), list(begins), [num_bytes] * len(names))
        self._note_failure("write", min(codes))
        return not any(codes)

    def _note_failure(self, what: str, code: int) -> None:
        """Logs a failed call of the store, unless a call of the same kind has failed with the same code before. what:
        kind of the call. code: the smallest result of the call; if it is negative, the call failed.
        """
        if code < 0 and f"{what} {code}" not in self._failures:
            self._failures.add(f"{what} {code}")
            _LOG.warning("Mooncake's store: a %s failed (code %d); its pages count as missing", what, code)

    def close(self) -> None:
        self._store.close()


def load_store(device: torch.device = _CPU) -> ModuleType:
    """Imports the store's module. Raises UnavailableError if the module is missing or broken."""
    return load_engine(("mooncake.store",), wheel_for(device))


def _num_first(succeeded: Sequence[bool]) -> int:
    """Returns the number of successes before the first failure."""
    return succeeded.index(False) if False in succeeded else len(succeeded)
