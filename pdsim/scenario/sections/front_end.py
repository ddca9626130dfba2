"""Front ends between clients and router: their kinds, and the delays that were measured for each kind."""

from typing import Any, Literal, NamedTuple, Self, get_args

from pydantic import model_validator

from pdsim.scenario.sections.fields import Duration, FineDuration, Section

FrontEndKind = Literal["in_process", "engine", "sglang_gateway", "vllm_router", "dynamo", "llm_d", "nim"]


class FrontEndSettings(Section):
    """HTTP server, tokenizer and gateway between clients and router."""

    kind: FrontEndKind | None = None
    """Kind of server before the router: in_process (Python calls without HTTP), engine (the engine's HTTP server),
    sglang_gateway, vllm_router, dynamo, llm_d or nim. Times that the scenario does not give are those of this kind.
    None: they are 0.
    """
    service: Duration = 0
    """Time for which the front end works on each request. Requests are handled one after another."""
    service_per_token: FineDuration = 0
    """Additional time that the front end works on a request, for each prompt token."""
    latency_in: Duration = 0
    """Delay of each request on its way to the router, after `service`. Requests do not wait for one another."""
    latency_out: Duration = 0
    """Delay of a first token, and of the end of an answer, on its way from the servers to the client."""
    ending: Duration = 0
    """Time for which the front end works at the end of each answer. Ends of answers are handled one after another.
    Needs holds_client.
    """
    holds_client: bool = False
    """True: client and front end share a thread. The client sends requests and notices answers only while the front end
    works on no request.
    """
    waits_for_prefill: bool | None = None
    """True: the client gets a first token only after prefill has seen the end of its transfer, as with SGLang's Rust
    gateway. None: the value that `kind` implies. With kind in_process or engine, or without a kind, None means true
    with engine sglang, and false with engine vllm.
    """
    stall: Duration = 0
    """Delay of a first token on a connection that was used less than 40 ms before (Nagle's algorithm and delayed
    acknowledgements)."""

    @model_validator(mode="before")
    @classmethod
    def _has_times_of_its_kind(cls, data: Any) -> Any:
        known = isinstance(data, dict) and data.get("kind") in get_args(FrontEndKind)
        return {**KINDS[data["kind"]].usual, **data} if known else data

    @property
    def is_none(self) -> bool:
        return not self.waits_for_prefill and self.of_times(self) == FrontEndSettings()

    @property
    def is_uncertain(self) -> bool:
        """True if all times are the usual ones of `kind`, so that the times of this kind's fastest and slowest servers
        are known as a range. False: the scenario gives another time, or no kind.
        """
        return self.kind is not None and self.of_times(self) == self.of_times(FrontEndSettings(kind=self.kind))

    @property
    def ends(self) -> tuple[Self, Self]:
        """This front end with the fastest times and with the slowest times that its kind (such as dynamo) may have."""
        assert self.kind is not None
        kind = KINDS[self.kind]
        times = ({**kind.usual, **end, "waits_for_prefill": self.waits_for_prefill} for end in (kind.fast, kind.slow))
        fast, slow = (self.model_validate(found) for found in times)
        return fast, slow

    @staticmethod
    def of_times(front_end: "FrontEndSettings") -> "FrontEndSettings":
        """The times of a front end alone, without `kind` and `waits_for_prefill`."""
        return front_end.model_copy(update={"kind": None, "waits_for_prefill": None})


class SeenTimes(NamedTuple):
    """Measured times of a kind of front end: the usual times, and those of the fastest and slowest servers where they
    differ. Keys are the fields of FrontEndSettings.

    experiments/front-ends names the source of each measurement.
    """

    usual: dict[str, Any]
    """Times of a typical server with this kind of front end. Fields that are left out keep their defaults."""
    fast: dict[str, Any]
    """Those times of the fastest servers of this kind that differ from the times in `usual`."""
    slow: dict[str, Any]
    """Those times of the slowest servers of this kind that differ from the times in `usual`."""


def _delay(usual_ms: int, fast_ms: int, slow_ms: int, **fields: Any) -> SeenTimes:
    """Times of a front end that delays each request without making other requests wait. usual_ms, fast_ms, slow_ms: the
    usual delay, and those of the fastest and the slowest servers, in ms. fields: further times of the usual front end,
    by field of FrontEndSettings.
    """
    usual, fast, slow = ({"latency_in": f"{ms} ms"} for ms in (usual_ms, fast_ms, slow_ms))
    return SeenTimes(usual | fields, fast, slow)


_GATEWAY = {
    "service": "730 us",
    "service_per_token": "1.19 us",
    "latency_in": "800 us",
    "latency_out": "2.1 ms",
    "waits_for_prefill": True,
    "stall": "41 ms",
}

KINDS: dict[FrontEndKind, SeenTimes] = {
    "in_process": _delay(1, 0, 15),
    "engine": _delay(5, 0, 20),
    "sglang_gateway": SeenTimes(_GATEWAY, {"latency_in": "0 ms", "latency_out": "0 ms"}, {"latency_in": "20 ms"}),
    "vllm_router": _delay(5, 0, 50, waits_for_prefill=False),
    "dynamo": _delay(100, 30, 300, waits_for_prefill=False),
    "llm_d": _delay(10, 2, 60, waits_for_prefill=False),
    "nim": _delay(50, 20, 100, waits_for_prefill=False),
}
