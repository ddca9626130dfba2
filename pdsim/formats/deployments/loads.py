"""Reads the commands of load generators as workload and client of a scenario."""

from collections.abc import Callable, Mapping
from typing import Any

from pdsim.formats.deployments.readers import Value
from pdsim.inputs import finite, whole

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

    def unset(self, name: str) -> str:
        """The value of an option if it is a variable that the file does not set. Otherwise empty."""
        found = self._flags.get(name, "")
        return found if isinstance(found, str) and "$" in found else ""

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
    dataset = flags.text("dataset-name", default="sharegpt")
    if given := flags.unset("dataset-name"):
        raise ValueError(f"--dataset-name {given}: the file does not set it; write the data set's name in its place")
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
    dataset = flags.text("dataset-name", default="random")
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
    if flags.text("input-file"):
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
