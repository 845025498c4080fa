"""The order in which the files of tests run: those that take longest first, so that none of them runs alone at the end.

The processes take the files as they come (`--dist loadfile --no-loadscope-reorder`; xdist's own order goes by the number of tests,
and the longest tests are alone in their files). Within a file, and for all others, the order stays.
"""

LONG = (
    "test_convert_families", "test_demo", "test_cli_compare", "test_explorer_pages", "test_lab_compare", "test_explorer_stack",
    "test_ops_triton_compiled", "test_ops_triton", "test_compile",
    "test_explorer_trace_page", "test_convert_minilm", "test_explorer_recording_page", "test_explorer_race_page", "test_lab_train",
    "test_convert_encoder", "test_convert_boundary", "test_convert_hostile", "test_convert_backend", "test_cli_explore",
    "test_nn_theory", "test_lab_theory", "test_nn_transformer_tools", "test_convert_fuse", "test_lab_flip", "test_nn_stack_tools",
)  # fmt: skip


def long_first(items):
    """Sorts the tests in place."""
    rank = {name: k for k, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONG)))
