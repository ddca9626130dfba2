"""Stalls of a cold server, until its kernels are compiled and its CUDA graphs have run."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import field

from pdsim.core.messages import PrefillChunk, PrefillStep
from pdsim.dataclass import dataclass

_FOREVER = 1 << 30


@dataclass(kw_only=True)
class ColdServer:
    """Stalls of one instance after its start, until its kernels are compiled and its CUDA graphs have run.

    SGLang allocates pages by a kernel that it compiles once for each number of requests, rounded up to a power of two.
    With two variants, one kernel is for lists of free pages that begin at a multiple of 16 bytes, and one for other
    lists. An entry of a list has 8 bytes.
    """

    steps: Mapping[int, int]
    """Stalls of decode steps in ns. Keys: number of the step that stalls. Only steps with several requests count; the
    first such step since the start has number 1."""
    prefill_kernel_ns: int = 0
    """Time in ns to compile a kernel for the prompts of a forward."""
    decode_kernel_ns: int = 0
    """Time in ns to compile a kernel for the requests of a decode step."""
    num_variants: int = 1
    page_size: int = 1
    """Number of tokens in a page."""
    _num_shared_steps: int = field(init=False, default_factory=int)  # compiled, a plain default would not be there
    """Number of decode steps with several requests since the start."""
    _num_allocated_pages: int = field(init=False, default_factory=int)
    """Number of pages that forwards have allocated since the start. Each of them has left the front of the list of free
    pages, so the list now begins this number of entries further back in memory. Not counted are pages that an
    aggregated instance's decode steps allocate, and pages that are freed in front of the list.
    """
    _compiled: set[tuple[int, int]] = field(init=False, default_factory=set)
    """Kernels that forwards have compiled. A kernel is (number of prompts, rounded up to a power of two; index of its
    variant).
    """
    _decode_steps: Counter[int] = field(init=False, default_factory=Counter)
    """Number of decode steps since the start. Keys: number of requests, rounded up to a power of two."""

    def forward_stall_ns(self, step: PrefillStep) -> int:
        """Returns the time in ns for which a forward waits until the kernel for its number of prompts is compiled; 0 if
        the kernel is compiled already. The caller makes one call per forward, in order.
        """
        kernel = _power_of_two(len(step.chunks)), self._num_allocated_pages % self.num_variants
        stall_ns = 0 if kernel in self._compiled else self.prefill_kernel_ns
        self._compiled.add(kernel)
        self._num_allocated_pages += sum([self._num_new_pages(chunk) for chunk in step.chunks])
        return stall_ns

    def _num_new_pages(self, chunk: PrefillChunk) -> int:
        end = chunk.num_context_tokens + chunk.num_tokens
        return -(-end // self.page_size) - -(-chunk.num_context_tokens // self.page_size)

    def next_stall(self, num_requests: int) -> tuple[int, int]:
        """Returns how many decode steps of num_requests requests run before the next stall, and the length of the stall
        in ns (0: no stall follows).

        A step stalls if it needs a kernel variant that is not compiled yet. The variant depends on the pages of the
        step, which are not counted. Therefore each of the first num_variants steps of a batch size, rounded up to a
        power of two, counts as if it compiled a variant.
        """
        num_before, stall_ns = self._next_numbered(num_requests)
        if self.decode_kernel_ns and self._decode_steps[_power_of_two(num_requests)] < self.num_variants:
            return 0, self.decode_kernel_ns + (0 if num_before else stall_ns)
        return num_before, stall_ns

    def _next_numbered(self, num_requests: int) -> tuple[int, int]:
        if num_requests > 1:
            for ordinal in sorted(self.steps):
                if ordinal > self._num_shared_steps:
                    return ordinal - self._num_shared_steps - 1, self.steps[ordinal]
        return _FOREVER, 0

    def count_steps(self, num_requests: int, num_steps: int) -> None:
        """Counts num_steps decode steps of num_requests requests each. The next call of `next_stall` is about the step
        that follows these steps.
        """
        if num_requests > 1:
            self._num_shared_steps += num_steps
        self._decode_steps[_power_of_two(num_requests)] += num_steps

    def restart(self) -> None:
        """Makes the instance cold again, because it has restarted."""
        self._num_shared_steps = 0
        self._num_allocated_pages = 0
        self._compiled.clear()
        self._decode_steps.clear()


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not less than a number of at least 1."""
    return 1 << (number - 1).bit_length()
