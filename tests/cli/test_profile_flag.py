"""One flag, and one field, apply all that a profile measured, in the same way for every command."""

import pytest

from tests.cli.test_commands import exit_code, output_json

SCENARIO = """\
name: plain
model: llama-3.1-8b
prefill: {gpu: h100}
decode: {gpu: h100}
network: {transport: mooncake-tcp}
workload: {use: random_lengths, num_requests: 20, input_tokens: 200, output_tokens: 20}
client: {use: closed_loop, concurrency: 4}
"""
PROFILE = """\
cost:
  prefill: {use: affine, prefill_base: BASE}
  decode: {use: affine, decode_base: BASE}
  host: {decode_step: 1 ms}
network: {transports: {mooncake-tcp: {bandwidth: 1 GB/s}}, message_latency: 1 ms}
front_end: {service: 3 ms}
provenance: {command: made up}
"""
BY_HAND = ("cost={profile: one.yaml}", "network.profile=one.yaml", "front_end={profile: one.yaml}")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.yaml").write_text(SCENARIO)
    (tmp_path / "one.yaml").write_text(PROFILE.replace("BASE", "10 ms"))
    (tmp_path / "two.yaml").write_text(PROFILE.replace("BASE", "20 ms"))
    return tmp_path


def changes(*given):
    return [word for change in given for word in ("--set", change)]


def test_the_flag_the_field_and_three_settings_are_the_same(capsys, folder):
    by_hand = output_json(capsys, "run", "plain.yaml", *changes(*BY_HAND))
    assert output_json(capsys, "run", "plain.yaml", "--profile", "one.yaml") == by_hand
    (folder / "field.yaml").write_text(f"{SCENARIO}profile: one.yaml\n")
    assert output_json(capsys, "run", "field.yaml") == by_hand
    (compared,) = output_json(capsys, "compare", "plain.yaml", "--profile", "one.yaml")
    assert {name: compared[name] for name in by_hand} == by_hand
    assert output_json(capsys, "run", "plain.yaml") != by_hand
    assert output_json(capsys, "run", "field.yaml", "--out", "run") == by_hand
    assert output_json(capsys, "run", "run/scenario.yaml") == by_hand


def test_each_role_may_have_its_own(capsys):
    both = output_json(capsys, "run", "plain.yaml", "--profile", "prefill=one.yaml", "--profile", "decode=two.yaml")
    costs = "cost={prefill: {profile: one.yaml}, decode: {profile: two.yaml}}"
    assert output_json(capsys, "run", "plain.yaml", *changes(costs, *BY_HAND[1:])) == both


def test_what_was_applied_is_said_in_one_line(capsys):
    assert exit_code("run", "plain.yaml", "--profile", "one.yaml", "--json") == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("one.yaml: applied step times of both roles, transfers of mooncake-tcp, front end")
    changed = changes("network.transport=nixl-rdma")
    assert exit_code("run", "plain.yaml", "--profile", "one.yaml", "--json", *changed) == 0
    assert "; not applied: transfers of nixl-rdma, which the profile lacks" in capsys.readouterr().err


def test_step_times_beside_a_profile_are_refused(capsys, folder):
    (folder / "both.yaml").write_text(f"{SCENARIO}profile: one.yaml\ncost: roofline\n")
    assert exit_code("run", "both.yaml") == 2
    assert "cost is given too" in capsys.readouterr().err
    assert exit_code("run", "both.yaml", "--profile", "two.yaml") == 0
    assert exit_code("run", "plain.yaml", "--profile", "one.yaml", "--profile", "two.yaml") == 2
