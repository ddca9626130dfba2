"""How long this machine takes for the forwards of one model: python -m pdreal.model_bench --shape qwen3-8b.

Weights and cached KV are random, and pages lie scattered. Times are medians, from the batch on the host to its tokens
there.
"""

from argparse import ArgumentParser, Namespace
from array import array
from collections.abc import Callable, Sequence
from random import Random
from statistics import median
from time import perf_counter_ns

import torch

from pdreal.batches import DecodeBatch, PrefillBatch, PrefillInput
from pdreal.model.config import from_catalog
from pdreal.model.transformer import Transformer
from pdreal.model.weights import RandomWeights
from pdreal.runner import ModelRunner

_WARM_UPS = 2


class ModelBench:
    def __init__(self, runner: ModelRunner, num_repeats: int, *, profiles: bool = False) -> None:
        self._runner = runner
        self._num_repeats = num_repeats
        self._profiles = profiles
        self._pages = Random(0).sample(range(1, runner.kv.num_pages + 1), runner.kv.num_pages)

    def prefill(self, num_prompts: int, num_tokens: int, num_context_tokens: int = 0) -> float:
        """Microseconds a token of prompts of num_tokens each, behind a cached context each."""
        inputs = [
            PrefillInput(
                i, self._tokens(num_tokens), num_context_tokens, self._page_table(i, num_context_tokens + num_tokens)
            )
            for i in range(num_prompts)
        ]
        batch = PrefillBatch(tuple(inputs))
        return self._measure_ns(lambda: self._runner.prefill(batch)) / (1000 * num_prompts * num_tokens)

    def decode(self, batch_size: int, num_context_tokens: int) -> float:
        """Milliseconds a step of sequences with num_context_tokens each."""
        tables = [self._page_table(i, num_context_tokens + 1) for i in range(batch_size)]
        batch = DecodeBatch(tuple(self._tokens(batch_size)), (num_context_tokens,) * batch_size, tuple(tables))
        return self._measure_ns(lambda: self._runner.decode(batch)) / 1e6

    def _measure_ns(self, forward: Callable[[], Sequence[int]]) -> float:
        for _ in range(_WARM_UPS):
            forward()
        durations_ns = []
        for _ in range(self._num_repeats):
            start_ns = perf_counter_ns()
            forward()
            durations_ns.append(perf_counter_ns() - start_ns)
        if self._profiles:
            self._profile(forward)
        return median(durations_ns)

    def _profile(self, forward: Callable[[], Sequence[int]]) -> None:
        is_cuda = self._runner.model.device.type == "cuda"
        with torch.profiler.profile() as profile:
            forward()
        order = "self_cuda_time_total" if is_cuda else "self_cpu_time_total"
        print(profile.key_averages().table(sort_by=order, row_limit=16, max_name_column_width=60))

    def _tokens(self, num_tokens: int) -> Sequence[int]:
        vocab_size = self._runner.model.config.vocab_size
        return array("i", (i * 7919 % vocab_size for i in range(num_tokens)))

    def _page_table(self, index: int, num_tokens: int) -> Sequence[int]:
        num_pages = -(-num_tokens // self._runner.kv.page_size)
        return array("i", self._pages[index * num_pages : (index + 1) * num_pages])


def main() -> None:
    args = _arguments()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    model = Transformer.load(from_catalog(args.shape), RandomWeights(0, device), dtype=dtype, device=device)
    pages_of_decode = max(args.batch) * (args.context // args.page_size + 1)
    pages_of_prefill = max(*args.prompt, 2 * args.chunk) // args.page_size + max(args.batch)
    runner = ModelRunner(
        model,
        num_pages=2 * max(pages_of_decode, pages_of_prefill),
        page_size=args.page_size,
        max_running_requests=max(args.batch),
    )
    with torch.inference_mode():
        runner.kv.memory.normal_()
    bench = ModelBench(runner, args.repeats, profiles=args.profile)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{args.shape}, {args.dtype}, pages of {args.page_size} tokens, torch {torch.__version__}, {name}")
    for num_tokens in args.prompt:
        print(f"prefill  1 x {num_tokens:5} tokens                {bench.prefill(1, num_tokens):8.2f} us a token")
    short = args.prompt[0]
    num_prompts = max(1, args.chunk // short)
    print(
        f"prefill {num_prompts:2} x {short:5} tokens                {bench.prefill(num_prompts, short):8.2f} us a token"
    )
    behind = bench.prefill(1, args.chunk, args.chunk)
    print(f"prefill  1 x {args.chunk:5} tokens behind {args.chunk:5}   {behind:8.2f} us a token")
    for batch_size in args.batch:
        step_ms = bench.decode(batch_size, args.context)
        print(f"decode  {batch_size:2} x {args.context:5} tokens                {step_ms:8.3f} ms a step")


def _arguments() -> Namespace:
    parser = ArgumentParser(prog="python -m pdreal.model_bench", description=__doc__)
    parser.add_argument("--shape", default="qwen3-8b", help="a model of the catalog")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--prompt", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="tokens of one prompt")
    parser.add_argument(
        "--chunk", type=int, default=4096, help="tokens of a forward of several prompts, or behind others"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 25, 64])
    parser.add_argument("--context", type=int, default=1100, help="tokens of each decoding sequence")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="show what each forward spends its time on")
    return parser.parse_args()


if __name__ == "__main__":
    main()
