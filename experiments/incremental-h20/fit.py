"""Fit the profile of this study to its main arm, and to nothing else: python experiments/incremental-h20/fit.py

Two numbers are fitted: how much of the nominal prefill compute is reached, and how much of the memory bandwidth decode
attention reaches with bf16 KV. All other settings are the roofline's defaults. The two prefill efficiencies keep the
ratio of the roofline defaults (attention 0.5, matrices 0.7), for one measured arm cannot tell them apart.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from pdsim import __version__, simulate
from pdsim.calibration.case import load_case
from pdsim.calibration.fit import fit_arm
from pdsim.scenario.yaml_file import to_yaml, write_yaml

HERE = Path(__file__).parent
START = {"matrix_efficiency": 0.6, "kv_bandwidth": 0.4}
ATTENTION_TO_MATRIX = 0.5 / 0.7


def cost(values: Mapping[str, float]) -> dict[str, object]:
    matrix = round(values["matrix_efficiency"], 4)
    return {
        "use": "roofline",
        "matrix_efficiency": matrix,
        "attention_efficiency": round(matrix * ATTENTION_TO_MATRIX, 4),
        "kv_bandwidth": round(values["kv_bandwidth"], 4),
    }


def main() -> None:
    case = load_case(HERE)
    main = next(arm for arm in case.arms if arm.fitted)
    fit = fit_arm(
        case,
        main,
        START,
        lambda values: (f"cost={to_yaml(cost(values))}",),
        lambda scenario: simulate(scenario).summary(),
        skip=("output_throughput", "duration", "concurrency", "p99_ttft_ms", "p99_itl_ms"),
    )
    provenance = {
        "fitted_on": f"{case.name}, arm {main.name}: {', '.join(main.measured)}",
        "seeds": list(case.seeds),
        "cost_of_fit": round(fit.cost, 4),
        "simulations": fit.num_simulations,
        "command": "python experiments/incremental-h20/fit.py",
        "date": datetime.now(UTC).date().isoformat(),
        "pdsim": __version__,
    }
    profile = {"name": "minimax-m2.5-h20-tp4", "cost": cost(fit.values), "provenance": provenance}
    write_yaml(profile, HERE / "profile.yaml")
    print(to_yaml(profile))


if __name__ == "__main__":
    main()
