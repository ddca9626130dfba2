"""Compares pdsim's encoder cache with that of vLLM: `python experiments/conformance/vllm/encoder.py WHEEL`.

WHEEL is the folder of an unpacked wheel of vLLM 0.33.0. Its EncoderCacheManager, and the four methods of its scheduler
that call it, run without the rest of vLLM and without torch. Prompts with images, chunks, preemptions and a lack of
pages are random.
"""

import ast
import bisect
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from pdsim.core.encode.media_item import MediaItem
from pdsim.core.instance import Request
from pdsim.core.sequence import Spans
from pdsim.core.vllm.encoder_cache import EncoderCache

METHODS = (
    "_try_schedule_encoder_inputs",
    "_allocate_encoder_inputs",
    "_free_encoder_inputs",
    "_free_encoder_input",
)
NUM_LOADS, HALF = 4000, 0.5


def functions(path: Path, *names: str, **known: Any) -> dict[str, Any]:
    """The functions and methods with these names in a file, which may use what is known."""
    found = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef) and n.name in names]
    lazy = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    module = ast.fix_missing_locations(ast.Module([lazy, *found], []))
    exec(compile(module, str(path), "exec"), known)  # noqa: S102
    return known


def manager(wheel: Path) -> Any:
    """The class EncoderCacheManager. What it imports is needed for annotations and logs only."""
    imported = {
        "vllm": {},
        "vllm.config": {"VllmConfig": object},
        "vllm.config.ec_manager_config": {"EncoderCacheManagerMetadata": object},
        "vllm.logger": {"init_logger": lambda _: None},
        "vllm.v1": {},
        "vllm.v1.request": {"Request": object},
    }
    for name, values in imported.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(values)
    names: dict[str, Any] = {}
    exec((wheel / "vllm/v1/core/encoder_cache_manager.py").read_text(), names)  # noqa: S102
    return names["EncoderCacheManager"]


class Position(SimpleNamespace):
    def get_num_embeds(self) -> int:
        return self.length

    def get_embeds_indices_in_range(self, start: int, end: int) -> tuple[int, int]:
        return start, end


class Told:
    """A request as vLLM's scheduler sees it."""

    has_encoder_inputs = True
    num_output_placeholders = num_computed_tokens = 0

    def __init__(self, request: Request) -> None:
        self.request_id = str(request.request_id)
        self.mm_features = [
            SimpleNamespace(
                identifier=name_of(item), mm_position=Position(offset=item.start_token, length=item.num_tokens)
            )
            for item in request.media
        ]

    def get_num_encoder_embeds(self, place: int) -> int:
        return self.mm_features[place].mm_position.length


def name_of(item: MediaItem) -> str:
    return f"{item.modality} {item.media_id}"


def prompts(rng: random.Random) -> list[tuple[Request, Told]]:
    tokens = [rng.randint(1, 12) for _ in range(rng.randint(1, 6))]
    found = []
    for i in range(rng.randint(1, 5)):
        items, end = [], 0
        for _ in range(rng.randint(1, 6)):
            number, start = rng.randrange(len(tokens)), end + rng.randint(0, 4)
            items.append(MediaItem(start, tokens[number], number))
            end = start + tokens[number]
        num_tokens = end + rng.randint(1, 5)
        request = Request(i, 0, Spans([(i, 0, num_tokens)]), num_tokens, media=tuple(items))
        found.append((request, Told(request)))
    return found


class Load:
    def __init__(self, scheduler: Any, cache_class: Any, rng: random.Random) -> None:
        self.rng, self.scheduler = rng, scheduler
        self.size = rng.randint(12, 40)
        whole = rng.random() < HALF
        scheduler.scheduler_config = SimpleNamespace(disable_chunked_mm_input=whole)
        self.theirs = scheduler.encoder_cache_manager = cache_class(self.size)
        self.ours = EncoderCache(self.size, splits_items=not whole)
        self.num_choices = self.num_cut = self.num_evicted = 0

    def step(self, requests: list[tuple[Request, Told]]) -> None:
        budget, taken = self.size, []
        self.ours.begin_step()
        for request, told in requests:
            most = self.rng.randint(0, min(24, request.num_tokens - request.num_scheduled_tokens))
            if not most:
                continue
            start = request.num_scheduled_tokens
            new, num_tokens, left, _, repeated = self.scheduler.try_schedule_encoder_inputs(told, start, most, budget)
            choice = self.ours.choose(request, most)
            assert (choice.num_tokens, list(choice.new.values()), list(choice.repeated)) == (num_tokens, new, repeated)
            self.num_choices += 1
            self.num_cut += num_tokens < most
            if num_tokens == 0 or not self.rng.randrange(10):  # pages lack
                self.theirs.free(told)
                self.ours.drop(request.request_id)
                continue
            self.ours.take(request, choice)
            if new:
                budget = left
                self.scheduler.allocate_encoder_inputs(told, new, repeated)
            request.num_scheduled_tokens += num_tokens
            taken.append((request, told))
        self.num_evicted += len(self.theirs.get_freed_mm_hashes())
        for request, told in taken:
            self.end(request, told)
        assert self.theirs.num_free_slots == self.ours.num_free_tokens
        assert self.theirs.num_freeable_slots == self.size - self.ours.num_used_tokens

    def end(self, request: Request, told: Told) -> None:
        if not self.rng.randrange(7):  # it is preempted
            request.num_scheduled_tokens = 0
        request.num_computed_tokens = told.num_computed_tokens = request.num_scheduled_tokens
        if request.num_computed_tokens:
            self.scheduler.free_encoder_inputs(told)
            self.ours.end_chunk(request)
        else:
            self.theirs.free(told)
            self.ours.drop(request.request_id)


def scheduler_of(wheel: Path) -> Any:
    """An object with vLLM's methods, under their names and under these without the first underscore."""
    found = functions(wheel / "vllm/multimodal/utils.py", "get_mm_features_in_window", bisect=bisect)
    found = functions(wheel / "vllm/v1/core/sched/scheduler.py", *METHODS, **found)
    members = {name: found[name] for name in METHODS} | {name[1:]: found[name] for name in METHODS}
    members |= {"is_encoder_decoder": False, "ec_connector": None}
    members["_reject_on_encoder_cache_embed_mismatch"] = lambda *_: False
    return type("Scheduler", (), members)()


def main(wheel: Path) -> None:
    scheduler = scheduler_of(wheel)
    cache_class, totals = manager(wheel), [0, 0, 0]
    for seed in range(NUM_LOADS):
        rng = random.Random(seed)
        load, requests = Load(scheduler, cache_class, rng), prompts(rng)
        for _ in range(rng.randint(1, 14)):
            load.step(requests)
        totals = [a + b for a, b in zip(totals, (load.num_choices, load.num_cut, load.num_evicted), strict=True)]
    print("{} choices agree; {} chunks were cut, {} embeddings evicted".format(*totals))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
