"""Write the tables of README.md and docs/ from the JSON in results/.

python benchmarks/table.py            replace the sections between the bench comments of each page
python benchmarks/table.py --check    change nothing; return 1 if a page does not match the results

The functions that make a section are in the benchmark's own file.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from addnorm.bench.harness import read

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "docs" / "_build"))
import page  # noqa: E402  # from there


def main(words: Sequence[str]) -> int:
    """Replace or check the sections. A section without results stays as it is."""
    if [*words] not in ([], ["--check"]):
        raise SystemExit(f"table.py was called with {' '.join(words)}, expected nothing or --check.")
    sys.path.append(str(Path(__file__).parent))
    stale = False
    for script in sorted(Path(__file__).parent.glob("bench_*.py")):
        benchmark = importlib.import_module(script.stem).BENCHMARK
        path = page.RESULTS / f"{benchmark.name}.json"
        for place, make in benchmark.sections.items() if path.exists() else ():
            name, section = place.split("#")
            made = {f"bench:{section}": partial(make, read(path))}
            stale |= page.update(ROOT / name, made, "benchmarks/table.py", check=bool(words))
    return int(stale)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
