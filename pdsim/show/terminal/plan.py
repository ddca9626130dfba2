"""Prints the result of `pdsim plan`, beginning with what matters most."""

import shlex
from pathlib import Path

from pdsim.metrics.run_folder import SCENARIO
from pdsim.show.terminal.layout import new_console
from pdsim.show.terminal.screen import print_command, print_confidence, print_headline, print_sentence, screen_table
from pdsim.study.planning.plan import Plan
from pdsim.study.planning.screen import Screen


def print_plan(plan: Plan, *, details: bool, out: Path | None) -> None:
    """Prints a plan. details: True: the user gave --details. out: folder into which the plan was written; None: the
    plan was not written.
    """
    screen, console = Screen(plan), new_console()
    print_headline(console, screen.headline)
    for line in filter(None, (screen.saving, screen.setting, screen.words)):
        print_sentence(console, line)
    if screen.limits.rows:
        console.print(screen_table(*screen.limits))
        print_confidence(console, screen.confidence, plan.measure)
    console.print(screen_table(*screen.clusters))
    for line in (*screen.failing, *screen.asked):
        print_sentence(console, line)
    if details:
        console.print()
        for line in screen.details:
            print_sentence(console, f"- {line}")
    console.print()
    for line in _next(plan, out, details=details):
        print_command(console, line)


def _next(plan: Plan, out: Path | None, *, details: bool) -> list[str]:
    """Commands that the user may run next. out: the folder into which the plan was written; None: the plan was not
    written. details: True: the user gave --details.
    """
    found = []
    if plan.chosen is not None and out is not None:
        found += [f"Start it:   pdsim launch {shlex.quote(str(out / SCENARIO))}"]
    elif plan.chosen is not None:
        found += ["Start it:   the same command with --out DIR, then pdsim launch DIR/scenario.yaml"]
    if out is not None:
        found += [f"As a page:  pdsim report {shlex.quote(str(out))}"]
    return found if details else [*found, "Say more:   the same command with --details"]
