"""How long this machine takes for the forwards of one model: python -m pdreal.model_bench --shape qwen3-8b.

Weights and cached KV are random, and pages lie scattered. Times are medians, from the batch on the host to its tokens
there.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence

import torch

from pdreal.measure.forwards import DecodeCase, ForwardBench, PrefillCase
from pdreal.model.config import from_catalog
from pdreal.model.transformer import Transformer
from pdreal.model.weights import RandomWeights
from pdreal.runner import ModelRunner


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
    bench = ForwardBench(runner, args.seconds, look=_profile if args.profile else None)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{args.shape}, {args.dtype}, pages of {args.page_size} tokens, torch {torch.__version__}, {name}")
    short = args.prompt[0]
    prefills = [PrefillCase(1, num_tokens) for num_tokens in args.prompt]
    prefills += [PrefillCase(max(1, args.chunk // short), short), PrefillCase(1, args.chunk, args.chunk)]
    for case in prefills:
        num_prompts, num_tokens, num_context_tokens = case
        token_us = bench.prefill(case).time_us / (num_prompts * num_tokens)
        print(
            f"prefill {num_prompts:2} x {num_tokens:5} tokens behind {num_context_tokens:5} {token_us:8.2f} us a token"
        )
    for batch_size in args.batch:
        step_ms = bench.decode(DecodeCase(batch_size, args.context)).time_us / 1e3
        print(f"decode  {batch_size:2} x {args.context:5} tokens              {step_ms:8.3f} ms a step")


def _profile(forward: Callable[[], Sequence[int]]) -> None:
    with torch.profiler.profile() as profile:
        forward()
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(profile.key_averages().table(sort_by=order, row_limit=16, max_name_column_width=60))


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
    parser.add_argument("--seconds", type=float, default=0.3, help="for each row, but no less than three repeats")
    parser.add_argument("--profile", action="store_true", help="show what each forward spends its time on")
    return parser.parse_args()


if __name__ == "__main__":
    main()
