"""Writes the blind loads that measure.sh sends: python experiments/sglang-h100/loads.py FOLDER

One JSON object a request: `t`, when it is due in seconds, `in` and `out` tokens, and `pre`, whose first `pre_len`
tokens it shares with others.
"""

import csv
import gzip
import json
import sys
from collections.abc import Iterator
from datetime import datetime
from itertools import accumulate, islice
from pathlib import Path
from random import Random
from typing import Any

TRACES = Path(__file__).resolve().parent.parent / "open-loops-h200"
MEDIUM = (256, 3840), (64, 448)
"""Least and most tokens in and out."""

Request = dict[str, Any]
Range = tuple[int, int]


def loads() -> dict[str, list[Request]]:
    return {
        "poisson8": uniform(Random("poisson8"), gaps(8), 200, *MEDIUM),
        "poisson19": uniform(Random("poisson19"), gaps(19), 450, *MEDIUM),
        "bursts": uniform(Random("bursts"), gaps(10, shape=0.1), 250, *MEDIUM),
        "long": uniform(Random("long"), gaps(3), 75, (4096, 12288), (128, 256)),
        "mixed": mixed(Random("mixed")),
        "code": trace("code", 300, speedup=6),
        "conversation": trace("conversation", 400, speedup=4),
        "shared": shared(Random("shared")),
        "retract": uniform(Random("retract"), None, 72, (512, 1024), (1024, 2048)),
    }


def gaps(rate: float, shape: float = 1) -> tuple[float, float]:
    """Parameters of gamma-distributed gaps: Poisson arrivals with shape 1, bursts below."""
    return shape, 1 / (rate * shape)


def times_s(random: Random, gap: tuple[float, float] | None) -> Iterator[float]:
    """None: all at once."""
    return accumulate(random.gammavariate(*gap) if gap else 0.0 for _ in iter(int, 1))


def uniform(random: Random, gap: tuple[float, float] | None, num: int, tokens: Range, output: Range) -> list[Request]:
    return [
        request(time_s, random.randint(*tokens), random.randint(*output))
        for time_s in islice(times_s(Random(num), gap), num)
    ]


def mixed(random: Random) -> list[Request]:
    """Short prompts, and one in twenty that is long."""
    short, long = (128, 1024), (20000, 30000)
    return [
        request(time_s, random.randint(*random.choices((short, long), (19, 1))[0]), random.randint(64, 192))
        for time_s in islice(times_s(Random(8), gaps(8)), 200)
    ]


def shared(random: Random) -> list[Request]:
    """One of 24 prefixes, the n-th as popular as 1 / n, and a question of its own."""
    prefixes = [random.randint(2000, 8000) for _ in range(24)]
    chosen = random.choices(range(24), [1 / n for n in range(1, 25)], k=240)
    return [
        request(time_s, prefixes[number] + random.randint(100, 600), random.randint(64, 256))
        | {"pre": f"shared-{number}", "pre_len": prefixes[number]}
        for time_s, number in zip(times_s(Random(9), gaps(9)), chosen, strict=False)
    ]


def trace(name: str, num: int, speedup: float) -> list[Request]:
    """The first requests of an Azure trace, faster."""
    with gzip.open(TRACES / f"azure-{name}.csv.gz", "rt", encoding="utf-8") as file:
        rows = list(islice(csv.DictReader(file), num))
    begin, *_ = times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    return [
        request((time - begin).total_seconds() / speedup, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for time, row in zip(times, rows, strict=True)
    ]


def request(time_s: float, tokens: int, output: int) -> Request:
    return {"t": round(time_s, 6), "in": tokens, "out": output}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, requests in loads().items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in requests), encoding="utf-8")
