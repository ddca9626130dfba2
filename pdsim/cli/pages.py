"""Shows a saved metrics page of a server, as the page says or with the increases of its counters since an earlier page.
The numbers of a simulation may stand beside the page's numbers.
"""

from pathlib import Path
from typing import Any

from pdsim.cli.command import print_json
from pdsim.formats.pages import Page, between, read_page, summary_of
from pdsim.scenario.yaml_file import ConfigError


def show_pages(
    path: Path,
    later: Path | None,
    scenario: Path | None,
    changes: tuple[str, ...],
    seconds: float | None,
    *,
    json_: bool,
) -> None:
    """Prints the numbers in saved pages of a server's metrics. later: second page, whose counters are shown as their
    increases since the first page; None: only the first page is shown. scenario: scenario to simulate for comparison;
    None: no comparison. seconds: time between the two pages; None: the difference between the files' times, or no rates
    if that is not above 0 s. Raises ConfigError if a file is no such page, if a counter of the later page is less than
    in the first, or if the scenario is wrong or does not determine the size of KV pools.
    """
    from pdsim.show.terminal.metrics_page import print_page

    page, notes = read_page(path), list[str]()
    if later is not None:
        page, notes = _between(page, read_page(later), seconds)
    simulated = {} if scenario is None else _simulated(scenario, changes, page)
    observed = {**page.values, **summary_of(page)}
    if json_:
        print_json(
            {"page": str(page.path), "observed": observed, "told": page.told, "simulated": simulated, "notes": notes}
        )
    else:
        print_page(observed, page.told, simulated if scenario else None, notes)


def _between(first: Page, last: Page, seconds: float | None) -> tuple[Page, list[str]]:
    notes = list[str]()
    if seconds is None:
        seconds = last.path.stat().st_mtime - first.path.stat().st_mtime
        if seconds > 0:
            notes.append(f"{seconds:.1f} s lie between the pages by the times of their files; --seconds corrects that")
        else:
            notes.append("no rates: the times of the files do not tell the time between the pages; give --seconds")
            seconds = None
    return between(first, last, seconds), notes


def _simulated(scenario: Path, changes: tuple[str, ...], page: Page) -> dict[str, Any]:
    """Simulates the scenario. Returns numbers by name: fields of the summary that summary_of(page) has, too, and always
    the mean number of running requests, the cache hit rate of prefill, and the KV pool's tokens in the role that the
    page names (otherwise the last role). Raises ConfigError if the scenario does not determine the size of KV pools.
    """
    from pdsim.cli.runner import run_scenario
    from pdsim.scenario.building.sizing import resolve
    from pdsim.scenario.loading import load_scenario

    run = run_scenario(scenario, changes, None, quiet=True, ranging="none")
    own = run.summary["pdsim"]
    found = {name: run.summary[name] for name in summary_of(page) if run.summary.get(name) is not None}
    found["running"] = own["mean_running_requests"]
    found["hit_share"] = own["prefill_cache_hit_rate"]
    resolved = resolve(load_scenario(scenario, changes))
    pools = {role: servers.pool_tokens for role, servers in resolved.roles.items()}
    if None in pools.values():
        raise ConfigError(
            f"{scenario}: the scenario does not determine the size of KV pools; set pool_tokens of each role"
        )
    role = page.told.get("disaggregation_mode")
    found["pool_tokens"] = pools[role] if role in pools else list(pools.values())[-1]
    return found
