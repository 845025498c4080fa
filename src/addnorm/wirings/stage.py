"""One sublayer among n residual streams, as data: three matrices and the norms around them.

    R  = N_in(C P(X))              what the sublayer reads      X: n streams of width d_model, P: an optional norm of each stream
    W  = N_branch(f(R))            what it writes
    X' = N_out(A X + B W)          the streams after it

C has a row for each of the sublayer's reads, A a row for each new stream, and B one entry for each new stream. A `Stage` has
any of them, a `Row` is the stage of one stream: x' = N_out(a * x + b * N_branch(f(c * N_in(x)))). A `Head` is the last read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from addnorm._util.arguments import check_bool, check_choice, check_float, check_int
from addnorm.wirings import stage_text
from addnorm.wirings.factors import FACTORS, Factor, Learned, Place, changed_fields, format_call
from addnorm.wirings.matrices import Matrix, Vector, append_zero, find_place, identity, is_constant, unit

__all__ = ["Computed", "Head", "Matrix", "Row", "Stage", "Vector", "append_zero", "identity", "unit"]

ALTERNATIVE = ", or Learned(...) for a factor that trains"
START = "for a start at zero use Learned(0.0)"


@dataclass(frozen=True, repr=False)
class Computed:
    """Coefficients that a small module computes: from parameters alone, or from the streams of each token.

    Args:
        kind: the module's class, one of `addnorm.wirings.coefficients` or your own: a subclass of `CoefficientModule`, which
            states what it computes, by which formulas, and how its parameters start.
        options: keyword arguments of the class.

    Example:
        >>> from addnorm.wirings import Computed, coefficients
        >>> Computed(coefficients.HyperConnection, {"dynamic": False})
        Computed(HyperConnection, dynamic=False)
    """

    kind: type[Any]
    options: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if not (isinstance(self.kind, type) and issubclass(self.kind, nn.Module) and hasattr(self.kind, "computes")):
            raise TypeError(f"kind is {self.kind!r}, expected a subclass of CoefficientModule.")
        object.__setattr__(self, "options", tuple(sorted(dict(self.options).items())))

    @property
    def computes(self) -> tuple[str, ...]:
        """Names of the coefficients that the module computes: of "collapse", "mix", "inject" and "bias"."""
        return tuple(self.kind.find_computed(**dict(self.options)))

    @property
    def appends(self) -> bool:
        """Whether the computed A has one row more than there are streams."""
        return bool(self.kind.appends and "mix" in self.computes)

    def make(self, d_model: int, n: int, reads: int, place: Place, **factory: Any) -> Any:
        """Return the module for one sublayer with n streams of width `d_model` and with `reads` inputs."""
        return self.kind(d_model, n, reads, place, **dict(self.options), **factory)

    @property
    def notation(self) -> Any:
        """How texts write what the module computes: a `Notation`."""
        return self.kind.notate(**dict(self.options))

    def __repr__(self) -> str:
        arguments = "".join(f", {name}={value!r}" for name, value in dict(self.options).items())
        return f"Computed({self.kind.__name__}{arguments})"


class _Reads:
    """Base of `Stage` and `Head`: the reads C P(X), whose entries are constant, learned or computed."""

    n: int
    collapse: Any
    coefficients: Computed | None
    delayed: bool
    norm_streams: Any
    names: str | tuple[str, ...]
    mix: Any = None
    inject: Any = None
    norm_out: Any = ()
    reads: int = 1
    c: Factor = 1.0  # the factor after N_in, of a `Row` alone
    shares: str = ""  # what a `Row` has in common with the one before it

    @property
    def n_out(self) -> int:
        """The number of streams after the sublayer; for a head, the number of streams that it reads."""
        if self.mix is not None:
            return len(self.mix)
        return self.n + (self.coefficients is not None and self.coefficients.appends)

    @property
    def is_stacked(self) -> bool:
        """Whether the module of the coefficients takes the streams as one tensor `(*, n, d_model)`, not as a tuple."""
        return self.coefficients is not None and self.coefficients.kind.stacked

    @property
    def computes(self) -> tuple[str, ...]:
        """Names of the coefficients that a module computes: of "collapse", "mix", "inject" and "bias"."""
        return () if self.coefficients is None else self.coefficients.computes

    @property
    def norms_out(self) -> tuple[bool, ...]:
        """Whether each new stream is normalized."""
        return self.norm_out if isinstance(self.norm_out, tuple) else (self.norm_out,)

    @property
    def matrices(self) -> dict[str, Matrix]:
        """Those of the matrices C, A and B that are given, by their names. B is a matrix of one row."""
        given = {"collapse": self.collapse, "mix": self.mix, "inject": self.inject and (self.inject,)}
        return {name: rows for name, rows in given.items() if rows is not None}

    @property
    def entries(self) -> dict[str, Any]:
        """The rows of `matrices`, in which each learned entry is replaced by the name of its parameter."""
        return {
            matrix: tuple(
                row if is_constant(row) else tuple(_name(matrix, k, j, entry) for j, entry in enumerate(row))
                for k, row in enumerate(rows)
            )
            for matrix, rows in self.matrices.items()
        }

    @property
    def learned(self) -> dict[str, Learned]:
        """The learned entries by the names of their parameters."""
        found: dict[str, Learned] = {}
        for name, entry in self._list_learned():
            if found.setdefault(name, entry) != entry:
                raise ValueError(
                    f"{name} is {found[name]!r} and {entry!r}, expected one: entries of one name are one parameter."
                )
        return found

    def _check_reads(self, consequence: str, most: int | None = None) -> None:
        """Check the streams and the read, and store C as a matrix of at most `most` rows, one for each read.

        A row of zeros is an error, whose message states the `consequence`.
        """
        check_int("n", self.n, 1)
        check_bool("delayed", self.delayed)
        if self.collapse is not None:
            is_nested = isinstance(self.collapse, Sequence) and self.collapse and isinstance(self.collapse[0], Sequence)
            rows = self.collapse[:most] if is_nested else (self.collapse,)
            object.__setattr__(self, "collapse", _to_matrix("collapse", rows, self.n, consequence))
        object.__setattr__(self, "norm_streams", _to_flags("norm_streams", self.norm_streams, self.n))
        _check_names("names", self.names, self.n)

    def _list_learned(self) -> Iterator[tuple[str, Learned]]:
        for matrix, rows in self.matrices.items():
            for k, row in enumerate(rows):
                for j, entry in enumerate(() if is_constant(row) else row):
                    if isinstance(entry, Learned):
                        yield str(_name(matrix, k, j, entry)), entry

    def __repr__(self) -> str:
        return format_call(type(self).__name__, changed_fields(self))


@dataclass(frozen=True, repr=False)
class Stage(_Reads):
    """The reads and the write of one sublayer of a wiring with n streams.

    Args:
        n: the number of streams before the sublayer.
        collapse: C, a row of n entries, or one row for each read of a sublayer that takes several inputs; None if computed, or
            if the row is the one that the stage before computed (`delayed`).
        mix: A, a tuple of rows of n entries, one row for each stream after the sublayer; None if computed or the identity.
        inject: B, one entry for each stream after the sublayer; None if computed.
        coefficients: the module that computes the matrices that are None.
        reads: the number of the sublayer's inputs. If C is given, it is the number of C's rows.
        delayed: whether the read uses the C that the stage before computed, and the C computed here is the next stage's.
        norm_streams: whether each stream is normalized before the read; or one bool for each stream.
        norm_in, norm_branch: whether the reads, and the sublayer's output, are normalized.
        norm_out: whether each new stream is normalized; or one bool for each of them.
        names: how texts call the streams, such as ("u", "v"), the default for two; or "x" for states that are counted: x_0, the
            embedding, up to x_n, the newest.
        names_out: the names of the streams after the sublayer, if their number changes.

    An entry is a number or a `Learned` factor.

    Example:
        Post-LN with a second stream that is never normalized (ResiDual):

        >>> from addnorm.wirings import Stage
        >>> print(Stage(2, collapse=(1, 0), mix=((1, 0), (0, 1)), inject=(1, 1), norm_out=(True, False)))
        u' = N(u + f(u)),   v' = v + f(u)
    """

    n: int
    collapse: Any = None
    mix: Any = None
    inject: Any = None
    coefficients: Computed | None = None
    reads: int = 1
    delayed: bool = False
    norm_streams: Any = False
    norm_in: bool = False
    norm_branch: bool = False
    norm_out: Any = False
    names: str | tuple[str, ...] = ""
    names_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_reads("the sublayer would read only zeros")
        check_int("reads", self.reads, 1)
        for name in ("norm_in", "norm_branch"):
            check_bool(name, getattr(self, name))
        if self.collapse is not None:
            object.__setattr__(self, "reads", len(self.collapse))
        if self.mix is not None:
            object.__setattr__(self, "mix", _to_matrix("mix", self.mix, self.n))
        computed = _check_source(self, ("collapse", "inject"))
        if self.delayed and ("collapse" not in computed or self.n_out != self.n):
            raise ValueError(
                f"delayed is True with {self.coefficients} and {self.n_out} streams after {self.n}, expected a module that "
                "computes collapse and as many streams: the next stage reads with that collapse."
            )
        if self.inject is not None:
            rows = _to_matrix("inject", (self.inject,), self.n_out, "the sublayer would never write")
            object.__setattr__(self, "inject", rows[0])
        object.__setattr__(self, "norm_out", _to_flags("norm_out", self.norm_out, self.n_out))
        _check_names("names_out", self.names_out, self.n_out)
        if self.is_stacked and any(self.norms_out):
            raise ValueError(
                f"norm_out is {self.norm_out!r} with {self.coefficients}, expected False: its streams are one tensor."
            )

    def __str__(self) -> str:
        return stage_text.equation(self)


Shares = Literal["", "state", "read"]


@dataclass(frozen=True, repr=False)
class Row(Stage):
    """The norms and factors of one sublayer: x' = N_out(a * x + b * N_branch(f(c * N_in(x)))).

    A row is the `Stage` of one stream whose factors are numbers or learned.

    Args:
        norm_in: whether the sublayer reads the norm of the stream.
        norm_branch: whether the sublayer's output is normalized.
        norm_out: whether the stream is normalized after the add.
        a: factor of the stream; 0 removes the residual connection.
        b: factor of the sublayer's output.
        c: factor of the sublayer's input.
        shares: what this sublayer shares with the sublayer before it in its layer: "" for nothing (it reads the stream after that
            sublayer's write), "state" if it reads the same state through its own norm, "read" if it has the same input.
            Sublayers that share are parallel. They must be plain sums: a = 1 and no norm_out.

    Each factor is a number or a `Learned` factor.

    Example:
        >>> print(addnorm.Row(norm_in=True))
        x' = x + f(N(x))
        >>> print(addnorm.Row(norm_out=True, a=2.0))
        x' = N(2 x + f(x))
    """

    n: int = field(default=1, init=False)
    collapse: Any = field(default=((1.0,),), init=False)
    mix: Any = field(default=None, init=False)  # ((a,),)
    inject: Any = field(default=None, init=False)  # (b,)
    coefficients: Computed | None = field(default=None, init=False)
    reads: int = field(default=1, init=False)
    delayed: bool = field(default=False, init=False)
    norm_streams: Any = field(default=(False,), init=False)
    norm_in: bool = False
    norm_branch: bool = False
    norm_out: bool = False
    names: str | tuple[str, ...] = field(default="", init=False)
    names_out: tuple[str, ...] = field(default=(), init=False)
    a: Factor = 1.0
    b: Factor = 1.0
    c: Factor = 1.0
    shares: Shares = ""

    def __post_init__(self) -> None:
        for name in ("norm_in", "norm_branch", "norm_out"):
            check_bool(name, getattr(self, name), ": whether the row has that norm")
        check_choice("shares", self.shares, ("", "state", "read"))
        for name in FACTORS:
            value = getattr(self, name)
            if not isinstance(value, Learned):
                object.__setattr__(self, name, check_float(name, value, ALTERNATIVE))
        for name, consequence in (("b", "the sublayer would never write"), ("c", "the sublayer would read only zeros")):
            if getattr(self, name) == 0.0:
                raise ValueError(f"{name} is 0, expected another number: {consequence}; {START}.")
        if self.shares and not self.is_sum:
            raise ValueError(
                f"shares is {self.shares!r} with a = {self.a!r} and norm_out = {self.norm_out}, expected a = 1 and no norm_out: "
                "the writes of parallel sublayers are added to the same state."
            )
        if self.shares == "read" and (self.norm_in or self.c != 1.0):
            raise ValueError(
                f"shares is 'read' with norm_in = {self.norm_in} and c = {self.c!r}, expected no norm_in and c = 1: the input is "
                "that of the sublayer before."
            )
        object.__setattr__(self, "mix", ((self.a,),))
        object.__setattr__(self, "inject", (self.b,))

    @property
    def is_sum(self) -> bool:
        """Whether the stream stays a plain sum of writes: a = 1, and no norm_out."""
        return self.a == 1.0 and not self.norm_out

    def _list_learned(self) -> Iterator[tuple[str, Learned]]:
        for name in FACTORS:
            value = getattr(self, name)
            if isinstance(value, Learned):
                yield name, value


@dataclass(frozen=True, repr=False)
class Head(_Reads):
    """The last read of n streams, whose norm is the wiring's final norm: y = N_final(C P(X)).

    Args:
        n: the number of streams after the last sublayer.
        collapse: C, one row of n entries; None if computed, or delayed.
        coefficients: the module that computes C.
        delayed: whether C is the one that the last stage computed.
        norm_streams: whether each stream is normalized before it is read; or one bool for each stream.
        names: as in `Stage`.
    """

    n: int
    collapse: Any = None
    coefficients: Computed | None = None
    delayed: bool = False
    norm_streams: Any = False
    names: str | tuple[str, ...] = ""

    def __post_init__(self) -> None:
        self._check_reads("the output would be 0", 1)
        if self.delayed and (self.collapse is not None or self.coefficients is not None):
            raise ValueError(
                "delayed is True beside collapse or coefficients, expected one: the last stage computes collapse."
            )
        if not self.delayed:
            _check_source(self, ("collapse",))


def _name(matrix: str, k: int, j: int, entry: Factor) -> float | str:
    if not isinstance(entry, Learned):
        return entry
    return entry.name or find_place(matrix, k, j)


def _check_source(spec: Any, required: Sequence[str]) -> tuple[str, ...]:
    """Check that no matrix is both given and computed, and return the names of the computed ones.

    A `required` matrix must be given or computed.
    """
    computed: tuple[str, ...] = spec.computes
    for name in ("collapse", "mix", "inject"):
        value = getattr(spec, name, None)
        if value is not None and name in computed:
            raise ValueError(f"{name} is {value!r}, expected None: {spec.coefficients} computes it.")
        if value is None and name in required and name not in computed:
            raise ValueError(f"{name} is None, expected its entries, or a module that computes it as coefficients.")
    return computed


def _check_names(argument: str, names: Any, n: int) -> None:
    """Check that the names are one for each stream, the letter of counted states, or empty."""
    if not names or (isinstance(names, str) and argument == "names"):
        return
    if not isinstance(names, tuple) or len(names) != n or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{argument} is {names!r}, expected a tuple of {n} texts, one for each stream.")


def _to_matrix(name: str, rows: Any, n: int, consequence: str = "") -> Matrix:
    """Check a matrix and return its rows as tuples of floats and `Learned`. With `consequence`, raise for a row of zeros."""
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not rows:
        raise TypeError(f"{name} is {rows!r}, expected a tuple of numbers.")
    matrix: list[Vector] = []
    for row in rows:
        if not isinstance(row, Sequence) or isinstance(row, str) or len(row) != n:
            raise ValueError(f"{name} has the row {row!r}, expected {n} entries, one for each stream.")
        matrix.append(row if is_constant(row) else tuple(_to_entry(name, entry) for entry in row))
        if consequence and not any(matrix[-1]):
            raise ValueError(f"{name} is {matrix[-1]!r}, expected an entry that is not 0: {consequence}; {START}.")
    return tuple(matrix)


def _to_entry(name: str, entry: Any) -> Factor:
    if not isinstance(entry, Learned):
        return check_float(f"an entry of {name}", entry, ALTERNATIVE)
    if entry.shared:
        raise ValueError(
            f"an entry of {name} is {entry!r}, expected shared=False: in a Stage a name makes entries one."
        )
    return entry


def _to_flags(name: str, value: Any, n: int) -> tuple[bool, ...]:
    """Return one bool for each stream."""
    flags = (value,) * n if isinstance(value, bool) else value
    if not isinstance(flags, Sequence) or len(flags) != n or not all(isinstance(flag, bool) for flag in flags):
        raise ValueError(f"{name} is {value!r}, expected True, False, or a tuple of {n} of them, one for each stream.")
    return tuple(flags)
