"""The gateway's logged choices are drawn as the simulated rule draws them."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

STUDY = Path(__file__).parents[2] / "experiments" / "sglang-2p2d-h200"
SPEC = spec_from_file_location("choices", STUDY / "choices.py")
choices = module_from_spec(SPEC)
SPEC.loader.exec_module(choices)


@pytest.mark.parametrize("load", choices.LOADS)
def test_the_page_has_the_gateways_choices(load):
    cells = " | ".join(f"{share:.3f}" for share in choices.shares(choices.logged(load)))
    apart = ", ".join(str(choices.most_apart(load, role)) for role in ("prefill", "decode"))
    assert f"| `{load}` | {cells} | {apart} |" in (STUDY / "README.md").read_text()


@pytest.mark.parametrize("load", choices.LOADS)
def test_a_simulation_repeats_the_logged_choices_and_is_as_wrong_as_the_page_says(load):
    found_ms, made = choices.simulated(choices.with_choices(load, choices.logged(load)))
    assert made == choices.logged(load)
    error = f"{found_ms / choices.measured_ttft_ms(load) - 1:+.1%}".replace("-", "\N{MINUS SIGN}").replace("%", " %")
    assert f"{found_ms:.0f} | {error} |" in (STUDY / "README.md").read_text()


def test_the_rule_draws_prefill_and_decode_apart():
    _, made = choices.simulated(choices.scenario("cache_aware", choices.RULE.format(0)))
    *drawn, related = choices.shares(made)
    assert drawn == pytest.approx([0.5, 0.5, 0.5], abs=0.07)
    assert abs(related) < 0.12
