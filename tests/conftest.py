"""Settings of pytest and Hypothesis. Examples have no deadlines, because machines are shared. HYPOTHESIS_PROFILE=fast
reports the first failure without shrinking it.
"""

import gc
import os

from hypothesis import HealthCheck, Phase, settings

quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "default",
    deadline=None,
    suppress_health_check=quiet,
    print_blob=True,
    derandomize="CI" in os.environ,  # a change is not judged by a rare example that it has nothing to do with
)
find = (Phase.explicit, Phase.reuse, Phase.generate)
settings.register_profile("fast", settings.get_profile("default"), phases=find, report_multiple_bugs=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

os.environ.pop("COLUMNS", None)  # tables as wide as they like: workers of pytest-xdist, and some terminals, export it


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="store what golden scenarios give, or pages show, now"
    )


def pytest_collection_modifyitems(config, items):
    unasked = {"nightly", "pages"} - {*config.option.markexpr.split()}
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in unasked)]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish():
    """Freezes all objects that exist now, most of which are modules, so that later garbage collections skip them. Each
    point of a sweep causes a collection.
    """
    gc.collect()
    gc.freeze()
