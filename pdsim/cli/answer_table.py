"""An answer on the terminal: what to do, why, and the table behind it."""

from pdsim.cli.tables import new_console, new_table
from pdsim.questions.answer import Answer


def print_answer(made: Answer) -> None:
    console = new_console()
    console.print(made.load, style="dim", highlight=False, markup=False)
    console.print()
    console.print(made.text, style="bold", highlight=False, markup=False)
    console.print()
    for note in made.remarks():
        console.print(f"- {note}", highlight=False, markup=False)
    table = new_table("")
    for i, title in enumerate(made.titles):
        table.add_column(
            title, justify="right" if 0 < i < len(made.titles) - 1 else "left", vertical="bottom", no_wrap=not i
        )
    for row in made.rows:
        table.add_row(*made.cells(row))
    console.print(table)
