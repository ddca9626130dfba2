"""Reads loads as workload and client of a scenario: the commands of load generators, and files beside a deployment,
which are traces or results of load generators.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pdsim.formats.deployments.readers import Value
from pdsim.formats.results.reading import is_printed, read_results
from pdsim.inputs import InputError, finite, whole
from pdsim.scenario.starter import workload_of_trace
from pdsim.scenario.yaml_file import ConfigError

Load = dict[str, Any]
"""Fields of a scenario: workload, client, seed and name."""
_PROMPTS = 1000
"""Number of prompts that the clients of SGLang and vLLM send by default."""


def load_of(program: str, flags: Mapping[str, Value]) -> tuple[Load, list[str]]:
    """The load that a load generator's options describe, and those options that pdsim does not understand. Raises
    ValueError if an option has a wrong value, or if the options name an input file, or a data set that pdsim does not
    read. program: name of the load generator, as in PROGRAMS. flags: values of its options, by option.
    """
    return _READERS[program](_Flags(flags))


class _Flags:
    """The options of a load generator. Remembers which options were read, so that `rest` can list those that pdsim does
    not understand.
    """

    def __init__(self, flags: Mapping[str, Value]) -> None:
        self._flags = flags
        self._asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        self._asked.add(name)
        return name in self._flags

    def text(self, *names: str, default: str = "") -> str:
        self._asked.update(names)
        found = next((self._flags[name] for name in names if name in self._flags), default)
        return found if isinstance(found, str) and "$" not in found else default

    def source(self, name: str, default: str = "") -> str:
        """The value of an option that names a data set or a file with requests, without which the load is not known.
        Raises ValueError if the option has several values, or a variable that the file does not set.
        """
        found = self._flags.get(name, "")
        text = " ".join(found) if isinstance(found, list) else str(found)
        if "$" in text:
            raise ValueError(f"--{name} {text}: the file does not set it; write the name in its place")
        if isinstance(found, list):
            raise ValueError(f"--{name} {text}: expected one value")
        return self.text(name, default=default)

    def count(self, *names: str, default: int) -> int:
        return whole(self.text(*names, default=str(default)))

    def number(self, *names: str, default: float) -> float:
        return finite(self.text(*names, default=str(default)))

    def rest(self) -> list[str]:
        """Texts on the options that have no effect: those that pdsim does not understand, and those whose value is a
        variable that the file does not set.
        """
        quiet = {*_SILENT, *self._asked}
        shown = {name: f"--{name}" if value is True else f"--{name} {value}" for name, value in self._flags.items()}
        unset = {name for name in self._asked - _SILENT if "$" in shown.get(name, "")}
        return [
            f"{text}: the file does not set it; the client's default counts" if name in unset else text
            for name, text in shown.items()
            if name in unset or name not in quiet
        ]


_SILENT = {
    "backend", "host", "port", "base-url", "model", "tokenizer", "output-file", "save-result", "result-filename",
    "result-dir", "ignore-eos", "tokenize-prompt", "url", "endpoint-type", "streaming", "extra-inputs", "endpoint",
    "output-artifact-dir", "artifact-dir", "percentile-metrics", "metric-percentiles", "trust-remote-code",
    "save-detailed", "disable-tqdm", "custom-dataset-type", "ready-check-timeout-sec", "goodput", "served-model-name",
}  # fmt: skip


def _client(flags: _Flags, *, inf: str = "inf") -> Load:
    rate, burstiness = flags.text("request-rate", default=inf), flags.number("burstiness", default=1)
    concurrency = flags.text("max-concurrency", "concurrency")
    if concurrency and rate in (inf, ""):
        ramp_s = flags.number("concurrency-ramp-duration", default=0)
        ramp = {"ramp": f"{ramp_s:g} s"} if ramp_s else {}
        all_count = {"warm_up_requests": 0}  # as the tool counts
        return {"use": "closed_loop", "concurrency": whole(concurrency), **all_count, **ramp}
    if rate in (inf, ""):
        return {"use": "open_loop"}
    arrivals: Load = {"use": "poisson", "rate": f"{rate} /s"}
    if burstiness != 1:
        arrivals = {"use": "gamma", "rate": f"{rate} /s", "burstiness": burstiness}
    return {"use": "open_loop", "arrivals": arrivals}


def _lengths(low: int, high: int) -> Any:
    return high if low == high else {"use": "uniform", "low": max(1, low), "high": high}


def _made(flags: _Flags, workload: Load, name: str) -> tuple[Load, list[str]]:
    load: Load = {"workload": workload, "client": _client(flags), "seed": flags.count("seed", "random-seed", default=0)}
    if label := flags.text(name):
        load["name"] = label
    return load, flags.rest()


def _random(flags: _Flags, span: Callable[[int, float], tuple[int, int]], default: float) -> Load:
    ratio = flags.number("random-range-ratio", default=default)
    sizes = (
        ("input_tokens", "random-input-len", "random-input", 1024),
        ("output_tokens", "random-output-len", "random-output", 128),
    )
    lengths = {ours: _lengths(*span(flags.count(*names, default=least), ratio)) for ours, *names, least in sizes}
    return {
        "use": "random_lengths",
        "num_requests": flags.count("num-prompts", "num-prompt", default=_PROMPTS),
        **lengths,
    }


def _of_sglang(flags: _Flags) -> tuple[Load, list[str]]:
    dataset = flags.source("dataset-name", default="sharegpt")
    if dataset == "generated-shared-prefix":
        workload: Load = {
            "use": "shared_prefix_groups",
            "num_groups": flags.count("gsp-num-groups", default=64),
            "prompts_per_group": flags.count("gsp-prompts-per-group", default=16),
            "system_prompt_tokens": flags.count("gsp-system-prompt-len", default=2048),
            "question_tokens": flags.count("gsp-question-len", default=128),
            "output_tokens": flags.count("gsp-output-len", default=256),
            "num_turns": flags.count("gsp-num-turns", default=1),
            "range_ratio": flags.number("gsp-range-ratio", default=1),
            "ordered": "gsp-ordered" in flags,
        }
        flags.text("num-prompts")
        return _made(flags, workload, "tag")
    _require(dataset, ("random", "random-ids"))
    return _made(flags, _random(flags, lambda length, ratio: (max(1, round(length * ratio)), length), 0), "tag")


def _of_vllm(flags: _Flags) -> tuple[Load, list[str]]:
    dataset = flags.source("dataset-name", default="random")
    if dataset == "prefix_repetition":
        groups = flags.count("prefix-repetition-num-prefixes", default=10)
        if groups < 1:
            raise ValueError(f"--prefix-repetition-num-prefixes {groups}: expected a whole number above 0")
        workload: Load = {
            "use": "shared_prefix_groups",
            "num_groups": groups,
            "prompts_per_group": max(1, flags.count("num-prompts", default=_PROMPTS) // groups),
            "system_prompt_tokens": flags.count("prefix-repetition-prefix-len", default=256),
            "question_tokens": flags.count("prefix-repetition-suffix-len", default=256),
            "output_tokens": flags.count("prefix-repetition-output-len", default=128),
            "ordered": "disable-shuffle" in flags,
        }
        return _made(flags, workload, "label")
    _require(dataset, ("random",))

    def around(length: int, ratio: float) -> tuple[int, int]:
        return max(1, round(length * (1 - ratio))), round(length * (1 + ratio))

    return _made(flags, _random(flags, around, 0), "label")


def _of_aiperf(flags: _Flags) -> tuple[Load, list[str]]:
    if flags.source("input-file"):
        raise ValueError("its --input-file: give that file to pdsim import, too")
    sizes = {
        "input_tokens": flags.count("isl", "synthetic-input-tokens-mean", "prompt-input-tokens-mean", default=550),
        "output_tokens": flags.count("osl", "output-tokens-mean", "prompt-output-tokens-mean", default=128),
    }
    count = flags.count("request-count", "num-prompts", default=10)
    return _made(flags, {"use": "random_lengths", "num_requests": count, **sizes}, "profile-name")


def _require(dataset: str, known: tuple[str, ...]) -> None:
    if dataset not in known:
        raise ValueError(
            f"dataset {dataset}: pdsim reads {', '.join(known)}; for another, give its requests as a trace"
        )


_READERS: dict[str, Callable[[_Flags], tuple[Load, list[str]]]] = {
    "sglang-load": _of_sglang,
    "vllm-load": _of_vllm,
    "aiperf-load": _of_aiperf,
}

_SUFFIXES = (".json", ".jsonl", ".csv", ".gz")


def is_beside(path: Path) -> bool:
    """True if the file can give the load of a deployment: a trace or a result of a load generator by the file's name,
    or a report that a load generator printed.
    """
    return path.suffix in _SUFFIXES or is_printed(path)


def load_beside(path: Path) -> tuple[dict[str, Any], str]:
    """Reads a load from a file. Returns (the scenario's fields `workload` and `client`, a text with assumptions; empty:
    none). Raises ConfigError if the file is neither a trace nor a load generator's result with totals of requests,
    prompt tokens and output tokens.
    """
    try:
        summary = {} if path.suffix == ".gz" else read_results(path)[0].summary
    except InputError:
        summary = {}
    if _has_lengths(summary):
        return _of_summary(summary), f"workload: equal lengths, the means of {path.name}"
    try:
        workload, has_times = workload_of_trace(path)
    except ConfigError as wrong:
        raise ConfigError(f"{path} is no result of a client and no trace: {wrong}") from None
    client: dict[str, Any] = {"use": "open_loop"} if has_times else {"use": "closed_loop", "concurrency": 64}
    said = "" if has_times else f"client: 64 in flight: {path.name} has no times"
    return {"workload": workload, "client": client}, said


def _has_lengths(summary: dict[str, Any]) -> bool:
    return all(summary.get(name) for name in ("completed", "total_input_tokens", "total_output_tokens"))


def _of_summary(summary: dict[str, Any]) -> dict[str, Any]:
    count = round(summary["completed"])
    lengths = {f"{what}put_tokens": max(1, round(summary[f"total_{what}put_tokens"] / count)) for what in ("in", "out")}
    client: dict[str, Any] = {"use": "open_loop"}
    if summary.get("max_concurrency"):
        client = {"use": "closed_loop", "concurrency": round(summary["max_concurrency"]), "warm_up_requests": 0}
    elif summary.get("request_throughput"):
        client["arrivals"] = {"use": "poisson", "rate": f"{summary['request_throughput']:g} /s"}
    return {"workload": {"use": "random_lengths", "num_requests": count, **lengths}, "client": client}
