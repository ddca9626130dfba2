"""A scaled profile takes on its own GPU what it took, and elsewhere what the resources it is bound by take."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.calibration.fit.scaling import OPERATORS, GpuScaling, scale, time_ratios
from pdsim.cost.affine import AffineModel
from pdsim.cost.settings import Affine
from pdsim.scenario.loading import load_cost
from pdsim.scenario.sections.cost import ENDS, GROUPS, CostChoice
from pdsim.scenario.yaml_file import ConfigError, read_yaml, write_yaml
from pdsim.system.catalog import load_gpu, load_model
from tests.cli.test_commands import exit_code, output, output_json
from tests.unit.test_measured import base_ns, step

STUDY = Path("experiments/scaled-h200")
MEASURED = Path("experiments/sglang-h200/profile.yaml")
SCENARIO = """\
model: qwen3-8b
prefill: {gpu: h20}
decode: {gpu: h20}
cost: {profile: profile.yaml}
workload: {use: random_lengths, num_requests: 8, input_tokens: 2000, output_tokens: 20}
"""


def scaling(target, **changes):
    return GpuScaling.between(load_gpu("h200"), load_gpu(target), load_model("qwen3-8b"), **changes)


def costs(path):
    """Of a profile: at its low end, as it is, and at its high end."""
    cost = load_cost(path)
    low, high = (cost.at(dict.fromkeys(GROUPS, end)) for end in ENDS)
    return low, cost, high


def prefill_ns(cost, context, new):
    """On a GPU that has rested."""
    return AffineModel(cost.prefill).prefill_ns(step((context, new)), 0)


def decode_line(cost, batch):
    return AffineModel(cost.decode).decode_line(batch)


@pytest.fixture(scope="module")
def unscaled(tmp_path_factory):
    path = tmp_path_factory.mktemp("scaled") / "h200.yaml"
    write_yaml(scale(MEASURED, scaling("h200"), "h200", "pdsim scale"), path)
    return costs(path)


@pytest.fixture(scope="module")
def measured():
    return costs(MEASURED)[1]


@given(st.integers(1, 16_384), st.integers(0, 65_536), st.integers(1, 200))
def test_on_the_gpu_it_was_measured_on_nothing_changes(unscaled, measured, new, context, batch):
    for again in unscaled:
        assert prefill_ns(again, context, new) == prefill_ns(measured, context, new)
        line, was = decode_line(again, batch), decode_line(measured, batch)
        assert line.base == pytest.approx(was.base, rel=1e-3)
        assert line[1:] == was[1:]


@pytest.mark.parametrize("gpu", ["h20", "b200", "gb200"])
def test_every_step_lies_between_the_ends(gpu):
    ends = costs(STUDY / f"qwen3-8b-{gpu}.yaml")
    for size in (1, 16, 64, 256, 8192):
        times_ns = [prefill_ns(cost, size, size) for cost in ends]
        lines = [decode_line(cost, size) for cost in ends]
        assert times_ns == sorted(times_ns)
        assert lines == sorted(lines)
        assert lines[0] < lines[2]


@pytest.mark.parametrize(("batch", "matrices_ns"), [(1, 4000), (40, 4000), (41, 4100), (100, 10_000)])
def test_matrices_take_the_longer_of_reading_and_computing(batch, matrices_ns):
    model = AffineModel(Affine(decode_base_ns=50, decode_weights_ns=4000, decode_matrices_per_request_ns=100))
    assert base_ns(model, batch) == 50 + matrices_ns


def test_decode_on_h20_is_bound_by_compute_in_batches_that_are_not_on_h200():
    """148 TFLOP/s behind 4 TB/s, instead of 989 behind 4.8: the batch that fills the GPU is a sixth as large."""
    settings = costs(STUDY / "qwen3-8b-h20.yaml")[1].decode
    model = AffineModel(settings)
    small, large = (base_ns(model, batch) - base_ns(model, batch - 1) for batch in (32, 128))
    assert small == pytest.approx(settings.decode_per_request_ns, abs=1)
    assert large == pytest.approx(settings.decode_per_request_ns + settings.decode_matrices_per_request_ns, abs=1)


def test_ratios_without_times_are_those_of_nominal_rates():
    ratios = time_ratios(load_gpu("h200"), load_gpu("rtx-4090"), ("bf16", "bf16"))
    assert {ratio.num_shapes for ratio in ratios.values()} == {0}
    assert ratios["matrix"].best == pytest.approx(989 / 165.2)
    assert ratios["weights"].low == ratios["weights"].high == pytest.approx(4.8 / 1.008)


@pytest.mark.parametrize("gpu", ["h20", "h100", "b200", "gb200"])
def test_ratios_hold_the_nominal_ones_and_turn_round(gpu):
    there = time_ratios(load_gpu("h200"), load_gpu(gpu), ("bf16", "bf16"))
    back = time_ratios(load_gpu(gpu), load_gpu("h200"), ("bf16", "bf16"))
    for operator in OPERATORS:
        assert there[operator].low <= there[operator].best <= there[operator].high
        assert there[operator].low * back[operator].high == pytest.approx(1)


@pytest.mark.parametrize("path", sorted(STUDY.glob("qwen3-8b-*.yaml")), ids=lambda path: path.stem)
def test_committed_profiles_are_what_the_command_gives(path, tmp_path, monkeypatch, capsys):
    told = read_yaml(path)
    monkeypatch.chdir(MEASURED.parent)
    _, *arguments = told["provenance"]["command"].split()
    made = output_json(capsys, *arguments, "-o", str(tmp_path / path.name))
    assert made["cost"] == told["cost"]
    assert made["provenance"]["scaled"] == told["provenance"]["scaled"]


@pytest.mark.parametrize(
    ("profile", "arguments", "message"),
    [
        ("experiments/sglang-h200/profile.yaml", "--to h21", "no gpu 'h21' in the catalog.*did you mean 'h2"),
        ("experiments/sglang-h200/profile.yaml", "--to h20 --model qwen3.5-35b-a3b", "has routed experts"),
        ("experiments/sglang-h200/profile.yaml", "--to h20 --tp 0", "for --tp. Must be >= 1"),
        ("experiments/scaled-h200/qwen3-8b-h20.yaml", "--to b200 --model qwen3-8b", "is scaled already"),
        ("experiments/vllm-rtx/profile.yaml", "--to b200 --model llama-3.1-8b", "roofline: only affine"),
        ("experiments/vllm-rtx/profile.yaml", "--to b200", "does not say its model: name it with --model"),
        ("experiments/sglang-h200/scenario.yaml", "--to b200", "scenario.yaml has no field 'provenance'"),
        ("experiments/none.yaml", "--to b200", "does not exist"),
    ],
)
def test_what_cannot_be_scaled_is_one_message(profile, arguments, message, tmp_path, capsys):
    command = ("scale", profile, "--from", "h200", *arguments.split(), "-o", str(tmp_path / "out.yaml"))
    assert exit_code(*command) == 2
    assert re.search(message, capsys.readouterr().err)


def measured_with(weight_dtype, folder):
    """The path of the measured profile, changed as if the weights had been of this data type."""
    profile = read_yaml(MEASURED)
    profile["cost"]["measured"]["weight_dtype"] = weight_dtype
    write_yaml(profile, folder / "profile.yaml")
    return str(folder / "profile.yaml")


@pytest.mark.parametrize(("given", "derived"), [((), "fp8"), (("--weight-dtype", "bf16"), "bf16")])
def test_the_measured_weights_are_the_profiles_not_the_catalogs(given, derived, tmp_path, capsys):
    profile = measured_with("fp8", tmp_path)
    made = output_json(capsys, "scale", profile, "--from", "h200", "--to", "h20", *given, "-o", tmp_path / "o.yaml")
    assert made["cost"]["measured"]["scaled_from"] == "h200 with fp8 weights"
    assert made["cost"]["measured"]["weight_dtype"] == derived
    ratios = time_ratios(load_gpu("h200"), load_gpu("h20"), ("fp8", derived))
    assert made["provenance"]["scaled"]["time_ratios"] == {name: str(ratio) for name, ratio in ratios.items()}
    of_fp8 = GpuScaling.between(load_gpu("h200"), load_gpu("h20"), load_model("qwen3-8b").in_dtype("fp8"))
    weights_ns = of_fp8.weights_ns * ratios["weights"].best
    assert float(made["cost"]["decode"]["decode_weights"].split()[0]) == pytest.approx(weights_ns / 1e3, rel=1e-3)


def test_an_unknown_type_of_measured_weights_is_one_message(tmp_path, capsys):
    command = ("scale", measured_with("fp7", tmp_path), "--from", "h200", "--to", "h20", "-o", str(tmp_path / "o.yaml"))
    assert exit_code(*command) == 2
    message = capsys.readouterr().err
    assert "profile.yaml: cost.measured.weight_dtype: expected bf16, fp8, fp4, int4, int8, found 'fp7'" in message


def test_a_run_says_between_what_it_lies(tmp_path, capsys):
    (tmp_path / "profile.yaml").write_text((STUDY / "qwen3-8b-h20.yaml").read_text())
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    scenario = str(tmp_path / "scenario.yaml")
    summary = output_json(capsys, "run", scenario)
    interval = summary["pdsim"]["interval"]
    for metric, (least, most) in interval.items():
        assert least <= summary[metric] <= most
        assert least < most
    shown = output(capsys, "compare", scenario, scenario, "--repeats", 0, "--details")
    assert "between the fastest and the slowest cost" in shown
    assert f"{interval['mean_tpot_ms'][0]:.2f}" in shown
    assert "scaled from h200 with bf16 weights to qwen3-8b" in shown
    assert "outside" not in shown


def test_of_another_setup_there_is_no_interval(tmp_path, capsys):
    (tmp_path / "profile.yaml").write_text((STUDY / "qwen3-8b-h20.yaml").read_text())
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    own = output_json(capsys, "run", str(tmp_path / "scenario.yaml"), "--set", "model=qwen3-32b")["pdsim"]
    assert "interval" not in own
    assert own["warnings"][0].endswith("this run: qwen3-32b: outside; its interval is left out")


def test_without_times_of_operators_there_is_no_interval(tmp_path, capsys):
    assert exit_code("scale", MEASURED, "--from", "h200", "--to", "rtx-4090", "-o", tmp_path / "out.yaml") == 0
    assert "no times on both h200 and rtx-4090" in capsys.readouterr().err
    cost = read_yaml(tmp_path / "out.yaml")["cost"]
    assert "prefill_interval" not in cost
    assert "attention_sm_bandwidth" not in cost, "its SMs are not known"


def test_coefficients_of_a_table_have_a_line_for_each_knot(tmp_path, capsys):
    profile = read_yaml(MEASURED)
    profile["cost"]["prefill"] = {"use": "table", "prefill": {1: "1.5 ms", 1024: "10 ms"}}
    table = tmp_path / "table.yaml"
    write_yaml(profile, table)
    assert exit_code("scale", table, "--from", "h200", "--to", "h20", "-o", tmp_path / "out.yaml") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["prefill", "at", "1", *3 * ["1.5", "ms"]] in lines
    assert any(line[:3] == ["prefill", "at", "1024"] for line in lines)


def test_sections_that_are_not_scaled_are_kept(tmp_path):
    """Every section that a profile may have: one that the schema gains has to be thought of here."""
    kept = {
        "host": {"launch": "5 ms", "decode_step": "2 ms", "slowdown": 1.2},
        "graph_sizes": [1, 8],
        "graph_empty_row_kv": 0.5,
        "graph_empty_rows_free": True,
        "eager_layer": "1 ms",
        "attention_sm_bandwidth": "60 GB/s",
        "attention_merge": "2 us",
        "encode_factor": 1.5,
        "cold_start": {2: "284 ms"},
        "cold_kernels": {"prefill": "200 ms", "decode": "66 ms"},
        "measured": {"decode_batch": [1, 128]},
    }
    front_end = {"service": "1 ms"}
    affine = {"use": "affine", "prefill_per_token": "20 us", "decode_base": "5 ms"}
    profile = {"cost": {"prefill": affine, "decode": affine, **kept}, "front_end": front_end, "provenance": {}}
    write_yaml(profile, tmp_path / "profile.yaml")
    made = scale(tmp_path / "profile.yaml", scaling("h20"), "h20", "pdsim scale")
    assert made["cost"].keys() == CostChoice.model_fields.keys()
    assert {section: made["cost"][section] for section in kept} == kept
    assert made["front_end"] == front_end


@pytest.mark.parametrize(
    ("coefficient", "operator"),
    [
        ("prefill_per_token_ns", "matrix"),
        ("prefill_per_pair_ns", "attention"),
        ("prefill_per_continued_pair_ns", "attention"),
        ("prefill_per_context_token_ns", "kv"),
        ("prefill_base_ns", None),
        ("prefill_least_per_continued_prompt_ns", None),
    ],
)
def test_each_coefficient_of_prefill_goes_with_its_operator(coefficient, operator):
    settings, target = Affine(**{coefficient: 1e6}), scaling("h20")
    scaled = CostChoice(**target.cost(CostChoice(prefill=settings, decode=Affine()), "best")).prefill
    ratio = target.ratios[operator].best if operator else 1
    assert getattr(scaled, coefficient) == pytest.approx(1e6 * ratio, rel=1e-3)


def test_a_table_is_scaled_beyond_its_launches(tmp_path):
    table = {"use": "table", "prefill": {128: "10 ms", 1024: "20 ms", 8192: "160 ms"}}
    cost = {"prefill": table, "decode": {"use": "affine", "decode_base": "5 ms"}}
    write_yaml({"cost": cost, "provenance": {"model": "qwen3-8b"}}, tmp_path / "table.yaml")
    made = scale(tmp_path / "table.yaml", scaling("h20"), "h20", "pdsim scale")["cost"]["prefill"]["prefill"]
    ratio = scaling("h20").ratios["matrix"].best
    assert list(made) == [128, 1024, 8192]
    assert made[128] == "10 ms"
    assert float(made[8192].split()[0]) == pytest.approx(1e3 * (10 + 150 * ratio), rel=1e-3)
    write_yaml({"cost": table, "provenance": {}}, tmp_path / "both.yaml")
    with pytest.raises(ConfigError, match="decode of the profile is table"):
        scale(tmp_path / "both.yaml", scaling("h20"), "h20", "pdsim scale")
