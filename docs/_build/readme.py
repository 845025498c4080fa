"""What README.md says was measured, besides its table of speeds: the comparison in its own words, and the limits.

python docs/_build/readme.py            replaces what stands between the readme comments of README.md
python docs/_build/readme.py --check    changes nothing; 1 if it is not what the results say

Numbers come from compare.json, fuse.json, stack.json and functional.json in benchmarks/results.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import add_norm
import comparing
import page

PAGE = comparing.ROOT / "README.md"


def limits() -> str:
    """What nobody should expect, with the numbers."""
    fused = add_norm.document("fuse")
    shares = [row["share"] for row in fused["rows"] if row["variant"] == "plain"]
    gains = [one["value"] for one in fused["summary"] if "fused, " in one["name"] and "times as fast" in one["name"]]
    stacks = {one["name"]: one["value"] for one in add_norm.document("stack")["summary"]}
    one_row = _speeds(1)
    plain = [stacks[f"{job}: mean, against plain PyTorch"] for job in ("inference", "forward + backward")]
    share = (
        f"- **Add & Norm is a small share of a model's time.** In MiniLM it is {100 * min(shares):.1f} to "
        f"{100 * max(shares):.1f} % of the forward pass; the rest is matrix products. Fused, the model ran {min(gains):.2f} to "
        f"{max(gains):.2f} times as fast as before ([docs/fusing.md](docs/fusing.md)). Do not expect the whole to gain what the "
        "operation gains."
    )
    as_good = (
        "- **PyTorch is as good** where there is little to do: with gradients and one row the operation runs "
        f"{min(one_row):.2f} to {max(one_row):.2f} times as fast as eager, and encoders of this library run {plain[0]:.2f} times "
        f"as fast as the same in plain PyTorch in inference, {plain[1]:.2f} times in training, on average over "
        "[many sizes](docs/performance.md)."
    )
    return f"{share}\n{as_good}"


def _speeds(rows: int) -> list[float]:
    """Against eager, forward and backward, LayerNorm without options, on so many rows and all threads."""
    found = add_norm.document("functional")
    kept: list[dict[str, Any]] = [
        row for row in found["rows"]
        if (row["rows"], row["norm"], row["variant"], row["job"]) == (rows, "layer", "addnorm", "forward_backward")
        and row["threads"] == found["threads"]
    ]  # fmt: skip
    return [row["ratio_to_eager"] for row in kept]


SECTIONS = {"readme:compare": comparing.short, "readme:limits": limits}


def main(words: Sequence[str]) -> int:
    """What `page.main` does."""
    return page.main(words, PAGE, SECTIONS, "the results say", "docs/_build/readme.py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
