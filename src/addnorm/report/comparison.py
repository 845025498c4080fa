"""Report of a comparison of wirings: verdict, learning curves, statistics by depth, and published results.

All sentences and numbers are computed from the results. Figures without numbers are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from addnorm._util.blocks import Cell, Table, TableRow
from addnorm._util.charts import Axis, Chart, Points
from addnorm._util.norms import KINDS
from addnorm._util.numbers import format_count, format_number, join_words
from addnorm.lab.comparison import Comparison
from addnorm.lab.published import PublishedResult
from addnorm.lab.streams import Numbers
from addnorm.lab.verdict import summarize_stack
from addnorm.report import comparison_charts as charts
from addnorm.report.model import TOP as TOP_FACTS
from addnorm.report.model import versions
from addnorm.report.page import Block, Facts, Figure, Findings, Page, Section, figure_of
from addnorm.wirings.factors import format_factor

BESIDE = ("gradient", "memory", "ablation")  # topics of findings beside their figures; others are at the top
NAMED = 5  # wirings in the title
TILES = 4  # losses in large type
PER_DRAWING = 8  # wirings in a drawing: the number of different colours and dashes

INIT_INTRO = (
    "The toy transformer for which the papers prove their results: attention that takes the mean of all tokens, a feed-forward "
    "sublayer as wide as the stream, weights N(0, 1/d), a random target for each token. DeepNorm's weights are drawn by its own "
    "rule. Numbers are means over the seeds, geometric means for norms and ratios. Curves far above all others, such as "
    "no_norm in deep stacks, leave the drawing at the top; the table below each drawing, which the printed page leaves out, "
    "has their numbers. A cross is an infinite value."
)


def build_comparison_page(comparison: Comparison, facts: Mapping[str, str] | None = None) -> Page:
    """Return the report of a comparison.

    Args:
        comparison: the result of `addnorm.lab.compare`.
        facts: further settings, such as the command.

    Example:
        >>> from addnorm import lab, report
        >>> quick = lab.Protocol(num_layers=2, warm_ups=0, steps=4, d_model=16, nhead=2, tokens=8, batch=4)
        >>> page = report.build_comparison_page(lab.compare(["post_ln", "pre_ln"], quick, at_init=False, jobs=1))
        >>> [section.title for section in page.sections][:2]
        ['Learning', 'By depth: 2 layers']
    """
    sections = [Section("Learning", _LEARNING, _learning(comparison))] if comparison.runs else []
    sections += [
        Section(f"By depth: {format_count(n, 'layer')}", "", _trained(comparison, n)) for n in comparison.by_depth
    ]
    sections += _untrained(comparison)
    settings = _settings(comparison) | dict(facts or {})
    top = {name: settings.pop(name) for name in TOP_FACTS if name in settings}
    sections.append(Section("Settings", "", [Facts(settings)]))
    return Page(
        _title(comparison), _subtitle(comparison), [finding for finding in comparison.verdict if finding.topic not in BESIDE],
        [section for section in sections if section.blocks], _tiles(comparison), facts=top,
    )  # fmt: skip


_LEARNING = (
    "All wirings get the same batches in the same order, and the same initial weights wherever two wirings draw them by the same "
    "rule. Losses are in nats a character."
)


def _title(comparison: Comparison) -> str:
    names = [*comparison.compared]
    if len(names) > NAMED:
        return f"{len(names)} residual wirings compared"
    return f"{join_words(names)} {'compared' if len(names) > 1 else 'measured'}"


def _subtitle(comparison: Comparison) -> str:
    subject = "A residual wiring" if len(comparison.compared) == 1 else "Residual wirings"
    if not comparison.runs:
        return f"{subject} before training: the stream and its gradient by depth."
    return f"{subject} in a character model trained on {comparison.text['name']}: learning curves, the stream, and its gradient."


def _tiles(comparison: Comparison) -> dict[str, str]:
    """Return the lowest losses of the deepest models by wiring. Without runs, return how many published results hold."""
    depths = [*comparison.by_depth.items()]
    if not depths:
        checks = [check for check in comparison.checks if check.holds is not None]
        return {"Published results that hold": f"{sum(bool(check.holds) for check in checks)} of {len(checks)}"}
    n, arms = depths[-1]
    lowest = sorted(arms, key=lambda arm: arm.best.loss())[:TILES]
    tiles = {
        f"Loss of {arm.wiring}, {format_count(n, 'layer')}": _loss(arm.best.loss()) for arm in arms if arm in lowest
    }
    return tiles | {"Loss of the character frequencies": format_number(comparison.text["entropy"], 3)}


def _loss(loss: float) -> str:
    return format_number(loss, 3) if math.isfinite(loss) else "diverged"


def _parts(comparison: Comparison) -> Iterator[tuple[Comparison, str]]:
    """Yield parts of the comparison, of at most `PER_DRAWING` wirings, and the suffix of the titles of their charts."""
    names = [*dict.fromkeys(arm.wiring for arm in comparison.arms)]
    size = -(-len(names) // (-(-len(names) // PER_DRAWING) or 1)) or 1
    for begin in range(0, len(names), size):
        some = names[begin : begin + size]
        runs = [run for run in comparison.runs if run["settings"]["wiring"] in some]
        yield replace(comparison, runs=runs), f": {join_words(some)}" if len(names) > size else ""


def _learning(comparison: Comparison) -> list[Block]:
    candidates: list[Chart | None] = []
    for n in comparison.by_depth:
        for part, suffix in _parts(comparison):
            if n in part.by_depth:
                candidates += [charts.learning_chart(part, n, suffix), charts.training_chart(part, n, suffix)]
                candidates += [charts.rate_chart(part, n, suffix)] if len(comparison.protocol.rates) > 1 else []
    return [*_figures(candidates), comparison.tabulate_settings(comparison.groups)]


def _trained(comparison: Comparison, n: int) -> list[Block]:
    """Return the charts by depth of models with n layers, each kind below the findings about it."""
    at = replace(comparison, runs=[run for run in comparison.runs if run["settings"]["num_layers"] == n], stacks=[])
    drawn: dict[str, list[Chart | None]] = {about: [] for about in BESIDE}
    for part, suffix in _parts(at):
        best = charts.best_groups(part, n)
        first = [line._replace(group=arm.groups[0]) for line, arm in zip(best, part.arms, strict=True)]
        drawn["gradient"] += [
            charts.depth_chart(first, suffix, after=False),
            charts.depth_chart(charts.groups_by_warm_up(part, n), suffix, after=True),
        ]
        drawn["memory"].append(charts.memory_chart(best, suffix))
        drawn["ablation"].append(charts.ablation_chart(best, suffix))
    blocks: list[Block] = []
    for about, candidates in drawn.items():
        figures = _figures(candidates)
        findings = [finding for finding in at.verdict if finding.topic == about and figures]
        blocks += [*([Findings(findings)] if findings else []), *figures]
    return blocks


def _figures(candidates: Iterable[Chart | None]) -> list[Figure]:
    return [figure_of(chart) for chart in candidates if chart is not None]


def _init_charts(comparison: Comparison) -> list[Chart]:
    """Return the charts of untrained stacks with one stream."""
    names = _init_names(comparison)
    rows = {name: [row for row in comparison.at_init if row["wiring"] == name] for name in names}
    deepest = max(row["num_layers"] for row in comparison.at_init)
    depths = Axis("layers", True, {n: str(n) for n in sorted({row["num_layers"] for row in comparison.at_init})})

    def over_layers(number: Callable[[Numbers], float]) -> dict[str, Points]:
        return {name: [(row["num_layers"], number(row)) for row in some] for name, some in rows.items()}

    def by_depth(key: str) -> dict[str, Points]:
        last = {name: row[key] for name, some in rows.items() for row in some if row["num_layers"] == deepest}
        return {name: [(k / 2, number) for k, number in enumerate(numbers)] for name, numbers in last.items()}

    return [
        charts.init_chart(
            "Gradients against depth",
            "The gradients of the last feed-forward sublayer and at x_0, over the number of layers. The published results below "
            "include the slopes.",
            {"last layer's ‖∂loss / ∂W₂‖": over_layers(lambda row: row["weight_gradient"][-1]),
             "‖∂loss / ∂x_0‖": over_layers(lambda row: row["gradient"][0])},
            depths,
        ),
        charts.init_chart(
            "Change of the logits by the first step",
            "Relative change of the logits by one step of SGD (learning rate 0.1) and of Adam (1e-3), without mixing of tokens.",
            {"after SGD": over_layers(lambda row: row["step_sgd"]), "after Adam": over_layers(lambda row: row["step_adam"])},
            depths,
        ),
        charts.init_chart(
            f"Forward and backward by depth, {format_count(deepest, 'layer')}",
            "From top to bottom: the mean square of the stream's elements, the mean cosine of two tokens, the gradient at the "
            "stream.",
            {"E‖x‖² / d": by_depth("variance"), "cos(token, token)": by_depth("similarity"),
             "‖∂loss / ∂x‖": by_depth("gradient")},
            Axis("layer"),
        ),
    ]  # fmt: skip


def _untrained(comparison: Comparison) -> list[Section]:
    """Return the sections about untrained stacks and published results."""
    if not comparison.at_init:
        return []
    blocks: list[Block] = [*_figures(_init_charts(comparison))]
    several: list[list[Cell]] = [
        [row["wiring"], row["num_layers"], *summarize_stack(row).values()]
        for row in comparison.untrained if row["wiring"] in comparison.compared and "variance" not in row
    ]  # fmt: skip
    if several:
        head = [
            "wiring", "layers", "largest read / x_0", "the same in pre_ln", "difference from pre_ln's output",
            "gain of the mixing",
        ]  # fmt: skip
        caption = "Compared wirings with several streams; the gain is that of random coefficients"
        blocks.append(Table(head, several, caption))
    return [
        Section("Before training", INIT_INTRO, blocks),
        Section("Published results", "Results of papers on untrained wirings, each with the band of its number.",
                _check_tables(comparison.checks)),
    ]  # fmt: skip


def _check_tables(checks: Sequence[PublishedResult]) -> list[Block]:
    """Return tables of the published results: verdicts, all numbers, sources."""
    rows: list[TableRow] = []
    for check in checks:
        values = [*check.measured.values()]
        ends = dict.fromkeys(format_number(end(values), 3) for end in (min, max)) if values else {}
        cells = [check.name, check.verdict, " to ".join(ends), check.criterion]
        rows.append(TableRow(cells, "bad" if check.holds is False else ""))
    numbers: list[list[Cell]] = [
        [check.name, what, value] for check in checks for what, value in check.measured.items()
    ]
    sources = [[check.name, check.source, check.why] for check in checks]
    why = "Sources, and reasons for the width of each band"
    return [
        Table(["published result", "verdict", "measured", "criterion"], rows),
        Table(["published result", "number", "measured"], numbers, "All numbers", True),
        Table(["published result", "source", "width of the band"], sources, why, True),
    ]


def _init_names(comparison: Comparison) -> list[str]:
    """Return the wirings of untrained stacks, the compared ones first."""
    names = dict.fromkeys(row["wiring"] for row in comparison.at_init)
    return [*dict.fromkeys([*filter(names.__contains__, comparison.compared), *names])]


def _settings(comparison: Comparison) -> dict[str, str]:
    """Return all facts of the comparison by name; those in `TOP_FACTS` are shown at the top of the page."""
    p, text = comparison.protocol, comparison.text
    settings = {"wirings": ", ".join(comparison.compared)}
    dated = [result for result in (*comparison.runs, *comparison.stacks) if "addnorm" in result]
    if dated:
        made = dict.fromkeys(f"addnorm {result['addnorm']}, torch {result['torch']}" for result in dated)
        settings |= {"date": _dates(dated), "results made with": "; ".join(made)}
    if comparison.runs:
        settings |= {
            "model": f"character model, {_listed(p.num_layers)} layers, d_model = {p.d_model}, {p.nhead} heads, feed-forward "
            f"{4 * p.d_model}, {KINDS[p.norm].title}, {text['symbols']} symbols",
            "inputs": f"{text['name']}, {p.steps} steps of {p.batch} sequences of {p.tokens} characters",
            "loss": "cross entropy of the next character on the test part, in nats: lower is better",
            "learning rates": _listed(p.rates), "warm-up steps": _listed(p.warm_ups), "seeds": _listed(p.seeds),
            "optimizer": "Adam, constant rate after a linear warm-up, no clipping, no weight decay",
            "weights": "each wiring's own rule; plain Xavier draws queries, keys and values as one matrix",
            "text": f"{text['name']}, {text['characters']:,} characters, SHA-256 {text['digest']}; 80% for training, "
            "10% for validation, 10% for test",
            "loss of a uniform guess": f"{text['uniform']:.3f} nats",
            "loss of the character frequencies": f"{text['entropy']:.3f} nats",
            "time": f"{sum(run['seconds'] for run in comparison.runs):,.0f} s of training in total, one thread per run",
        }  # fmt: skip
    if comparison.at_init:
        seeds = sorted({seed for row in comparison.at_init for seed in row["seeds"]})
        settings["untrained stacks"] = (
            f"{_listed(sorted({row['num_layers'] for row in comparison.at_init}))} layers, {format_count(len(seeds), 'seed')}, "
            "width 64, one sequence of 32 tokens"
        )
    return settings | {"this report": ", ".join(f"{name} {version}" for name, version in versions().items())}


def _listed(values: Sequence[float]) -> str:
    return ", ".join(format_factor(value) if isinstance(value, float) else str(value) for value in values)


def _dates(results: Sequence[Numbers]) -> str:
    """Return the dates of the first and the last result."""
    dates = sorted(result["date"] for result in results)
    ends = [date[:16].replace("T", " ") + (" UTC" if "T" in date else "") for date in (dates[0], dates[-1])]
    return " to ".join(dict.fromkeys(ends))
