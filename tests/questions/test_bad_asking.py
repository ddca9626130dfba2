"""Wrong flags: one clear message, exit code 2, no traceback."""

import json
import re

import pytest

from pdsim import ConfigError, ask
from pdsim.cli import main

WRONG = [
    (["pdratio"], "no question 'pdratio' (did you mean 'pd-ratio'?); there are pd-ratio, pd-or-not"),
    (["routing", "--slo", "ttft < 0 s for 90 %"], "a limit is above 0"),
    (["routing", "--slo", "tpot < inf ms for 90 %"], "tpot < inf ms for 90 %"),
    (["routing", "--slo", "ttft < 1 s for 0 %"], "p0 is no percentile, above 0 and at most 100"),
    (["routing", "--slo", "ttft < 1 s"], "'ttft < 1 s' has no percentile: write"),
    (["routing", "--set", "model=llama-3.1-7b"], "no model 'llama-3.1-7b' in the catalog"),
    (["routing", "--set", "decode.gpu=h2000"], "no gpu 'h2000' in the catalog"),
    (["routing", "--trace", "nowhere.csv"], "--trace: no trace file nowhere.csv"),
    (["routing", "x.yaml"], "x.yaml does not exist"),
    (["routing", "--set", "decode.radix=1"], "--set: unknown field 'decode.radix' (did you mean 'radix_cache'?)"),
    (["routing", "--set", "corner=slow", "--set", "corner.prefill=slowest"], "no end of a range 'slow'"),
    (["routing", "--seeds", "0"], "--seeds 0: at least 1"),
    (
        ["capacity", "--trace", "sharegpt.json", "--set", "client=open_loop"],
        "capacity varies the rate, and this trace has no times",
    ),
    (
        ["capacity", "--speedup", "1,2"],
        "--speedup applies to the question capacity only, and needs a trace that has arrival times",
    ),
    (["routing", "--trace", "trace.jsonl", "--speedup", "2"], "applies to the question capacity only"),
    (["capacity", "--trace", "trace.jsonl", "--speedup", "1;2"], "--speedup 1;2: expected numbers, such as 0.5,1,2,4"),
    (["capacity", "--trace", "trace.jsonl", "--speedup", "0"], "--speedup 0: expected numbers above 0"),
    (
        ["staging-ring", "--set", "model=deepseek-r1", "--set", "prefill.tp=8", "--set", "decode.tp=8"],
        "deepseek-r1 has latent KV, which every rank holds whole",
    ),
    (["pd-ratio", "--trace", "empty.csv"], "pdsim: --trace: empty.csv: no requests in it"),
    (["pd-ratio", "--set", "model=llama-3.1-405b"], "pdsim: --set: no point can run; the first fails: prefill: llama"),
    (["pd-ratio", "x.yaml"], "x.yaml does not exist"),
    (["pd-ratio", "aggregated.yaml"], "questions are about prefill and decode instances"),
]

TURNS = [{"from": "human", "value": "Why? " * 20}, {"from": "gpt", "value": "Because. " * 20}]


@pytest.mark.parametrize(
    ("arguments", "message"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_what_is_wrong_is_said(arguments, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 0, "input_length": 9, "output_length": 9, "hash_ids": [0]}\n')
    (tmp_path / "sharegpt.json").write_text(json.dumps([{"conversations": TURNS}]))
    (tmp_path / "empty.csv").write_text("arrival_s,in_tokens,out_tokens\n")
    load = "workload: {use: random_lengths, num_requests: 3, input_tokens: 9, output_tokens: 9}\n"
    (tmp_path / "aggregated.yaml").write_text(f"model: qwen3-0.6b\naggregated: {{gpu: h100}}\n{load}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["ask", *arguments])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seeds": 0}, "--seeds 0: at least 1"),
        ({"slo": "ttft < 0 s for 90 %"}, "a limit is above 0"),
        ({"trace": "nowhere.csv"}, "--trace: no trace file nowhere.csv"),
    ],
    ids="".join,
)
def test_what_is_wrong_in_python_is_said(wrong, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        ask("routing", **wrong)
