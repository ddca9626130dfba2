"""Checks what a client says it completed against what was asked: completed.py FILE REQUESTS OUTPUT_TOKENS"""

import json
import sys
from pathlib import Path


def aiperf(result: dict) -> tuple[str, int, int, int]:
    tokens = [round(result[name]["avg"]) for name in ("total_isl", "total_osl")]
    return f"aiperf {result['aiperf_version']}", round(result["request_count"]["avg"]), *tokens


def bench_serving(result: dict) -> tuple[str, int, int, int]:
    """SGLang's, which also counts the tokens of the text it got, and vLLM's."""
    counted = result.get("total_output_tokens_retokenized", result["total_output_tokens"])
    name = "sglang" if "total_output_tokens_retokenized" in result else "vllm"
    return f"{name} ({result['backend']})", result["completed"], result["total_input_tokens"], counted


file, requests, output_tokens = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
result = json.loads(file.read_text().splitlines()[-1]) if file.suffix == ".jsonl" else json.loads(file.read_text())
name, done, num_input, num_output = aiperf(result) if "aiperf_version" in result else bench_serving(result)
print(f"{file.stem}: {name}: {done} of {requests} requests, {num_input} tokens in, {num_output} of {output_tokens} out")
sys.exit((done, num_output) != (requests, output_tokens))
