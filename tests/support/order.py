"""The order in which test files run: the slowest first, so that no slow file runs alone at the end.

Worker processes take the files in this order (`--dist loadfile --no-loadscope-reorder`; xdist's own order is by the number of
tests). The order within a file, and of all other files, is unchanged.
"""

from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent

SLOWEST = (
    "ops/triton/test_kernels",
    "cli/test_demo",
    "functional/test_compile",
    "explorer/test_views",
    "functional/test_memory",
    "ops/test_compile_mode",
    "fusion/test_families",
    "report/test_comparison",
    "lab/test_compare",
    "explorer/test_stack",
    "ops/triton/test_compiled",
    "explorer/test_race_page",
    "bench/test_models",
    "docs/test_docs",
    "cli/test_fuse",
    "fusion/test_backend",
    "nn/test_theory",
    "explorer/test_trace_page",
    "cli/test_explore",
    "cli/test_compare",
    "fusion/test_fuse_robustness",
    "explorer/test_recording_page",
    "stream/find/test_families",
)


def sort_slowest_first(items):
    """Sort the collected tests in place."""
    rank = {TESTS / f"{name}.py": k for k, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: rank.get(Path(item.path), len(SLOWEST)))
