"""The instruction sets that tests run with: each value of ATEN_CPU_CAPABILITY and its name in `addnorm.backends()`."""

import torch

NAMES = {"default": "default", "avx2": "AVX2", "avx512": "AVX512"}
HERE = torch.backends.cpu.get_cpu_capability().lower()

# Only up to this processor's: torch crashes with an illegal instruction if a higher one is selected.
CAPABILITIES = dict([*NAMES.items()][: [*NAMES].index(HERE) + 1]) if HERE in NAMES else NAMES
