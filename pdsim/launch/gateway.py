"""Options of SGLang's gateway (sglang-router 0.3.2): its policies, and the URLs of its servers."""

from collections.abc import Mapping
from typing import Any

from pdsim.launch.commands import FIRST_BOOTSTRAP_PORT, GATEWAY_PORT, HOST, THRESHOLDS, Launch, Place, Rule, thresholds
from pdsim.launch.words import Flags
from pdsim.policy.routing import CacheAware, LeastLoaded
from pdsim.policy.sessions import Manual
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.component import component_name

POLICIES = ("cache_aware", "round_robin", "random", "power_of_two", "manual")
MANUAL = {
    "assignment-mode": "assignment_mode",
    "max-idle-secs": "max_idle",
    "eviction-interval-secs": "eviction_interval",
}
"""For each of the gateway's options: the setting of the policy `manual` that it sets."""
_SECOND_NS = 10**9


def _policy(value: Any, scenario: Scenario) -> str | None:
    if value not in (*POLICIES, "least_loaded"):
        return f"SGLang's gateway has {', '.join(POLICIES)}, and least_loaded by a threshold of cache_aware"
    if scenario.aggregated is None:
        for kind, settings in (("cache_aware thresholds", _thresholds), ("settings of manual", _of_manual)):
            both = [settings(policy) for policy in (scenario.router.prefill, scenario.router.decode)]
            if None not in both and both[0] != both[1]:
                return f"the gateway has one set of {kind}; give both roles the same"
    return None


def _whole_seconds(time_ns: Any, _scenario: Scenario) -> str | None:
    return "the gateway takes whole seconds" if time_ns % _SECOND_NS else None


GATEWAY_RULES: dict[str, Rule] = {
    "router.shedding": "SGLang's gateway limits requests by rate; leave it out",
    "router.queue": "SGLang's gateway holds no request back while servers are busy; leave it out",
}
for _role in ("router.prefill", "router.decode"):
    GATEWAY_RULES[_role] = _policy
    GATEWAY_RULES |= {f"{_role}.{name}": None for name in (*THRESHOLDS.values(), "assignment_mode")}
    GATEWAY_RULES |= {f"{_role}.{name}": _whole_seconds for name in ("max_idle", "eviction_interval")}


def gateway_flags(made: Launch, scenario: Scenario, at: Mapping[str, list[Place]]) -> Flags:
    """Options of SGLang's gateway. made: the launch, which gets notes on policies that act in another way than in the
    simulation. at: where the servers run, by role; empty: the gateway finds the servers itself, and gets no URLs.
    """
    flags: Flags = [("host", HOST), ("port", GATEWAY_PORT)]
    router = scenario.router
    if scenario.aggregated is not None:
        if at:
            flags.append(("worker-urls", [place.url for place in at["aggregated"]]))
        flags.append(("policy", _name(router.prefill)))
    else:
        flags.append(("pd-disaggregation", True))
        flags += [("prefill", [one.url, FIRST_BOOTSTRAP_PORT + i]) for i, one in enumerate(at.get("prefill", ()))]
        flags += [("decode", [place.url]) for place in at.get("decode", ())]
        flags += [(f"{role}-policy", _name(getattr(router, role))) for role in ("prefill", "decode")]
    policies = [router.prefill] if scenario.aggregated else [router.prefill, router.decode]
    for settings in (_thresholds, _of_manual):
        given = [options for policy in policies if (options := settings(policy))]
        flags += given[0].items() if given else ()
    made.notes += _notes(policies)
    if (health := scenario.health) is not None:
        flags += [("retry-max-retries", health.max_retries), ("retry-jitter-factor", health.backoff_jitter)]
    return flags


def _notes(policies: list[Any]) -> list[str]:
    notes = []
    if any(isinstance(policy, LeastLoaded) for policy in policies):
        notes.append("router: least_loaded: cache_aware with a threshold above all matches; ties are random")
    if len(policies) > 1 and any(isinstance(one, CacheAware) and one.gateway == "main" for one in policies):
        notes.append(
            "router: cache_aware: the newest gateway of pip (sglang-router 0.3.2) ignores prefixes of prefill and "
            "decode servers; build the gateway from source, or simulate it: router: {use: cache_aware, gateway: 0.3.2}"
        )
    if any(isinstance(policy, Manual) for policy in policies):
        notes.append("router: manual: the load sends no X-SMG-Routing-Key, without which the gateway picks at random")
    return notes


def _name(policy: Any) -> str:
    return "cache_aware" if isinstance(policy, LeastLoaded) else component_name(policy)


def _thresholds(policy: Any) -> Mapping[str, object] | None:
    """Options of the gateway's policy cache_aware that differ from the defaults. None: the gateway has another policy.

    least_loaded is written as cache_aware with a cache threshold of 1. The share of a prompt that a worker has cached
    never exceeds 1, so the gateway always takes the worker with the fewest requests
    (sgl-model-gateway/src/policies/cache_aware.rs).
    """
    if isinstance(policy, LeastLoaded):
        return {"cache-threshold": 1.0}
    return thresholds(policy) if isinstance(policy, CacheAware) else None


def _of_manual(policy: Any) -> Mapping[str, object] | None:
    """Options of the policy `manual` of SGLang's gateway that differ from the defaults. None: the gateway has another
    policy.
    """
    if not isinstance(policy, Manual):
        return None
    own, default = (
        (one.assignment_mode, one.max_idle_ns // _SECOND_NS, one.eviction_interval_ns // _SECOND_NS)
        for one in (policy, Manual())
    )
    return {flag: value for flag, value, other in zip(MANUAL, own, default, strict=True) if value != other}
