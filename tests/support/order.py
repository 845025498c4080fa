"""The order in which test files run: the slowest first, so that no slow file runs alone at the end.

Worker processes take the files in this order (`--dist loadfile --no-loadscope-reorder`; xdist's own order is by the number of
tests). The order within a file, and of all other files, is unchanged.
"""

from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent

SLOWEST = (
    "docs/test_docs",
    "functional/test_compile",
    "ops/triton/test_kernels",
    "lab/test_compare",
    "explorer/test_stack",
    "cli/test_demo",
    "deploy/test_onnx",
    "report/test_comparison",
    "ops/test_cpu",
    "fusion/test_fuse",
    "cli/test_compare",
    "ops/test_compile_mode",
    "fusion/test_backend",
    "explorer/test_views",
    "distributed/test_layers",
    "distributed/test_sharded_stream",
    "distributed/test_dtensor",
    "distributed/test_parallel",
    "deploy/test_packages",
    "cli/test_explore",
    "explorer/test_page",
    "cli/test_fuse",
    "fusion/test_fuse_robustness",
    "cli/test_record",
    "fusion/test_families",
    "explorer/test_race",
    "explorer/test_race_page",
    "fusion/test_pattern",
    "fusion/test_pattern_side_effects",
    "explorer/test_trace_page",
    "nn/test_theory",
    "stream/find/test_families",
    "cli/test_wirings",
    "explorer/test_stack_history",
    "ops/triton/test_compiled",
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
