"""A journal as text."""

import json
from random import Random
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import pdsim
from pdsim.core.journal.calls import KILLED, Entry
from pdsim.core.journal.lines import digest, from_lines, to_line
from pdsim.core.journal.message_json import LONG, TYPES, from_json, to_json
from pdsim.core.journal.message_text import to_text
from pdsim.core.messages import Arrival, Finished, FirstToken, KvGranted, PrefillDone, Send, Wait
from pdsim.core.sequence import Spans, TokenIds
from pdsim.metrics.journal_blocks import entries_in, to_block
from pdsim.policy.views import TokenSequence
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


def sequence(rng):
    return rng.choice([Spans([(rng.randrange(9), 0, 5), (rng.randrange(10, 19), 3, 2)]), TokenIds([rng.randrange(9)])])


def any_value(hint, rng):
    """A random value of a type."""
    of_type = {
        int: lambda: rng.choice([0, -1, 2**63 - 1, -(2**63), rng.randrange(999)]),
        float: rng.random,
        str: lambda: rng.choice(["", "é", '"', "decode-0"]),
        bool: lambda: rng.random() < 0.5,
        NoneType: lambda: None,
        TokenSequence: lambda: sequence(rng),
        Any: lambda: sequence(rng),
    }
    if hint in of_type:
        return of_type[hint]()
    arguments = get_args(hint)
    if get_origin(hint) is tuple:
        kinds = [arguments[0]] * rng.choice([0, 1, 2, 20]) if arguments[-1] is ... else arguments
        return tuple([any_value(kind, rng) for kind in kinds])
    if get_origin(hint) is Literal:
        return rng.choice(arguments)
    if arguments:
        return any_value(rng.choice(arguments), rng)
    return hint(**{name: any_value(inner, rng) for name, inner in get_type_hints(hint).items()})


@pytest.mark.parametrize("kind", TYPES.values(), ids=TYPES)
@pytest.mark.skipif(pdsim.is_compiled(), reason="compiled classes do not keep the types of their fields")
def test_messages_in_a_block_are_read_as_they_were(kind):
    """Whether a message stands in a call, in another message or in several places."""
    rng = Random(1)
    for _ in range(4):
        found = [any_value(kind, rng) for _ in range(3)]
        calls = [
            Entry("prefill-0", "on_message", (found[0], 3), []),
            Entry("é", "on_step_done", (found[1], found[0], 4), [Send("b", found[0]), *found]),
            Entry("prefill-0", "next_step", (5,), (found[2], [found[1]])),
            Entry("prefill-0", KILLED, (6,), None),
        ]
        back = list(entries_in(to_block(calls)))
        assert [to_line(entry) for entry in back] == [to_line(entry) for entry in calls]
        assert digest(back) == digest(calls)


def test_a_block_has_each_message_once():
    granted, done = KvGranted(3, 0, (1, 2)), PrefillDone(3)
    calls = [
        Entry("decode-0", "next_step", (5,), (Wait(), [Send("prefill-0", granted), done])),
        Entry("prefill-0", "on_message", (granted, 6), [done]),
    ]
    block = json.loads(to_block(calls))
    columns = dict(block["objects"])
    assert columns["KvGranted"] == {"request_id": [3], "num_cached_tokens": [0], "pages": [[1, 2]]}
    assert columns["PrefillDone"] == {"request_id": [3]}
    assert len(block["objects"]) == len(columns) == 4


@example([[(0, 10), (11, 1), (10, 1), (12, 1)]])  # as far from first to last as a run
@given(st.lists(RUNS, min_size=1, max_size=4))
def test_pages_of_a_block_are_read_as_they_were_and_consecutive_pages_are_a_run(runs):
    pages = [tuple(number for first, count in one for number in range(first, first + count)) for one in runs]
    calls = [Entry("prefill-0", "on_message", (KvGranted(3, 0, one), 6), []) for one in (*pages, pages[0])]
    block = to_block(calls)
    assert list(entries_in(block)) == [entry._replace(returned=()) for entry in calls]
    column = dict(json.loads(block)["objects"])["KvGranted"]["pages"]
    is_run = [len(one) >= LONG and list(one) == list(range(one[0], one[0] + len(one))) for one in (*pages, pages[0])]
    assert [type(one) is dict for one in column] == is_run
