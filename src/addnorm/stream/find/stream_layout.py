"""The layout of a stream: which dimensions of its values hold features, tokens of a sequence, and sequences.

layout = StreamLayout(chain)
layout.of(add.x)                 `TokenLayout` of a state
layout.of_write(sublayer)        `TokenLayout` of the operand that a sublayer adds
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from addnorm.stream.dataflow.arithmetic import is_activation, strip_views
from addnorm.stream.dataflow.graph import PARAMETER, Value, find_ops_between, walk
from addnorm.stream.find.chain import Chain
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.paths import Path
from addnorm.stream.find.sublayers import Sublayer
from addnorm.stream.layout.dimensions import ANONYMOUS, Dim, Dims, Part, Roots, relate, trace
from addnorm.stream.layout.mixing import Mixing
from addnorm.stream.layout.token_layout import Piece, TokenLayout

PROJECTING = ("product", "linear", "embedding", "convolution")  # traits of the operators that make features from others


class StreamLayout:
    """Dimensions of the features, tokens and sequences in all values of a stream.

    Attributes:
        width: number of features.
        axis: dimension of the features in the first sum, counted from the end.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._is_continuous = True  # whether the dimensions of every state follow from those of x_0
        self._roots = Roots()
        self._dims: dict[Value, Dims] = {}
        self._operands: list[Dims | None] = []
        self._follow_states()
        self._summed: dict[Sublayer, list[Part]] = {}
        # The dimensions of a sublayer's input, and `Mixing.repeated`.
        self._repeated: dict[Sublayer, tuple[Dims, list[Dims]]] = {}
        mixing = self._follow_sublayers()
        self._features = self._find_features(mixing)
        self._tokens, self.proven = self._find_tokens(mixing)
        self.width, self.axis = self._measure_features()

    # Results.

    def of(self, value: Value) -> TokenLayout | None:
        """Return the layout of a state or of a value between two states; None if it is not known."""
        return self._build(value, trace(value, self._dims, self._roots))

    def find_raw(self, sublayer: Sublayer) -> tuple[Value, TokenLayout | None]:
        """Return the output of a sublayer, before norm and factors, and its layout.

        The output is returned as the first view whose features have dimensions of their own. In an MLP-Mixer, for example, the
        product has features and sequences in one dimension.
        """
        views = [sublayer.raw] if sublayer.norm is not None else _list_views(sublayer.write_path, sublayer.raw)
        for view in views:
            layout = self._of_earlier(sublayer, view)
            if layout is not None:
                return view, layout
        return sublayer.raw, None

    def of_write(self, sublayer: Sublayer) -> TokenLayout | None:
        """Return the layout of the operand that a sublayer adds."""
        return self._of_earlier(sublayer, sublayer.write_path.terms[-1].value)

    def of_norm(self, norm: Norm) -> TokenLayout | None:
        """Return the layout of a norm's input, which may be inside a sublayer."""
        owners = [sublayer for sublayer in self.chain.list_sublayers() if sublayer.norm is norm]
        return self.of(norm.x) or (self._of_earlier(owners[0], norm.x) if owners else None)

    def find_features(self, sublayer: Sublayer, value: Value) -> tuple[int, ...] | None:
        """Return the feature dimensions of a state, or of a value between a sublayer and its add; None if not known."""
        layout = self.of(value) or self._of_earlier(sublayer, value)
        return None if layout is None else layout.features

    def normalizes_features(self, norm: Norm) -> bool:
        """Return whether a norm normalizes all features, not the tokens; True if that is not known."""
        dims = trace(norm.x, self._dims, self._roots)
        return not dims or (norm.x.shape[-1] == self.width and all(map(self._is_feature, dims[-1])))

    def find_entry(self, k: int) -> Value:
        """Return the residual of add `k`; if it is a parameter that is expanded, its view with the batch dimension.

        If x_0 has tokens and sequences flattened into one dimension, and no other use, return the view that separates the two.
        """
        add = self.chain.adds[k]
        views = _list_views(add.residual_path, add.x)
        entry = next(view for view in views if math.prod(view.shape) == math.prod(views[-1].shape))
        for view in views[views.index(entry) :] if not k else ():
            layout = self.of(view)
            if layout is not None and not layout.depends_on_shape:
                return view
            if len(view.users) != 1:
                break
        return entry

    def _of_earlier(self, sublayer: Sublayer, value: Value) -> TokenLayout | None:
        return self._build(value, self._find_earlier_dims(sublayer, value))

    def _find_earlier_dims(self, sublayer: Sublayer, value: Value) -> Dims | None:
        """Derive the dimensions of `value`, which is between a sublayer's output and its add, from those of the sum."""
        total, dims = sublayer.add.out, self._operands[sublayer.place]
        for term in sublayer.write_path.terms:  # from the add to the innermost partial sum
            if dims is not None and term.op is not None:
                whole = term.op.out
                dims, total = relate(whole, total, dims), whole
            if dims is None:
                return None
            dims, total = _align_operand(term.value.shape, total.shape, dims), term.value
        return None if dims is None else relate(value, total, dims)

    def _build(self, value: Value, dims: Dims | None) -> TokenLayout | None:
        if dims is None or any(part.root == ANONYMOUS for dim in dims for part in dim):
            return None
        features = tuple(d for d, dim in enumerate(dims) if any(self._is_feature(part) for part in dim))
        parts = [part for d in features for part in dims[d]]
        if not all(map(self._is_feature, parts)) or math.prod(value.shape[d] for d in features) != self.width:
            return None
        pieces = [
            tuple(
                Piece(cut, is_token, min(self._roots.find_origins(cut.root)))
                for part in dim
                for cut, is_token in self._classify(part)
            )
            for d, dim in enumerate(dims)
            if d not in features
        ]
        return TokenLayout(value.shape, features, tuple(pieces), self.proven)

    # Analysis.

    def _follow_states(self) -> None:
        """Find the dimensions of every state and of the sum of every add."""
        first, operand = self.chain.adds[0].x, self.chain.adds[0].residual_path.terms[0].value
        start = self._dims[operand] = self._roots.start(operand.shape)
        self._dims[first] = relate(first, operand, start) or self._roots.start(first.shape)
        for add in self.chain.adds:
            dims = trace(add.x, self._dims, self._roots)
            if dims is None or any(part.root == ANONYMOUS for dim in dims for part in dim):
                self._is_continuous = False
                self._dims[add.x] = self._roots.start(add.x.shape)
            operand = add.residual_path.terms[0].value
            dims = trace(operand, self._dims, self._roots)
            self._operands.append(dims)
            if dims is not None:
                self._dims[add.out] = dims

    def _follow_sublayers(self) -> Mixing:
        mixing = Mixing(self._roots)
        for add, sublayers in zip(self.chain.adds, self.chain.sublayers, strict=True):
            dims = trace(add.read, self._dims, self._roots)
            for sublayer in sublayers:
                if dims is not None and sublayer.ops:
                    before = len(mixing.projected), len(mixing.reduced), len(mixing.repeated)
                    mixing.follow(add.read, dims, sublayer.ops)
                    self._summed[sublayer] = [*mixing.projected[before[0] :], *mixing.reduced[before[1] :]]
                    self._repeated[sublayer] = dims, mixing.repeated[before[2] :]
        return mixing

    def _find_features(self, mixing: Mixing) -> set[Part]:
        """Return the parts of dimensions that are features: norms normalize these parts, or else most products sum over them."""
        norms: list[Norm] = []
        for sublayers, norms_out in zip(self.chain.sublayers, self.chain.norms_out, strict=True):
            norms += [*norms_out, *(norm for sublayer in sublayers for norm in sublayer.reads.norms)]
        normed = {part for norm in norms for part in (trace(norm.x, self._dims, self._roots) or ((),))[-1]}
        start = self._find_projected_start()
        if normed and not self._is_other_axis({part.root for part in normed}, start, mixing):
            return normed
        normed = set() if normed else {part for dim in self._list_other_normed() for part in dim}
        if normed or start:
            return normed or {*start}
        roots = Counter(part.root for part in mixing.projected)
        last = self._dims[self.chain.adds[0].x][-1:]
        if roots:
            own = {part.root for dim in last for part in dim}
            root = max(roots, key=lambda root: (roots[root], root in own))
            return {Part(root, 1, self._roots.sizes[root])}
        return {*last[0]} if last else set()

    def _is_other_axis(self, normed: set[int], start: Dim, mixing: Mixing) -> bool:
        """Return whether norms normalize other axes (`normed`) than those over which products with parameters sum.

        False if the last axis is in `normed` and there are no convolutions, since all products may then combine tokens.
        """
        combined = {root for part in (*mixing.projected, *start) for root in self._roots.find_origins(part.root)}
        origins = {origin for root in normed for origin in self._roots.find_origins(root)}
        last = {part.root for dim in self._dims[self.chain.adds[0].x][-1:] for part in dim}
        is_conv = any("channels_first" in op.traits for sublayer in self.chain.list_sublayers() for op in sublayer.ops)
        return bool(mixing.projected) and combined.isdisjoint(origins) and (is_conv or last.isdisjoint(normed))

    def _list_other_normed(self) -> Iterator[Dim]:
        """Yield the dimensions that are normalized by norms of the embedding and of the sublayers' outputs."""
        for norm in self.chain.adds[0].norms:
            yield (trace(norm.y, self._dims, self._roots) or ((),))[-1]
        for sublayer in self.chain.list_sublayers():
            if sublayer.norm is not None:
                yield (self._find_earlier_dims(sublayer, sublayer.norm.y) or ((),))[-1]

    def _find_projected_start(self) -> Dim:
        """Return the output dimension of the last matrix product or embedding before x_0; an empty tuple if there is none."""
        x = self.chain.adds[0].x
        value = strip_views(x)
        while value.traits.isdisjoint(PROJECTING):
            same = [v for v in value.inputs if v.has_data and v.shape == value.shape]
            if not same:
                return ()
            value = strip_views(same[0])
        if not value.kind & PARAMETER:
            return ()
        made = 1 if "channels_first" in value.traits else len(value.shape) - 1
        pairs = zip(_follow_dims(value, x), self._dims[x], strict=False)
        return next((dim for own, dim in pairs if [part.root for part in own] == [made]), ())

    def mixes_tokens(self, sublayer: Sublayer) -> bool:
        """Return whether a sublayer sums over another dimension than the features: in a product with parameters, or in a mean."""
        roots = {feature.root for feature in self._features}
        parts = self._summed.get(sublayer, []) if self._is_continuous else []
        return any(part.size > 1 and roots.isdisjoint(self._roots.find_origins(part.root)) for part in parts)

    def keeps_tokens_apart(self, sublayer: Sublayer) -> bool:
        """Return whether each product of two activations is of one token, as in a weighted sum of experts; False if not known."""
        dims, products = self._repeated.get(sublayer, ((), []))
        parts = {part for dim in dims for part in dim if not self._is_feature(part)}
        pairs = [op for op in sublayer.ops if "pair" in op.traits and all(map(is_activation, op.inputs))]
        # A dimension of size 1 may be that of the tokens, of which the sublayer then has one.
        is_known = self._is_continuous and 0 < len(pairs) == len(products) and all(part.size > 1 for part in parts)
        return is_known and all(parts <= {part for dim in batch for part in dim} for batch in products)

    def _is_feature(self, part: Part) -> bool:
        return any(
            part.root == feature.root
            and part.stride % feature.stride == 0
            and part.stride * part.size <= feature.stride * feature.size
            for feature in self._features
        )

    def _find_tokens(self, mixing: Mixing) -> tuple[dict[int, list[int] | None], bool]:
        """Return the stream's axes of tokens, and whether sublayers that mix tokens prove this; if not, it is a guess.

        The dict maps the number of an axis to None if the axis holds only tokens. If the axis holds tokens and sequences, the
        dict maps it to the strides at which tokens follow each other, as [begin, end, begin, end, ...] (see `Part`).
        """
        roots = self._list_roots()
        for marks in (mixing.strong, mixing.weak):
            marked = defaultdict[int, list[Part]](list)
            for part in marks:
                # A view may merge a dimension of size 1 with any other one.
                for root in self._roots.find_origins(part.root) & {*roots} if part.size > 1 else ():
                    marked[root].append(part)
            if marked:
                break
        else:
            single = {root for part in mixing.strong for root in self._roots.find_origins(part.root) & {*roots}}
            if single and len(roots) - len(single) < 2:  # a sequence of one token, beside the batch
                return dict.fromkeys(single), True
            batch = self._guess_batch(roots) if len(roots) > 1 else None
            return {root: None for root in roots if root != batch}, False
        kin = {root: self._roots.find_origins(root) & {*marked} for root in roots}
        has_batch = any(not of_root for of_root in kin.values())
        tokens: dict[int, list[int] | None] = {}
        for root, of_root in kin.items():
            if of_root:
                parts = marked[root]
                is_cut = bool(parts) and all(p.root == root and p.size < self._roots.sizes[root] for p in parts)
                tokens[root] = _join_intervals(parts) if is_cut and not has_batch else None
        return tokens, True

    def _guess_batch(self, roots: Sequence[int]) -> int:
        """Guess which axis holds the sequences, for a model whose sublayers combine no tokens.

        Take the axis over which x_0 is expanded, else the first dimension of the model's input, else the first one of x_0.
        """
        x = self.chain.adds[0].x
        dims = self._dims[x]
        own = [part.root for dim in dims for part in dim]
        expanded = [root for root in roots if root not in own and not self._roots.sources[root]]
        first = self._operands[0] or ((),)
        # A dimension of size one that a view inserts after the first dimension, such as one row of an image, is no batch.
        expanded = [
            root for root in expanded if self._roots.sizes[root] > 1 or any(part.root == root for part in first[0])
        ]
        if expanded and any(part.root == expanded[0] for dim in first for part in dim):
            return expanded[0]
        for leaf in _find_inputs(x):
            for there, here in zip(_follow_dims(leaf, x), dims, strict=False):
                pairs = zip(there, here, strict=True) if len(there) == len(here) else ()
                batch = [part.root for origin, part in pairs if origin.root == 0 and origin.size == part.size]
                if batch and batch[0] in roots:
                    return batch[0]
        return next((root for root in own if root in roots), roots[0])

    def _list_roots(self) -> list[int]:
        """Return the stream's axes that hold no features, the oldest first."""
        states = [
            *(self._dims[add.x] for add in self.chain.adds),
            *(dims for dims in self._operands if dims is not None),
        ]
        parts = (part for dims in states for dim in dims for part in dim)
        return sorted({part.root for part in parts if not self._is_feature(part)})

    def _classify(self, part: Part) -> Iterable[tuple[Part, bool]]:
        """Cut a part into pieces that hold only tokens (yielded with True) or only sequences (yielded with False)."""
        origins = [root for root in self._roots.find_origins(part.root) if root in self._tokens]
        bounds = self._tokens.get(part.root)
        if not origins or bounds is None:
            yield part, bool(origins)
            return
        cuts = [bound for bound in bounds if part.stride < bound < part.stride * part.size]
        edges = [part.stride, *sorted(cuts), part.stride * part.size]
        for low, high in reversed([*pairwise(edges)]):
            inside = any(begin <= low < end for begin, end in zip(bounds[::2], bounds[1::2], strict=True))
            yield Part(part.root, low, high // low), inside

    def _measure_features(self) -> tuple[int, int]:
        out = self.chain.adds[0].out
        dims = self._dims.get(out, ())
        axes = [d for d, dim in enumerate(dims) if dim and all(map(self._is_feature, dim))]
        width = math.prod(out.shape[d] for d in axes) if axes else out.shape[-1]
        return width, (axes[-1] - len(dims) if axes else -1)


def _align_operand(shape: tuple[int, ...], total: tuple[int, ...], dims: Dims) -> Dims | None:
    """Derive the dimensions of an operand of a sum from `dims`, those of the sum. The operand may be broadcast."""
    before = len(total) - len(shape)
    if before < 0:
        return None
    return tuple(dims[before + d] if size == total[before + d] else () for d, size in enumerate(shape))


def _follow_dims(source: Value, value: Value) -> Dims:
    """Return the axes of `source`, an earlier value, in each dimension of `value`; an empty tuple if they are not known."""
    roots = Roots()
    dims = Mixing(roots).follow(source, roots.start(source.shape), find_ops_between(source, value))
    return dims.get(value, ())


def _join_intervals(parts: Sequence[Part]) -> list[int]:
    """Return the union of the parts' intervals [stride, stride * size), sorted, as begin, end, begin, end, ..."""
    bounds: list[int] = []
    for begin, end in sorted((part.stride, part.stride * part.size) for part in parts):
        if bounds and begin <= bounds[-1]:
            bounds[-1] = max(bounds[-1], end)
        else:
            bounds += [begin, end]
    return bounds


def _find_inputs(value: Value) -> list[Value]:
    """Return the inputs of the model on which a value depends."""
    reached = walk([value], lambda v: [source for source in v.inputs if source.has_data])
    inputs = [v for v in reached if v.op is None and v.has_data and v.shape]
    return sorted(inputs, key=lambda leaf: leaf.part if isinstance(leaf.part, int) else -1)


def _list_views(path: Path, x: Value) -> list[Value]:
    """Return x, the value at the start of `path`, and its views before any other operator on the path."""
    views = [x]
    for op in reversed(path.ops):
        if "view" not in op.traits or not op.inputs or op.inputs[0] is not views[-1]:
            break
        views.append(op.out)
    return views
