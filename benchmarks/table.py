"""Write the tables of README.md and docs/ from the JSON in results/.

python benchmarks/table.py            replace the sections between the bench comments of each page
python benchmarks/table.py --check    change nothing; return 1 if a page does not match the results

The functions that make a section are in the benchmark's own file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import bench_claims
import bench_compile
import bench_functional
import bench_fuse
import bench_lab
import bench_limit
import bench_loop
import bench_memory
import bench_norms
import bench_stack
import bench_stream
import bench_stream_layers
import bench_streams
from harness import RESULTS, read

from addnorm.bench import gpu

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "docs" / "_build"))
import page  # noqa: E402  # from there

# Page -> section -> the results and the function that makes the section of them.
PAGES: dict[str, dict[str, tuple[str, Callable[[Any], str]]]] = {
    "README.md": {"speed": ("functional", bench_functional.speed_section)},
    "docs/performance.md": {
        "training": ("functional", bench_functional.training_section),
        "saved": ("functional", bench_functional.saved_section),
        "inference": ("functional", bench_functional.inference_section),
        "limit": ("limit", bench_limit.section),
        "limit-training": ("limit", bench_limit.training_section),
        "states": ("functional", bench_functional.states_section),
        "peers": ("functional", bench_functional.peers_section),
        "one-thread": ("functional", bench_functional.one_thread_section),
        "targets": ("functional", bench_functional.targets_section),
        "stack": ("stack", bench_stack.speed_section),
        "stack-targets": ("stack", bench_stack.targets_section),
        "loop": ("loop", bench_loop.section),
        "memory": ("memory", bench_memory.section),
        "compile": ("compile", bench_compile.times_section),
        "compile-contract": ("compile", bench_compile.contract_section),
        "gpu": ("gpu", gpu.section),
    },
    "docs/numerics.md": {"accuracy": ("functional", bench_functional.accuracy_section)},
    "docs/several_streams.md": {
        "streams": ("streams", bench_streams.section),
        "stream-layers": ("stream_layers", bench_stream_layers.section),
    },
    "docs/streams.md": {"streams": ("stream", bench_stream.section)},
    "docs/fusing.md": {"fuse": ("fuse", bench_fuse.section)},
    "docs/comparing.md": {"lab": ("lab", bench_lab.section)},
    "docs/claims.md": {
        "claims": ("claims", bench_claims.claims_section),
        "claims-norms": ("norms", bench_norms.claims_section),
        "norms-rates": ("norms", bench_norms.rates_section),
        "claims-by-depth": ("claims", bench_claims.depth_section),
        "claims-trained": ("claims", bench_claims.training_section),
    },
}


def main(words: Sequence[str], root: Path = ROOT, results: Path = RESULTS) -> int:
    """Replace or check the sections. A section without results stays as it is; that of the GPU says that there are none."""
    documents = {path.stem: read(path) for path in results.glob("*.json")}
    stale = 0
    for name, sections in PAGES.items():
        chosen = {
            f"bench:{section}": partial(make, documents.get(result))
            for section, (result, make) in sections.items() if result in documents or result == "gpu"
        }  # fmt: skip
        stale |= page.main(words, root / name, chosen, "the results say", "benchmarks/table.py")
    return stale


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except ValueError as error:  # a document that does not fit its section
        raise SystemExit(f"table.py: {error}") from error
