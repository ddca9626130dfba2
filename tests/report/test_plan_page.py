"""The page of a plan as somebody reads it, on a laptop and on a telephone."""

import asyncio

import pytest

from pdsim.cli import main
from pdsim.study.planning.planning import plan
from pdsim.study.planning.screen import Screen
from tests.report.browser import CHROMIUM

pytest.importorskip("aiohttp", reason="the web extra is not installed")

from tests.web.tab import tab

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt install chromium"),
]

SCENARIO = """\
model: qwen3-8b
prefill: {gpu: h100}
decode: {gpu: h100, instances: 3}
cost: kernels
workload: {use: random_lengths, num_requests: 60, input_tokens: 1500, output_tokens: 40}
client: {use: open_loop, arrivals: {use: poisson, rate: 20 /s}}
"""
TEXTS = "[...document.querySelectorAll('svg text')].map((text) => text.getBoundingClientRect().height)"
CUT = """
[...document.querySelectorAll("svg text, #tables td")]
  .filter((one) => one.textContent && one.getBoundingClientRect().right > document.documentElement.clientWidth)
  .map((one) => one.textContent).join()
"""
"""Figures and runners-up that are only seen by scrolling to the right."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("plan")


@pytest.fixture(scope="module")
def made(folder):
    (folder / "scenario.yaml").write_text(SCENARIO)
    found = plan(
        folder / "scenario.yaml",
        slo="ttft p90 < 350 ms, tpot p90 < 12 ms",
        prices={"h100": 2.5},
        max_gpus=6,
        seeds=1,
        engine="here",
        out=folder / "plan",
    )
    with pytest.raises(SystemExit) as ended:
        main(["report", str(folder / "plan"), "--out", str(folder / "plan.html")])
    assert not ended.value.code
    return found


@pytest.mark.parametrize("width", [1280, 390])
def test_the_answer_is_on_the_first_screen_and_all_else_below(made, folder, width, tmp_path):
    async def read():
        async with tab((folder / "plan.html").as_uri(), width, tmp_path) as page:
            first = await page.run(
                "[...document.querySelectorAll('.answer, .card')]"
                ".filter((one) => one.getBoundingClientRect().bottom < innerHeight)"
                ".map((one) => one.innerText).join(' ').replace(/\\s+/g, ' ')"
            )
            text = await page.run("document.body.innerText.replace(/\\s+/g, ' ')")
            heights = [float(height) for height in (await page.run(f"{TEXTS}.join()")).split(",")]
            overflow = await page.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            return first, text, heights, overflow, await page.run(CUT)

    first, text, heights, overflow, cut = asyncio.run(read())
    assert made.chosen is not None
    candidate = made.chosen.candidate
    assert made.safe is not None
    for words in (
        Screen(made).headline,
        Screen(made).confidence.reason,
        f"GPUs {candidate.num_gpus}",
        f"price ${candidate.price_per_h:.2f}",
    ):
        assert words in first
    assert "60 requests (mean 1,500 tokens in, 40 out), sent 20 a second; SLO: TTFT p90 < 350 ms" in text
    for row in made.rows:
        assert row.candidate.label in text
    for sentence in Screen(made).details:
        assert " ".join(sentence.split()) in text
    assert min(heights) > 8, "the figure can be read"
    assert overflow == 0
    assert cut == ""
