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
    notebook: Annotated[
        Path | None, Parameter(help="Write a notebook that asks this, .ipynb or .py, and do not answer here.")
    ] = None,
    json_: Json = False,
) -> None:
    """Answer a question about a scenario: a recommendation, the numbers behind it, and what limits the system."""
    from pdsim.scenario.yaml_file import ConfigError
    from pdsim.show.study_tables import print_answer, print_questions
    from pdsim.study.questions.question import NAMES, question

    given = {**options.given(), "changes": set_, "seeds": seeds, "jobs": jobs, "out": out}
    if name is None:
        if notebook is not None:
            raise ConfigError(f"--notebook {notebook}: name its question; there are {', '.join(NAMES)}")
        asks = {name: question(name).asks for name in NAMES}
        if json_:
            print_json(asks)
        else:
            print_questions(asks)
    elif notebook is not None:
        from pdsim.study.questions.notebook import write_notebook

        write_notebook(notebook, name, scenario, **given)
        if json_:
            print_json({"notebook": str(notebook)})
        else:
            print(f"notebook: {notebook}")
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
