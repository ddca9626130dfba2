"""A journal as text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.journal import Entry, digest, from_lines, to_line
from pdsim.core.message_text import from_json, to_json, to_text
from pdsim.core.messages import Arrival, Finished, FirstToken, KvGranted, PrefillDone, Send
from pdsim.core.sequence import TokenIds
from tests.support import run, small

CLUSTERS = {
    "plain": {},
    "radix": {"decode__radix_cache": True, "decode__pool_tokens": 400},
    "staged": {"prefill__tp": 2, "network__staging": {"ring": "20 MB"}},
    "layers": {"prefill__layer_groups": 4},
}


@pytest.mark.parametrize("changes", CLUSTERS.values(), ids=CLUSTERS)
def test_a_line_is_the_json_of_its_entry(changes):
    scenario = small(
        workload={"use": "sessions", "num_sessions": 10, "num_turns": 2, "input_tokens": 60, "output_tokens": 30},
        client={"use": "closed_loop", "concurrency": 6},
        **changes,
    )
    journal = run(scenario).journal
    lines = [to_line(entry) for entry in journal]
    assert lines == [json.dumps(to_json(tuple(entry)), separators=(",", ":")) + "\n" for entry in journal]
    back = list(from_lines(lines))
    assert [to_line(entry) for entry in back] == lines
    assert digest(back) == digest(journal)


def test_messages_that_are_equal_as_tuples_keep_their_names():
    """FirstToken(5) == Finished(5): nothing may be remembered by value alone."""
    for message in (FirstToken(5), Finished(5), PrefillDone(5)):
        line = to_line(Entry("a", "on_message", (Send("b", message), 7), []))
        assert line == f'["a","on_message",[{{"Send":["b",{{"{type(message).__name__}":[5]}}]}},7],[]]\n'


def test_token_ids_and_odd_values():
    entry = Entry("é", "on_message", (Arrival(1, TokenIds(range(20)), 2), True, None, 1.5, ["x"]), ())
    assert json.loads(to_line(entry)) == json.loads(json.dumps(to_json(tuple(entry))))


def test_a_recording_with_lists_of_token_ids_is_read():
    """As runs in experiments have them."""
    entry = Entry("decode-0", "on_message", (Arrival(1, TokenIds([7, 70_000]), 2),), ())
    line = '["decode-0","on_message",[{"Arrival":[1,{"TokenIds":[7,70000]},2]}],[]]\n'
    assert list(from_lines([line])) == [entry]


def test_pages_are_written_as_runs():
    pages = (*range(95, 183), *range(400, 407))
    assert to_text(KvGranted(3, 0, pages)) == '{"KvGranted":[3,0,{"Runs":[95,88,400,7]}]}'


@pytest.mark.parametrize(
    "pages", [tuple(range(11)), tuple(range(0, 200, 2)), tuple(range(50, 0, -1)), (1,) * 12, (True, False) * 8]
)
def test_integers_are_written_as_a_list_where_runs_are_no_shorter(pages):
    assert to_text(pages) == json.dumps(list(pages), separators=(",", ":"))


RUNS = st.lists(st.tuples(st.integers(-20, 10**6), st.integers(1, 30)), max_size=12)


@given(RUNS)
def test_sequences_of_integers_are_read_as_they_were_and_are_never_longer_than_a_list(runs):
    ids = tuple(number for first, count in runs for number in range(first, first + count))
    text = to_text(ids)
    assert from_json(json.loads(text)) == ids
    assert text == json.dumps(to_json(ids), separators=(",", ":"))
    assert len(text) <= len(json.dumps(list(ids), separators=(",", ":")))


def test_lists_of_earlier_releases_are_read():
    pages = tuple(range(40))
    assert from_json({"KvGranted": [3, 0, list(pages)]}) == KvGranted(3, 0, pages)


@pytest.mark.parametrize("runs", [[], [1], [1, 0], [1, -3, 5, 9], [1, 1 << 40], [1.5, 2], ["1", 2], 7])
def test_broken_runs_are_refused(runs):
    with pytest.raises((ValueError, TypeError)):
        from_json({"Runs": runs})
