"""Profiles of two machines, joined by role."""

from pathlib import Path

import pytest

from pdsim.scenario.loading import parse_scenario
from pdsim.scenario.yaml_file import ConfigError, read_yaml, write_yaml
from pdsim.sim.simulation import simulate

PROFILES = Path(__file__).parent.parent.parent / "experiments"
H200, H100, H20 = "sglang-h200/profile.yaml", "host-cache/sglang_h100/profile.yaml", "scaled-h200/qwen3-8b-h20.yaml"


def scenario(cost, prefill="h200", decode="h200", **fields):
    workload = {"use": "random_lengths", "num_requests": 8, "input_tokens": 500, "output_tokens": 20}
    data = {"model": "qwen3-8b", "prefill": {"gpu": prefill}, "decode": {"gpu": decode}, "workload": workload}
    return parse_scenario({**data, "cost": cost, **fields}, base=PROFILES, where="test")


def profile(path):
    return {"profile": path}


@pytest.mark.parametrize(
    ("path", "setup"),
    [
        (H200, {}),
        ("decode-radix-b200/profile.yaml", {"model": "qwen3-32b", "prefill": "b200", "decode": "b200"}),
        ("drafts-two-h200/profile.yaml", {}),
    ],
    ids=("a model of each role", "one model of both", "drafts"),
)
def test_a_profile_joined_with_itself_is_itself(path, setup):
    of_roles = {"prefill": profile(path), "decode": profile(path)}
    assert scenario(of_roles, **setup).cost == scenario(profile(path), **setup).cost


def test_each_role_has_the_times_of_its_own_machine():
    fast, slow = scenario(profile(H200)).cost, scenario({"prefill": profile(H100), "decode": profile(H100)}).cost
    joined = scenario({"prefill": profile(H200), "decode": profile(H100)}, decode="h100").cost
    assert (joined.prefill, joined.decode) == (fast.prefill, slow.decode)
    assert (joined.host.start, joined.graph_sizes) == (fast.host.start, slow.graph_sizes)
    assert joined == scenario({**profile(H200), "decode": profile(H100)}, decode="h100").cost


def test_each_role_compiles_as_its_own_machine(tmp_path):
    for name, prefill, decode in (("one", "200 ms", "66 ms"), ("other", "249 ms", "87 ms")):
        of_all = read_yaml(PROFILES / H200)
        of_all["cost"]["cold_kernels"] = {"prefill": prefill, "decode": decode}
        write_yaml(of_all, tmp_path / f"{name}.yaml")
    roles = {"prefill": profile(tmp_path / "one.yaml"), "decode": profile(tmp_path / "other.yaml")}
    kernels = scenario(roles, page_size=64).cost.cold_kernels
    assert (kernels.prefill, kernels.decode) == (200_000_000, 87_000_000)
    kernels = scenario({**roles, "cold_kernels": {"decode": "90 ms"}}, page_size=64).cost.cold_kernels
    assert (kernels.prefill, kernels.decode) == (200_000_000, 90_000_000)
    for profiles in (roles, roles["prefill"]):
        assert scenario({**profiles, "cold_kernels": None}).cost.cold_kernels is None


def test_a_scenarios_cold_start_goes_before_those_of_its_profiles(tmp_path):
    of_all = read_yaml(PROFILES / H200)
    of_all["cost"]["cold_start"] = {1: "7 ms"}
    write_yaml(of_all, tmp_path / "cold.yaml")
    one, cold = profile(tmp_path / "cold.yaml"), {"cold_start": {1: "3 ms"}}
    for profiles in (one, {"prefill": one, "decode": one}):
        assert scenario({**profiles, **cold}).cost.cold_start == {1: 3_000_000}


@pytest.mark.parametrize("section", ["host", "measured"])
@pytest.mark.parametrize("given", [None, 3])
def test_what_is_no_section_beside_two_profiles_is_refused(section, given):
    roles = {"prefill": profile(H200), "decode": profile(H200)}
    with pytest.raises(ConfigError, match=f"{section}: expected a section, {{name: value}}, found {given}"):
        scenario({**roles, section: given})


def test_a_mixed_cluster_is_measured_where_both_of_its_machines_were():
    cost = {"prefill": profile(H200), "decode": profile(H100)}
    assert scenario(cost, decode="h100").foreign_setup == []
    assert scenario(cost, decode="h200").foreign_setup == ["h200"]
    assert scenario(cost, prefill="h100", decode="h200").foreign_setup == ["h100 and h200"]
    assert scenario(cost, decode="h100").uncertain == ()


@pytest.mark.parametrize(("measured", "foreign"), [("prefill", ["PP2 prefill"]), ("decode", ["TP8", "DCP2 decode"])])
def test_the_other_roles_sizes_are_not_foreign_to_a_profile_of_one_role(measured, foreign):
    cluster = parse_scenario(
        {
            "model": "qwen3-8b",
            "prefill": {"gpu": "h200", "pp": 2},
            "decode": {"gpu": "h200", "tp": 8, "dcp": 2},
            "workload": {"use": "random_lengths", "num_requests": 8, "input_tokens": 500, "output_tokens": 20},
            "cost": {measured: profile(H200)},
        },
        base=PROFILES,
    )
    assert cluster.foreign_setup == foreign


def test_the_range_of_a_mixed_cluster_is_that_of_what_was_not_measured():
    mixed = scenario({"prefill": profile(H200)}, decode="h100", front_end={})
    assert mixed.uncertain == ("decode",)
    fast, slow = (simulate(end) for end in mixed.ends)
    assert fast.scenario.cost.prefill == slow.scenario.cost.prefill
    assert fast.summary()["mean_tpot_ms"] < slow.summary()["mean_tpot_ms"]
    (warning,) = fast.summary()["pdsim"]["warnings"]
    assert warning.startswith("cost of decode: only kernels of h100 were measured")
    elsewhere = scenario({"prefill": profile(H200)}, prefill="b200", decode="h100", front_end={})
    assert elsewhere.uncertain == ("decode",)
    assert elsewhere.foreign_setup == ["b200"]


def test_what_stands_beside_a_roles_profile_is_refused():
    with pytest.raises(ConfigError, match="decode: profile cannot be combined with use"):
        scenario({"decode": {"use": "roofline", **profile(H200)}})
    with pytest.raises(ConfigError, match=r"none\.yaml does not exist"):
        scenario({"decode": profile("none.yaml")})


def test_a_scaled_profile_of_one_role_keeps_its_range():
    joined = scenario({"prefill": profile(H20), "decode": profile(H200)}, prefill="h20")
    assert joined.uncertain == ("prefill",)
    assert joined.foreign_setup == []
