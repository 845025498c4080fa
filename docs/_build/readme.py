"""Write the measured sentences of README.md: the verdict of the comparison, and the limits.

python docs/_build/readme.py            replace the text between the readme comments of README.md
python docs/_build/readme.py --check    change nothing; exit with 1 if the page disagrees with the results

Numbers come from compare.json, fuse.json, stack.json and functional.json in benchmarks/results.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import add_norm
import comparing
import page

PAGE = page.ROOT / "README.md"


def limits() -> str:
    """Return the limits with their numbers."""
    fused = add_norm.document("fuse")
    shares = [row["share"] for row in fused["rows"] if row["variant"] == "plain"]
    gains = [one["value"] for one in fused["summary"] if "fused, " in one["name"] and "times as fast" in one["name"]]
    stacks = {one["name"]: one["value"] for one in add_norm.document("stack")["summary"]}
    one_row = _speeds(1)
    plain = [stacks[f"{job}: mean, against plain PyTorch"] for job in ("inference", "forward + backward")]
    share = (
        f"- **Add & Norm is a small share of a model's time.** In MiniLM it is {100 * min(shares):.1f} to "
        f"{100 * max(shares):.1f} % of the forward pass; the rest is mostly matrix products. "
        f"The fused model ran {min(gains):.2f} to {max(gains):.2f} times as fast as the original "
        "([docs/fusing.md](docs/fusing.md)). A model gains far less than the operation."
    )
    as_good = (
        "- **No gain on small inputs and whole encoders:** with gradients and one row the operation runs "
        f"{min(one_row):.2f} to {max(one_row):.2f} times as fast as eager. Encoders of this library run {plain[0]:.2f} times as "
        f"fast as plain PyTorch in inference and {plain[1]:.2f} times in training, the mean over "
        "[many sizes](docs/performance.md)."
    )
    return f"{share}\n{as_good}"


def _speeds(rows: int) -> list[float]:
    """Return the speed relative to eager of LayerNorm, forward and backward, for a number of rows, on all threads."""
    results = add_norm.document("functional")
    kept: list[dict[str, Any]] = [
        row for row in results["rows"]
        if (row["rows"], row["norm"], row["variant"], row["job"]) == (rows, "layer", "addnorm", "forward_backward")
        and row["threads"] == results["threads"]
    ]  # fmt: skip
    return [row["ratio_to_eager"] for row in kept]


SECTIONS = {"readme:compare": comparing.short, "readme:limits": limits}


def main(words: Sequence[str]) -> int:
    """Run `page.main` for README.md."""
    return page.main(words, PAGE, SECTIONS, "the results say", "docs/_build/readme.py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
