"""What a client measures, split into forwards and the rest: the parts of a made-up server are found again."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdsim.calibration.fit.machine import CANNOT_TELL, MESSAGES_NS
from pdsim.calibration.fit.profile import calibrate, profile_of
from pdsim.calibration.fit.rows import read_rows, write_rows
from pdsim.scenario.sections.fields import DURATION
from pdsim.scenario.yaml_file import ConfigError

PROVENANCE = {"device": "h200", "model": "qwen3-8b", "command": "made", "date": "2026-01-01"}
NO_PREFIX = "no prompt had a cached prefix: the server has no prefix cache, or its times do not show hits"
LENGTHS = [round(32 * 2 ** (i / 2)) for i in range(15)]


def forward_us(tokens, base_us, per_token_us):
    return base_us + per_token_us * tokens


def rows(base_us, per_token_us, service_us, latency_us, *, elsewhere=False):
    """All kinds that an observation has, of a server that behaves as said."""
    around_us = service_us + latency_us

    def ttft_us(tokens):
        return around_us + forward_us(tokens, base_us, per_token_us)

    made = [{"kind": "ttft", "new_tokens": n, "context_tokens": 0, "time_us": ttft_us(n)} for n in LENGTHS]
    made += [
        {"kind": "stall", "new_tokens": n, "time_us": 1 if elsewhere else forward_us(n, base_us, per_token_us)}
        for n in LENGTHS[2::2]
    ]
    for prompts in (4, 8):
        first, rest = (forward_us(64 * n, base_us, per_token_us) for n in (1, prompts - 1))
        time_us = around_us + first + rest + (prompts - 1) * service_us
        made.append({"kind": "burst", "prompts": prompts, "new_tokens": 64 * prompts, "time_us": time_us})
    made += [{"kind": "round_trip", "time_us": latency_us / 2}] * 3
    return made + [
        {"kind": "decode", "batch": b, "context_tokens": b * c, "time_us": 5000 + 20 * b + 0.03 * b * c}
        for b in (1, 2, 4, 8, 16)
        for c in (64, 256, 1024)
    ]


def profile(made, path):
    columns = dict.fromkeys(name for row in made for name in row)
    write_rows(path, ({name: row.get(name, "") for name in columns} for row in made), PROVENANCE)
    made = calibrate(read_rows([path]))
    return profile_of(made, "made", "made"), made.notes


def us(text):
    return DURATION.parse(text) / 1e3


@settings(max_examples=6, deadline=None)
@given(factor=st.floats(1.5, 3), quick_rounds=st.sampled_from([(1,), (0, 3)]))
def test_where_forwards_take_turns_at_two_paces_the_usual_one_is_found(factor, quick_rounds, tmp_path_factory):
    """Short prompts whose launches a slow core makes longer in most of five rounds."""
    made = []
    for number in range(5):
        pace = 1 if number in quick_rounds else factor
        made += [
            {**row, "time_us": row["time_us"] * pace} if row["kind"] in {"ttft", "stall"} else row
            for row in rows(20_000, 0.001, 0, 100)
        ]
    found, _ = profile(made, tmp_path_factory.mktemp("paces") / "rows.csv")
    prefill = found["cost"]["prefill"]
    forward_us = max(us(prefill.get(name, "0 ns")) for name in ("prefill_base", "prefill_least"))
    assert forward_us == pytest.approx(20_000 * factor, rel=0.1)


@settings(max_examples=8, deadline=None)
@given(
    base_us=st.floats(500, 20_000),
    per_token_us=st.floats(5, 100),
    service_us=st.floats(50, 3000),
    latency_us=st.floats(200, 5000),
)
def test_the_parts_of_a_server_are_found_again(tmp_path_factory, base_us, per_token_us, service_us, latency_us):
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    found, notes = profile(rows(base_us, per_token_us, service_us, latency_us), path)
    assert notes == (NO_PREFIX, CANNOT_TELL)
    prefill = found["cost"]["prefill"]
    assert us(prefill["prefill_per_token"]) == pytest.approx(per_token_us, rel=0.02)
    for tokens in (100, 3000):
        expected = forward_us(tokens, base_us, per_token_us)
        at_least = us(prefill["prefill_least"])
        line = us(prefill["prefill_base"]) + tokens * us(prefill["prefill_per_token"])
        line += us(prefill["prefill_per_pair"]) * tokens**2 / 2
        assert max(line, at_least) == pytest.approx(expected, rel=0.03)
    front_end = {name: us(value) for name, value in found["front_end"].items()}
    assert front_end["service"] == pytest.approx(service_us, rel=0.1, abs=40)
    around_us = service_us + latency_us - MESSAGES_NS / 1e3
    assert sum(front_end.values()) == pytest.approx(around_us, rel=0.1, abs=20)


def test_streams_that_do_not_wait_are_on_other_gpus(tmp_path):
    found, notes = profile(rows(1000, 20, 100, 600, elsewhere=True), tmp_path / "rows.csv")
    assert any("include KV transfers" in note for note in notes)
    assert us(found["cost"]["prefill"]["prefill_per_token"]) == pytest.approx(20, rel=0.02)
    assert sum(map(us, found["front_end"].values())) <= 300


def test_what_lies_around_is_less_than_the_shortest_prompt_takes(tmp_path):
    made = [row for row in rows(1000, 20, 100, 600) if row["kind"] != "stall"]
    made += [{"kind": "round_trip", "time_us": 1e6}] * 9
    found, notes = profile(made, tmp_path / "rows.csv")
    assert any("one round trip" in note for note in notes)
    shortest_us = 700 + forward_us(LENGTHS[0], 1000, 20)
    assert sum(map(us, found["front_end"].values())) < shortest_us


def test_without_decode_it_says_what_is_lacking(tmp_path):
    made = [row for row in rows(1000, 20, 100, 600) if row["kind"] != "decode"]
    with pytest.raises(ConfigError, match="a profile needs rows of decode"):
        profile(made, tmp_path / "rows.csv")
