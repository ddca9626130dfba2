"""The control channel, the logbooks and the tokens of a workload, without a model."""

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install 'pdsim[real]'")

from pdreal.clients import Tokens
from pdreal.control.channel import Channel, Envelope, decode, encode, process_of
from pdreal.control.logbook import InstanceLog, Logbook, read_journal, read_records
from pdreal.control.notices import KINDS, Broken, Pong, Settle, Streamed
from pdreal.control.requests import Request, RequestFailed, Sampling
from pdreal.hosts.instances import _LAST_WORDS_S, Instances
from pdreal.launcher import Launcher
from pdreal.settings.options import Options

from pdsim.core.instance import Levels
from pdsim.core.journal.calls import Entry
from pdsim.core.journal.replay import replay
from pdsim.core.messages import Finished, FirstToken, KvGranted, NewRequest, PeerDown, Woken
from pdsim.core.routing.router import attempt_id
from pdsim.core.sequence import Spans, TokenIds
from pdsim.scenario.building.machines import build_router, restarted, state_machines
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.loading import load_scenario, parse_scenario


@pytest.mark.parametrize(
    "message",
    [
        NewRequest(3, 5, TokenIds([1, 2, 511]), 16, "prefill-0", "decode-1"),
        KvGranted(3, 8, tuple(range(20))),
        Streamed([[3, 17], [4, 0]]),
        Settle(4),
    ],
)
def test_what_is_sent_is_what_comes(message):
    assert decode(encode(Envelope("decode-1", message, {"token": 3}))) == Envelope("decode-1", message, {"token": 3})


def test_no_notice_has_a_name_of_the_core():
    from pdsim.core import messages

    assert not [name for name in KINDS if hasattr(messages, name)]


@pytest.mark.parametrize(
    ("machine", "process"),
    [
        ("prefill-0", "prefill-0"),
        ("prefill-0.sender", "prefill-0"),
        ("decode-1.receiver", "decode-1"),
        ("router", "launcher"),
        ("decode-1.rank1", "decode-1.rank1"),
    ],
)
def test_where_state_machines_live(machine, process):
    assert process_of(machine) == process


def test_messages_keep_their_order_and_miss_the_next_life(tmp_path):
    async def receive(channel, count):
        """What comes first, in its order."""
        loop, got, all_here = asyncio.get_running_loop(), [], asyncio.Event()

        def take(envelope, payload):
            got.append((envelope.message.timeout_ns, payload))
            if len(got) == count:
                all_here.set()

        channel.listen(loop, take)
        await all_here.wait()
        loop.remove_reader(channel.descriptor)
        channel.close()
        return got

    async def play():
        here, first = Channel(tmp_path, "launcher"), Channel(tmp_path, "decode-0", 0)
        here.connect("decode-0", first.endpoint)
        for number in range(100):
            here.send("decode-0.receiver", Settle(number), payload=number if number % 2 else None)
        got = await receive(first, 100)
        here.send("decode-0", Settle(100))  # to the dead
        second = Channel(tmp_path, "decode-0", 1)
        here.connect("decode-0", second.endpoint)
        here.send("decode-0", Settle(101))
        here.send("nobody", Settle(102))
        late = await receive(second, 1)
        here.close()
        return got, late

    got, late = asyncio.run(play())
    assert got == [(number, number if number % 2 else None) for number in range(100)]
    assert late == [(101, None)]


def test_the_last_answer_of_the_dead_is_not_their_load():
    """It may be read after their end was seen."""
    instances = nobody_up()
    instances.on_notice(Pong("decode-0", [0] * len(Levels._fields)))
    assert not instances.levels


def test_a_kill_of_the_dead_changes_nothing_of_their_next_end(caplog):
    """Their next end is logged, and the delay of their restart is its own."""
    instances = nobody_up()
    instances.kill("decode-0", None, None)
    assert "decode-0" not in instances._restart_s
    assert instances._reason_of("decode-0", -9, "9 s after it was up") == "killed by SIGKILL"
    assert "decode-0: killed by SIGKILL, 9 s after it was up" in caplog.text


@pytest.mark.parametrize(
    ("name", "dead"),
    [
        ("aggregated-0", {"aggregated-0"}),
        ("prefill-0", {"prefill-0", "prefill-0.sender"}),
        ("decode-0", {"decode-0", "decode-0.receiver"}),
    ],
)
def test_a_death_is_that_of_the_machines_that_there_are(name, dead, tmp_path):
    server = {"gpu": "h100", "pool_tokens": 4096, "max_running_requests": 8}
    roles = ["aggregated"] if name == "aggregated-0" else ["prefill", "decode"]
    data = {"model": "tiny-qwen3", "page_size": 4, "network": {"staging": {}}, **dict.fromkeys(roles, server)}
    data["workload"] = {"use": "random_lengths", "num_requests": 1, "input_tokens": 8, "output_tokens": 1}
    scenario = resolve(parse_scenario(data, base=Path()))
    instances = nobody_up(scenario)
    instances._timeline.now_ns = 7
    instances._note_death(tmp_path, name)
    entries = read_journal(tmp_path)
    assert {entry.instance_id for entry in entries} == dead
    assert replay(entries, state_machines(scenario), partial(restarted, scenario)) == 0


def nobody_up(scenario=None):
    return Instances(
        scenario or load_scenario(Path("experiments/real-demo/pair.yaml")),
        Options(),
        channel=None,
        timeline=SimpleNamespace(loop=None),
        logbook=Logbook(None, "launcher", 0),
        network=None,
        sockets=Path("nowhere"),
        folder=None,
        carry_out=pytest.fail,
        on_lost=pytest.fail,
        spawn_task=pytest.fail,
    )


@pytest.mark.parametrize("is_aggregated", [False, True])
def test_tokens_of_an_attempt_that_was_given_up_do_not_count(is_aggregated):
    """They may be on their way when its instance is lost, and come before the next attempt begins."""
    server = {"gpu": "h100", "pool_tokens": 4096, "max_running_requests": 8, "instances": 2}
    roles = ["aggregated"] if is_aggregated else ["prefill", "decode"]
    data = {"model": "tiny-qwen3", "page_size": 4, "health": {}, **dict.fromkeys(roles, server)}
    data["workload"] = {"use": "random_lengths", "num_requests": 1, "input_tokens": 8, "output_tokens": 1}
    scenario = resolve(parse_scenario(data, base=Path()))
    launcher = Launcher(scenario, Options())
    launcher._plain_router = launcher._router = build_router(scenario)
    launcher.timeline = SimpleNamespace(now_ns=0, at=lambda *_: None)
    launcher._instances = SimpleNamespace(is_up=lambda _: False)

    def stream(attempt, token):
        if is_aggregated:
            launcher._on_envelope(Envelope("launcher", Streamed([[attempt, token]])), None)
        extra = [None if is_aggregated else token, 0, None]
        launcher._on_envelope(Envelope("router", FirstToken(attempt), extra), None)

    request = launcher.submit([1, 2, 3], Sampling(4))
    launcher._tell_router(PeerDown(launcher._router.live[0].attempt.decode_id))
    stream(0, 7)
    assert not request.tokens
    launcher.timeline.now_ns = 10**9
    launcher._tell_router(Woken())
    stream(0, 7)
    stream(attempt_id(0, 1), 8)
    assert request.tokens == [8]
    launcher._tell_router(PeerDown(launcher._router.live[0].attempt.decode_id))
    assert request.has_ended, "a request that has a token is not tried again"


def test_why_a_process_ended_may_come_after_its_end(monkeypatch):
    instances, reasons = nobody_up(), []
    monkeypatch.setattr(
        instances, "_on_death", lambda *args: reasons.append((*args, instances._deaths.get("decode-0")))
    )

    async def play():
        instances._on_exit("prefill-0", -9)  # killed: it says nothing
        instances._on_exit("decode-0", 1)
        instances.on_notice(Broken("decode-0", "no weights"))
        await asyncio.sleep(2 * _LAST_WORDS_S)

    asyncio.run(play())
    assert reasons == [("prefill-0", -9, None), ("decode-0", 1, "no weights")]


def test_logbooks_become_one_journal(tmp_path):
    """By time; what a killed process left half is left out, and its next life follows."""
    for process, life, times in (("prefill-0", 0, (1, 5)), ("prefill-0", 1, (7,)), ("launcher", 0, (2, 6))):
        logbook = Logbook(tmp_path, process, life)
        for now_ns in times:
            logbook.entry(Entry(process, "on_message", (Woken(), now_ns), ()))
        logbook.close()
    with (tmp_path / "prefill-0.0.journal").open("a") as file:
        file.write('["prefill-0","on_mess')
    assert [(e.instance_id, e.args[-1]) for e in read_journal(tmp_path)] == [
        ("prefill-0", 1),
        ("launcher", 2),
        ("prefill-0", 5),
        ("launcher", 6),
        ("prefill-0", 7),
    ]


def test_what_others_hear_of_is_on_file(tmp_path):
    """A rank that is killed as its outcome is heard leaves all rows of that request."""
    pytest.importorskip("torch", reason="needs torch: pip install 'pdsim[real]'")
    from pdreal.rank.leader import Outbox

    logbook, seen = Logbook(tmp_path, "decode-0", 0), []
    log = InstanceLog("decode-0", logbook, SimpleNamespace(now_ns=0))

    async def tell():
        channel = SimpleNamespace(send=lambda *_: seen.append(len(read_records(tmp_path).levels)))
        outbox = Outbox(channel, log, asyncio.get_running_loop())
        for i in range(3):
            log.levels(SimpleNamespace(levels=lambda i=i: Levels(*[i] * len(Levels._fields))))
            outbox.send("router", Finished(i))
            if i:
                await asyncio.sleep(0)

    asyncio.run(tell())
    logbook.close()
    assert seen == [2, 2, 3]


def test_rows_become_records(tmp_path):
    front, decode = Logbook(tmp_path, "launcher", 0), Logbook(tmp_path, "decode-0", 0)
    front.row("on_arrival", 10, 0, 5, 3)
    front.row("on_routed", 11, 0, "prefill-0", "decode-0")
    decode.row("on_admitted", 20, 0, 4)
    front.row("on_end", 90, Finished(0))
    front.close()
    decode.close()
    (request,) = read_records(tmp_path).requests
    assert (request.arrival_ns, request.admitted_ns, request.end_ns) == (10, 20, 90)
    assert (request.num_decode_cached_tokens, request.outcome) == (4, "finished")


def test_records_end_where_the_launcher_wrote_no_arrival(tmp_path):
    front, decode = Logbook(tmp_path, "launcher", 0), Logbook(tmp_path, "decode-0", 0)
    front.row("on_arrival", 10, 0, 5, 3)
    decode.row("on_admitted", 20, 0, 4)
    decode.row("on_admitted", 30, 1, 4)
    decode.row("on_streamed", 40, 0)
    front.close()
    decode.close()
    (request,) = read_records(tmp_path).requests
    assert (request.admitted_ns, request.streamed_ns, request.outcome) == (20, None, "unfinished")


def test_equal_spans_are_equal_tokens():
    tokens = Tokens(512)
    prompt, longer = Spans.of(7, 50), Spans(((7, 0, 50), (9, 3, 10)))
    assert tokens.ids(longer).ids()[:50] == tokens.ids(prompt).ids()
    assert tokens.ids(Spans(((7, 20, 5),))).ids() == tokens.ids(prompt).ids()[20:25]
    assert len(set(tokens.ids(Spans.of(1, 2000)).ids())) > 450
    assert all(0 <= token < 512 for token in tokens.ids(longer).ids())


def test_the_next_turn_repeats_what_the_model_said():
    tokens, output = Tokens(512), Spans.of(8, 3)
    tokens.learn(output, [5, 6, 7])
    assert tokens.ids(Spans.of(7, 2).then(output)).ids()[2:] == [5, 6, 7]


def test_of_an_answer_cut_short_only_what_was_said_is_repeated():
    tokens, untold = Tokens(512), Tokens(512)
    tokens.learn(Spans(((8, 10, 4), (9, 0, 3))), [1, 2, 3, 4, 5])
    part = Spans(((8, 12, 4), (9, 0, 2)))
    expected = untold.ids(part).ids()
    expected[:2], expected[4] = [3, 4], 5
    assert tokens.ids(part).ids() == expected


def test_a_request_streams_and_says_why_it_failed():
    got = []

    async def take(request):
        async for tokens in request:
            got.append(tokens)  # noqa: PERF401  what came before it failed counts

    async def play():
        request = Request(0, TokenIds([1]), Sampling(4))
        request.put(5)
        request.put(6)
        asyncio.get_running_loop().call_later(0.01, request.put, 7)
        asyncio.get_running_loop().call_later(0.02, request.end, "it was lost")
        await take(request)

    with pytest.raises(RequestFailed, match="it was lost"):
        asyncio.run(play())
    assert got == [[5, 6], [7]]
