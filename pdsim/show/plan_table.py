"""A plan on the terminal."""

from pdsim.show.tables import new_console, new_table
from pdsim.study.planning.plan import Plan


def print_plan(plan: Plan) -> None:
    console = new_console()
    console.print(f"SLO: {plan.slo}; {plan.num_tried} of {plan.num_candidates} clusters simulated", style="dim")
    console.print()
    console.print(plan.text, style="bold", highlight=False, markup=False)
    console.print()
    for note in plan.notes:
        console.print(f"- {note}", highlight=False, markup=False)
    table = new_table("")
    for title in plan.titles:
        table.add_column(title, justify="right" if title in plan.titles[1:-1] else "left")
    for row in plan.rows:
        table.add_row(*plan.cells(row))
    console.print(table)
