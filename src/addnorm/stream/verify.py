"""`verify`: compare a model with the wiring that it should have, or with a reference, term by term, and name what differs."""

from __future__ import annotations

import inspect as python_inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from addnorm._util.arguments import check_float
from addnorm._util.blocks import Block, Paragraph
from addnorm._util.norms import KINDS
from addnorm._util.numbers import format_count, format_number
from addnorm._util.render import Rendered
from addnorm.stream.deviations import MAX_SITES, Deviation, compare_programs, compare_wirings
from addnorm.stream.find.inspection import Inspection, Unknown
from addnorm.stream.inspect import inspect
from addnorm.stream.states import States, TermError, collect_states, load_states, measure_terms
from addnorm.wirings.spec import Stage, Wiring, as_wiring


@dataclass(frozen=True, repr=False)
class Verification(Rendered):
    """Result of `verify`. It prints as one sentence for each difference.

    Attributes:
        wiring: the expected wiring; None for a comparison with a reference.
        inspection: what the model computes.
        deviations: the terms whose equations differ.
        reference: name of the reference's class; None for a wiring.
        terms: the numbers of each term, compared with the reference's; empty for a wiring, or if the streams cannot be compared.
        unproven: parts of the model, or else of the reference, that `inspect` does not understand: nothing is said about them.
    """

    wiring: Wiring | None
    inspection: Inspection
    deviations: tuple[Deviation, ...]
    reference: str | None = None
    terms: tuple[TermError, ...] = ()
    unproven: tuple[Unknown, ...] = ()

    @property
    def different(self) -> tuple[TermError, ...]:
        """The terms whose numbers differ beyond rounding, in the order of the run."""
        return tuple(term for term in self.terms if term.error is not None and not term.agrees)

    @property
    def agrees(self) -> bool:
        """Whether no term differs, and every equation of the model and of the reference is proven."""
        return self.inspection.closes and not (self.deviations or self.unproven) and all(t.agrees for t in self.terms)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        deviations = [{**vars(one), "sites": [*one.sites], "sentence": str(one)} for one in self.deviations]
        if self.wiring is not None:
            expected = {"wiring": self.wiring.name, "options": dict(self.wiring.options)}
            return {**expected, "agrees": self.agrees, "deviations": deviations}
        terms = [{**vars(term), "agrees": term.agrees} for term in self.terms]
        return {"reference": self.reference, "agrees": self.agrees, "sentences": [*self.list_sentences()],
                "deviations": deviations, "terms": terms}  # fmt: skip

    def list_sentences(self) -> Iterator[str]:
        """Yield what differs, one sentence each: first the equations, then the numbers, then what could not be compared."""
        yield from map(str, self.deviations)
        places = {site for deviation in self.deviations for site in deviation.sites}
        different = [
            term for term in self.different if term.site not in places
        ]  # the others may follow from the equations
        if different:
            first, *others = different
            is_inside = not self.deviations and all(term.term == "branch" for term in different)
            yield "all residual terms agree; " * is_inside + f"the difference begins {first}" + _list_more(others)
        missing = [term for term in self.terms if term.error is None]
        if missing:
            yield f"{format_count(len(missing), 'term')} could not be compared, the first {missing[0]}"

    def __repr__(self) -> str:
        return f"<Verification: {'agrees' if self.agrees else 'differs'}, {self.expected}>"

    @property
    def expected(self) -> str:
        """The wiring's name, or the reference in words."""
        return self.wiring.name if self.wiring is not None else f"the reference, {self.reference}"

    def _blocks(self) -> Iterator[Block]:
        sites = format_count(len(self.inspection.sites), "sublayer")
        sentences = [*self.list_sentences()]
        if self.agrees and self.wiring is not None:
            error = format_number(self.inspection.closure, 2)
            yield Paragraph(("agrees ", "good"), f"with {self.expected}: {sites}, largest error {error}")
        elif self.agrees:
            most = max(self.terms, key=lambda term: term.roundings)
            text = f"{sites}, each computed from the reference's states; " + (
                f"the largest difference is {most}" if most.error else "equal to the bit"
            )
            yield Paragraph(("agrees ", "good"), f"with {self.expected}: {text}")
        elif not sentences:
            what = self.unproven[0].reason if self.unproven else "no residual stream was found"
            yield Paragraph(("not proven ", "bad"), f"to be {self.expected}: {what}")
        for sentence in sentences:
            yield Paragraph(("differs ", "bad"), f"from {self.expected}: {sentence}")


def _list_more(terms: Sequence[TermError]) -> str:
    places = ", ".join(term.place for term in terms[:MAX_SITES]) + ", ..." * (len(terms) > MAX_SITES)
    return f"; {format_count(len(terms), 'more term')} {'differ' if len(terms) > 1 else 'differs'}: {places}" * bool(
        terms
    )


def verify(
    model: nn.Module | Inspection, *args: Any, wiring: Wiring | Stage | str | None = None,
    like: nn.Module | Inspection | str | Path | None = None, eps: float | None = None, norm: str | None = None,
    dtype: torch.dtype | None = None, **kwargs: Any,
) -> Verification:  # fmt: skip
    """Compare a model with the wiring that it should have, or with a reference, and name each term that differs.

    The model runs once, as in `inspect`, which proves the equation of every sublayer; the rows are then compared with those of
    the wiring. A norm of the embedding, or a last norm, that the wiring does not have is no difference: post-LN models often have
    one. Learned factors are compared by their shape, not by their values.

    With a reference (`like`), the equations are compared first: norms, factors, eps, kinds, order. Then each term of a sublayer
    is computed again from the reference's own values before it: the norm that it reads, its branch, the add, the norm after it.
    So no error accumulates, and each term that differs is wrong by itself. Names of modules, the order of dimensions, and the
    dtype may differ. What precedes the stream is compared at its start; what follows the final norm is not compared.

    Args:
        model: the model, or an `Inspection` of it. Then there are no further inputs.
        args: positional arguments of the model.
        wiring: the expected wiring: one of `addnorm.wirings` with one stream, its name, or a `Row`.
        like: the reference: a model, which is called with the same inputs, an `Inspection`, or a file of `save_states`.
        eps: the expected eps of every norm; None to accept any.
        norm: the expected kind of every norm, "layer" or "rms"; None to accept any.
        dtype: the expected dtype of every sum; None to accept any.
        kwargs: keyword arguments of the model.

    Raises:
        ValueError: the wiring has several streams or computed coefficients, or an argument has a wrong value.
        Exception: as `inspect`.

    Example:
        >>> import copy
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
        >>> print(addnorm.verify(model, torch.randn(2, 5, 16), wiring="pre_ln"))
        differs from pre_ln: the final norm is missing, expected after the last sublayer
        >>> addnorm.verify(model.bfloat16(), torch.randn(2, 5, 16).bfloat16(), like=copy.deepcopy(model).float()).agrees
        True
    """
    if isinstance(model, Inspection) and (args or kwargs):
        raise TypeError("model is an Inspection, whose run has the inputs already: pass no more of them.")
    if like is not None:
        if any(option is not None for option in (wiring, eps, norm, dtype)):
            raise TypeError(
                "like is set, and wiring, eps, norm or dtype too, expected one of them: call verify for each."
            )
        inspection = model if isinstance(model, Inspection) else inspect(model, *args, **kwargs)
        return _verify_like(inspection, _find_states(like, args, kwargs))
    if wiring is None:
        raise TypeError('wiring and like are not set, expected one of them: verify(model, x, wiring="pre_ln").')
    wiring = as_wiring(wiring)
    if not wiring.has_rows:
        raise ValueError(
            f"wiring is {wiring.name!r}, which has several streams or computed coefficients, expected rows."
        )
    if norm is not None and norm not in KINDS:
        raise ValueError(f"norm is {norm!r}, expected {' or '.join(map(repr, KINDS))}, or None.")
    eps = None if eps is None else check_float("eps", eps)
    inspection = model if isinstance(model, Inspection) else inspect(model, *args, **kwargs)
    found = compare_wirings(inspection.streams, wiring, eps, norm, dtype)
    return Verification(wiring, inspection, found, unproven=inspection.unknown)


def _find_states(like: nn.Module | Inspection | str | Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> States:
    """Return the states of a reference."""
    if isinstance(like, str | Path):
        return load_states(like)
    return collect_states(like if isinstance(like, Inspection) else inspect_reference(like, args, kwargs))


def inspect_reference(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inspection:
    """Inspect a reference on the inputs of another model: in its own dtype, and by position if its arguments have other names."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"like is {type(model).__name__}, expected a torch.nn.Module, an Inspection or a path.")
    floats = [p.dtype for p in model.parameters() if p.is_floating_point()]
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda t: t.to(floats[0]) if floats and t.is_floating_point() else t, (args, kwargs)
    )
    try:
        python_inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        args, kwargs = (*args, *kwargs.values()), {}
    return inspect(model, *args, **kwargs)


def _verify_like(inspection: Inspection, reference: States) -> Verification:
    """Compare a model with the states of a reference."""
    theirs = reference["inspection"]
    unknown = [Unknown(**part) for part in theirs["unknown"]]
    unproven = inspection.unknown or tuple(replace(part, reason=f"{part.reason} (the reference)") for part in unknown)
    found, is_aligned = compare_programs(inspection, theirs["streams"], reference["terms"])
    if inspection.mode != theirs["mode"]:
        found = (Deviation("the mode", inspection.mode, theirs["mode"]), *found)
    terms = measure_terms(inspection, reference) if is_aligned else []
    return Verification(None, inspection, found, theirs["model"], tuple(terms), unproven)
