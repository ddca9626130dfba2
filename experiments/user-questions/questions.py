"""Twelve questions of users, each by a command: python experiments/user-questions/questions.py

Prints what README.md shows of them: the table, and the commands.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Answer = dict[str, Any]
"""What a command prints with --json."""


class Question(NamedTuple):
    """What a user asked and saw, and how pdsim answers."""

    asked: str
    thread: str
    """Repository and number on GitHub."""
    saw: str
    command: str
    says: Callable[[Answer], str]


THREADS = {"vllm": "vllm-project/vllm", "sglang": "sgl-project/sglang", "dynamo": "ai-dynamo/dynamo"}


def estimate(answer: Answer, arm: str, name: str) -> float:
    """The mean of one number of one way of doing it."""
    (found,) = [one for one in answer["arms"] if one["arm"] == arm]
    return float(found["estimates"][name]["mean"])


def ratio(answer: Answer, arm: str, other: str, name: str) -> float:
    return estimate(answer, arm, name) / estimate(answer, other, name)


def scattered_ms(answer: Answer, page_tokens: int) -> float:
    """To move a prompt's KV whose pages do not follow one another, from the rate that the answer names."""
    (line,) = [note for note in answer["notes"] if note.startswith(f"Pages of {page_tokens}:")]
    numbers = re.search(r"([\d,]+) descriptors of ([\d.]+) KB per pair of ranks, ([\d.]+) GB/s", line)
    assert numbers is not None, line
    descriptors, kilobytes, gigabytes_per_s = (float(number.replace(",", "")) for number in numbers.groups())
    return descriptors * kilobytes / gigabytes_per_s / 1e3


def alone(answer: Answer) -> str:
    """What requests have one at a time, which a note of an infeasible SLO names."""
    (note,) = [note for note in answer["notes"] if note.startswith("Infeasible")]
    return note.partition("one request at a time: ")[2].partition(". ")[0]


PAGES = (
    "pdsim ask page-and-descriptors --seeds 1 --set model=qwen3-32b --set prefill.tp=4 --set decode.tp=4 "
    "--set network.transport=nixl-cuda-ipc "
    "--set 'workload={use: random_lengths, num_requests: 10, input_tokens: 5000, output_tokens: 100}'"
)
QUESTIONS = (
    Question(
        "How do I choose P:D? Should prefill and decode have equal work?",
        "vllm#11345",
        "about 1:1",
        "pdsim ask pd-ratio --seeds 1",
        lambda a: a["recommendation"],
    ),
    Question(
        "Why does disaggregation gain nothing with 32k tokens in and 512 out on H200?",
        "sglang#24488",
        "no gain",
        "pdsim ask pd-or-not --seeds 1 --set prefill.instances=1 --set decode.instances=1 "
        "--set 'workload={use: random_lengths, num_requests: 150, input_tokens: 32000, output_tokens: 512}' "
        "--set 'client={use: open_loop, arrivals: {use: poisson, rate: 0.5/s}}'",
        lambda a: (
            f"within the SLO: {estimate(a, '1P1D', 'attained'):.0f} % of requests, "
            f"{estimate(a, 'aggregated, least_loaded', 'attained'):.0f} % aggregated"
        ),
    ),
    Question(
        "Why is TTFT so much higher than on the same GPUs without disaggregation?",
        "vllm#21037",
        "2 times",
        "pdsim ask explain-ttft --seeds 1",
        lambda a: f"{ratio(a, 'disaggregated', 'aggregated', 'ttft'):.1f} times; see what it waits for",
    ),
    Question(
        "Pages of 16 or of 64 tokens?",
        "vllm#50913",
        "105 ms a transfer with 16, 47 with 64",
        PAGES,
        lambda a: f"{scattered_ms(a, 16):.0f} ms with 16, {scattered_ms(a, 64):.0f} with 64",
    ),
    Question(
        "What do 40,064 descriptors cost between GPUs of one host?",
        "vllm#34054",
        "174 ms a transfer",
        PAGES,
        lambda a: f"{scattered_ms(a, 16):.0f} ms",
    ),
    Question(
        "How many small transfers does staging save, where TP differs?",
        "sglang#19890",
        "1,000 times fewer than some 30,000",
        "pdsim ask staging-ring --seeds 1 --set workload.num_requests=200",
        lambda a: (
            f"{estimate(a, 'no staging: slices', 'descriptors'):,.0f} a request, "
            f"{estimate(a, 'ring of 1,024 MiB', 'descriptors'):.0f} with a ring of 1 GiB"
        ),
    ),
    Question(
        "Does a radix cache on decode help me?",
        "sglang#19746",
        "1.32 times the requests/s, median TTFT an eighth",
        "pdsim ask decode-cache experiments/decode-radix-b200/scenario.yaml --seeds 1 "
        "--slo 'ttft < 10 s and tpot < 200 ms for 90 %'",
        lambda a: (
            f"{ratio(a, 'on', 'off', 'rate'):.2f} times the requests/s, "
            f"median TTFT 1/{1 / ratio(a, 'on', 'off', 'median_ttft'):.0f}"
        ),
    ),
    Question(
        "Is decode's GPU memory enough for the cache, with 162k tokens of pool and 50 prefixes of 16k?",
        "sglang#26560",
        "hit rate under 20 %",
        "pdsim ask decode-cache --seeds 1 --set decode.pool_tokens=162000 --set 'workload={use: prefix_pool, "
        "num_requests: 300, num_prefixes: 50, prefix_tokens: 16000, input_tokens: 500, output_tokens: 200}'",
        lambda a: f"hit rate {estimate(a, 'on', 'decode_hits'):.0f} %",
    ),
    Question(
        "Why does round robin beat cache_aware, when all share a prefix?",
        "sglang#21199",
        "TTFT 627 ms against 1,617",
        "pdsim ask routing --seeds 1 --set workload.num_prefixes=1",
        lambda a: f"{estimate(a, 'round_robin', 'ttft'):.0f} ms against {estimate(a, 'cache_aware', 'ttft'):.0f}",
    ),
    Question(
        "How many tokens should decode reserve for a request?",
        "sglang#6860",
        "output tokens/s -56 % with 1,024",
        "pdsim ask admission --seeds 1 --slo 'ttft < 60 s and tpot < 50 ms for 90 %'",
        lambda a: f"{ratio(a, 'reserve 1024', 'reserve 128', 'tokens') - 1:+.0%} against 128".replace("%", " %"),
    ),
    Question(
        "Does sending KV layer by layer pay over TCP?",
        "sglang#19931",
        "TTFT -14.6 %",
        "pdsim ask overlap experiments/layerwise-tcp/scenario.yaml --seeds 1",
        lambda a: f"TTFT {100 * (ratio(a, '60 groups of layers', 'whole prompt', 'ttft') - 1):+.1f} %",
    ),
    Question(
        "Can more prefill replicas bring TTFT under the SLO?",
        "dynamo#11624",
        "no, where one request alone misses it",
        "pdsim ask pd-ratio --seeds 1 --slo 'ttft < 100 ms and tpot < 50 ms for 90 %' --set workload.num_requests=200",
        lambda a: f"no: even one at a time, {alone(a)}",
    ),
)


def answer_of(command: str) -> Answer:
    words = [sys.executable, "-m", "pdsim", *shlex.split(command)[1:], "--json"]
    ended = subprocess.run(words, capture_output=True, text=True, check=True)  # noqa: S603  the commands above
    answer: Answer = json.loads(ended.stdout)
    return answer


def lines() -> Iterator[str]:
    """The table and the commands, in markdown."""
    answers = {command: answer_of(command) for command in dict.fromkeys(question.command for question in QUESTIONS)}
    yield from ("| | asked | users saw | simulated |", "|---|---|---|---|")
    for number, question in enumerate(QUESTIONS, 1):
        tracker, _, issue = question.thread.partition("#")
        link = f"[{question.thread}](https://github.com/{THREADS[tracker]}/issues/{issue})"
        figures = f"{question.saw} | {question.says(answers[question.command])}".replace("-", "\N{MINUS SIGN}")
        yield f"| {number} | {question.asked} {link} | {figures} |"
    yield from ("", "```sh")
    for command in answers:
        numbers = [str(number) for number, question in enumerate(QUESTIONS, 1) if question.command == command]
        yield f"{command}  # {' and '.join(numbers)}"
    yield "```"


if __name__ == "__main__":
    print("\n".join(lines()))
