"""The instruction sets for which tests run: a name for ATEN_CPU_CAPABILITY, and what `addnorm.backends()` calls it."""

import torch

NAMES = {"default": "default", "avx2": "AVX2", "avx512": "AVX512"}
HERE = torch.backends.cpu.get_cpu_capability().lower()

# Up to that of this processor: torch itself dies with an illegal instruction where it is asked for more.
CAPABILITIES = dict([*NAMES.items()][: [*NAMES].index(HERE) + 1]) if HERE in NAMES else NAMES
