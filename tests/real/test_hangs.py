"""Ranks that hang (SIGSTOP): they are killed and come back, block nobody, and nothing waits for them without an end."""

import asyncio
import os
import signal
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

from tests.real import clusters

torch = pytest.importorskip("torch", reason="real mode needs torch")
pytest.importorskip("zmq", reason="needs pyzmq: pip install 'pdsim[real]'")

from hypothesis import given
from hypothesis import strategies as st
from pdreal.control.requests import RequestFailed, Sampling
from pdreal.control.tasks import Compute, DecodeBatch
from pdreal.hosts import bootstrap, instances
from pdreal.hosts.bootstrap import Bootstrap
from pdreal.hosts.fleet import Fleet
from pdreal.hosts.instances import next_backoff_s
from pdreal.launcher import Launcher
from pdreal.rank import group
from pdreal.serve import server
from pdreal.serve.service import Entrance
from pdreal.settings.host import LaunchError
from pdreal.settings.options import Options
from pdreal.settings.scenario import real_scenario

HEALTH = {"heartbeat_interval": "500 ms", "heartbeat_failures": 2}
ANYWHERE = server.Address("127.0.0.1", 0)
BOUND_S = 30
"""Far more than any of these needs; what waits without an end does not meet it."""


def resolved(**changes):
    return real_scenario(clusters.scenario(workload__num_requests=1, **changes), Options())[0]


STOPPED = []


@pytest.fixture(autouse=True)
def none_is_left():
    """Or pytest would wait for it when it ends."""
    yield
    while STOPPED:
        with suppress(ProcessLookupError):
            os.kill(STOPPED.pop(), signal.SIGKILL)


def hang(cluster, instance_id, rank=0):
    pid = cluster._instances.fleet._home._alive[instance_id][rank].pid
    os.kill(pid, signal.SIGSTOP)
    STOPPED.append(pid)
    return pid


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def until(holds):
    while not holds():  # noqa: ASYNC110  the launcher tells nobody
        await asyncio.sleep(0.02)


async def in_time(work):
    async with asyncio.timeout(BOUND_S):
        return await work


async def tokens_of(request):
    return [token async for tokens in request for token in tokens]


@pytest.mark.parametrize(("instance_id", "rank"), [("prefill-0", 0), ("decode-0", 1)], ids=["leader", "follower"])
def test_a_rank_that_hangs_is_killed_and_comes_back(instance_id, rank):
    async def main():
        cluster = Launcher(resolved(health=HEALTH, decode__tp=2), Options())
        await in_time(cluster.start())
        pid = hang(cluster, instance_id, rank)
        await in_time(until(lambda: is_gone(pid)))
        await in_time(until(lambda: instance_id in cluster.load()))
        assert cluster._instances.fleet.lives[instance_id] >= 1
        assert len(await in_time(tokens_of(cluster.submit([5, 6, 7], Sampling(max_tokens=3))))) == 3
        return await in_time(cluster.stop())

    assert asyncio.run(main()) == []


def test_a_forward_without_an_end_is_found():
    """The main thread of its rank still answers."""
    may_end = threading.Event()
    resources = SimpleNamespace(
        runner=SimpleNamespace(run=lambda *_: may_end.wait() and []),
        mover=None,
        device=SimpleNamespace(type="cpu"),
        stored=None,
        num_workers=0,
        enter_compute=lambda: None,
        enter_copies=lambda: None,
    )

    async def main():
        threads, ended = group.RankThreads(asyncio.get_running_loop(), resources, 50_000_000), asyncio.Event()
        threads.begin(Compute(None), lambda *_: ended.set())
        assert not threads.hangs
        await in_time(until(lambda: threads.hangs))
        may_end.set()
        await in_time(ended.wait())
        assert not threads.hangs

    asyncio.run(main())


def test_a_rank_whose_forward_takes_too_long_ends_and_says_why():
    """Found by what it computes, though its main thread answers; and without a health section, too."""
    pool = {"pool_tokens": 8192, "max_running_requests": 2, "radix_cache": False}  # so that each prompt is computed
    server = {"gpu": "h100", "chunked_prefill_tokens": 4096, **pool}
    options = Options(watchdog_timeout=0.01)
    scenario = clusters.scenario(prefill=None, decode=None, aggregated=server, workload__num_requests=1)

    async def main():
        cluster = Launcher(real_scenario(scenario, options)[0], options)
        await in_time(cluster.start())
        while cluster.failure is None:  # pings come once a second, and some between forwards
            with suppress(RequestFailed):
                await in_time(tokens_of(cluster.submit([5] * 4000, Sampling(max_tokens=2))))
        await in_time(cluster.stop())
        return cluster.failure

    assert asyncio.run(main()) == "aggregated-0 was lost: a forward took more than 0.01 s"


class Launched:
    """A decode step of a GPU that is done when it has been asked twice, or fails then."""

    def __init__(self, error=None):
        self.done = self
        self.tokens = torch.tensor([7])
        self._error = error
        self._num_asked = 0

    def query(self):
        self._num_asked += 1
        if self._num_asked > 1 and self._error:
            raise self._error
        return self._num_asked > 1


@pytest.mark.parametrize("error", [None, RuntimeError("the GPU is gone")])
def test_launched_steps_are_looked_for_behind_what_the_thread_computes(error):
    """The thread's work comes first; then a step needs no thread."""
    may_end, computed = threading.Event(), []

    def compute(work, _):
        computed.append(work)
        assert may_end.wait(30)
        return []

    resources = SimpleNamespace(
        runner=SimpleNamespace(
            run=compute, launch=lambda _: Launched(error), expert_counts=None, logprobs=(), seeds=()
        ),
        mover=None,
        device=SimpleNamespace(type="cpu"),
        stored=None,
        num_workers=0,
        enter_compute=lambda: None,
        enter_copies=lambda: None,
    )
    step, ends = Compute(DecodeBatch((5,), (3,))), []

    async def main():
        threads = group.RankThreads(asyncio.get_running_loop(), resources, 300_000_000_000)
        for task in (Compute(None), step):
            threads.begin(task, lambda done, failed: ends.append((done.tokens, failed)))
        may_end.set()
        await in_time(until(lambda: len(ends) == 2))
        threads.begin(step, lambda done, failed: ends.append((done and done.tokens, failed)))
        assert not threads.hangs
        await in_time(until(lambda: len(ends) == 3))

    asyncio.run(main())
    assert computed == [None, step.work]
    assert ends[:2] == [([], None)] * 2
    assert ends[2][1] is error
    assert error or ends[2][0] == [7]


def test_one_that_hangs_as_it_starts_blocks_no_other():
    async def main():
        cluster = Launcher(resolved(health=HEALTH), Options())
        await in_time(cluster.start())
        cluster.kill("prefill-0", restart_after_s=0.01)
        await in_time(until(lambda: cluster._instances.fleet.lives["prefill-0"] == 1))
        hanging = hang(cluster, "prefill-0")
        cluster.kill("decode-0", restart_after_s=0.01)
        await in_time(until(lambda: cluster._instances.fleet.lives["decode-0"] >= 1 and "decode-0" in cluster.load()))
        assert cluster._instances.fleet.lives["prefill-0"] == 1
        assert await in_time(cluster.stop()) == []
        return hanging

    assert is_gone(asyncio.run(main()))


def call_once(monkeypatch, method, act):
    """After it has dealt with the first rank of decode-0: as that is started (spawn), or as its hello is heard."""
    owner = Fleet if method == "spawn" else Bootstrap
    original, has_acted = getattr(owner, method), []

    def wrapped(self, what):
        original(self, what)
        if not has_acted and getattr(what, "process", what) == "decode-0":
            has_acted.append(True)
            act()

    monkeypatch.setattr(owner, method, wrapped)


@pytest.mark.parametrize(("limit", "at"), [("start", "spawn"), ("connect", "on_notice")])
def test_to_come_up_has_a_deadline(limit, at, monkeypatch):
    """One hangs before it says hello, or after."""
    hanging = []
    cluster = Launcher(resolved(), Options())
    call_once(monkeypatch, at, lambda: hanging.append(hang(cluster, "decode-0")))
    monkeypatch.setattr(bootstrap, f"_{limit.upper()}_S", 2.0)
    with pytest.raises(LaunchError, match=rf"decode-0 did not {limit} within 2 s"):
        asyncio.run(in_time(cluster.start()))
    assert is_gone(*hanging)


@pytest.mark.parametrize("health", [None, HEALTH], ids=["unwatched", "watched"])
def test_stop_ends_though_a_rank_hangs(health, monkeypatch):
    monkeypatch.setattr(instances, "_SETTLE_S", 1.0)

    async def main():
        cluster = Launcher(resolved(health=health), Options())
        await in_time(cluster.start())
        request = cluster.submit([5, 6, 7], Sampling(max_tokens=300))
        await in_time(until(lambda: request.tokens))
        pid = hang(cluster, "decode-0")
        leaks = await in_time(cluster.stop())
        return pid, leaks, request.has_ended

    pid, leaks, has_ended = asyncio.run(main())
    assert is_gone(pid)
    assert has_ended
    assert [leak for leak in leaks if leak.startswith("decode-0 did not answer") or "decode-0 is dead" in leak]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["starts", "serves"])
def test_a_server_is_stopped_though_a_rank_hangs(moment, number, monkeypatch):
    hanging = []
    cluster = Launcher(resolved(), Options())
    monkeypatch.setattr(server, "Launcher", lambda *_: cluster)
    monkeypatch.setattr(instances, "_SETTLE_S", 0.5)

    def hang_and_stop(_=None):
        hanging.append(hang(cluster, "decode-0"))
        os.kill(os.getpid(), number)

    if moment == "starts":
        call_once(monkeypatch, "spawn", hang_and_stop)
    announce = hang_and_stop if moment == "serves" else print
    leaks = asyncio.run(in_time(server.serve(resolved(), Options(), ANYWHERE, "tiny", Entrance(), announce=announce)))
    assert leaks == (["decode-0 did not answer, and was killed"] if moment == "serves" else [])
    assert is_gone(*hanging)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=2000))
def test_backoffs_double_up_to_a_cap_until_one_was_up_for_long(ups_s):
    last_s = None
    for up_s in ups_s:
        before_s, last_s = last_s, next_backoff_s(last_s, up_s)
        if before_s is None or up_s >= 60:
            assert last_s == 0.5
        else:
            assert last_s == min(30, 2 * before_s)


def test_after_thousands_of_deaths_it_is_started_again():
    last_s = None
    for _ in range(5000):
        last_s = next_backoff_s(last_s, 0.0)
    assert last_s == 30
