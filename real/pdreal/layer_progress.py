"""Tells while a prefill runs of which groups of layers the KV is in memory, so that it can be sent."""

from collections.abc import Callable

import torch


class LayerProgress:
    """Of one forward. On a CPU it tells at once; on a GPU in `report`, when the stream has come so far."""

    def __init__(
        self, num_layers: int, num_groups: int, on_layers: Callable[[int], None] | None, device: torch.device
    ) -> None:
        """on_layers is called with the number of groups that are done, never if there are none.

        Groups are as equal as whole layers allow.
        """
        self._num_layers = num_layers
        self._num_groups = num_groups
        self._on_layers = on_layers
        self._is_cuda = device.type == "cuda"
        self._num_done = 0
        self._events: list[tuple[int, torch.cuda.Event]] = []

    def on_kv(self, layer: int) -> None:
        """The layer's keys and values are written, or will be when the stream comes to it."""
        num_done = self._groups_within(layer + 1)
        if self._on_layers is None or num_done == self._num_done:
            return
        self._num_done = num_done
        if self._is_cuda:
            event = torch.cuda.Event()
            event.record()
            self._events.append((num_done, event))
        else:
            self._on_layers(num_done)

    def report(self) -> None:
        """Wait for the stream, group after group. The whole forward has been launched."""
        for num_done, event in self._events:
            event.synchronize()
            if self._on_layers is not None:
                self._on_layers(num_done)

    def _groups_within(self, num_layers: int) -> int:
        """Group g ends with layer num_layers * (g + 1) // num_groups."""
        num_groups = self._num_groups
        return min(num_groups, ((num_layers + 1) * num_groups - 1) // self._num_layers) if num_groups else 0
