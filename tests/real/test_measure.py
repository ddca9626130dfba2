"""`pdreal measure`: every kind of row at tiny size, and what is said of what cannot be measured."""

import csv
import sys
from contextlib import nullcontext
from itertools import accumulate
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="real mode needs torch")

import torch
from pdreal.cli import main
from pdreal.measure import forwards, plan, storage, transfers
from pdreal.measure.forwards import DecodeCase, PrefillCase, SustainedCase, forward_rows
from pdreal.measure.plan import FULL, Plan
from pdreal.settings.model import from_catalog

from pdsim.calibration.fit.rows import Ranks, read_rows
from tests.real.models import CPU, tiny_model

TINY = Plan(
    prefill=(PrefillCase(1, 8), PrefillCase(2, 8, 16)),
    sustained=(),
    decode=(DecodeCase(1, 16), DecodeCase(4, 16)),
    copied_pages=(1, 3),
    transferred_bytes=(4096,),
    descriptors=(1, 4),
    stored_pages=(1, 3),
    served_batches=(2,),
    served_tokens=32,
    served_outputs=24,
    seconds=0.0,
)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(plan, "QUICK", TINY)
    monkeypatch.setattr("pdreal.measure.transfers.ENGINES", {"cpu": ("shared-memory",)})
    monkeypatch.setattr("pdreal.measure.transfers.BETWEEN_HOSTS", ("shared-memory",))


def measure(out, *flags, model="tiny-qwen3"):
    """Its exit code."""
    with pytest.raises(SystemExit) as done:
        main(["measure", "--model", model, "--page-size", "16", "--quick", "--out", str(out), *flags])
    return done.value.code


def shapes(rows, kind, *columns):
    return [tuple(row[column] for column in columns) for row in rows if row["kind"] == kind]


HOSTS = f"""\
hosts:
  here: {{address: 127.0.0.1}}
  beside: {{address: 127.0.0.1, start: {sys.executable} -m pdreal host}}
"""


@pytest.mark.parametrize("hosts", ["", HOSTS], ids=["one host", "two hosts"])
def test_every_kind_has_the_columns_that_calibrate_reads(tiny, tmp_path, capsys, hosts):
    (tmp_path / "hosts.yaml").write_text(hosts)
    assert not measure(tmp_path / "rows.csv", *(["--hosts", str(tmp_path / "hosts.yaml")] if hosts else []))
    with (tmp_path / "rows.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert shapes(rows, "prefill", "prompts", "new_tokens", "context_tokens") == [("1", "8", "0"), ("2", "16", "32")]
    assert shapes(rows, "decode", "batch", "context_tokens") == [("1", "16"), ("4", "64")]
    page_bytes = 2 * 4 * 16 * 4 * 32 * 4  # planes of 4 layers, tokens, heads, elements of 4 bytes
    assert shapes(rows, "gather", "payload_bytes") == [(str(page_bytes // 2),), (str(3 * page_bytes // 2),)]
    assert shapes(rows, "scatter", "payload_bytes") == [(str(page_bytes),), (str(3 * page_bytes),)]
    sent = [("shared-memory", "4096", "1"), ("shared-memory", "4096", "4")]
    assert shapes(rows, "transfer", "transport", "payload_bytes", "num_descriptors") == sent
    stages = [(what, "512") for what in ("route", "admit", "grant", "result", "answer")]
    expected = [("message", ""), ("loading", ""), *stages, ("submit", "128"), ("submit", "1024")]
    of_host = shapes(rows, "host", "what", "new_tokens")
    assert of_host in (expected, [*expected, ("end", "")])  # if two ended in one step
    wave_bytes = {("shared-memory", str(num_tokens * page_bytes // 16)) for num_tokens in (128, 1024)}
    assert set(shapes(rows, "sending", "transport", "payload_bytes")) <= wave_bytes  # of transfers that waited
    assert shapes(rows, "handover", "transport", "payload_bytes") == [("shared-memory", str(512 * page_bytes // 16))]
    told = capsys.readouterr().err.splitlines()
    left_out = [line for line in told if line.startswith("left out: ")]  # a busy machine may part a batch
    assert shapes(rows, "loop", "batch") == [] if left_out else [("2",)]
    assert all(line.startswith("left out: decode loop, batch of 2: the batch stayed") for line in left_out)
    assert all(0 < float(row["rest_us"]) < float(row["time_us"]) for row in rows if row["kind"] == "loop")
    assert all(float(row["time_us"]) > 0 and row["device"] and row["command"] and row["date"] for row in rows)
    assert len(told) == len(rows) + len(left_out)


def test_sustained_forwards_know_how_long_they_have_been_going_on(monkeypatch):
    monkeypatch.setattr(forwards, "_BURST_SECONDS", 0.02)
    model = tiny_model()
    rows = list(forward_rows(model, 16, [SustainedCase(2, 8)], 0.0, print))
    assert [row.busy_us for row in rows] == pytest.approx([0, *accumulate(row.time_us for row in rows[:-1])])
    assert {(row.kind, row.prompts, row.new_tokens, row.repeats) for row in rows} == {("clock", 2, 16, 3)}


def test_pages_of_storage_are_measured_if_they_are_named(tiny, tmp_path):
    pytest.importorskip("mooncake.store", reason="needs Mooncake's wheel and libibverbs1", exc_type=ImportError)
    assert not measure(tmp_path / "rows.csv", "--only", "storage")
    with (tmp_path / "rows.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    whats = [(what, str(pages), str(pages << 16)) for pages in (1, 3) for what in ("write", "lookup", "read")]
    assert shapes(rows, "storage", "what", "num_descriptors", "payload_bytes") == whats


@pytest.mark.parametrize("verified", ["", "3"], ids=["plain", "drafts"])
def test_forwards_of_two_ranks_have_the_same_rows(tiny, tmp_path, verified):
    drafts = ["--draft-tokens", verified] if verified else []
    assert not measure(tmp_path / "rows.csv", "--tp", "2", "--only", "prefill,decode", *drafts)
    with (tmp_path / "rows.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert shapes(rows, "prefill", "prompts", "new_tokens", "tp") == [("1", "8", "2"), ("2", "16", "2")]
    steps = [("1", "16", "2", verified), ("4", "64", "2", verified)]
    assert shapes(rows, "decode", "batch", "context_tokens", "tp", "verified") == steps


def test_the_loop_of_steps_that_verify_drafts(tiny, tmp_path):
    """Each step accepts no draft, so that the batch stays as it is."""
    assert not measure(tmp_path / "rows.csv", "--draft-tokens", "3", "--only", "host")
    with (tmp_path / "rows.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert shapes(rows, "loop", "batch", "verified") in ([], [("2", "3")])  # a busy machine may part a batch
    assert len(shapes(rows, "handover", "transport")) == 1


@pytest.mark.parametrize("backend", ["none", "deepep"])
def test_ranks_may_hold_whole_experts(tiny, tmp_path, backend):
    flags = "--tp", "2", "--ep", "2", "--moe-a2a-backend", backend, "--only", "prefill,decode"
    assert not measure(tmp_path / "rows.csv", *flags, model="tiny-qwen3-moe")
    with (tmp_path / "rows.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = "kind", "tp", "ep", "moe_a2a_backend"
    found = {tuple(row[column] for column in columns) for row in rows}
    assert found == {(kind, "2", "2", backend) for kind in ("prefill", "decode")}
    pair = (Ranks(2, 2, backend),) * 2
    assert {of_kind.ranks for of_kind in read_rows([tmp_path / "rows.csv"]).of_ranks(*pair).rows} == {pair[0]}


def test_rounds_follow_each_other(tiny, tmp_path):
    assert not measure(tmp_path / "rows.csv", "--only", "prefill,decode", "--rounds", "2")
    with (tmp_path / "rows.csv").open(encoding="utf-8") as file:
        rows = [(row["kind"], row["new_tokens"], row["batch"]) for row in csv.DictReader(file)]
    decode = [("decode", "", "1"), ("decode", "", "4")]
    assert rows == 2 * [*decode, ("prefill", "8", ""), ("prefill", "16", "")]


def test_a_prefill_row_is_of_lengths_around_the_cases(monkeypatch):
    computed = []

    def prefill(self, batch):
        computed.append(sum(len(chunk.tokens) for chunk in batch.chunks))
        return []

    monkeypatch.setattr(forwards.ModelRunner, "prefill", prefill)
    (row,) = forward_rows(tiny_model(), 16, [PrefillCase(2, 20, 16)], 0.0, print)
    assert (row.prompts, row.new_tokens, row.context_tokens) == (2, 40, 32)
    assert computed == [40, 42, 38, 44, 36]  # two to warm up


def test_an_interrupted_command_keeps_what_it_has(tiny, tmp_path, monkeypatch):
    def interrupted(self, case):
        raise KeyboardInterrupt

    monkeypatch.setattr(forwards.ForwardBench, "prefill", interrupted)
    assert measure(tmp_path / "rows.csv", "--only", "decode,prefill") == 130
    assert (tmp_path / "rows.csv").read_text().count("\ndecode,") == 2


def test_steps_are_measured_while_the_cached_kv_is_random(monkeypatch):
    """Prefill writes the KV of its prompts, behind which tokens choose like experts."""
    ran = []
    for name in ("prefill", "decode"):
        forward = getattr(forwards.ModelRunner, name)
        run = lambda self, batch, name=name, forward=forward: ran.append(name) or forward(self, batch)  # noqa: E731
        monkeypatch.setattr(forwards.ModelRunner, name, run)
    list(forward_rows(tiny_model(), 16, [PrefillCase(1, 20), DecodeCase(2, 16)], 0.0, print))
    assert ran == sorted(ran)
    assert len(set(ran)) == 2


def test_a_step_may_have_one_longer_context(monkeypatch):
    steps = []
    decode = forwards.ModelRunner.decode
    monkeypatch.setattr(forwards.ModelRunner, "decode", lambda self, batch: steps.append(batch) or decode(self, batch))
    (row,) = forward_rows(tiny_model(), 16, [DecodeCase(3, 20, 100)], 0.0, print)
    assert (row.batch, row.context_tokens) == (3, 140)
    assert {batch.num_kv_tokens for batch in steps} == {(20, 20, 100)}
    tables = [change.pages for change in steps[0].changes]
    assert [len(pages) for pages in tables] == [2, 2, 7]
    assert len({page for pages in tables for page in pages}) == 11


def test_shapes_without_room_are_left_out_and_told(monkeypatch):
    model = tiny_model()
    page_bytes = forwards.kv_page_bytes(model.config, model.dtype, 16)
    monkeypatch.setattr(forwards, "free_bytes", lambda _: 4 * page_bytes / forwards._SHARE_OF_MEMORY)
    told = []
    cases = [DecodeCase(2, 16), DecodeCase(4, 16), PrefillCase(1, 5000)]
    (row,) = forward_rows(model, 16, cases, 0.0, told.append)
    assert (row.batch, row.context_tokens) == (2, 32)
    assert told == [
        "decode, 4 contexts of 16 tokens: 8 pages, and memory has room for 4",
        "prefill, 1 prompts of 5,000 tokens: tiny-qwen3 has room for 4096 tokens",
    ]


@pytest.mark.parametrize(("device", "num_pages"), [("cuda", 8), ("cpu", 4)])
def test_ranks_need_memory_for_their_own_heads(device, num_pages, monkeypatch):
    """Two ranks have a GPU each, or share the host's memory, where there is room for four pages of all heads."""
    config = from_catalog("tiny-qwen3")
    page_bytes = forwards.kv_page_bytes(config, torch.float32, 16)
    monkeypatch.setattr(forwards, "free_bytes", lambda _: 4 * page_bytes / forwards._SHARE_OF_MEMORY)
    of_rank = {"num_kv_heads": config.num_kv_heads // 2, "tp": SimpleNamespace(size=2)}
    model = SimpleNamespace(config=config, dtype=torch.float32, device=torch.device(device), **of_rank)
    cases = [DecodeCase(size, 15) for size in range(1, 12)]
    assert forwards._possible(model, 16, cases, lambda _: None, 1) == cases[:num_pages]


@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-hybrid"])
def test_a_page_in_storage_is_that_of_layers_with_attention(model, monkeypatch):
    """Four pages need more of the host's memory than there is, and are not asked for."""
    config, told, asked, payloads = from_catalog(model), [], [], []
    page_bytes = forwards.kv_page_bytes(config, torch.float32, 16)
    store_bytes = storage._BATCHES_WRITTEN * page_bytes
    monkeypatch.setattr(storage, "free_host_bytes", lambda: 4 * store_bytes / storage._SHARE_OF_MEMORY)
    monkeypatch.setattr(storage, "running_store", lambda num_bytes: asked.append(num_bytes) or nullcontext("here"))
    monkeypatch.setattr(storage, "MooncakeStore", lambda *_: ForgetfulStore(payloads))
    rows = list(storage.storage_rows(config, CPU, torch.float32, 16, (2, 4), 0.0, told.append))
    assert asked == [2 * store_bytes]
    assert [(row.what, row.payload_bytes) for row in rows] == [
        (what, 2 * page_bytes) for what in ("write", "lookup", "read")
    ]
    assert {*payloads} == {2 * page_bytes}
    assert [line.partition(":")[0] for line in told] == ["storage, 4 pages"]


def test_no_store_runs_for_nothing(monkeypatch):
    monkeypatch.setattr(storage, "free_host_bytes", lambda: 0)
    monkeypatch.setattr(storage, "running_store", pytest.fail)
    config, told = from_catalog("tiny-qwen3"), []
    for counts in ((), (1, 2)):
        assert not list(storage.storage_rows(config, CPU, torch.float32, 16, counts, 0.0, told.append))
    assert len(told) == 2


class ForgetfulStore:
    """Takes all and keeps nothing. Notes how many bytes each call moves."""

    def __init__(self, payloads):
        self.payloads = payloads

    def register(self, memory):
        pass

    def num_there(self, names):
        return len(names)

    def missing(self, names):
        return [*range(len(names))]

    def read(self, names, begins, num_bytes):
        self.payloads.append(len(begins) * num_bytes)
        return len(names)

    def write(self, names, begins, num_bytes):
        self.payloads.append(len(begins) * num_bytes)
        return True

    def close(self):
        pass


def test_copies_without_room_are_left_out(monkeypatch):
    config = from_catalog("tiny-qwen3")
    page_bytes = forwards.kv_page_bytes(config, torch.float32, 16)
    monkeypatch.setattr(transfers, "free_bytes", lambda _: 4 * page_bytes / transfers._SHARE_OF_MEMORY)
    (row,) = transfers.copy_rows(["scatter"], config, CPU, torch.float32, 16, (4, 5), 0.0)
    assert row.payload_bytes == 4 * page_bytes


def test_the_plan_names_no_shape_twice():
    for cases in (FULL.prefill, FULL.decode):
        assert len(set(cases)) == len(cases)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "prefil"], "--only: no kind 'prefil' (did you mean 'prefill'?); there are prefill, decode, gather"),
        (["--model", "tiny-qwen"], "--model: "),
        (["--only", "transfer", "--tp", "2"], "--only: transfer is measured with one rank only; --tp allows"),
        (["--tp", "3"], "--tp: tiny-qwen3: tp 3 does not divide its query heads"),
        (["--tp", "2", "--ep", "4"], "--ep: expected 1 or all 2 ranks of an instance, found 4"),
        (["--tp", "2", "--ep", "2"], "--ep: tiny-qwen3 has no experts"),
        (["--tp", "2", "--moe-a2a-backend", "deepep"], "sent to whole experts only; tiny-qwen3 has none"),
        (["--tp", "2", "--moe-a2a-backend", "deepep", "--model", "tiny-qwen3-moe"], "whole experts only; give --ep 2"),
        (["--moe-a2a-backend", "deepep", "--model", "tiny-qwen3-moe"], "whole experts only; give --tp 2 --ep 2"),
        (["--page-size", "0"], "--page-size: expected at least 1 token, found 0"),
        (["--out", "no/such/rows.csv"], "--out: no/such/rows.csv: No such file or directory"),
    ],
)
def test_mistakes_are_told_in_one_message(flags, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    right = {"--model": "tiny-qwen3", "--out": "rows.csv", "--only": "host"}
    given = right | dict(zip(flags[::2], flags[1::2], strict=True))
    with pytest.raises(SystemExit) as wrong:
        main(["measure", *(word for pair in given.items() for word in pair)])
    assert wrong.value.code == 2
    assert message in capsys.readouterr().err
