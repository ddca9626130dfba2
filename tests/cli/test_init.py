"""`pdsim init` writes a scenario that runs, and says what each part is for."""

import io
import json
import re
import sys

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pdsim import load_scenario
from pdsim.cli import main
from pdsim.scenario import starter
from pdsim.scenario.loading import parse_scenario
from pdsim.scenario.starter import OPTIONAL, StarterOptions, commented, first_scenario, starting_point
from pdsim.scenario.yaml_file import ConfigError, parse_yaml
from pdsim.system.catalog import names


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def call(*words, code=0, typed=None):
        if typed is not None:
            monkeypatch.setattr(sys, "stdin", Terminal(typed))
        with pytest.raises(SystemExit) as stop:
            main(list(words))
        assert (stop.value.code or 0) == code, capsys.readouterr()
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    return call


def test_without_flags_it_is_the_starting_point_of_questions_and_it_runs(call, tmp_path):
    assert "scenario.yaml: llama-3.1-8b on 2P2D, each of 1 h200" in call("init")
    written = load_scenario("scenario.yaml")
    start = parse_scenario(starting_point(), base=tmp_path)
    assert written == start.model_copy(update={"name": "scenario"})
    assert json.loads(call("run", "scenario.yaml", "--set", "workload.num_requests=20", "--json"))["completed"] == 20


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(names("models")),
    st.sampled_from(names("gpus")),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([{}, {"rate": "4/s"}, {"concurrency": 3}, {"input_tokens": 100, "output_tokens": 7}]),
)
def test_what_is_written_is_what_was_chosen(tmp_path_factory, model, gpu, prefill, decode, load):
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    options = StarterOptions(model=model, gpu=gpu, prefill=prefill, decode=decode, requests=10, **load)
    try:
        data = first_scenario(options, (), file=file)
    except ConfigError:
        assume(False)  # too large for a server
    file.write_text(commented(data))
    written = load_scenario(file)
    assert parse_yaml(file.read_text(), "any.yaml") == data
    assert (written.model, written.pair.prefill.gpu, written.pair.decode.gpu) == (model, gpu, gpu)
    assert (written.pair.prefill.instances, written.pair.decode.instances) == (prefill, decode)


FLAGS = ("--model", "qwen3-8b", "--gpu", "h100", "--prefill", "1", "--decode", "3", "--tp", "2", "--rate", "4/s")


def test_flags_reach_the_file(call):
    told = call("init", "mine.yaml", *FLAGS)
    assert "mine.yaml: qwen3-8b on 1P3D, each of 2 h100\nrun it: pdsim run mine.yaml" in told
    written = load_scenario("mine.yaml")
    assert (written.name, written.pair.decode.tp, written.client.arrivals.rate_per_s) == ("mine", 2, 4)


@pytest.mark.parametrize(("model", "gpu", "tp"), [("llama-3.1-8b", "h100", 1), ("llama-3.1-70b", "h100", 4)])
def test_servers_have_the_fewest_gpus_that_hold_the_model(call, model, gpu, tp):
    call("init", "--model", model, "--gpu", gpu)
    assert load_scenario("scenario.yaml").pair.prefill.tp == tp
    if tp > 1:
        assert "use a larger tp or GPU" in call(
            "init", "other.yaml", "--model", model, "--gpu", gpu, "--tp", "1", code=2
        )


def test_any_other_field_is_set_as_everywhere(call):
    changes = ["prefill=null", "decode=null", "aggregated={gpu: h200, tp: 8}", "model=deepseek-r1", "faults=[]"]
    call("init", *(word for change in changes for word in ("--set", change)))
    assert load_scenario("scenario.yaml").aggregated.tp == 8


def test_a_trace_beside_the_file_is_named_relative_to_it(call, tmp_path):
    (tmp_path / "load.csv").write_text("arrival_s,in_tokens,out_tokens\n0,9,5\n1,9,5\n")
    call("init", "--trace", "load.csv")
    text = (tmp_path / "scenario.yaml").read_text()
    assert "  use: request_table  # format of the trace\n  path: load.csv\n" in text
    assert json.loads(call("run", "scenario.yaml", "--json"))["completed"] == 2
    call("init", "sub/other.yaml", "--trace", "load.csv", "--rate", "4/s", "--requests", "1")
    assert json.loads(call("run", "sub/other.yaml", "--json"))["completed"] == 1


def test_nothing_is_written_over(call, tmp_path):
    (tmp_path / "scenario.yaml").write_text("mine")
    assert "scenario.yaml: exists already" in call("init", code=2)
    assert (tmp_path / "scenario.yaml").read_text() == "mine"
    assert "exists already" in call("init", str(tmp_path), code=2)
    (tmp_path / "link.yaml").symlink_to("nowhere")
    assert "exists already" in call("init", "link.yaml", code=2)


def test_a_file_that_comes_while_the_command_asks_is_kept(call, tmp_path, monkeypatch):
    def asked(options):
        (tmp_path / "scenario.yaml").write_text("mine")
        return options

    monkeypatch.setattr("pdsim.cli.scenarios._asked", asked)
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert "scenario.yaml: exists already, and is kept" in call("init", code=2)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_closed_standard_streams_are_no_error(call, monkeypatch):
    for name in ("stdin", "stderr"):
        monkeypatch.setattr(sys, name, None)
    call("init")
    assert json.loads(call("run", "scenario.yaml", "--json"))["completed"] > 0
    assert "TTFT" in call("run", "scenario.yaml", "--no-ranges")
    for stream in (sys.stdin, sys.stderr):
        stream.close()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "qwen3-8"], "did you mean 'qwen3-8b'?"),
        (["--gpu", "h10"], "did you mean 'h100'?"),
        (["--model", "deepseek-r1", "--gpu", "h100"], "needs 86.1 GB on each of 8 h100"),
        (["--rate", "4"], "bare number 4: write a rate with its unit, such as '4/s'"),
        (["--rate", "4/s", "--concurrency", "2"], "--rate and --concurrency exclude each other"),
        (["--trace", "none.csv"], "--trace: no trace file none.csv"),
        (["--trace", "none.csv", "--input-tokens", "5"], "leave out --input-tokens"),
        (["--prefill", "0"], "prefill.instances"),
        (["--tp", "3"], "tp"),
        (["--set", "nonsense=1"], "unknown field 'nonsense'"),
    ],
    ids=str,
)
def test_a_wrong_choice_is_a_message_and_writes_nothing(call, tmp_path, words, says):
    assert says in call("init", *words, code=2)
    assert list(tmp_path.iterdir()) == []


def test_on_a_terminal_it_asks_for_what_is_missing(call):
    """An answer that is wrong is asked for again; Enter takes the default."""
    asked = call("init", "--gpu", "h100", typed="qwen3-8\nqwen3-8b\n\n0\n3\n\n\n4/s\n")
    assert "did you mean 'qwen3-8b'?" in asked
    assert "'0': expected a number of at least 1" in asked
    assert "GPU [" not in asked
    written = load_scenario("scenario.yaml")
    assert (written.model, written.pair.prefill.gpu, written.client.arrivals.rate_per_s) == ("qwen3-8b", "h100", 4)
    assert (written.pair.prefill.instances, written.pair.decode.instances) == (2, 3)


def test_an_end_of_input_writes_nothing(call, tmp_path):
    assert "nothing is written" in call("init", typed="qwen3-8b\n", code=130)
    assert list(tmp_path.iterdir()) == []


def test_json_asks_nothing(call):
    assert json.loads(call("init", "--json", typed="")) == {"scenario": "scenario.yaml"}


def test_fields_that_are_suggested_have_their_defaults(call, tmp_path):
    call("init")
    path = tmp_path / "scenario.yaml"
    plain = load_scenario(path)
    _, *lines = OPTIONAL.splitlines(keepends=True)
    path.write_text(path.read_text().replace(OPTIONAL, "".join(line.removeprefix("# ") for line in lines)))
    assert {"seed", "router", "network", "cost"} <= parse_yaml(path.read_text(), "").keys()
    assert load_scenario(path) == plain


def test_every_comment_is_in_some_file(tmp_path):
    (tmp_path / "load.csv").write_text("arrival_s,in_tokens,out_tokens\n0,9,5\n")
    file = tmp_path / "a.yaml"
    several = (StarterOptions(), StarterOptions(trace=tmp_path / "load.csv"), StarterOptions(rate="4/s"))
    texts = "".join(commented(first_scenario(options, (), file=file)) for options in several)
    assert all(comment in texts for comment in starter._COMMENTS.values())
    assert max(map(len, texts.splitlines())) <= 120
    assert not re.search(r"[ \t]$", texts, re.MULTILINE)
