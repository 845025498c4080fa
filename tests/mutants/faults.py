"""Planted faults as data. Each fault is one small, realistic error on supported input, which the tests of its area must detect.

A fault replaces `old`, which occurs exactly once in `file`, by `new`. `AREAS` lists the tests of each area as runs of pytest, the
fastest first; each run is a few patterns of files or folders. A change of the code that a fault edits must also change the fault.
"""

from mutants.operation_faults import OPERATION_FAULTS
from mutants.stack_faults import STACK_FAULTS
from mutants.stream_faults import STREAM_FAULTS
from mutants.tool_faults import TOOL_FAULTS

AREAS = {
    "forward": ("tests/functional/test_edges.py tests/functional/test_adversarial_rows.py tests/functional/test_functional.py",
                "tests/ops/test_cpu*.py tests/functional/test_p*.py"),
    "backward": ("tests/ops/test_autograd.py", "tests/ops/test_cpu*.py tests/functional/test_[lp]*.py"),
    "past_caches": ("tests/functional/test_past_caches.py",),
    "save_outputs": ("tests/ops/test_save_outputs.py",),
    "dropout": ("tests/ops/test_philox.py tests/ops/test_cpu_options.py tests/ops/test_autograd.py", "tests/functional/test_fuzz.py"),
    "options": ("tests/ops/test_scale_gradients.py tests/ops/test_cpu_options.py tests/functional/test_functional.py",
                "tests/ops/test_autograd.py tests/functional/test_fuzz.py"),
    "casting": ("tests/functional/test_functional.py tests/functional/test_reference.py",
                "tests/ops/test_cpu_options.py tests/functional/test_fuzz.py"),
    "dtypes": ("tests/functional/test_functional.py tests/ops/test_dispatch.py tests/ops/test_schema.py",
               "tests/ops/test_cpu_options.py"),
    "in_place": ("tests/functional/test_inplace*.py tests/ops/test_aliasing.py",),
    "autocast": ("tests/ops/test_autocast.py tests/functional/test_functional.py",),
    "validation": ("tests/ops/test_validation.py tests/functional/test_functional.py tests/functional/test_inplace*.py",),
    "triton": ("tests/ops/triton/test_kernels.py",),
    "triton_streams": ("tests/ops/triton/test_streams.py",),
    "sharded_streams": ("tests/distributed/test_dtensor_streams.py",),
    "attention": ("tests/nn/test_attention.py tests/nn/test_cache.py tests/nn/test_transformer*.py",),
    "from_torch": ("tests/nn/test_from_torch*.py",),
    "untouched": ("tests/nn/test_untouched.py",),
    "stack": ("tests/nn/test_stack*.py", "tests/nn/test_executor.py tests/wirings/test_equivalences.py"),
    "streams": ("tests/wirings/test_transcriptions.py tests/wirings/test_coefficients.py", "tests/wirings/test_real_models.py",
                "tests/nn/test_streams*.py tests/ops/streams"),
    "stream_kernels": ("tests/ops/streams/test_boundary.py tests/ops/streams/test_refusals.py",
                       "tests/ops/streams/test_[etk]*.py"),
    "wirings": ("tests/wirings/test_catalog.py tests/wirings/test_init.py tests/wirings/test_spec.py", "tests/nn/test_claims.py"),
    "equation": ("tests/wirings", "tests/cli/test_wirings.py"),
    "trace": ("tests/trace",),
    "finder": ("tests/stream/find",),
    "state": ("tests/stream/test_state.py",),
    "record": ("tests/stream/record/test_record*.py tests/stream/record/test_gradients.py", "tests/stream/record/test_s*.py"),
    "decompose": ("tests/stream/test_decompose.py",),
    "ablate": ("tests/stream/test_ablate*.py",),
    "proof": ("tests/fusion/test_proof*.py tests/fusion/test_call_proof.py tests/fusion/test_rng_replay.py",),
    "fuse": ("tests/fusion/test_pattern*.py", "tests/fusion/test_fuse*.py tests/fusion/test_families.py"),
    "lab_data": ("tests/lab/test_data.py tests/lab/test_run.py tests/lab/test_train.py",),
    "lab_verdict": ("tests/lab/test_comparison.py tests/lab/test_theory.py", "tests/lab/test_compare.py"),
    "lab_store": ("tests/lab/test_result_store.py", "tests/lab/test_compare.py"),
    "report": ("tests/report",),
    "server": ("tests/explorer/test_scheduler.py tests/explorer/test_server*.py",),
    "pages": ("tests/explorer/test_trace*.py", "tests/explorer/test_race*.py", "tests/explorer/test_stack*.py tests/explorer/test_recording_page.py"),
    "cli": ("tests/cli/test_cli.py tests/cli/test_record.py", "tests/cli/test_stream.py tests/cli/test_fuse.py"),
}  # fmt: skip

FAULTS = (*OPERATION_FAULTS, *STACK_FAULTS, *STREAM_FAULTS, *TOOL_FAULTS)
