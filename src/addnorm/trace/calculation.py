"""`trace`: the computation of Add & Norm and its gradient for one token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import add, mul
from typing import Any, get_args

from .steps import EpsPlace, Norm, Placement, Section, Step, Trace, Variance, Vector, show


def trace(
    x: Iterable[float],
    sublayer: Iterable[float],
    *,
    placement: Placement = "post",
    norm: Norm = "layer",
    weight: Iterable[float] | float | None = None,
    bias: Iterable[float] | float | None = None,
    eps: float = 1e-5,
    grad: Iterable[float] | None = None,
    read_grad: Iterable[float] | None = None,
    variance: Variance = "biased",
    eps_place: EpsPlace = "inside",
    digits: int = 5,
    title: str = "",
) -> Trace:
    r"""Compute Add & Norm of one token, and its gradient, step by step.

        z = x + Sublayer(x)      z_norm = (z - mean) / sqrt(var + eps)      y = weight * z_norm + bias
        g = dy * weight          dz = (g - mean(g) - z_norm * mean(g * z_norm)) / sqrt(var + eps)
        dx = dSublayer(x) = dz   dweight = dy * z_norm      dbias = dy

    Args:
        x: the token, d numbers.
        sublayer: the sublayer's output for it (pre-LN: for Norm(x)), d numbers.
        placement: "post" normalizes the sum, "pre" the sublayer's input: z = x + Sublayer(Norm(x)).
        norm: "layer", or "rms", which does not subtract the mean and divides by sqrt(mean(z^2) + eps).
        weight: gamma, d numbers or one number; None is ones.
        bias: beta, d numbers or one number; None is zeros.
        eps: a number >= 0.
        grad: the gradient of the output (y, in pre-LN z), d numbers; None is (1, 0, ..., 0), the gradient of its first
            feature.
        read_grad: pre-LN only: the gradient of the sublayer's input, d numbers: `grad` times the sublayer's Jacobian. None
            uses `grad`, as if the unknown Jacobian were the identity.
        variance: divided by d ("biased", as in LayerNorm) or by d - 1 ("unbiased", as in `torch.std`).
        eps_place: "inside" the root, or "outside": (z - mean) / (sqrt(var) + eps).
        digits: significant digits in the formulas and in `str()`. The values are not rounded.
        title: line above the table.

    Returns:
        The trace. Its steps by name, forward: x, sublayer, z, mean, centred, squares, variance, root, normalized, scaled,
        shifted (pre-LN: sublayer and z last; RMSNorm: mean_square for mean, centred and variance). Checks: check_mean,
        check_variance (RMSNorm: check_square), expected. Backward: grad, grad_scaled, grad_mean (not RMSNorm),
        projection, dz, dx, dsublayer, dweight, dbias (pre-LN: grad, straight, dsublayer, read_grad, grad_scaled,
        grad_mean, projection, dnorm, dx, dweight, dbias).

    Raises:
        ValueError: a vector is empty, has the wrong length or a number that is not finite, or a choice is unknown.

    Source: Ba, Kiros, Hinton, "Layer Normalization" (arXiv 1607.06450); Zhang, Sennrich, "Root Mean Square Layer
    Normalization" (arXiv 1910.07467); variance by d - 1 and eps outside the root as in "The Annotated Transformer".

    Example:
        >>> t = trace([1, 2, 3], [0.5, -1, 1.5])
        >>> t["mean"].value, t["mean"].numbers
        (2.3333333333333335, '(1.5 + 1 + 4.5) / 3 = 7 / 3')
        >>> show(t.output, digits=3)
        '[-0.539, -0.863, 1.4]'
    """
    for name, choice, choices in (
        ("placement", placement, Placement), ("norm", norm, Norm), ("variance", variance, Variance),
        ("eps_place", eps_place, EpsPlace),
    ):  # fmt: skip
        if choice not in get_args(choices):
            expected = " or ".join(map(repr, get_args(choices)))
            raise ValueError(f"{name} is {choice!r}, expected {expected}: write one of them.")
    if norm == "rms" and variance == "unbiased":
        raise ValueError("variance is 'unbiased', but RMSNorm has no variance: leave it out, or use norm='layer'.")
    if read_grad is not None and placement == "post":
        raise ValueError(
            "read_grad requires placement 'pre', got 'post', where the norm reads z: use placement='pre', or grad."
        )
    eps = _number("eps", eps)
    if eps < 0:
        raise ValueError(f"eps is {eps:g}, expected a number >= 0: the usual ones are 1e-5 and 1e-6.")
    if not (isinstance(digits, int) and 1 <= digits <= 17):
        raise ValueError(f"digits is {digits!r}, expected a whole number from 1 to 17: 17 show a float exactly.")
    token = _vector("x", x)
    d = len(token)
    branch = _vector("sublayer", sublayer, d)
    gamma = (1.0,) * d if weight is None else _vector("weight", weight, d, scalar=True)
    beta = (0.0,) * d if bias is None else _vector("bias", bias, d, scalar=True)
    out_grad = _vector("grad", (1.0, *(0.0,) * (d - 1)) if grad is None else grad, d)
    default = "" if grad is not None else "default: 1 for the first feature, 0 for the others"
    v = "z" if placement == "post" else "x"
    rule = _Rule(norm == "layer", variance == "biased", eps_place == "inside", eps, gamma, beta, v)
    w = _Writer(digits)
    stream, sums = tuple(map(add, token, branch)), w.pairs(token, " + ", branch)

    w.add("x", "x", token, note="input of the sublayer")
    if placement == "post":
        w.add("sublayer", "Sublayer(x)", branch, note="output of the sublayer")
        w.add("z", "z", stream, "x + Sublayer(x)", sums)
        saved = _add_norm(w, stream, rule)
        _add_checks(w, saved, rule)
        w.add("grad", "dy", out_grad, note=default or "incoming gradient")
        dz = _add_gradient(w, out_grad, "dy", saved, rule, "dz")
        w.add("dx", "dx", dz, "dz", note="the +1 path; the sublayer adds its Jacobian times dSublayer(x)")
        w.add("dsublayer", "dSublayer(x)", dz, "dz", note="the same: both terms of a sum get its gradient")
        _add_parameter_gradients(w, out_grad, "dy", saved, rule)
    else:
        saved = _add_norm(w, token, rule)
        w.add("sublayer", "Sublayer(read)", branch, note="output of the sublayer for it")
        w.add("z", "z", stream, "x + Sublayer(read)", sums, "the stream continues without a norm")
        _add_checks(w, saved, rule)
        w.add("grad", "dz", out_grad, note=default or "incoming gradient")
        w.add("straight", "dx, straight", out_grad, "dz", note="the +1 path: there is no norm on it")
        w.add("dsublayer", "dSublayer(read)", out_grad, "dz", note="the same: both terms of a sum get its gradient")
        back, note = out_grad, "default: the identity replaces the unknown Jacobian of the sublayer"
        if read_grad is not None:
            back, note = (
                _vector("read_grad", read_grad, d),
                "from the argument read_grad: the result of the sublayer's backward",
            )
        w.add("read_grad", "dread", back, "Jacobianᵀ dSublayer(read)", note=note)
        through = _add_gradient(w, back, "dread", saved, rule, "dnorm")
        dx, note = (
            tuple(map(add, out_grad, through)),
            "the straight path, plus the path through the sublayer and its norm",
        )
        w.add("dx", "dx", dx, "dz + dnorm", w.pairs(out_grad, " + ", through), note)
        _add_parameter_gradients(w, back, "dread", saved, rule)
    steps = _explain_nonfinite(w.steps, rule)
    return Trace(placement, norm, variance, eps_place, eps, gamma, beta, digits, steps, title)


class _Rule:
    """Kind of the norm, and the texts of its formulas; `v` is the symbol of its input."""

    def __init__(
        self, layer: bool, biased: bool, inside: bool, eps: float, weight: Vector, bias: Vector, v: str
    ) -> None:
        self.layer, self.biased, self.inside, self.eps = layer, biased, inside, eps
        self.weight, self.bias, self.v = weight, bias, v
        self.count = len(weight) if biased else len(weight) - 1
        self.spread = "σ²" if layer else "ms"
        self.centred = f"({v} - μ)" if layer else v
        self.root = f"√({self.spread} + ε)" if inside else f"√{self.spread} + ε"
        self.over_root = f"/ {self.root}" if inside else f"/ ({self.root})"
        self.normalized = f"{v}_norm"
        self.average = "(1/d)" if biased else "(1/(d - 1))"


@dataclass(frozen=True, slots=True)
class _Saved:
    """Values that the backward needs; `direction` is the derivative of the root by each feature, times count."""

    normalized: Vector
    direction: Vector
    spread: float
    root: float


class _Writer:
    """Collector of steps that writes numbers into formulas."""

    def __init__(self, digits: int) -> None:
        self.digits = digits
        self.section: Section = "forward"
        self.steps: list[Step] = []

    def add(
        self, name: str, symbol: str, value: float | Vector, formula: str = "", numbers: str = "", note: str = ""
    ) -> None:
        """Add a step to the current section."""
        self.steps.append(Step(name, self.section, symbol, value, formula, numbers, note))

    def number(self, value: float) -> str:
        """Return a number as text."""
        return show(value, self.digits)

    def operand(self, value: float) -> str:
        """Return a number, in parentheses if it is negative or has an exponent."""
        text = self.number(value)
        return f"({text})" if "-" in text or "e" in text else text

    def abbreviate(self, d: int, text: Callable[[int], str], separator: str) -> str:
        """Return the texts of d features, joined; of more than four only the first two and the last."""
        return separator.join(map(text, range(d)) if d <= 4 else [text(0), text(1), "…", text(d - 1)])

    def vector(self, d: int, text: Callable[[int], str]) -> str:
        """Return the texts of d features in brackets."""
        return f"[{self.abbreviate(d, text, ', ')}]"

    def pairs(self, left: Vector, sign: str, right: Vector) -> str:
        """Return an operation on two vectors with its numbers, feature by feature."""
        return self.vector(len(left), lambda k: f"{self.number(left[k])}{sign}{self.operand(right[k])}")

    def mean(self, values: Vector, count: int, text: Callable[[int], str] | None = None) -> str:
        """Return a mean with its numbers: the terms, their sum and the divisor."""
        terms = self.abbreviate(len(values), text or (lambda k: (self.operand if k else self.number)(values[k])), " + ")
        return f"({terms}) / {count} = {self.number(_sum(values))} / {count}"


def _add_norm(w: _Writer, z: Vector, rule: _Rule) -> _Saved:
    """Add the steps from the mean (RMSNorm: the squares) to the shift."""
    d, count, v = len(z), rule.count, rule.v
    centred = z
    if rule.layer:
        mean = _divide(_sum(z), d)
        centred = tuple(a - mean for a in z)
        w.add("mean", "μ", mean, f"(1/d) Σ {v}ₖ", w.mean(z, d))
        w.add("centred", f"{v} - μ", centred, numbers=w.pairs(z, " - ", (mean,) * d))
    squares = tuple(a * a for a in centred)
    w.add("squares", f"{rule.centred}²", squares, numbers=w.vector(d, lambda k: f"{w.operand(centred[k])}²"))
    spread = _divide(_sum(squares), count)
    name = "variance" if rule.layer else "mean_square"
    in_brackets = f"({v}ₖ - μ)²" if rule.layer else f"{v}ₖ²"
    w.add(name, rule.spread, spread, f"{rule.average} Σ {in_brackets}", w.mean(squares, count))
    sigma = math.sqrt(spread)
    root = math.sqrt(spread + rule.eps) if rule.inside else sigma + rule.eps
    eps = f"{rule.eps:g}"
    numbers = f"√({w.number(spread)} + {eps})" if rule.inside else f"√{w.number(spread)} + {eps}"
    w.add("root", rule.root, root, numbers=numbers)
    normalized = tuple(_divide(a, root) for a in centred)
    numbers, note = w.pairs(centred, " / ", (root,) * d), _note_on_normalized(z, normalized, root, rule)
    w.add("normalized", rule.normalized, normalized, f"{rule.centred} {rule.over_root}", numbers, note)
    scaled = tuple(map(mul, rule.weight, normalized))
    w.add("scaled", f"γ ⊙ {rule.normalized}", scaled, numbers=w.pairs(rule.weight, "·", normalized))
    y, symbol, note = tuple(map(add, scaled, rule.bias)), "y", ""
    if v == "x":
        symbol, note = "read", "input of the sublayer"
    w.add("shifted", symbol, y, f"γ ⊙ {rule.normalized} + β", w.pairs(scaled, " + ", rule.bias), note)
    direction = normalized if rule.inside else tuple(_divide(a, sigma) if sigma else 0.0 for a in centred)
    return _Saved(normalized, direction, spread, root)


def _add_checks(w: _Writer, saved: _Saved, rule: _Rule) -> None:
    """Add the checks of mean 0 and variance 1, and switch to the backward section."""
    d, n = len(saved.normalized), rule.normalized
    w.section = "checks"
    mean = _divide(_sum(saved.normalized), d)
    w.add("check_mean", f"mean({n})", mean, note=_note_on_mean(mean, rule))
    center = mean if rule.layer else 0.0
    square = _divide(_sum(tuple((a - center) * (a - center) for a in saved.normalized)), d)
    name, symbol = ("check_variance", f"variance({n})") if rule.layer else ("check_square", f"mean({n}²)")
    w.add(name, symbol, square, note="divided by d" if rule.layer else "")
    share = rule.count / d  # the check always divides by d
    expected = _divide(saved.spread, saved.root * saved.root) * share
    formula = f"{rule.spread} / ({rule.spread} + ε)" if rule.inside else f"{rule.spread} / ({rule.root})²"
    formula = formula if rule.biased else f"(d - 1)/d · {formula}"
    w.add("expected", "expected", expected, formula, note=_note_on_expected(expected, saved.spread, rule))
    w.section = "backward"


def _add_gradient(w: _Writer, out: Vector, symbol: str, saved: _Saved, rule: _Rule, name: str) -> Vector:
    """Add the steps from the gradient of the norm's output to that of its input, the step `name`."""
    d, n = len(out), rule.normalized
    g = tuple(map(mul, out, rule.weight))
    w.add("grad_scaled", "g", g, f"{symbol} ⊙ γ", w.pairs(out, "·", rule.weight))
    mean = 0.0
    if rule.layer:
        mean = _divide(_sum(g), d)
        w.add("grad_mean", "mean(g)", mean, "(1/d) Σ gₖ", w.mean(g, d))
    products = tuple(map(mul, g, saved.normalized))
    p = _divide(_sum(products), rule.count)
    numbers = w.mean(products, rule.count, lambda k: f"{w.operand(g[k])}·{w.operand(saved.normalized[k])}")
    w.add("projection", "p", p, f"{rule.average} Σ gₖ·{n}ₖ", numbers, f"component of g along {n}")
    dz = tuple(_divide(a - mean - b * p, saved.root) for a, b in zip(g, saved.direction, strict=True))
    minus_mean, direction = " - mean(g)" if rule.layer else "", n if rule.inside else f"{rule.centred}/√{rule.spread}"
    subtracted = f" - {w.operand(mean)}" if rule.layer else ""
    numbers = w.vector(
        d,
        lambda k: (
            f"({w.number(g[k])}{subtracted} - {w.operand(saved.direction[k])}·{w.operand(p)}) / {w.number(saved.root)}"
        ),
    )
    note = f"sums to 0: the norm ignores a constant added to {rule.v}"
    note = note if rule.layer and all(map(math.isfinite, dz)) else ""
    if not rule.inside and not any(saved.direction):
        note = "the limit at √0; autograd gives nan here: 0 times the infinite slope of the root"
    w.add(name, name, dz, f"(g{minus_mean} - {direction}·p) {rule.over_root}", numbers, note)
    return dz


def _add_parameter_gradients(w: _Writer, out: Vector, symbol: str, saved: _Saved, rule: _Rule) -> None:
    """Add the gradients of gamma and beta of this token; a batch sums them over its tokens."""
    dweight, numbers = tuple(map(mul, out, saved.normalized)), w.pairs(out, "·", saved.normalized)
    w.add("dweight", "dγ", dweight, f"{symbol} ⊙ {rule.normalized}", numbers, "a batch sums this over its tokens")
    w.add("dbias", "dβ", out, symbol, note="a batch sums this over its tokens")


def _note_on_mean(mean: float, rule: _Rule) -> str:
    if not math.isfinite(mean):
        return ""
    if not rule.layer:
        return "RMSNorm does not subtract the mean"
    return (
        "0 up to round-off"
        if abs(mean) < 1e-9
        else "not 0: the features are so large that the round-off of μ is visible"
    )


def _note_on_expected(expected: float, spread: float, rule: _Rule) -> str:
    if not math.isfinite(expected):
        return ""
    if not spread:
        return "the variance is 0 and cannot become 1"
    if expected < 1:
        cause = "ε" if rule.biased else "d - 1 and ε" if rule.eps else "d - 1"
        return f"{1 - expected:.2g} below 1, due to {cause}"
    return "1: ε is negligible beside this variance" if rule.eps else "1: ε = 0 has no effect"


def _note_on_normalized(z: Vector, normalized: Vector, root: float, rule: _Rule) -> str:
    """Return a note about a special token: zeros, equal features, one feature, overflow."""
    n, y = rule.normalized, "y" if rule.v == "z" else "the read"
    if root == math.inf and not any(normalized):
        return f"the squares overflow, so {n} = 0 and {y} = β"
    if not all(map(math.isfinite, normalized)):
        return ""
    if not rule.layer:
        return "" if any(z) else f"a token of zeros stays zero, and {y} = β"
    if len(z) == 1:
        return f"d = 1: a single feature is its own mean, so {n} = 0 and {y} = β for every input"
    if min(z) == max(z):
        if max(map(abs, normalized)) > 1e-6:
            return "all features are equal: the values are only the round-off of μ; a larger ε hides it"
        return f"all features are equal: {n} = 0 up to round-off, and {y} = β"
    return ""


def _explain_nonfinite(steps: list[Step], rule: _Rule) -> tuple[Step, ...]:
    """Return the steps, with the reason as a note at the first step that is not finite."""
    for k, step in enumerate(steps):
        if not step.finite:
            if step.name == "variance" and not rule.count:
                why = "0/0: with d = 1 there is no variance divided by d - 1; later values are nan"
            elif step.name == "normalized":
                why = "division by 0: the root is 0, and ε = 0"
            else:
                why = "overflow: larger than the largest float64, 1.8e308; later values may be inf or nan"
            steps[k] = replace(step, note="; ".join(filter(None, (step.note, why))))
            break
    return tuple(steps)


def _sum(values: Vector) -> float:
    total = 0.0
    for value in values:
        total = total + value
    return total


def _divide(a: float, b: float) -> float:
    """Return the quotient by IEEE 754; b is not a negative zero."""
    if b:
        return a / b
    return math.copysign(math.inf, a) if a and not math.isnan(a) else math.nan


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of more than one element
        raise ValueError(f"{name} is {value!r:.60}, expected a number: write it with digits, as in 1.5.") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}, expected a finite number.")
    return number


def _vector(name: str, values: Any, d: int | None = None, *, scalar: bool = False) -> Vector:
    remedy = "pass a list of numbers, such as [1.5, -1, 4.5]"
    if isinstance(values, str | bytes):
        raise ValueError(f"{name} is the text {values!r:.60}, expected numbers: {remedy}.")
    try:
        entries = list(values)
    except TypeError:
        if scalar and d is not None:
            return (_number(name, values),) * d
        raise ValueError(f"{name} is {values!r:.60}, expected a vector: {remedy}.") from None
    if not entries:
        raise ValueError(f"{name} is empty, expected at least one number: {remedy}.")
    vector = tuple(_number(f"{name}[{k}]", value) for k, value in enumerate(entries))
    if d is not None and len(vector) != d:
        why = "they are added element by element" if name == "sublayer" else "each feature has its own"
        count = "1 number" if len(vector) == 1 else f"{len(vector)} numbers"
        raise ValueError(f"{name} has {count}, expected {d}, the length of x: {why}, so give both the same length.")
    return vector
