"""Choices of experts: counted, kept by a run, read as skew."""

import pytest

torch = pytest.importorskip("torch", reason="real mode needs torch")

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from pdreal.cli import app
from pdreal.control.expert_counts import TABLE, CountedStep, count, read_counts, skews, write_counts
from pdreal.control.tasks import DecodeBatch, whole_tables
from pdreal.rank.graphs import DecodeGraphs
from pyarrow import parquet

from pdsim.scenario.yaml_file import ConfigError
from tests.real.models import DEEPSEEK, GPU_OR_CPU, load, runner, tokens, whole


def test_each_token_counts_once_for_each_of_its_experts():
    choices = np.array([[[0, 2], [2, 1]], [[3, 0], [0, 3]]])
    assert count(choices, 4).tolist() == [[1, 1, 2, 0], [2, 0, 0, 2]]


def test_skew_is_what_the_busiest_rank_has_beyond_the_mean():
    first, second = ([[4, 0, 0, 0]], [[0, 0, 1, 3]])
    steps = [CountedStep("d", "decode", i, np.array(c, np.uint32)) for i, c in enumerate((first, second))]
    (skew,) = skews(steps, 2)
    assert (skew.step_skew, skew.lasting_skew, skew.shares) == (1.0, 0.0, (1.0, 1.0))
    assert next(skews(steps, 4)).lasting_skew == 1.0
    with pytest.raises(ConfigError, match="a divisor of the 4 experts, found 3"):
        next(skews(steps, 3))


@given(st.lists(st.lists(st.integers(0, 9), min_size=8, max_size=8).filter(any), min_size=1, max_size=5))
def test_steps_weigh_as_many_tokens_as_they_have(counts):
    """The busiest rank of each step, all steps together, over the mean."""
    steps = [CountedStep("d", "decode", i, np.array([own], np.uint32)) for i, own in enumerate(counts)]
    (skew,) = skews(steps, 4)
    loads = [[own[i] + own[i + 1] for i in range(0, 8, 2)] for own in counts]
    assert skew.step_skew == pytest.approx(4 * sum(map(max, loads)) / sum(map(sum, loads)) - 1)
    lasting = [sum(ranks) for ranks in zip(*loads, strict=True)]
    assert skew.lasting_skew == pytest.approx(4 * max(lasting) / sum(lasting) - 1)


def test_a_step_survives_its_line():
    step = CountedStep("d-0", "decode", 7, np.arange(12, dtype=np.uint32).reshape(3, 4))
    again = CountedStep.from_line(step.to_line())
    assert again[:3] == step[:3]
    assert np.array_equal(again.counts, step.counts)


def test_more_choices_than_16_bits_hold_are_counted_and_kept(tmp_path):
    counts = count(np.zeros((1, 65_537, 1), np.int32), 2)
    assert counts.tolist() == [[65_537, 0]]
    step = CountedStep("p-0", "prefill", 7, counts)
    write_counts(tmp_path, [step])
    (kept,) = read_counts(tmp_path)
    assert CountedStep.from_line(step.to_line()).counts.tolist() == kept.counts.tolist() == [[65_537, 0]]


def test_older_tables_of_16_bits_are_read(tmp_path):
    row = {"instance_id": "d-0", "kind": "decode", "end_ns": 7, "num_layers": 2}
    raw = np.arange(4, dtype="<u2").tobytes()
    parquet.write_table(pa.table({name: [value] for name, value in (row | {"counts": raw}).items()}), tmp_path / TABLE)
    (step,) = read_counts(tmp_path)
    assert step.counts.tolist() == [[0, 1], [2, 3]]


def test_padded_rows_of_a_graph_do_not_count():
    pytest.importorskip("triton", reason="the decode path of GPUs is written in Triton")
    model = load(DEEPSEEK, device=GPU_OR_CPU)
    r = runner(model, records_experts=True)
    prompts = [tokens(seed, 9, DEEPSEEK.vocab_size) for seed in range(3)]
    tables = [[1 + 4 * i + page for page in range(4)] for i in range(3)]
    last = r.prefill(whole(*zip(prompts, tables, strict=True)))
    assert r.expert_counts.sum(1).tolist() == [27 * DEEPSEEK.experts.num_active] * DEEPSEEK.experts.num_layers
    batch = DecodeBatch(tuple(last), (9, 9, 9), whole_tables(tables))
    graphs = DecodeGraphs(model, r.kv, 4, records_experts=True)
    with torch.inference_mode():
        graphs.decode(batch)
    counted = count(torch.stack(graphs.choices).cpu().numpy(), DEEPSEEK.experts.num_experts)
    if GPU_OR_CPU.type == "cpu":  # on a GPU graphs are the only way
        r.decode(batch)
        assert np.array_equal(counted, r.expert_counts)
    assert counted.sum(1).tolist() == [3 * DEEPSEEK.experts.num_active] * DEEPSEEK.experts.num_layers


def test_a_run_keeps_them_and_a_command_reads_them(tmp_path, capsys):
    pytest.importorskip("zmq", reason="needs pyzmq: pip install 'pdsim[real]'")
    changes = ["model=tiny-deepseek-v3", "workload.num_requests=6", "prefill.radix_cache=false"]
    given = ["experiments/real-demo/pair.yaml", *(word for change in changes for word in ("--set", change))]
    app(["run", *given, "--record-experts", "--out", str(tmp_path / "run"), "--json"], result_action="return_value")
    steps = read_counts(tmp_path / "run")
    assert {(step.instance_id, step.kind) for step in steps} == {("prefill-0", "prefill"), ("decode-0", "decode")}
    choices = dict.fromkeys(("prefill", "decode"), 0)
    for step in steps:
        choices[step.kind] += int(step.counts[0].sum())
    assert choices == {"prefill": 6 * 180 * 4, "decode": 6 * 23 * 4}  # the last of 24 tokens is not computed
    assert all(len(set(step.counts.sum(1))) == 1 for step in steps)
    capsys.readouterr()
    app(["experts", str(tmp_path / "run"), "--ep", "4"], result_action="return_value")
    assert "simulate it: expert_skew: " in capsys.readouterr().out
