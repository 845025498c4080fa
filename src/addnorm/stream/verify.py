"""`verify`: compare a model with the wiring that it should have, or with a reference, term by term, and name what differs."""

from __future__ import annotations

import inspect as python_inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
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
from addnorm.stream.dataflow.graph import DATA, NOISE
from addnorm.stream.dataflow.state import fork_rng
from addnorm.stream.dataflow.wrappers import distribute, find_split_parameter, has_flat_parameters
from addnorm.stream.deviations import MAX_SITES, Deviation, compare_models, compare_wirings, group_differences
from addnorm.stream.find.remarks import MISSING
from addnorm.stream.find.unknown import Unknown
from addnorm.stream.inspect import inspect, inspect_run
from addnorm.stream.inspection import Inspection
from addnorm.stream.program.deviations import RULE, Difference, compare_program, compare_program_norms
from addnorm.stream.program.result import Program, ProgramSite
from addnorm.stream.states import States, TermError, collect_states, load_states, match_parallel, measure_terms
from addnorm.wirings.spec import Stage, Wiring, as_wiring

NO_PROGRAM = "its rows have no known wiring, and no other streams were found"
NORM = "it begins with a norm over a dimension that is not known to hold the features of a token"
RANDOM = "its matrices are random, as with dropout: call model.eval() before"
DAMAGED = (
    "like is {!r}, expected a whole file of `addnorm record --states`: a part is missing or changed ({}: {}). "
    "Record it again."
)
MOVE, SMALL = 1.5, 64  # how far a parameter of the coefficients is moved if it has at most that many numbers
SHARES = (1.0, 0.1, 0.01)  # factors of the moves, tried in turn: the numbers of a deep model may overflow
UNMOVED = ", with the parameters of the coefficients as they are: streams that are equal before training hide errors"


@dataclass(frozen=True, repr=False)
class Verification(Rendered):
    """Result of `verify`: true if the model agrees. It prints as one sentence for each difference.

    Attributes:
        wiring: the expected wiring; None for a comparison with a reference.
        inspection: what the model computes.
        deviations: the terms whose equations differ.
        reference: name of the reference's class; None for a wiring.
        terms: the numbers of each term, compared with the reference's; empty for a wiring, or if the streams cannot be compared.
        unproven: parts of the model, or else of the reference, that `inspect` does not understand: nothing is said about them.
        moved: whether the coefficients were compared with other parameters than the model's, which drive its streams apart;
            False for an `Inspection`, for `FullyShardedDataParallel`, and if the numbers overflow with them. None if no
            coefficients with parameters were compared.

    Example:
        >>> model = addnorm.nn.Encoder(2, 16, nhead=2, wiring="post_ln").eval()
        >>> found = addnorm.verify(model, torch.randn(2, 5, 16), wiring="pre_ln")
        >>> bool(found), str(found.deviations[0])
        (False, 'the norm is after the add, expected before the sublayer: in all 4')
    """

    wiring: Wiring | None
    inspection: Inspection
    deviations: tuple[Deviation, ...]
    reference: str | None = None
    terms: tuple[TermError, ...] = ()
    unproven: tuple[Unknown, ...] = ()
    moved: bool | None = None

    @property
    def different(self) -> tuple[TermError, ...]:
        """The terms whose numbers differ beyond rounding, in the order of the run."""
        return tuple(term for term in self.terms if term.error is not None and not term.agrees)

    @property
    def agrees(self) -> bool:
        """Whether no term differs, and every equation of the model and of the reference is proven."""
        return self.inspection.closes and not (self.deviations or self.unproven) and all(t.agrees for t in self.terms)

    def __bool__(self) -> bool:
        return self.agrees

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        deviations = [{**vars(one), "sites": [*one.sites], "sentence": str(one)} for one in self.deviations]
        if self.wiring is not None:
            expected = {"wiring": self.wiring.name, "options": dict(self.wiring.options)}
            return {**expected, "agrees": self.agrees, "moved": self.moved, "deviations": deviations}
        terms = [{**vars(term), "agrees": term.agrees} for term in self.terms]
        return {"reference": self.reference, "agrees": self.agrees, "sentences": [*self.list_sentences()],
                "deviations": deviations, "terms": terms}  # fmt: skip

    def list_sentences(self) -> Iterator[str]:
        """Yield what differs, one sentence each: first the equations, then the numbers, then what could not be compared."""
        yield from map(str, self.deviations)
        places = {site for deviation in self.deviations for site in deviation.sites}
        different = [term for term in self.different if term.site not in places]  # others may follow from the equations
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
        sites = format_count(len(self.inspection.list_sites()), "sublayer")
        sentences = [*self.list_sentences()]
        if self.agrees and self.wiring is not None:
            error = format_number(self.inspection.closure, 2)
            text = f"with {self.expected}: {sites}, largest error {error}" + UNMOVED * (self.moved is False)
            yield Paragraph(("agrees ", "good"), text)
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
    verb = "differ" if len(terms) > 1 else "differs"
    return f"; {format_count(len(terms), 'more term')} {verb}: {places}" * bool(terms)


def verify(
    model: nn.Module | Inspection, *args: Any, wiring: Wiring | Stage | str | None = None,
    like: nn.Module | Inspection | str | Path | None = None, eps: float | None = None, norm: str | None = None,
    dtype: torch.dtype | None = None, **kwargs: Any,
) -> Verification:  # fmt: skip
    """Compare a model with the wiring that it should have, or with a reference, and name each term that differs.

    The model runs once, as in `inspect`, which proves the equation of every sublayer; the rows are then compared with those of
    the wiring. A norm of the embedding, or a last norm, that the wiring does not have is no difference: post-LN models often have
    one. Learned factors are compared by their shape, not by their values.

    With a wiring of several streams, or of computed coefficients, the measured matrices C, A and B of every sublayer are compared
    with the wiring's formula, computed with the model's own parameters, and with its mutants: transposed, not applied, scaled.
    The model runs a second time with other parameters of the coefficients, which then get their values back: before training
    all streams are equal, and most faults change no number. An `Inspection` is compared as it is.

    With a reference (`like`), the equations are compared first: norms, factors, eps, kinds, order. Then each term of a sublayer
    is computed again from the reference's own values before it: the norm that it reads, its branch, the add, the norm after it.
    So no error accumulates, and each term that differs is wrong by itself. Names of modules, the order of dimensions, and the
    dtype may differ. What precedes the stream is compared at its start; what follows the final norm is not compared.

    Args:
        model: the model, or an `Inspection` of it. Then there are no further inputs.
        args: positional arguments of the model.
        wiring: the expected wiring: one of `addnorm.wirings`, its name, or a `Row` or `Stage`.
        like: the reference: a model, which is called with the same inputs, an `Inspection`, or a file of `save_states`.
        eps: the expected eps of every norm; None to accept any.
        norm: the expected kind of every norm, "layer" or "rms"; None to accept any.
        dtype: the expected dtype of every sum; None to accept any.
        kwargs: keyword arguments of the model.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value.
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
        for name, one in (("model", model), ("like", like)):
            _refuse_split(name, one)
        inspection = model if isinstance(model, Inspection) else inspect(model, *args, **kwargs)
        inspection = inspection.with_program()
        if isinstance(like, str | Path):
            reference = load_states(like)
        else:
            other = like if isinstance(like, Inspection) else inspect_reference(like, args, kwargs, model)
            reference = collect_states(other.with_program())
        try:
            return _verify_like(inspection, reference)
        except (LookupError, TypeError, AttributeError) as error:
            if not isinstance(like, str | Path):
                raise
            raise ValueError(DAMAGED.format(str(like), type(error).__name__, error)) from error
    if wiring is None:
        raise TypeError('wiring and like are not set, expected one of them: verify(model, x, wiring="pre_ln").')
    wiring = as_wiring(wiring)
    if norm is not None and norm not in KINDS:
        raise ValueError(f"norm is {norm!r}, expected {' or '.join(map(repr, KINDS))}, or None.")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}, expected a torch.dtype as torch.float32, or None.")
    eps = None if eps is None else check_float("eps", eps)
    if not wiring.has_rows:
        return _verify_program(model, args, kwargs, wiring, (eps, norm, dtype))
    inspection = model if isinstance(model, Inspection) else inspect_run(model, args, kwargs, as_program=False)
    if inspection.program is not None:
        return _verify_program(inspection, args, kwargs, wiring, (eps, norm, dtype))
    unproven = {part.path for part in inspection.unknown} - {""}  # an empty one is the model
    found = compare_wirings(inspection.streams, wiring, eps, norm, dtype, unproven)
    states = [value.tensor for site in inspection.sites for value in (site.sublayer.add.x, site.sublayer.add.out)]
    return _judge(wiring, inspection, found, states)


def _refuse_split(name: str, model: Any) -> None:
    """Raise a ValueError if each process computes a part of a model's sublayers: the processes would wait for each other."""
    module = model.target if isinstance(model, Inspection) else model
    if isinstance(module, nn.Module) and (parameter := find_split_parameter(module)):
        raise ValueError(
            f"{name} has the parameter {parameter} that tensor parallelism splits, expected whole ones, or those of FSDP: "
            "compare a model in one process, into which the state dict loads."
        )


def _judge(
    wiring: Wiring, inspection: Inspection, found: tuple[Deviation, ...], states: Iterable[Tensor]
) -> Verification:
    """Return the result of a comparison with a wiring.

    If a state has infinities, NaN or squares that overflow, these alone may be the cause of all deviations. Then the deviations
    are left out, and the reason is in `unproven`.
    """
    reason = next(filter(None, map(_explain_numbers, states)), "") if found or inspection.unknown else ""
    if reason:
        return Verification(wiring, inspection, (), unproven=(Unknown("", reason), *inspection.unknown))
    remarks = [Unknown(stream.name, remark) for stream in inspection.streams for remark in stream.remarks]
    missing = [remark for remark in remarks if remark.reason.endswith(MISSING)]
    return Verification(wiring, inspection, found, unproven=(*inspection.unknown, *missing))


def _explain_numbers(state: Tensor) -> str:
    """Return why a state with NaN, infinity or overflow proves nothing; an empty string if its numbers are in order."""
    numbers = state.double()
    odd = numbers.numel() - int(numbers.isfinite().sum())
    if odd:
        return f"{odd:,} of the {numbers.numel():,} numbers of a state are NaN or infinite: call it with other inputs"
    largest = torch.finfo(torch.promote_types(state.dtype, torch.float32)).max
    if numbers.numel() and float(numbers.square().sum(-1).amax()) > largest:
        return "the squares of a state overflow, so a norm gives zeros: call it with smaller inputs"
    return ""


@fork_rng()  # a thread that moves parameters keeps out the others that verify or inspect a model
def _verify_program(
    model: nn.Module | Inspection, args: Any, kwargs: dict[str, Any], wiring: Wiring, norms: tuple[Any, Any, Any]
) -> Verification:
    """Compare the residual program of a model with a wiring of several streams, or with computed coefficients.

    The model is compared with its coefficients' parameters perturbed: before training all streams are equal, which hides faults.
    """
    inspection = model if isinstance(model, Inspection) else inspect_run(model, args, kwargs, as_program=True)
    program = inspection.program
    if program is None:
        if not inspection.closes or inspection.wiring == wiring.name:
            return Verification(wiring, inspection, (), unproven=inspection.unknown)
        if inspection.wiring in ("none", "unknown"):
            return Verification(wiring, inspection, (), unproven=(Unknown("", NO_PROGRAM),))
        return Verification(wiring, inspection, (Deviation(RULE, inspection.wiring, wiring.name),))
    if sites := [site for site in program.sites if _begins_in_unknown_norm(site)]:
        return Verification(wiring, inspection, (), unproven=tuple(Unknown(site.id, NORM) for site in sites))
    if _has_dropout(program):
        return Verification(wiring, inspection, (), unproven=(Unknown("", RANDOM),))
    is_other = wiring.has_rows and program.wiring is not None  # then every term differs
    is_learned = not is_other and bool(program.find_leaves(program.matrices)[0])
    found = [Difference(RULE, inspection.wiring, wiring.name, "")] if is_other else None
    # FullyShardedDataParallel gathers from its own storage, or frees what is written to.
    if is_learned and not isinstance(model, Inspection) and not has_flat_parameters(model):
        for share in SHARES:
            with move_coefficients(model, program, share):
                other = inspect_run(model, args, kwargs, as_program=True).program
                if other is not None and other.closes:
                    found = compare_program(other, wiring)
                    break
    moved = found is not None if is_learned else None
    found = compare_program(program, wiring) if found is None else found
    differences = [*found, *compare_program_norms(program, *norms)]
    states = [value.tensor for state in program.spine.states for value in state]
    judged = _judge(wiring, inspection, group_differences(differences, len(program.sites)), states)
    return replace(judged, moved=moved)


def _begins_in_unknown_norm(site: ProgramSite) -> bool:
    """Return whether a sublayer normalizes what it reads by an operator that is not known to be a norm over the features."""
    before = takewhile(lambda op: "mixing" not in op.traits, site.write.ops)
    return any("normalizing" in op.traits and not op.norms for op in before)


def _has_dropout(program: Program) -> bool:
    """Return whether a matrix is random, as with dropout. Dropout of a sublayer's output is a part of the sublayer."""
    spine = program.spine
    carried = {value.op for value in spine.relevant - spine.carrier.sources_set}
    ops = (*program.find_leaves(program.matrices)[1], *carried)
    return any(
        "random" in op.traits or any(v.kind & (DATA | NOISE) == NOISE for v in (*op.inputs, *op.outputs))
        for op in ops if op is not None
    )  # fmt: skip


@contextmanager
def move_coefficients(model: nn.Module, program: Program, share: float = 1.0) -> Iterator[None]:
    """Perturb the parameters of the coefficients in place while the block runs, and restore their bits after it."""
    names = {leaf.name for leaf in program.find_leaves(program.matrices)[0]}
    inner = getattr(model, "_orig_mod", model)  # the module that torch.compile wraps
    own = [tensor.data for name, tensor in (*inner.named_parameters(), *inner.named_buffers()) if name in names]
    moved = [(tensor, tensor.clone()) for tensor in own if tensor.is_floating_point() and 0 not in tensor.stride()]
    generator = torch.Generator().manual_seed(0)
    try:
        for tensor, _ in moved:
            size = MOVE if tensor.numel() <= SMALL else tensor.shape[-1] ** -0.5
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            tensor.add_(distribute((share * size * noise).to(tensor.device, tensor.dtype), tensor))
        yield
    finally:
        for tensor, before in moved:
            tensor.copy_(before)


def inspect_reference(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], other: nn.Module | Inspection
) -> Inspection:
    """Inspect a reference on the inputs of another model: in its own dtype, and by position if its arguments have other names.

    Args:
        model: the reference.
        args, kwargs: the inputs.
        other: the model that is compared. Inputs are cast unless its parameters and the reference's have the same dtypes.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"like is {type(model).__name__}, expected a torch.nn.Module, an Inspection or a path.")
    floats, own = _list_dtypes(model), _list_dtypes(other) if isinstance(other, nn.Module) else []
    if floats and {*floats} != {*own}:
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda t: t.to(floats[0]) if t.is_floating_point() else t, (args, kwargs)
        )
    signature = python_inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        order = [*python_inspect.signature(other.forward).parameters] if isinstance(other, nn.Module) else []
        names = sorted(kwargs, key=lambda name: order.index(name) if name in order else len(order))
        args, kwargs = (*args, *(kwargs[name] for name in names)), {}
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"like is {type(model).__name__}, expected a model that takes these inputs by name or by position ({error}): "
            "pass an Inspection of it."
        ) from None
    return inspect(model, *args, **kwargs)


def _list_dtypes(model: nn.Module) -> list[torch.dtype]:
    """Return the dtypes of the floating-point parameters of a model."""
    return [p.dtype for p in model.parameters() if p.is_floating_point()]


def _verify_like(inspection: Inspection, reference: States) -> Verification:
    """Compare a model with the states of a reference."""
    reference = match_parallel(inspection, reference)
    theirs = reference["inspection"]
    unknown = [Unknown(**part) for part in theirs["unknown"]]
    unproven = inspection.unknown or tuple(replace(part, reason=f"{part.reason} (the reference)") for part in unknown)
    found, is_aligned = compare_models(inspection, theirs, reference["terms"])
    if inspection.mode != theirs["mode"]:
        found = (Deviation("the mode", inspection.mode, theirs["mode"]), *found)
    terms = measure_terms(inspection, reference) if is_aligned else []
    return Verification(None, inspection, found, theirs["model"], tuple(terms), unproven)
