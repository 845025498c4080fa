"""The order in which the files of tests run: those that take longest first, so that none of them runs alone at the end.

The processes take the files as they come (`--dist loadfile --no-loadscope-reorder`; xdist's own order goes by the number of tests,
and the longest tests are alone in their files). Within a file, and for all others, the order stays.
"""

LONG = (
    "test_ops_triton", "test_demo", "test_bench", "test_compile", "test_explorer_pages", "test_memory", "test_ops_compiled",
    "test_bench_gpu", "test_convert_families", "test_report_comparison", "test_lab_compare", "test_explorer_stack",
    "test_ops_triton_compiled", "test_convert_minilm", "test_explorer_race_page", "test_bench_labs", "test_docs", "test_cli_fuse",
    "test_bench_fuses", "test_convert_backend", "test_nn_theory", "test_explorer_trace_page", "test_cli_explore",
    "test_bench_compiles", "test_cli_compare", "test_fuse_hostile", "test_explorer_recording_page", "test_stream_find",
)  # fmt: skip


def long_first(items):
    """Sorts the tests in place."""
    rank = {name: k for k, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONG)))
