"""Whether the default cost finds the better of two arms: python signs.py prints each sign, by the rules of docs/signs.

See docs/signs.py for the pairs of arms.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from docs.accuracy import read
from docs.signs import RULES, VERDICTS, counted, signs
from pdsim.metrics.summary_rows import table_of_markdown


def main() -> None:
    numbers = read()
    rows = []
    for sign in signs(numbers):
        said = [sign.verdict(is_known) for is_known in RULES.values()]
        changes = [f"{change:+.0%}" for change in (sign.measured, sign.predicted)]
        arms, metric = f"{sign.before.arm} to {sign.after.arm}", f"{sign.after.metric}, {sign.after.known}"
        rows.append([sign.choice, arms, metric, *changes, *said])
    print(table_of_markdown(["choice", "arms", "metric", "measured", "predicted", *RULES], rows))
    print(f"\n{table_of_markdown(['a sign is said', *VERDICTS], counted(numbers))}")


if __name__ == "__main__":
    main()
