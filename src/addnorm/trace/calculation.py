"""`trace`: the computation of Add & Norm and its gradient for one token.

`trace` has many parameters: one for each setting of the norm and of the printed table.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import add, mul, sub
from typing import Any, get_args

from .steps import PLACEMENTS, EpsPlace, Norm, Placement, Section, Step, Trace, Variance, Vector, show


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
        sublayer: the sublayer's output for x (pre-LN: for Norm(x)), d numbers.
        placement: "post" or "post_ln" normalizes the sum, "pre" or "pre_ln" the sublayer's input: z = x + Sublayer(Norm(x)).
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
    if isinstance(placement, str):
        placement = PLACEMENTS.get(placement.lower().replace("-", "_"), placement)
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
        raise ValueError(f"eps is {show(eps, 6)}, expected a number >= 0: the usual ones are 1e-5 and 1e-6.")
    if not (isinstance(digits, int) and 1 <= digits <= 17):
        raise ValueError(f"digits is {digits!r}, expected a whole number from 1 to 17: 17 show a float exactly.")
    token = _vector("x", x)
    d = len(token)
    branch = _vector("sublayer", sublayer, d)
    gamma = _vector("weight", 1.0 if weight is None else weight, d, scalar=True)
    beta = _vector("bias", 0.0 if bias is None else bias, d, scalar=True)
    out_grad = _vector("grad", (1.0, *(0.0,) * (d - 1)) if grad is None else grad, d)
    back = out_grad if read_grad is None else _vector("read_grad", read_grad, d)
    settings = Trace(placement, norm, variance, eps_place, eps, gamma, beta, digits, (), title)
    w = _Derivation(settings)
    w.add("x", "x", token, note="the residual stream")
    (_add_post_ln if placement == "post" else _add_pre_ln)(w, token, branch, out_grad, back)
    if grad is None:
        w.explain("grad", "default: 1 for the first feature, 0 for the others")
    if read_grad is None:
        w.explain("read_grad", "default: the identity replaces the unknown Jacobian of the sublayer")
    return replace(settings, steps=_explain_nonfinite(w))


class _Derivation:
    """Steps of a trace, computed and written into formulas: every step has its value, its formula and its numbers.

    Args:
        of: a trace without steps, which has the settings of the norm.

    Attributes:
        v: symbol of the norm's input.
        count: divisor of the variance.
        normalized, spread, root: z_norm, the variance and the root, which the backward uses.
        direction: derivative of the root by each feature, times `count`.
    """

    normalized: Vector
    direction: Vector
    spread: float
    root: float

    def __init__(self, of: Trace) -> None:
        self.layer, self.biased, self.inside = of.norm == "layer", of.variance == "biased", of.eps_place == "inside"
        self.eps, self.weight, self.bias, self.digits = of.eps, of.weight, of.bias, of.digits
        self.d = len(of.weight)
        self.count = self.d if self.biased else self.d - 1
        self.v = v = "z" if of.placement == "post" else "x"
        self.spread_text = "σ²" if self.layer else "ms"
        self.centred_text = f"({v} - μ)" if self.layer else v
        self.root_text = f"√({self.spread_text} + ε)" if self.inside else f"√({self.spread_text}) + ε"
        self.over_root = f"/ {self.root_text}" if self.inside else f"/ ({self.root_text})"
        self.normalized_text = f"{v}_norm"
        self.average_text = "(1/d)" if self.biased else "(1/(d - 1))"
        self.section: Section = "forward"
        self.steps: list[Step] = []

    def add(
        self, name: str, symbol: str, value: float | Vector, formula: str = "", numbers: str = "", note: str = ""
    ) -> None:
        """Add a step to the current section."""
        self.steps.append(Step(name, self.section, symbol, value, formula, numbers, note))

    def explain(self, name: str, note: str) -> None:
        """Replace the note of a step, unless `note` is empty."""
        self.steps = [replace(step, note=note) if note and step.name == name else step for step in self.steps]

    def combine(
        self, name: str, symbol: str, left: Vector, sign: str, right: Vector, formula: str = "", note: str = ""
    ) -> Vector:
        """Add a step that combines two vectors feature by feature, and return its value."""
        value = tuple(map(OPERATIONS[sign], left, right))
        numbers = self.vector(lambda k: f"{self.number(left[k])}{sign}{self.operand(right[k])}")
        self.add(name, symbol, value, formula, numbers, note)
        return value

    def average(
        self, name: str, symbol: str, values: Vector, count: int, formula: str, text: Callable[[int], str] | None = None,
        note: str = "",
    ) -> float:  # fmt: skip
        """Add a step with a mean, and return the mean. `text` returns the text of a term; by default its number."""
        total = _sum(values)
        terms = self.abbreviate(text or (lambda k: (self.operand if k else self.number)(values[k])), " + ")
        value = _divide(total, count)
        self.add(name, symbol, value, formula, f"({terms}) / {count} = {self.number(total)} / {count}", note)
        return value

    def number(self, value: float) -> str:
        """Return a number as text."""
        return show(value, self.digits)

    def operand(self, value: float) -> str:
        """Return a number, in parentheses if it is negative or has an exponent."""
        text = self.number(value)
        return f"({text})" if "-" in text or "e" in text else text

    def abbreviate(self, text: Callable[[int], str], separator: str) -> str:
        """Return the joined texts of the features. With more than four features, only the first two and the last appear."""
        d = self.d
        return separator.join(map(text, range(d)) if d <= 4 else [text(0), text(1), "…", text(d - 1)])

    def vector(self, text: Callable[[int], str]) -> str:
        """Return the texts of the features in brackets."""
        return f"[{self.abbreviate(text, ', ')}]"


def _add_post_ln(w: _Derivation, token: Vector, branch: Vector, grad: Vector, _: Vector) -> None:
    """Add the steps of post-LN after the token."""
    w.add("sublayer", "Sublayer(x)", branch, note="output of the sublayer")
    _add_norm(w, w.combine("z", "z", token, " + ", branch, "x + Sublayer(x)"))
    _add_checks(w)
    w.add("grad", "dy", grad, note="incoming gradient")
    dz = _add_gradient(w, grad, "dy", "dz")
    w.add("dx", "dx", dz, "dz", note="the +1 path; the sublayer adds its Jacobian times dSublayer(x)")
    w.add("dsublayer", "dSublayer(x)", dz, "dz", note="the same: both terms of a sum get its gradient")
    _add_parameter_gradients(w, grad, "dy")


def _add_pre_ln(w: _Derivation, token: Vector, branch: Vector, grad: Vector, read_grad: Vector) -> None:
    """Add the steps of pre-LN after the token."""
    _add_norm(w, token)
    w.add("sublayer", "Sublayer(read)", branch, note="output of the sublayer for it")
    w.combine("z", "z", token, " + ", branch, "x + Sublayer(read)", note="the stream continues without a norm")
    _add_checks(w)
    w.add("grad", "dz", grad, note="incoming gradient")
    w.add("straight", "dx, straight", grad, "dz", note="the +1 path: there is no norm on it")
    w.add("dsublayer", "dSublayer(read)", grad, "dz", note="the same: both terms of a sum get its gradient")
    note = "from the argument read_grad: the result of the sublayer's backward"
    w.add("read_grad", "dread", read_grad, "Jacobianᵀ dSublayer(read)", note=note)
    through = _add_gradient(w, read_grad, "dread", "dnorm")
    note = "the straight path, plus the path through the sublayer and its norm"
    w.combine("dx", "dx", grad, " + ", through, "dz + dnorm", note)
    _add_parameter_gradients(w, read_grad, "dread")


def _add_norm(w: _Derivation, z: Vector) -> None:
    """Add the steps of the norm, from the mean (RMSNorm: the squares) to the output, weight * z_norm + bias."""
    v, n, centred = w.v, w.normalized_text, z
    if w.layer:
        mean = w.average("mean", "μ", z, w.d, f"(1/d) Σ {v}ₖ")
        centred = w.combine("centred", f"{v} - μ", z, " - ", (mean,) * w.d)
    squares = tuple(a * a for a in centred)
    w.add("squares", f"{w.centred_text}²", squares, numbers=w.vector(lambda k: f"{w.operand(centred[k])}²"))
    name, term = ("variance", f"({v}ₖ - μ)²") if w.layer else ("mean_square", f"{v}ₖ²")
    spread = w.spread = w.average(name, w.spread_text, squares, w.count, f"{w.average_text} Σ {term}")
    sigma, eps, size = math.sqrt(spread), show(w.eps), w.number(spread)
    root = w.root = math.sqrt(spread + w.eps) if w.inside else sigma + w.eps
    w.add("root", w.root_text, root, numbers=f"√({size} + {eps})" if w.inside else f"√({size}) + {eps}")
    formula = f"{w.centred_text} {w.over_root}"
    normalized = w.normalized = w.combine("normalized", n, centred, " / ", (root,) * w.d, formula)
    w.explain("normalized", _note_on_normalized(w, z))
    scaled = w.combine("scaled", f"γ ⊙ {n}", w.weight, "·", normalized)
    symbol, note = ("y", "") if v == "z" else ("read", "input of the sublayer")
    w.combine("shifted", symbol, scaled, " + ", w.bias, f"γ ⊙ {n} + β", note)
    w.direction = normalized if w.inside else tuple(_divide(a, sigma) if sigma else 0.0 for a in centred)


def _add_checks(w: _Derivation) -> None:
    """Add the checks of mean 0 and variance 1, and switch to the backward section."""
    n, normalized, spread = w.normalized_text, w.normalized, w.spread_text
    w.section = "checks"
    mean = _divide(_sum(normalized), w.d)
    w.add("check_mean", f"mean({n})", mean, note=_note_on_mean(w, mean))
    center = mean if w.layer else 0.0
    square = _divide(_sum(tuple((a - center) * (a - center) for a in normalized)), w.d)
    name, symbol = ("check_variance", f"variance({n})") if w.layer else ("check_square", f"mean({n}²)")
    w.add(name, symbol, square, note="divided by d" if w.layer else "")
    expected = _divide(w.spread, w.root * w.root) * (w.count / w.d)  # the check always divides by d
    formula = f"{spread} / ({spread} + ε)" if w.inside else f"{spread} / ({w.root_text})²"
    formula = formula if w.biased else f"(d - 1)/d · {formula}"
    w.add("expected", "expected", expected, formula, note=_note_on_expected(w, expected))
    w.section = "backward"


def _add_gradient(w: _Derivation, out: Vector, symbol: str, name: str) -> Vector:
    """Add the steps from the gradient `out` of the norm's output to the gradient of the norm's input, the step `name`."""
    n, normalized, mean, subtracted = w.normalized_text, w.normalized, 0.0, ""
    g = w.combine("grad_scaled", "g", out, "·", w.weight, f"{symbol} ⊙ γ")
    if w.layer:
        mean = w.average("grad_mean", "mean(g)", g, w.d, "(1/d) Σ gₖ")
        subtracted = f" - {w.operand(mean)}"
    p = w.average(
        "projection", "p", tuple(map(mul, g, normalized)), w.count, f"{w.average_text} Σ gₖ·{n}ₖ",
        lambda k: f"{w.operand(g[k])}·{w.operand(normalized[k])}", f"component of g along {n}",
    )  # fmt: skip
    dz = tuple(_divide(a - mean - b * p, w.root) for a, b in zip(g, w.direction, strict=True))
    minus_mean, direction = " - mean(g)" if w.layer else "", n if w.inside else f"{w.centred_text}/√{w.spread_text}"
    last, root = w.operand(p), w.number(w.root)
    numbers = w.vector(lambda k: f"({w.number(g[k])}{subtracted} - {w.operand(w.direction[k])}·{last}) / {root}")
    note = f"sums to 0: the norm ignores a constant added to {w.v}"
    note = note if w.layer and all(map(math.isfinite, dz)) else ""
    if not w.inside and not any(w.direction):
        note = "the limit at √0; autograd gives nan here: 0 times the infinite slope of the root"
    w.add(name, name, dz, f"(g{minus_mean} - {direction}·p) {w.over_root}", numbers, note)
    return dz


def _add_parameter_gradients(w: _Derivation, out: Vector, symbol: str) -> None:
    """Add the gradients of gamma and beta for this token. In a batch, the gradients of all tokens are summed."""
    note = "a batch sums this over its tokens"
    w.combine("dweight", "dγ", out, "·", w.normalized, f"{symbol} ⊙ {w.normalized_text}", note)
    w.add("dbias", "dβ", out, symbol, note=note)


def _note_on_mean(w: _Derivation, mean: float) -> str:
    if not math.isfinite(mean):
        return ""
    if not w.layer:
        return "RMSNorm does not subtract the mean"
    if abs(mean) < 1e-9:
        return "0 up to round-off"
    return "not 0: the features are so large that the round-off of μ is visible"


def _note_on_expected(w: _Derivation, expected: float) -> str:
    if not math.isfinite(expected):
        return ""
    if not w.spread:
        return "the variance is 0 and cannot become 1"
    if expected < 1:
        cause = "ε" if w.biased else "d - 1 and ε" if w.eps else "d - 1"
        return f"{show(1 - expected, 2)} below 1, due to {cause}"
    return "1: ε is negligible beside this variance" if w.eps else "1: ε = 0 has no effect"


def _note_on_normalized(w: _Derivation, z: Vector) -> str:
    """Return a note about a special token: zeros, equal features, one feature, overflow."""
    n, y, normalized = w.normalized_text, "y" if w.v == "z" else "the read", w.normalized
    if w.root == math.inf and not any(normalized):
        return f"the squares overflow, so {n} = 0 and {y} = β"
    if not all(map(math.isfinite, normalized)):
        return ""
    if not w.layer:
        return "" if any(z) else f"a token of zeros stays zero, and {y} = β"
    if w.d == 1:
        return f"d = 1: a single feature is its own mean, so {n} = 0 and {y} = β for every input"
    if min(z) == max(z):
        if max(map(abs, normalized)) > 1e-6:
            return "all features are equal: the values are only the round-off of μ; a larger ε hides it"
        return f"all features are equal: {n} = 0 up to round-off, and {y} = β"
    return ""


def _explain_nonfinite(w: _Derivation) -> tuple[Step, ...]:
    """Return the steps. The first step whose value is not finite gets the reason as a note."""
    first = next((step for step in w.steps if not step.finite), None)
    if first is not None:
        if first.name == "variance" and not w.count:
            why = "0/0: with d = 1 there is no variance divided by d - 1; later values are nan"
        elif first.name == "normalized":
            why = "division by 0: the root is 0, and ε = 0"
        else:
            why = "overflow: larger than the largest float64, 1.8e308; later values may be inf or nan"
        w.explain(first.name, "; ".join(filter(None, (first.note, why))))
    return tuple(w.steps)


def _sum(values: Vector) -> float:
    total = 0.0
    for value in values:
        total = total + value
    return total


def _divide(a: float, b: float) -> float:
    """Return a / b as in IEEE 754, with inf or nan for b = 0. b must not be a negative zero."""
    if b:
        return a / b
    return math.copysign(math.inf, a) if a and not math.isnan(a) else math.nan


OPERATIONS: dict[str, Callable[[float, float], float]] = {" + ": add, " - ": sub, "·": mul, " / ": _divide}


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
