"""What the server lets in is admitted by an idle decode instance, and comes back if it is retracted."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs torch: pip install 'pdsim[real]'")

from pdreal.control.refused import RefusedError
from pdreal.settings.options import Options
from pdreal.settings.scenario import Room, real_scenario, served_scenario

from pdsim.policy.pages import num_pages
from pdsim.policy.protocols import Admitted
from pdsim.policy.views import Candidate
from pdsim.scenario.yaml_file import ConfigError
from tests.real import clusters

CONTEXT = 4096


def room(pool_tokens, page_size=4, **changes):
    scenario = clusters.scenario(page_size=page_size, decode__pool_tokens=pool_tokens, **changes)
    return Room.of(served_scenario(scenario, Options()), CONTEXT)


def is_taken(policy, pool_pages, page_size, request, num_tokens, *, resumes):
    """By a decode instance that has nothing else."""
    view = SimpleNamespace(
        num_available_pages=pool_pages,
        page_size=page_size,
        resume_unit_tokens=page_size,
        num_active=0,
        num_ahead_tokens=1,
        num_running_tokens=0,
        running=(),
        active=(),
        retracted=(),
    )
    pages = num_pages(num_tokens, page_size)
    return isinstance(policy.admit(Candidate(request, num_tokens, 0, pages, resumes=resumes), view), Admitted)


@given(
    pool=st.integers(64, 2000),
    page=st.sampled_from([1, 4, 16]),
    admission=st.integers(0, 1200).map(lambda n: {"use": "reserve_decode_tokens", "reserved_tokens": n})
    | st.just("reserve_max_output"),
    num_prompt_tokens=st.integers(1, 1500),
    max_tokens=st.integers(1, 1500),
)
def test_what_is_let_in_is_admitted_and_comes_back(pool, page, admission, num_prompt_tokens, max_tokens):
    try:
        limits = room(pool, page, decode__admission=admission)
        limits.check(num_prompt_tokens, max_tokens)
    except (ConfigError, RefusedError):
        return
    policy = clusters.scenario(decode__admission=admission).decode.admission
    request = SimpleNamespace(num_prompt_tokens=num_prompt_tokens, num_output_tokens=0, max_output_tokens=max_tokens)
    pages = pool // page
    assert is_taken(policy, pages, page, request, num_prompt_tokens, resumes=False)
    longest = num_prompt_tokens + max(max_tokens - 2, 0)
    request.num_output_tokens = max(max_tokens - 1, 0)
    assert is_taken(policy, pages, page, request, longest, resumes=True)


def test_a_prompt_that_decode_never_admits_is_refused_with_the_reason():
    with pytest.raises(RefusedError, match=r"600 tokens .* room for 588 prompt .*decode\.admission\.reserved_tokens"):
        room(1100).check(600, 4)
    room(1100).check(588, 1)


def test_a_pool_smaller_than_its_reserve_is_refused_before_it_starts():
    with pytest.raises(ConfigError, match=r"no request fits pool_tokens, as .* keeps 512 of decode's pool free"):
        room(500)


def test_a_workload_that_decode_never_admits_is_refused_before_it_starts():
    workload = {"use": "random_lengths", "num_requests": 1, "input_tokens": 600, "output_tokens": 4}
    with pytest.raises(ConfigError, match=r"request 0 has a prompt of 600 .*reserved_tokens 512 free"):
        real_scenario(clusters.scenario(decode__pool_tokens=1100, workload=workload), Options())
