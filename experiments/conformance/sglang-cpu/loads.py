"""The loads: servers, and the requests that they get. Everything is drawn from seeds."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

VOCABULARY = 2048
STOPPED = 0.5
"""Part of the requests that some tokens end."""


@dataclass(frozen=True)
class Role:
    """Instances of one role, by SGLang's names."""

    max_total_tokens: int = 8192
    chunked_prefill_size: int = 8192
    max_running_requests: int = 64
    radix: bool = True
    max_prefill_tokens: int = 16384
    num_reserved_decode_tokens: int = 512
    policy: str = "fcfs"
    preempts: bool = False
    mixed: bool = False
    """An aggregated server: --enable-mixed-chunk."""
    overlap: bool = False
    """An aggregated or a prefill server without --disable-overlap-schedule."""
    """Requests have priorities, and running ones give way to higher ones."""

    def arguments(self, role: str) -> list[str]:
        arguments = ["--max-total-tokens", str(self.max_total_tokens)]
        arguments += ["--max-running-requests", str(self.max_running_requests)]
        arguments += ["--chunked-prefill-size", str(self.chunked_prefill_size)]
        arguments += ["--max-prefill-tokens", str(self.max_prefill_tokens), "--schedule-policy", self.policy]
        if self.preempts:
            arguments += ["--enable-priority-scheduling", "--enable-priority-preemption"]
        if role == "decode":
            arguments += ["--num-reserved-decode-tokens", str(self.num_reserved_decode_tokens)]
            return arguments + ["--disaggregation-decode-enable-radix-cache"] * self.radix
        return arguments + ["--disable-radix-cache"] * (not self.radix)


@dataclass(frozen=True)
class Servers:
    page_size: int
    prefill: Role
    """Of an aggregated server, all."""
    decode: Role | None = None
    num_each: int = 1
    release: str = "0.5.12"

    @property
    def is_aggregated(self) -> bool:
        return self.decode is None


@dataclass(frozen=True)
class Request:
    at_s: float
    prompt: list[int]
    max_new_tokens: int
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    priority: int = 0


@dataclass(frozen=True)
class Load:
    servers: Servers
    requests: "Requests"
    comes_in_order: bool = False
    """A router sees its requests one after another."""


Requests = Callable[[random.Random], list[Request]]


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(16, VOCABULARY - 16) for _ in range(count)]


def poisson(
    count: int,
    rate: float,
    prompts: tuple[int, int],
    outputs: tuple[int, int],
    *,
    prefixes: int = 0,
    prefix_tokens: tuple[int, int] = (0, 0),
    burst: int = 1,
    spacing_s: float = 0,
    ignore_eos: bool = False,
) -> Requests:
    """Bursts of requests at random instants. Of each prompt, part may be one of some prefixes."""

    def make(draw: random.Random) -> list[Request]:
        stems = [_tokens(draw, prefix_tokens[1]) for _ in range(prefixes)]
        requests, at_s = [], 0.0
        for i in range(count):
            if i % burst == 0:
                at_s += max(spacing_s, draw.expovariate(rate / burst))
            stem = draw.choice(stems)[: draw.randint(*prefix_tokens)] if stems else []
            prompt = stem + _tokens(draw, draw.randint(*prompts))
            stops = draw.sample(range(VOCABULARY), 20) if draw.random() < STOPPED else []
            requests.append(Request(round(at_s, 4), prompt, draw.randint(*outputs), stops, ignore_eos))
        return requests

    return make


def mixed_lengths(count: int, rate: float, prompts: tuple[int, ...], outputs: tuple[int, ...], burst: int) -> Requests:
    """Bursts of requests, each as long as one of some lengths."""

    def make(draw: random.Random) -> list[Request]:
        requests, at_s = [], 0.0
        for i in range(count):
            at_s += draw.expovariate(rate / burst) if i % burst == 0 else 0
            requests.append(Request(round(at_s, 4), _tokens(draw, draw.choice(prompts)), draw.choice(outputs)))
        return requests

    return make


def repeats(count: int, rate: float, texts: int, lengths: tuple[int, ...], longest_output: int, burst: int) -> Requests:
    """Bursts of requests, each of which begins one of some texts."""

    def make(draw: random.Random) -> list[Request]:
        all_texts = [_tokens(draw, max(lengths)) for _ in range(texts)]
        requests, at_s = [], 0.0
        for i in range(count):
            at_s += draw.expovariate(rate / burst) if i % burst == 0 else 0
            prompt = draw.choice(all_texts)[: draw.choice(lengths)]
            requests.append(Request(round(at_s, 4), prompt, draw.randint(1, longest_output)))
        return requests

    return make


def prioritised(load: Requests, priorities: tuple[int, ...]) -> Requests:
    """The same requests, each with one of these priorities."""

    def make(draw: random.Random) -> list[Request]:
        return [replace(request, priority=draw.choice(priorities)) for request in load(draw)]

    return make


_ROUTED = poisson(100, 8, (8, 120), (4, 30), prefixes=6, prefix_tokens=(60, 400), spacing_s=0.03)
_SHARED = poisson(120, 12, (4, 200), (2, 40), prefixes=6, prefix_tokens=(20, 300))
_LONG = poisson(50, 4, (50, 1500), (2, 24))
_OUTPUTS = poisson(60, 12, (20, 200), (60, 250), burst=6)
_TURNS = poisson(150, 15, (1, 90), (8, 60), prefixes=3, prefix_tokens=(100, 500), burst=5)


_BACK = Role(radix=False)
AGGREGATED_TIGHT = Servers(1, Role(max_total_tokens=2500, chunked_prefill_size=512, max_running_requests=32))
AGGREGATED_PAGES = Servers(16, Role(max_total_tokens=4096, chunked_prefill_size=256, max_running_requests=32))
AGGREGATED_OFF = Servers(
    64, Role(max_total_tokens=4096, chunked_prefill_size=2048, max_running_requests=16, radix=False)
)
PAIR = Servers(1, Role(max_total_tokens=6000), _BACK)
PAIR_CHUNKS = Servers(64, Role(chunked_prefill_size=512, max_total_tokens=6400), Role(max_total_tokens=8192))
PAIR_TIGHT = Servers(
    1,
    Role(max_total_tokens=2000, max_running_requests=8, chunked_prefill_size=1024),
    Role(max_total_tokens=3000, max_running_requests=24, num_reserved_decode_tokens=16, radix=False),
)
PAIR_TIGHT_PAGES = Servers(
    16,
    Role(max_total_tokens=2048, max_running_requests=6, chunked_prefill_size=256),
    Role(max_total_tokens=3200, max_running_requests=24, num_reserved_decode_tokens=16, radix=False),
)
TWO_EACH = Servers(16, Role(chunked_prefill_size=512, max_total_tokens=4096), Role(num_reserved_decode_tokens=64), 2)

AGGREGATED_ABORT = Servers(1, Role(max_total_tokens=3000, chunked_prefill_size=256, max_running_requests=32))
AGGREGATED_FIXED = Servers(1, Role(max_total_tokens=2500, max_running_requests=16, radix=False))
AGGREGATED_PRIORITY = Servers(
    1, Role(max_total_tokens=4000, chunked_prefill_size=256, max_running_requests=6, preempts=True)
)
AGGREGATED_REPEATS = Servers(
    32, Role(max_total_tokens=2048, chunked_prefill_size=128, max_running_requests=32, max_prefill_tokens=192)
)
PAIR_SMALL_CHUNKS = Servers(
    64,
    Role(max_total_tokens=4096, chunked_prefill_size=128),
    Role(max_total_tokens=6400, max_running_requests=8),
)
PAIR_EQUAL = Servers(
    1,
    Role(max_total_tokens=4000, max_running_requests=16),
    Role(max_total_tokens=2000, max_running_requests=16, num_reserved_decode_tokens=16, radix=False),
)
PAIR_PREFIXES = Servers(
    1,
    Role(max_total_tokens=4000, chunked_prefill_size=256, max_running_requests=8, policy="lpm"),
    Role(max_total_tokens=6000, num_reserved_decode_tokens=64),
)
PAIR_RADIX_PAGES = Servers(
    16,
    Role(max_total_tokens=4096, chunked_prefill_size=256),
    Role(max_total_tokens=2560, num_reserved_decode_tokens=8),
)
PAIR_RADIX = Servers(
    1,
    Role(max_total_tokens=6000, chunked_prefill_size=1024),
    Role(max_total_tokens=2400, num_reserved_decode_tokens=16),
)
PAIR_FEW = Servers(
    1,
    Role(max_total_tokens=4000, max_running_requests=2),
    Role(max_total_tokens=4000, max_running_requests=3, num_reserved_decode_tokens=64),
)

LOADS = {
    "aggregated-shared": Load(AGGREGATED_TIGHT, _SHARED),
    "aggregated-retraction": Load(AGGREGATED_TIGHT, _OUTPUTS),
    "aggregated-pages-shared": Load(AGGREGATED_PAGES, _TURNS),
    "aggregated-pages-chunks": Load(AGGREGATED_PAGES, _LONG),
    "aggregated-pages-retraction": Load(AGGREGATED_PAGES, _OUTPUTS),
    "aggregated-no-radix": Load(AGGREGATED_OFF, _OUTPUTS),
    "pair-shared": Load(PAIR, _SHARED),
    "pair-chunks": Load(PAIR_CHUNKS, _LONG),
    "pair-chunks-turns": Load(PAIR_CHUNKS, _TURNS),
    "pair-retraction": Load(PAIR_TIGHT, _OUTPUTS),
    "pair-pages-retraction": Load(PAIR_TIGHT_PAGES, _OUTPUTS),
    "pair-pages-small-pools": Load(PAIR_TIGHT_PAGES, _TURNS),
    "two-each-round-robin": Load(TWO_EACH, _ROUTED, comes_in_order=True),
    "two-each-chunks": Load(TWO_EACH, _LONG),
    "agg-abort": Load(AGGREGATED_ABORT, poisson(80, 14, (4, 700), (20, 200), burst=4)),
    "agg-no-radix-ignore-eos": Load(AGGREGATED_FIXED, poisson(60, 16, (4, 200), (40, 200), burst=6, ignore_eos=True)),
    "agg-priority": Load(
        AGGREGATED_PRIORITY, prioritised(poisson(80, 16, (4, 400), (10, 120), burst=8), (0, 0, 5, 10, 20))
    ),
    "agg32-repeats": Load(AGGREGATED_REPEATS, repeats(80, 12, 4, (31, 32, 33, 64, 97, 128, 320), 200, burst=8)),
    "chunk128-shared": Load(
        PAIR_SMALL_CHUNKS, poisson(60, 6, (1, 150), (2, 60), prefixes=4, prefix_tokens=(50, 700), burst=3)
    ),
    "equal-retraction": Load(PAIR_EQUAL, poisson(48, 16, (100, 100), (150, 150), burst=8)),
    "lpm-shared": Load(PAIR_PREFIXES, poisson(70, 14, (4, 120), (4, 60), prefixes=4, prefix_tokens=(40, 300), burst=7)),
    "radix-retraction": Load(
        PAIR_RADIX, poisson(70, 10, (4, 120), (40, 200), prefixes=4, prefix_tokens=(20, 200), burst=5)
    ),
    "radix-pages-retraction": Load(
        PAIR_RADIX_PAGES, poisson(80, 12, (1, 60), (30, 210), prefixes=3, prefix_tokens=(10, 200), burst=8)
    ),
    "small-running": Load(PAIR_FEW, mixed_lengths(80, 20, (1, 2, 40, 300), (1, 2, 5, 60), burst=10)),
}
