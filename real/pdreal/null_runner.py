"""In place of a model: answers at once, so that what is left is the harness."""

from collections.abc import Callable

from pdreal.tasks import DecodeBatch, PrefillBatch, Work


class NullRunner:
    def warm_up(self) -> None:
        """Nothing gets warm."""

    def run(self, work: Work, on_layers: Callable[[int], None] | None = None) -> list[int]:
        """A token for each sequence."""
        match work:
            case PrefillBatch():
                return [1] * len(work.chunks)
            case DecodeBatch():
                return [1] * len(work.tokens)
        return []
