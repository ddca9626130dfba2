"""Questions about loads that were made so that the answer is known."""

import json

import pytest

import pdsim
from pdsim.study.base import ROUTERS
from pdsim.study.points.estimate import number
from pdsim.study.questions.study import QUESTIONS, question
from pdsim.study.sweeping.sweep import read_sweep
from tests.markdown import ROOT, sections

SCENARIO = """\
model: qwen3-0.6b
page_size: 16
prefill: {gpu: h100, instances: 2, radix_cache: false, overlap: false, chunked_prefill_tokens: 8192}
decode: {gpu: h100, instances: 2}
router: round_robin
network: {transport: nixl-rdma, message_latency: 1 us}
cost: {use: affine, prefill_per_token: 100 us, decode_base: 5 ms}
workload: {use: random_lengths, num_requests: 24, input_tokens: 200, output_tokens: 20}
client: {use: closed_loop, concurrency: 8}
"""


def poisson(rate):
    return f"client={{use: open_loop, arrivals: {{use: poisson, rate: {rate}/s}}}}"


@pytest.fixture
def ask(tmp_path):
    path = tmp_path / "base.yaml"
    path.write_text(SCENARIO)

    def asked(name, *changes, seeds=1, ttft_ms=2000, tpot_ms=50, **options):
        slo = f"ttft < {ttft_ms} ms and tpot < {tpot_ms} ms for 90 %"
        return pdsim.ask(name, path, changes=changes, seeds=seeds, jobs=1, slo=slo, **options)

    return asked


def value(made, arm, column):
    (row,) = [row for row in made.rows if row.arm == arm]
    return row.estimates[column].mean


def test_prompts_want_prefill_and_outputs_want_decode(ask):
    prompts = ask("pd-ratio", "workload.output_tokens=2")
    outputs = ask("pd-ratio", "workload.input_tokens=16", "workload.output_tokens=200", "decode.max_running_requests=2")
    assert (prompts.winner, outputs.winner) == ("3P1D", "1P3D")
    assert "3P1D" in prompts.text
    assert prompts.limit.resource == "prefill compute"


def test_splits_give_each_role_whole_servers(ask):
    stages = ("prefill.pp=2", "decode.pp=2", "model=qwen3-8b", "prefill.instances=2", "decode.instances=2")
    made = ask("pd-ratio", *stages)
    assert {row.arm.partition(",")[0] for row in made.rows} == {"1P3D", "2P2D", "3P1D"}


def test_questions_keep_the_engine(ask):
    pulled, pushed = (ask("explain-ttft", f"engine={engine}") for engine in ("vllm", "sglang"))
    assert value(pulled, "disaggregated", "ttft") != value(pushed, "disaggregated", "ttft")
    with pytest.raises(pdsim.ConfigError, match=r"engine vllm: network\.staging is a setting of SGLang"):
        ask("staging-ring", "engine=vllm")


def unrouted(tmp_path):
    path = tmp_path / "unrouted.yaml"
    path.write_text(SCENARIO.replace("router: round_robin\n", "").replace("radix_cache: false", "radix_cache: true"))
    return path


ONE_PREFIX = (
    "workload={use: prefix_pool, num_requests: 40, num_prefixes: 1, prefix_tokens: 600, input_tokens: 60, "
    "output_tokens: 40}"
)


def test_a_router_that_nobody_names_is_chosen_and_named(tmp_path):
    """With one prefix for all, cache_aware sends all to one instance."""
    made = pdsim.ask("pd-ratio", unrouted(tmp_path), changes=[ONE_PREFIX], seeds=1, jobs=1)
    splits = ("1P3D", "2P2D", "3P1D")
    assert [row.arm for row in made.rows] == [f"{split}, {router}" for split in splits for router in ROUTERS]
    split, _, router = made.winner.partition(", ")
    assert f"Use {split}, {router}: " in made.text
    assert any(made.winner in note and f"'{split}, " in note and "goodput" in note for note in made.notes)
    named = [
        pdsim.ask("pd-ratio", unrouted(tmp_path), changes=[ONE_PREFIX, f"router={one}"], seeds=1, jobs=1)
        for one in ROUTERS
    ]
    assert all({row.arm for row in one.rows} == set(splits) for one in named)
    assert value(made, made.winner, "goodput") == max(value(one, one.winner, "goodput") for one in named)


def test_routers_are_tried_where_there_is_a_choice_of_instances(tmp_path):
    pair = ("prefill.instances=1", "decode.instances=1")
    made = pdsim.ask("pd-or-not", unrouted(tmp_path), changes=pair, seeds=1, jobs=1)
    arms = [row.arm for row in made.rows if "in" not in row.arm.split()]
    assert arms == [*(f"aggregated, {router}" for router in ROUTERS), "1P1D"]
    assert made.winner in arms
    (note,) = [note for note in made.notes if note.startswith("Better cluster by prompt length")]
    assert " in " not in note.partition(":")[2], "lengths are not said twice"


def test_idle_roles_are_a_waste_and_long_prompts_disturb_decode(ask):
    """Prompts alone keep both aggregated GPUs busy; decode steps cannot wait for prompts of 0.4 s."""
    pair = ("prefill.instances=1", "decode.instances=1")
    prompts = ask("pd-or-not", *pair, "workload.output_tokens=2")
    long = ("workload.input_tokens=4000", "workload.output_tokens=100", "client.concurrency=6")
    disturbed = ask("pd-or-not", *pair, *long, ttft_ms=10_000, tpot_ms=8)
    assert prompts.winner == "aggregated"
    assert disturbed.winner != "aggregated"
    assert any("Better cluster by prompt length" in note for note in prompts.notes)


def test_ttft_is_explained_by_its_longest_stage(ask):
    made = ask("explain-ttft", "network.bandwidth=50 MB/s", "client.concurrency=1")
    first = made.text.partition(",")[0]
    assert "prefill_transfer_kv_cache" in first
    assert value(made, "disaggregated", "transfer") > value(made, "disaggregated", "forward")
    assert any("Against the same GPUs" in note for note in made.notes)


def test_pages_matter_by_the_cost_of_a_descriptor(ask):
    dear = ask("page-and-descriptors", "network.descriptor_latency=10 us")
    free = ask("page-and-descriptors", "network.descriptor_latency=0 us", "network.transport=mooncake-rdma")
    assert int(dear.winner) >= 64
    assert free.winner == "1"
    # 200 tokens in pages of 16 are 13 pages, of 28 layers' K and V each
    assert any("Pages of 16: 728 descriptors" in note for note in dear.notes)


@pytest.mark.parametrize(("tokens", "is_trap"), [(2000, True), (1000, False)])
def test_a_prefill_buffer_that_is_too_small_is_found(ask, tokens, is_trap):
    """114,688 B a token, half of it on each of two ranks: 1,170 tokens fill 64 MiB."""
    made = ask("staging-ring", f"workload.input_tokens={tokens}", "network.descriptor_latency=5 us")
    (note,) = [note for note in made.notes if "64 MiB (0.5.12)" in note]
    assert f"the KV of a mean prompt is {number(114_688 / 2 * tokens / 2**20)} MiB" in note
    assert note.startswith("SGLang's default is too small" if is_trap else "SGLang's default prefill buffer suffices")
    sliced, trapped = (value(made, arm, "transfer") for arm in ("no staging: slices", "prefill buffer of 64 MiB"))
    assert trapped == pytest.approx(sliced) if is_trap else trapped < sliced / 10


@pytest.mark.parametrize(("chunk", "staged"), [("4096", "4,096"), ("null", "8,192")])
def test_of_a_long_prompt_the_part_that_is_staged_together_is_told(ask, chunk, staged):
    """pdsim stages at most a chunk at once, and 8,192 tokens of prompts that are not divided."""
    made = ask("staging-ring", "workload.input_tokens=10000", f"prefill.chunked_prefill_tokens={chunk}")
    (note,) = [note for note in made.notes if "64 MiB (0.5.12)" in note]
    mib = 114_688 / 2 * int(staged.replace(",", "")) / 2**20
    assert f"the KV of {staged} tokens of a mean prompt, which are staged together, is {number(mib)} MiB " in note


CLASSES = ("workload.classes={chat: 0.3, batch: 0.7}", "priorities={chat: 1}")


@pytest.mark.parametrize(("rate", "is_reached"), [(40, True), (60, False)])
def test_priorities_are_recommended_if_the_first_class_meets_the_slo(ask, rate, is_reached):
    """All requests together miss it, because of those of the other class."""
    load = ("workload.num_requests=200", "workload.input_tokens=500", poisson(rate))
    made = ask("priorities", *CLASSES, *load, ttft_ms=200)
    assert made.winner.startswith("priorities, ")
    assert (value(made, made.winner, "first") >= 90) == is_reached
    assert made.to_json()["recommendation"] == (made.winner if is_reached else None)
    says = f"Use '{made.winner}': " if is_reached else f"None reaches 90%; '{made.winner}' is the nearest: "
    assert made.text.startswith(says)
    assert any(note.startswith(f"Over all classes, '{made.winner}' misses the SLO: ") for note in made.notes)
    assert made.as_good == []


@pytest.mark.parametrize(("tokens", "word"), [(300, "high"), (9000, "medium")])
def test_the_confidence_is_in_the_winners_own_servers(tokens, word):
    """The profile was measured with TP2. Long prompts are better divided among more GPUs."""
    load = f"workload={{use: random_lengths, num_requests: 12, input_tokens: {tokens}, output_tokens: 5}}"
    changes = ("prefill.instances=2", load, "client={use: closed_loop, concurrency: 3}")
    path = ROOT / "experiments" / "decode-radix-b200" / "scenario.yaml"
    made = pdsim.ask("prefill-split", path, changes=changes, seeds=1, jobs=1)
    assert made.winner.endswith(" x TP2") == (word == "high")
    assert made.confidence.word == word


def test_rings_that_hold_no_cell_are_named(ask):
    """Cells of 229 to 459 MB: a ring of 256 MiB holds some of them, and lets the others fail."""
    burst = "client.warm_up_requests=0"
    made = ask("staging-ring", "workload.input_tokens={use: uniform, low: 2000, high: 4000}", burst)
    assert made.winner == "ring of 512 MiB"
    assert any("fail with a ring of 128 MiB or a ring of 256 MiB" in note for note in made.notes)


def test_a_transport_matters_by_what_there_is_to_move(ask):
    much = ask(
        "transport", "cost.prefill.prefill_per_token=1 us", "workload.output_tokens=2", "workload.input_tokens=4000"
    )
    little = ask("transport", "workload.input_tokens=50")
    assert value(much, "mooncake-tcp", "ttft") > 1.5 * value(much, much.winner, "ttft")
    assert knee(little) < knee(much)


def knee(made) -> float:
    (note,) = [note for note in made.notes if note.startswith("Links faster than ")]
    return float(note.split()[3])


def test_a_decode_cache_pays_where_prefixes_fill_decode(ask):
    pool = "num_prefixes: 2, prefix_tokens: 800, input_tokens: 50, output_tokens: 40"
    changes = (f"workload={{use: prefix_pool, num_requests: 60, {pool}}}", "cost.prefill.prefill_per_token=1 us")
    small = ("decode.pool_tokens=4000", "decode.admission.reserved_tokens=40")
    assert ask("decode-cache", *changes, *small, "client.concurrency=24").winner == "on"
    assert ask("decode-cache").winner == "off"


def test_host_memory_pays_where_prefixes_outgrow_the_pool(ask):
    """Four prefixes of 800 tokens, and of 1,200 a pool: 0.128 GiB, twice of which hold two more."""
    pool = "num_prefixes: 4, prefix_tokens: 800, input_tokens: 50, output_tokens: 4"
    load = (f"workload={{use: prefix_pool, num_requests: 60, {pool}}}", "client.concurrency=1")
    prefill = ("prefill.radix_cache=true", "prefill.instances=1")
    made = ask("host-cache", *load, *prefill, "prefill.pool_tokens=1200")
    assert made.winner == "0.513 GiB"
    assert value(made, "0.128 GiB", "prefill_hits") < value(made, "0.256 GiB", "prefill_hits")
    assert value(made, "0.256 GiB", "prefill_hits") < value(made, made.winner, "prefill_hits")
    assert value(made, made.winner, "ttft") < value(made, "off", "ttft") / 2
    assert ask("host-cache", *load, *prefill).winner == "off"


def test_the_scenarios_size_of_host_memory_is_tried_once(ask):
    """auto is twice the pool, which is tried anyway, but has one digit more here: 0.2563 GiB."""
    sizes = ("prefill.radix_cache=true", "prefill.pool_tokens=1200", "prefill.host_cache=auto")
    assert [row.arm for row in ask("host-cache", *sizes).rows] == [
        "off",
        "0.128 GiB",
        "0.2563 GiB",
        "0.513 GiB",
        "1.03 GiB",
    ]


def test_host_memory_pays_with_vllm_too(ask):
    pool = "num_prefixes: 4, prefix_tokens: 800, input_tokens: 50, output_tokens: 4"
    load = (f"workload={{use: prefix_pool, num_requests: 60, {pool}}}", "client.concurrency=1")
    vllm = ("engine=vllm", "prefill.instances=1", "prefill.pool_tokens=1200", "page_size=16")
    made = ask("host-cache", *load, *vllm)
    assert made.winner == "0.513 GiB"
    assert value(made, made.winner, "ttft") < value(made, "off", "ttft") / 2


def test_storage_pays_where_prefixes_outgrow_host_memory(ask):
    """Of the four prefixes, a pool and as much host memory hold one each; a drive holds two, more hold all."""
    pool = "num_prefixes: 4, prefix_tokens: 800, input_tokens: 50, output_tokens: 4"
    load = (f"workload={{use: prefix_pool, num_requests: 60, {pool}}}", "client.concurrency=1")
    tiers = ("prefill.host_cache=160 MiB", "storage={size: 200 MiB, prefetch_threshold: 200}")
    prefill = ("prefill.radix_cache=true", "prefill.instances=1")
    made = ask("storage", *load, *prefill, *tiers, "prefill.pool_tokens=1000")
    assert json.loads(json.dumps(made.to_json()))["recommendation"] == made.winner
    assert made.winner.endswith("drives")
    assert value(made, "none", "prefill_hits") < value(made, "1 drive", "prefill_hits")
    assert value(made, "1 drive", "prefill_hits") < value(made, made.winner, "prefill_hits")
    assert value(made, made.winner, "ttft") < value(made, "none", "ttft")
    assert any(note.startswith("Hit rates on prefill: none") for note in made.notes)
    assert ask("storage", *load, *prefill, *tiers).winner == "none"


def test_one_long_prompt_wants_all_of_prefill_and_many_want_servers(ask):
    """At equal TP, which decode has: layers and tokens are shared by stages and groups."""
    load = ("cost=roofline", "prefill.instances=4", "workload.input_tokens=30000", "prefill.overlap=true")
    alone, many = (ask("prefill-split", *load, f"client.concurrency={n}", ttft_ms=20_000) for n in (1, 16))
    assert (alone.winner, many.winner) == ("1 x TP4 CP4", "4 x TP1")
    assert value(alone, "1 x TP1 PP4", "ttft") < value(alone, "2 x TP1 PP2", "ttft") < value(alone, "4 x TP1", "ttft")
    assert value(many, "4 x TP1", "rate") > value(many, "2 x TP1 PP2", "rate") > value(many, "1 x TP1 PP4", "rate")
    assert alone.text.count("; with") == 2


def test_a_split_of_prefill_that_is_impossible_says_why(ask):
    with pytest.raises(pdsim.ConfigError, match="prefill"):
        ask("prefill-split", "model=llama-3.1-70b", "prefill.instances=1")


def test_routing_by_cache_pays_for_many_prefixes_and_herds_for_one(ask):
    def load(count):
        pool = f"num_prefixes: {count}, prefix_tokens: 600, input_tokens: 60, output_tokens: 4"
        return f"workload={{use: prefix_pool, num_requests: 80, {pool}}}"

    caches = "prefill.radix_cache=true"
    many = ask("routing", load(8), caches, "prefill.pool_tokens=4000", "prefill.instances=4", "client.concurrency=4")
    one = ask("routing", load(1), caches, "prefill.instances=4", "client.concurrency=16")
    assert many.winner in ("cache_aware", "dynamo_kv")
    assert one.winner not in ("cache_aware", "dynamo_kv")
    assert value(one, "cache_aware", "ttft") > 1.5 * value(one, one.winner, "ttft")


def test_reserved_tokens_cost_where_the_pool_is_short_alone(ask):
    short = ask("admission", "decode.pool_tokens=5000", "client.concurrency=32", "cost.prefill.prefill_per_token=1 us")
    assert value(short, "reserve 2048", "tokens") < value(short, "reserve 128", "tokens") / 2
    assert "hardly matters" in ask("admission").text


def test_layers_hide_a_slow_link_and_nothing_else(ask):
    slow = ask("overlap", "network.bandwidth=1 GB/s", "client.concurrency=1")
    fast = ask("overlap", "network.bandwidth=1000 GB/s", "network.descriptor_latency=0 us", "client.concurrency=1")
    assert slow.winner == "28 groups of layers"
    assert "hardly matters" in fast.text


@pytest.mark.parametrize("name", ["capacity", "explain-ttft", "pd-ratio", "routing"])
def test_a_router_that_nobody_chose_is_said(tmp_path, name):
    """Where the question does not try several itself."""
    path = tmp_path / "base.yaml"

    def says(text):
        path.write_text(text)
        made = pdsim.ask(name, path, changes=[poisson(20)], seeds=1, jobs=1)
        return any("names no router: cache_aware" in note for note in made.notes)

    unnamed = SCENARIO.replace("router: round_robin\n", "")
    assert says(unnamed) == (name in ("capacity", "explain-ttft"))
    assert not says(SCENARIO)
    assert not says(unnamed.replace("instances: 2", "instances: 1"))


def test_capacity_lies_below_what_a_server_can_do(ask):
    """Two prefill servers of 20 ms a prompt: 100/s at most."""
    made = ask("capacity", "workload.num_requests=150", "workload.output_tokens=2", poisson(250), ttft_ms=200)
    highest = float(made.winner.removesuffix("/s"))
    assert 60 < highest < 100
    assert any("GPUs, 3 times this cluster" in note or "GPUs, 4 times this cluster" in note for note in made.notes)


def even_trace(path, interval_s):
    rows = [f"{interval_s * i:.3f},200,2" for i in range(150)]
    path.write_text("\n".join(["arrival_s,in_tokens,out_tokens", *rows]))
    return path


@pytest.mark.parametrize("interval_s", [0.05, 0.004])
def test_a_trace_keeps_its_times_and_is_sped_up(ask, tmp_path, interval_s):
    """Two prefill servers of 20 ms a prompt take prompts that come evenly, 10 ms apart."""
    trace = even_trace(tmp_path / "even.csv", interval_s)
    made = ask("capacity", trace=trace, ttft_ms=60)
    highest = float(made.winner.removeprefix("speed-up "))
    assert 0.7 < highest * 0.01 / interval_s <= 1.01
    assert f"the trace at {highest:g} times its speed, " in made.text
    assert made.axis == "speed-up of the trace"
    above = [row for row in made.rows if row.arm.startswith("speed-up ") and float(row.arm.split()[1]) > highest]
    assert above[0].remark
    slower = even_trace(tmp_path / "slower.csv", interval_s * 2)
    same = ask("capacity", trace=slower, speedup="2", ttft_ms=60)
    assert [row.arm for row in same.rows] == ["all at once", "speed-up 2"]
    if "speed-up 1" in [row.arm for row in made.rows]:
        assert value(same, "speed-up 2", "rate") == value(made, "speed-up 1", "rate")


def test_what_no_instance_can_help_is_said_apart_from_queueing(ask):
    alone = ask("pd-ratio", "client.concurrency=1", ttft_ms=10)
    queued = ask("pd-ratio", "client.concurrency=32", ttft_ms=30)
    assert any(note.startswith("Infeasible") for note in alone.notes)
    assert not any(note.startswith("Infeasible") for note in queued.notes)


def test_saturated_arms_have_no_latency(ask):
    made = ask("pd-ratio", "workload.num_requests=200", "workload.output_tokens=2", poisson(120))
    (row,) = [row for row in made.rows if row.arm == "1P3D"]
    assert row.remark == "saturated"
    assert row.estimates["tail_ttft"] is None


def test_replications_give_intervals_and_a_folder_keeps_all(ask, tmp_path):
    out = tmp_path / "answer"
    made = ask("routing", "workload.input_tokens={use: uniform, low: 50, high: 400}", seeds=2, out=out)
    assert made.rows[0].estimates["ttft"].half_width > 0
    assert json.loads((out / "answer.json").read_text()) == json.loads(json.dumps(made.to_json()))
    assert made.text in (out / "answer.md").read_text()
    assert (out / "answer.png").stat().st_size > 10_000
    assert [point.changes for point in read_sweep(out).points] == [row.changes for row in made.rows]


def test_an_answer_on_a_trace_says_if_chance_changes_it(ask, tmp_path, monkeypatch):
    trace = even_trace(tmp_path / "even.csv", 0.05)
    steady = ask("routing", trace=trace, ttft_ms=100)
    assert steady.is_recommended
    assert not any(note.startswith("Chance decides") for note in steady.notes)
    monkeypatch.setattr("pdsim.study.base.JITTERS", (0.05, 1e9))
    changed = ask("routing", trace=trace, ttft_ms=100)
    (note,) = [note for note in changed.notes if note.startswith("Chance decides")]
    assert "1 of 3 runs say nothing meets the SLO" in note


def test_every_question_asks_something_and_is_documented():
    assert all(question(name).asks.endswith("?") for name in QUESTIONS)
    headings = list(sections(ROOT / "docs" / "ask.md"))
    assert headings[headings.index("The questions") + 1 :] == list(QUESTIONS)
