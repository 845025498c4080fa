"""Norms in primitive operators, found by what they compute, in whatever spelling.

A candidate is a value y that combines a statistic of x with x, its dominator (functions.py): y = f(x, gains), where the gains are
the weight and the bias. The function is computed again in float64 on test tokens: random directions at magnitudes from 1e-20 to
1e8, with random gains. It is a norm if

    y_i = (x_i - m) / D(x) * weight_i + bias_i       with m = 0 or the mean of x, for every token, whatever the other tokens are

and if D is one of the known roots of the mean square, with its eps, for every token (`Norm`). If D is another even function of x
that grows with x, the norm has a formula of its own: kind "own". `match_affine` adds the casts, the weight and the bias that
follow in the same call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from addnorm.stream.dataflow.arithmetic import is_move, match_factor, strip_views
from addnorm.stream.dataflow.graph import Op, Value
from addnorm.stream.find.functions import Dominators, Function, is_pointwise
from addnorm.stream.find.norm import EpsRole, Kind, Norm, add_eps, centre

CLOSE = 1e-6  # relative: constants such as 1 / d and eps pass through float32
MAX_GAINS = 4  # tensors that may be the weight or the bias of one norm
SCALES = [10.0**k for k in range(-20, 9, 2)]  # magnitudes of the test tokens; the squares begin far below any eps
DIRECTIONS = 3
SUBLINEAR = 0.99  # x / D(x) is a norm if it grows at most like |x|^0.99; x times a bounded gate grows like |x|


@dataclass
class _Form:
    """Formula y = (x - m) / D * weight + bias that a function computes.

    Attributes:
        is_centred: whether m is the mean of x.
        weight, bias: indices of the weight and the bias in `Function.list_gains()`, or None.
        kind: kind of the norm; "own" if D is none of the known roots.
        eps, role, unbiased: the root's `eps`, `eps_role` and `unbiased`, as in `Norm`.
    """

    is_centred: bool
    weight: int | None
    bias: int | None
    kind: Kind = "own"
    eps: float | None = None
    role: EpsRole = "square"
    unbiased: bool = False


class _Probe(NamedTuple):
    """Test tokens x of a function and the outputs y, both `(n, d)`. Tokens k and k + n / 2 have opposite signs."""

    x: Tensor
    y: Tensor
    gains: list[Tensor]


class NormFinder:
    """Finder of norms in primitive operators. Call `match` with every operator of a run, in order."""

    def __init__(self) -> None:
        self._dominators = Dominators()
        self._forms: dict[Hashable, _Form | None] = {}
        self._own: dict[Op, tuple[Function, _Form]] = {}
        self._undone: set[Op] = set()

    def match(self, op: Op, fused: Norm | None) -> Norm | None:
        """Return the norm of a known formula whose last step is this operator; None if there is none.

        If the operator alone is a norm, such as torch's layer_norm, that norm is passed as `fused` and returned.
        """
        x, y = self._dominators.add(op), op.out if op.outputs else None
        if fused is not None or x is None or y is None or not _is_candidate(op, x, y):
            return fused
        function = Function.between(x, y)
        if function is None or not function.combines_features:
            return None
        form = self._find_form(function)
        if form is None:
            self._undone.update(part for part in function.ops if part in self._own)
            return None
        if form.kind == "own":
            self._own[op] = function, form
            return None
        # The RMSNorm of x - mean(x) is the LayerNorm of x.
        before = None if form.is_centred else self._dominators.nearest.get(x)
        whole = Function.between(before, y) if before is not None and before.shape == x.shape else None
        of_whole = self._find_form(whole) if whole is not None else None
        if whole is not None and of_whole is not None and of_whole.kind != "own" and of_whole.is_centred:
            return _build_norm(whole, of_whole)
        return _build_norm(function, form)

    def list_own(self, norms: Sequence[Norm]) -> list[Norm]:
        """Return the norms of kind "own" that overlap neither with `norms` nor with each other, and that are not undone later.

        A norm is undone if a later function of the same x contains it and is no norm: x / max(x), rounded, times max(x).
        """
        inside = {op for norm in norms for op in norm.ops}
        found = []
        for op, (function, form) in reversed(self._own.items()):
            if op not in self._undone and inside.isdisjoint(function.ops):
                inside.update(function.ops)
                found.append(_build_norm(function, form))
        return found[::-1]

    def _find_form(self, function: Function) -> _Form | None:
        key = function.key()
        if key not in self._forms:
            self._forms[key] = _identify(function)
        return self._forms[key]


def _is_candidate(op: Op, x: Value, y: Value) -> bool:
    """Return whether `op` can be the last operator of a norm: y has the size of x, and combines values or features."""
    if y.shape[-1:] != x.shape[-1:] or y.tensor.numel() != x.tensor.numel() or not x.shape or x.shape[-1] < 2:
        return False
    if not (y.tensor.is_floating_point() and x.tensor.is_floating_point() and x.tensor.numel()):
        return False
    if is_pointwise(op):
        return len({v for v in op.inputs if v.has_data or not x.has_data}) > 1
    return not is_move(op)


def _build_norm(function: Function, form: _Form) -> Norm:
    gains = function.list_gains()
    weight, bias = (None if k is None else gains[k] for k in (form.weight, form.bias))
    norm = Norm(
        form.kind, form.eps, _strip_casts(function.x), function.y, weight, bias,
        unbiased=form.unbiased, eps_role=form.role, ops={*function.ops}, is_centred=form.is_centred,
    )  # fmt: skip
    if form.kind == "own":
        norm.divisor = _make_divisor(function, form)
    return norm


def _make_divisor(function: Function, form: _Form) -> Callable[[Tensor], Tensor]:
    """Return the function D of a norm y = (x - m) / D(x), computed by the operators of the run."""
    gains = function.list_gains()
    plain = {gains[k]: fill for k, fill in ((form.weight, 1.0), (form.bias, 0.0)) if k is not None}
    compute = function.freeze({v: torch.full(v.shape, fill, dtype=torch.float64) for v, fill in plain.items()})

    def divide(x: Tensor) -> Tensor:
        """Return D(x) for each token, `(*, d)` -> `(*, 1)`; 1 where the (centred) token is zero."""
        rows = x.reshape(-1, x.shape[-1]).to("cpu", torch.float64)
        y, rows = compute(rows), centre(rows, form.is_centred)
        product = (y * rows).sum(-1)
        divisor = torch.where(product != 0, rows.square().sum(-1) / product, 1.0)
        return divisor.reshape(*x.shape[:-1], 1).to(x)

    return divide


def _strip_casts(value: Value) -> Value:
    """Return the value from which `value` is computed by casts and views that keep the last dimension and the token order."""
    while value.op is not None and strip_views(value) is not value:
        before = value.op.inputs[0]
        is_permuted = value.op.name == "alias" and len(value.op.args) > 1
        if is_permuted or not value.traits & {"copy", "reshape", "squeeze", "affine"}:
            break
        if before.shape[-1:] != value.shape[-1:] or before.tensor.numel() != value.tensor.numel():
            break
        value = before
    return value


# What a function computes.


def _identify(function: Function) -> _Form | None:
    """Return the formula of a function that is a norm; None if the function is no norm."""
    probe = _compute_probe(function) if len(function.list_gains()) <= MAX_GAINS else None
    if probe is None:
        return None
    own = None
    for form, divisor in _list_forms(probe):
        known = _find_root(form, divisor, probe, function.list_numbers())
        if known is not None:
            return known
        own = form if _is_rescaling(divisor) else own
    return own


def _compute_probe(function: Function) -> _Probe | None:
    """Compute a function on the test tokens; None if that fails, or if its output for a token depends on other tokens."""
    d = function.x.shape[-1]
    random = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, dtype=torch.float64)

    gains = function.list_gains()
    values = [0.5 + torch.rand(g.shape, generator=random, dtype=torch.float64) for g in gains]
    directions = draw(DIRECTIONS, d) + 0.1
    rows = torch.cat([scale * directions for scale in SCALES])
    rows = torch.cat([rows, -rows])
    order = torch.randperm(len(rows), generator=random)
    kept = torch.arange(len(rows)) % 2 == 0
    try:
        compute = function.freeze(dict(zip(gains, values, strict=True)))
        y = compute(rows)
        again = compute(torch.where(kept[:, None], rows[order], draw(len(rows), d)))[kept]
    except Exception:  # of any kind: an operator of the function cannot be computed again
        return None
    before = y[order][kept]
    alone = (again - before).norm(dim=-1) <= CLOSE * before.norm(dim=-1)
    return _Probe(rows, y, [v.flatten() for v in values]) if bool(alone.all()) else None


def _list_forms(probe: _Probe) -> Iterator[tuple[_Form, Tensor]]:
    """Yield the formulas (x - m) / D * weight + bias that fit the probe, each with D for each token (NaN if not known)."""
    choices = [None, *range(len(probe.gains))]
    for bias in choices:
        for weight in choices:
            if weight is not None and weight == bias:
                continue
            scale = 1.0 if weight is None else probe.gains[weight]
            shift = torch.zeros(()) if bias is None else probe.gains[bias]
            normed = (probe.y - shift) / scale
            for is_centred in (False, True):
                x = centre(probe.x, is_centred)
                rate = (normed * x).sum(-1) / x.square().sum(-1)
                error = (normed - rate[:, None] * x).norm(dim=-1)
                size = normed.norm(dim=-1)
                is_known = size > CLOSE * shift.norm()  # for other tokens the bias hides the normalized features
                if bool((error <= CLOSE * size)[is_known].all()) and bool(is_known[-DIRECTIONS:].all()):
                    yield _Form(is_centred, weight, bias), torch.where(is_known, 1.0 / rate, torch.nan)


def _find_root(form: _Form, divisor: Tensor, probe: _Probe, numbers: Sequence[float]) -> _Form | None:
    """Return `form` with the kind and eps of the known root that `divisor` equals; None if it equals no known root."""
    d, total = probe.x.shape[-1], centre(probe.x, form.is_centred).square().sum(-1)
    kind: Kind = "layer" if form.is_centred else "rms"
    roots: list[tuple[Kind, bool, Tensor]] = [
        (kind, False, total / d), (kind, True, total / (d - 1)), ("scale", False, total),
    ]  # fmt: skip
    known = divisor.isfinite()
    divisor = divisor[known]
    for kind, unbiased, squares in roots:
        square = squares[known]
        if abs(float(divisor[-1] / square[-1].sqrt()) - 1) > CLOSE:
            continue
        choices: dict[EpsRole, Tensor] = {
            "square": divisor.square() - square, "root": divisor - square.sqrt(), "bound": divisor,
        }  # fmt: skip
        for role, eps in choices.items():
            smallest = int(square.argmin())
            found = float(eps[smallest])
            least = float(square[smallest] if role == "square" else square[smallest].sqrt())
            found = 0.0 if abs(found - (least if role == "bound" else 0.0)) <= CLOSE * least else found
            if found >= 0 and bool(((add_eps(square, found, role) - divisor).abs() <= CLOSE * divisor.abs()).all()):
                return replace(form, kind=kind, eps=_round(found, numbers), role=role, unbiased=unbiased)
    return None


def _round(eps: float, numbers: Sequence[float]) -> float:
    """Return the operators' constant in `numbers` that equals `eps` up to round-off; if there is none, `eps` in six digits."""
    near = min(numbers, key=lambda number: abs(number - eps), default=0.0)
    return near if abs(near - eps) <= 10 * CLOSE * eps else float(f"{eps:.6g}")


def _is_rescaling(divisor: Tensor) -> bool:
    """Return whether x / D(x) is a norm of kind "own": D is even and grows with |x| alike in all directions."""
    half = len(divisor) // 2
    even = (divisor[:half] - divisor[half:]).abs() <= CLOSE * divisor[:half].abs()
    ratio = divisor[half - DIRECTIONS : half] / divisor[half - 2 * DIRECTIONS : half - DIRECTIONS]
    growth = torch.log10(ratio) / 2  # between tokens whose magnitudes differ by a factor of 100
    is_same = float(growth.max() - growth.min()) < 1 - SUBLINEAR
    return bool(even[divisor[:half].isfinite()].all()) and is_same and float(growth.min()) > 1 - SUBLINEAR


def match_affine(norm: Norm, vectors_only: bool = False) -> None:
    """Extend a matched norm by the casts, the weight and the bias that the same call applies to its output.

    Args:
        norm: the norm, which is changed.
        vectors_only: accept only vectors over the features, since a single number may be a factor of a sublayer. Search also in
            the call that contains the norm's module. Pass True for an operator of torch without a weight.
    """
    y = norm.y
    assert y.op is not None
    frame = y.op.frame
    frames = (frame, frame.parent) if vectors_only else (frame,)
    casts: list[Op] = []
    while len(y.users) == 1 and y.users[0].frame in frames and y.users[0].outputs:
        op = y.users[0]
        if op.frame is not frame and _is_scale_of_write(op):
            return
        gains = _match_gains(norm, op, y)
        y = op.out
        if "copy" in op.traits:  # part of the norm if a weight or a bias follows
            casts.append(op)
        elif not gains or (
            vectors_only and norm.x.shape[-1] > 1 and any(g.tensor.numel() == 1 for g in gains.values())
        ):
            return
        else:
            norm.weight, norm.bias = gains.get("weight", norm.weight), gains.get("bias", norm.bias)
            norm.ops |= {op, *casts}
            norm.y, casts = y, []
            if "root of d" in gains:
                norm.kind, norm.uses_length = "layer" if norm.is_centred else "rms", True


def _is_scale_of_write(op: Op) -> bool:
    """Return whether `op` is a product that only adds of the same call use: gamma * N(f(x)) in x + gamma * N(f(x))."""
    users = op.out.users
    return op.name == "mul" and len(users) == 1 and users[0].name == "add" and users[0].frame is op.frame


def _match_gains(norm: Norm, op: Op, y: Value) -> dict[str, Value]:
    """Return the "weight" or the "bias" that `op` applies to `y`, the output of a norm, or both.

    The dict is empty if `op` applies neither. If `op` multiplies a unit vector by the root of d, the only key is "root of d".
    """
    product = match_factor(op) if norm.kind == "scale" else None
    # A unit vector times the root of d has a mean square of one.
    if product is not None and product.x is y and abs(product.number / y.shape[-1] ** 0.5 - 1) < CLOSE:
        return {"root of d": y}
    gains = [a for a in op.args[:3] if isinstance(a, Value) and a is not y]
    if norm.bias is not None or op.out.shape != y.shape or not all(_is_gain(v, y) for v in gains):
        return {}
    if op.name == "addcmul" and norm.weight is None and len(gains) == 2 and op.get("value") == 1:
        return dict(zip(("bias", "weight"), gains, strict=True)) if op.args[0] is gains[0] else {}
    if len(gains) != 1 or op.get("alpha", 1) != 1:
        return {}
    if op.name == "mul" and norm.weight is None:
        return {"weight": gains[0]}
    return {"bias": gains[0]} if op.name == "add" else {}


def _is_gain(value: Value, y: Value) -> bool:
    """Return whether a value is a parameter or a constant: a number, or a vector over the features of y."""
    is_vector = value.tensor.numel() in (1, y.shape[-1]) and value.shape[-1:] in ((), (1,), y.shape[-1:])
    return is_vector and value.is_fixed
