"""Settings under which the benchmarks time single calls of small tensors: no test asserts a time."""

import gc

from addnorm.bench import exactness, operation, timing

# Without full garbage collections, pauses and new processes.
SHORT = (
    (timing, "SEGMENT_MS", 0.01), (gc, "collect", lambda *_: 0), (exactness, "import_ms", lambda: 1.0), (exactness, "SHAPE", (64, 32)),
    (operation, "PAUSE_SECONDS", 0.0),
)  # fmt: skip
