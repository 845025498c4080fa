"""Write the measured sentences of README.md: the verdict of the comparison, and the limits.

Numbers come from compare.json, fuse.json, stack.json, compile.json and functional.json in benchmarks/results.
"""

from __future__ import annotations

from collections.abc import Sequence

import comparing
import page

from addnorm.bench.case import by_case


def limits() -> str:
    """Return the limits with their numbers."""
    whole = [row for row in page.document("fuse")["rows"] if row["variant"] == "plain"]
    minilm, decoders = ([row["share"] for row in whole if (row["model"] == "minilm") is own] for own in (True, False))
    ratios, overlapping = _fusing_alone()
    stacks = {one["name"]: one["value"] for one in page.document("stack")["summary"]}
    one_row, dropped = _speeds(1, "forward_backward"), _speeds(1, "dropout")
    plain = [stacks[f"{job}: mean, against plain PyTorch"] for job in ("inference", "forward + backward")]
    share = (
        f"- **Add & Norm is a small share of a model's time:** in MiniLM {_percents(minilm)} of the forward pass, in small "
        f"decoders with RMSNorm {_percents(decoders)}. Fusing alone, measured on captured graphs, makes them {_range(ratios)} "
        "times as fast; the "
        f"middle halves of the times overlap in {overlapping} of {len(ratios)} cases ([fusing](docs/fusing.md))."
    )
    as_good = (
        f"- **Whole encoders gain next to nothing:** those of this library run {plain[0]:.2f} times as fast as plain PyTorch in "
        f"inference and {plain[1]:.2f} times in training (mean over [many sizes](docs/performance.md)). One row with gradients "
        f"runs {_range(one_row)} times as fast as eager, with dropout {_range(dropped)} times."
    )
    return f"{share}\n{as_good}\n{_compiled()}"


def _compiled() -> str:
    """Return how the default form and the operator compare with torch's own code inside `torch.compile`."""
    summary = {one["name"]: one["value"] for one in page.document("compile")["summary"]}
    (mean, lowest), (op_mean, op_lowest) = (
        [summary[f"{form}: {statistic} (x torch.compile)"] for statistic in ("mean", "lowest")]
        for form in ("default form", "operator")
    )
    return (
        "- **Little to gain inside `torch.compile` on CPU:** a compiled call runs "
        f"{mean:.2f} times as fast as without this library in the mean, {lowest:.2f} at "
        "worst; small ones become PyTorch's own norm there. With the operator everywhere, which keeps its bits, it "
        f"runs {op_mean:.2f} times as fast, {op_lowest:.2f} at worst "
        "([Performance](docs/performance.md#under-torchcompile))."
    )


def _fusing_alone() -> tuple[list[float], int]:
    """Return the speed of fused graphs relative to the same graphs unfused, and in how many cases both overlap."""
    cases = by_case(page.document("fuse")["rows"], ("model", "job", "batch", "tokens", "dtype"))
    pairs = [(rows["frontend"], rows["fused"]) for _, rows in cases if {"frontend", "fused"} <= {*rows}]
    overlapping = sum(one["q1_us"] <= other["q3_us"] and other["q1_us"] <= one["q3_us"] for one, other in pairs)
    return [unfused["median_us"] / fused["median_us"] for unfused, fused in pairs], overlapping


def _percents(shares: Sequence[float]) -> str:
    return f"{100 * min(shares):.1f} to {100 * max(shares):.1f}%"


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def _speeds(rows: int, job: str) -> list[float]:
    """Return the speed relative to eager of LayerNorm in a job, for a number of rows, on all threads."""
    results = page.document("functional")
    wanted = {"rows": rows, "norm": "layer", "variant": "addnorm", "job": job, "threads": results["threads"]}
    return [row["ratio_to_eager"] for row in results["rows"] if wanted.items() <= row.items()]


SECTIONS = {"readme:compare": comparing.short, "readme:limits": limits}
