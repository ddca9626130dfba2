"""The check of KV by fingerprints, with the answers of ranks that a test gives."""

from types import SimpleNamespace

import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install 'pdsim[real]'")
pytest.importorskip("torch", reason="needs torch: pip install 'pdsim[real]'")

from pdreal.rank.kv_transfers import KvCheck

from pdsim.core.messages import KvGranted


class Ranks:
    """A group whose ranks answer each task with the next of `answers`."""

    def __init__(self, *answers):
        self.answers = [*answers]
        self.tasks = []
        self.failures = []

    def begin_or_fail(self, task, what, then):
        self.tasks.append(task)
        then(self.answers.pop(0))

    def fail(self, error):
        self.failures.append(str(error))


def unit(pages, *, is_last):
    return SimpleNamespace(request_id=3, source_pages=pages, after_layers=None, is_last=is_last)


@pytest.mark.parametrize(
    ("sent", "arrived", "damaged"),
    [
        ([{"0": 7}, {"0": 7, "1": 8}], [{"0": 7, "1": 8}], None),
        ([{"0": 7, "1": 8}], [{"0": 7, "1": 9}], "KV heads 1 of"),
        ([{"0": 7}, {"0": 9}], [{"0": 7}], "KV heads 0 of"),
        ([{"0": 7}, {"0": 9}], [{"0": 7}, {"0": 9}], "KV heads 0 of"),
    ],
    ids=["equal", "another", "copies differ on prefill", "copies differ on both sides"],
)
def test_kv_that_arrives_is_compared_with_kv_that_was_sent(sent, arrived, damaged):
    ranks, told = Ranks(sent, arrived), []
    check = KvCheck(ranks)
    check.on_sent(unit([1, 2], is_last=True), 0, 8, 0, lambda: told.append("sent"))
    check.expect(3, check.sent(3))
    check.compare(KvGranted(3, 0, (4, 5)), 8, 0, lambda: told.append("arrived"))
    if damaged is None:
        assert told == ["sent", "arrived"]
        assert ranks.failures == []
    else:
        assert told == ["sent"]
        assert damaged in ranks.failures[0]


def test_pages_of_a_request_that_ended_early_are_forgotten():
    ranks = Ranks([{"0": 7}])
    check = KvCheck(ranks)
    check.on_sent(unit([1, 2], is_last=False), 0, 8, 0, lambda: None)
    check.forget(3)
    check.on_sent(unit([5], is_last=True), 0, 4, 0, lambda: None)
    assert [task.pages for task in ranks.tasks] == [[5]]
    check.forget(3)
    assert not check._digests
