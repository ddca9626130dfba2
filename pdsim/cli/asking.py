"""pdsim ask: a question, answered."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from pdsim.cli.command import Jobs, Json, Set, print_json
from pdsim.study.questions.base import NUM_SEEDS, AskOptions


def ask(
    name: Annotated[str | None, Parameter(help="The question; without one, all are listed, with an example.")] = None,
    scenario: Annotated[Path | None, Parameter(help="A scenario file [a starter of four H200].")] = None,
    /,
    *,
    options: Annotated[AskOptions, Parameter(name="*", help="Load and SLO.")] = AskOptions(),  # noqa: B008  it is frozen
    set_: Set = (),
    seeds: Annotated[int, Parameter(help="Runs of each way of doing it.")] = NUM_SEEDS,
    jobs: Jobs = None,
    out: Annotated[
        Path | None,
        Parameter(name=("--out", "-o"), help="Write answer.md, answer.json, answer.png and all runs here."),
    ] = None,
    json_: Json = False,
) -> None:
    """Answer a question about a scenario: a recommendation, the numbers behind it, and what limits the system."""
    from pdsim.show.study_tables import print_answer, print_questions
    from pdsim.study.questions.study import QUESTIONS, question

    given = {**options.given(), "changes": set_, "seeds": seeds, "jobs": jobs, "out": out}
    if name is None:
        asks = {name: question(name).asks for name in QUESTIONS}
        if json_:
            print_json(asks)
        else:
            print_questions(asks)
    else:
        from pdsim.cli.finished import progress_over
        from pdsim.study.questions.answering import ask as answer

        with progress_over(name, None, quiet=json_) as advance:
            made = answer(name, scenario, **given, progress=advance)
        if json_:
            print_json(made.to_json())
        else:
            print_answer(made)
            if out is not None:
                print(f"answer.md, answer.json and answer.png: {out}")
