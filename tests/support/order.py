"""The order in which test files run: the slowest first, so that no slow file runs alone at the end.

Worker processes take the files in this order (`--dist loadfile --no-loadscope-reorder`; xdist's own order is by the number of
tests). The order within a file, and of all other files, is unchanged.
"""

from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent

SLOWEST = (
    "functional/test_compile",
    "ops/triton/test_kernels",
    "report/test_comparison",
    "ops/triton/test_compiled",
    "cli/test_demo",
    "explorer/test_stack",
    "ops/test_compile_mode",
    "lab/test_compare",
    "explorer/test_views",
    "functional/test_memory",
    "cli/test_compare",
    "explorer/test_page",
    "fusion/test_backend",
    "fusion/test_fuse",
    "fusion/test_families",
    "ops/test_cpu",
    "docs/test_docs",
    "explorer/test_race",
    "fusion/test_fuse_robustness",
    "explorer/test_race_page",
    "explorer/test_trace_page",
    "nn/test_theory",
    "stream/find/test_families",
    "cli/test_wirings",
    "cli/test_fuse",
    "cli/test_record",
    "fusion/test_pattern_side_effects",
    "cli/test_explore",
    "fusion/test_pattern",
    "functional/test_guarded",
    "cli/test_stream",
    "explorer/test_browser",
    "report/test_model",
    "fusion/test_encoder",
    "explorer/test_server_process",
    "lab/test_train",
    "bench/test_gpu",
    "bench/test_models",
    "explorer/test_recording_page",
    "ops/test_autograd",
    "functional/test_inplace_transforms",
)


def sort_slowest_first(items):
    """Sort the collected tests in place."""
    rank = {TESTS / f"{name}.py": k for k, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: rank.get(Path(item.path), len(SLOWEST)))
