"""How a split passes through functions of torch: what each demands of the dims of its tensors.

A function of this module takes a traced call, unites and forbids dims of its inputs, and gives its outputs theirs. In a
form that it does not know it raises `NoRule`, and the call forbids all dims that it touches.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

from evenly.parallel.tensor.dim_factors import Dim
from evenly.parallel.tensor.graph import Dims, Graph, NoRule, Rule, argument, counted, dim_of, dims_of, input_of, tensor
from evenly.parallel.tensor.trace import Ref, TracedCall, refs_in

# --------------------------------------------------------------------------------------------------- element by element


def aligned(graph: Graph, call: TracedCall, refs: Iterable[Ref], shape: Sequence[int]) -> Dims:
    """Dims of `shape`, to which all `refs` are broadcast: they are united, and new where none has the dim."""
    dims: list[Dim | None] = [None] * len(shape)
    for ref in refs:
        before = len(shape) - len(graph.shape(ref))
        for place, (size, dim) in enumerate(zip(graph.shape(ref), graph.of(ref), strict=True), before):
            if place < 0 or size not in (1, shape[place]):
                raise NoRule
            if size == shape[place]:
                dims[place] = joined(graph, call, dims[place], dim)
    return [graph.new(size) if dim is None else dim for dim, size in zip(dims, shape, strict=True)]


def joined(graph: Graph, call: TracedCall, first: Dim | None, second: Dim) -> Dim:
    if first is not None:
        graph.unite(first, second, call)
    return second


def pointwise(graph: Graph, call: TracedCall) -> None:
    refs = [*refs_in((call.arguments, call.keywords))]
    graph.give(call, aligned(graph, call, refs, graph.output_shape(call)))


def pointwise_unary(graph: Graph, call: TracedCall) -> None:
    """The first tensor element by element; others tell a type, or are broadcast to."""
    graph.give(call, aligned(graph, call, [input_of(call)], graph.output_shape(call)))


def created(graph: Graph, call: TracedCall) -> None:
    for which in range(len(call.outputs)):
        graph.give(call, [graph.new(size) for size in graph.output_shape(call, which)], which)


# --------------------------------------------------------------------------------------------------------------- shapes


def viewed(graph: Graph, call: TracedCall) -> None:
    """The same elements in the same order under another shape."""
    ref, shape = input_of(call), graph.output_shape(call)
    if graph.trace.values[ref.index].elements != graph.trace.values[call.outputs[0]].elements:
        raise NoRule  # as another type
    graph.give(call, graph.factors.regroup(graph.of(ref), shape, call.place))


def transposed(graph: Graph, call: TracedCall) -> None:
    dims = [*graph.of(input_of(call))]
    first, second = (counted(argument(call, at, f"dim{at - 1}", f"axis{at - 1}"), len(dims)) for at in (1, 2))
    dims[first], dims[second] = dims[second], dims[first]
    graph.give(call, dims)


def last_two_transposed(graph: Graph, call: TracedCall) -> None:
    dims = [*graph.of(input_of(call))]
    graph.give(call, [*dims[:-2], *dims[-2:][::-1]])


def permuted(graph: Graph, call: TracedCall) -> None:
    dims = graph.of(input_of(call))
    order = argument(call, 1, "dims")
    order = order if isinstance(order, tuple) else call.arguments[1:]
    graph.give(call, [dims[counted(dim, len(dims))] for dim in order])


def moved(graph: Graph, call: TracedCall) -> None:
    dims = graph.of(input_of(call))
    sources, targets = (
        [counted(dim, len(dims)) for dim in (given if isinstance(given, tuple) else (given,))]
        for given in (argument(call, 1, "source"), argument(call, 2, "destination"))
    )
    others = iter([dim for dim in range(len(dims)) if dim not in sources])
    order = [sources[targets.index(place)] if place in targets else next(others) for place in range(len(dims))]
    graph.give(call, [dims[dim] for dim in order])


def repeated(graph: Graph, call: TracedCall) -> None:
    """Copies one behind the other: copies x what was there."""
    ref, shape = input_of(call), graph.output_shape(call)
    old = (1,) * (len(shape) - len(graph.shape(ref))) + graph.shape(ref)
    dims = [()] * (len(shape) - len(graph.shape(ref))) + graph.of(ref)
    copies = [graph.new(size // max(before, 1)) for size, before in zip(shape, old, strict=True)]
    graph.give(call, [(*copy, *dim) for copy, dim in zip(copies, dims, strict=True)])


def repeated_each(graph: Graph, call: TracedCall) -> None:
    """Each element several times in a row: what was there x copies."""
    ref = input_of(call)
    times = argument(call, 1, "repeats")
    if not isinstance(times, int) or argument(call, 2, "dim") is None:
        raise NoRule
    dim, dims = dim_of(graph, call, 2), [*graph.of(ref)]
    dims[dim] = (*dims[dim], *graph.new(times))
    graph.give(call, dims)


# ------------------------------------------------------------------------------------------------------ along some dims


def along(position: int, default: Any = None) -> Rule:
    """Mixes the elements of some dims, given as argument `position`, and keeps the others apart."""

    def rule(graph: Graph, call: TracedCall) -> None:
        dims = [*graph.of(input_of(call))]
        for dim in dims_of(graph, call, position, default):
            graph.forbid(dims[dim], call)
            dims[dim] = ()
        for which in range(len(call.outputs)):
            shape = graph.output_shape(call, which)
            if len(shape) != len(dims):
                raise NoRule
            graph.give(call, [dim or graph.forbidden(size, call) for dim, size in zip(dims, shape, strict=True)], which)

    return rule


def reduced(position: int) -> Rule:
    """One element of all those of some dims."""

    def rule(graph: Graph, call: TracedCall) -> None:
        dims, gone = graph.of(input_of(call)), dims_of(graph, call, position)
        for dim in gone:
            graph.forbid(dims[dim], call)
        left = [dim for place, dim in enumerate(dims) if place not in gone]
        with_ones = [() if place in gone else dim for place, dim in enumerate(dims)]
        for which in range(len(call.outputs)):
            keeps = len(graph.output_shape(call, which)) == len(dims)
            graph.give(call, with_ones if keeps else left, which)

    return rule


def summed(graph: Graph, call: TracedCall) -> None:
    """`sum` and `mean`: a tensor that no call takes, and that is not the loss, may be summed of the ranks' parts."""
    dims, taken = graph.of(input_of(call)), graph.is_consumed(call.outputs[0])
    if taken or not graph.output_shape(call):
        return reduced(1)(graph, call)
    gone = dims_of(graph, call, 1)
    for dim in gone:
        graph.ends_in_sum(dims[dim], "sum")
    keeps = len(graph.output_shape(call)) == len(dims)
    graph.give(call, [() if at in gone else dim for at, dim in enumerate(dims) if keeps or at not in gone])
    return None


def extreme(graph: Graph, call: TracedCall) -> None:
    """`max` and `min` of elements, along a dim, or of two tensors."""
    rule = pointwise if isinstance(argument(call, 1, "other"), Ref) else reduced(1)
    rule(graph, call)


def triangle(graph: Graph, call: TracedCall) -> None:
    dims = graph.of(input_of(call))
    for dim in dims[-2:]:
        graph.forbid(dim, call)
    graph.give(call, dims)


def padded(graph: Graph, call: TracedCall) -> None:
    ref, widths = input_of(call), argument(call, 1, "pad")
    if not isinstance(widths, tuple):
        raise NoRule
    dims, shape = [*graph.of(ref)], graph.output_shape(call)
    for back in range(len(widths) // 2):
        place = len(dims) - 1 - back
        if any(widths[2 * back : 2 * back + 2]):
            graph.forbid(dims[place], call)
            dims[place] = graph.forbidden(shape[place], call)
    graph.give(call, dims)


# --------------------------------------------------------------------------------------------------------------- pieces


def pieces(position: int) -> Rule:
    """`split`, `chunk`: equal pieces are read as pieces x rest, of which the rest can be split, alike in all pieces."""

    def rule(graph: Graph, call: TracedCall) -> None:
        place, dims = dim_of(graph, call, position, 0), [*graph.of(input_of(call))]
        sizes = [graph.output_shape(call, which)[place] for which in range(len(call.outputs))]
        dim, rest = dims[place], graph.new(sizes[0])
        if len({*sizes}) == 1:
            graph.unite(dim, (*graph.forbidden(len(sizes), call), *rest), call)
        else:
            graph.forbid(dim, call)
        for which, size in enumerate(sizes):
            dims[place] = rest if len({*sizes}) == 1 else graph.forbidden(size, call)
            graph.give(call, dims, which)

    return rule


def gated(graph: Graph, call: TracedCall) -> None:
    """`glu`: one half times the sigmoid of the other."""
    place, dims = dim_of(graph, call, 1, -1), [*graph.of(input_of(call))]
    rest = graph.new(graph.output_shape(call)[place])
    graph.unite(dims[place], (*graph.forbidden(2, call), *rest), call)
    dims[place] = rest
    graph.give(call, dims)


def unbound(graph: Graph, call: TracedCall) -> None:
    place, dims = dim_of(graph, call, 1, 0), [*graph.of(input_of(call))]
    graph.forbid(dims.pop(place), call)
    for which in range(len(call.outputs)):
        graph.give(call, dims, which)


def cat(graph: Graph, call: TracedCall) -> None:
    """One behind the other along a dim, which is forbidden; the others are united."""
    refs = [ref for ref in refs_in(argument(call, 0, "tensors")) if graph.shape(ref) != (0,)]
    shape = graph.output_shape(call)
    place = counted(argument(call, 1, "dim", "axis", default=0), len(shape))
    for ref in refs:
        graph.forbid(graph.of(ref)[place], call)
    give_united(graph, call, [[*graph.of(ref)] for ref in refs], place)


def stacked(graph: Graph, call: TracedCall) -> None:
    place = counted(argument(call, 1, "dim", default=0), len(graph.output_shape(call)))
    parts = [[*graph.of(ref)] for ref in refs_in(argument(call, 0, "tensors"))]
    for part in parts:
        part.insert(place, ())
    give_united(graph, call, parts, place)


def give_united(graph: Graph, call: TracedCall, parts: Sequence[Dims], place: int) -> None:
    """The output of the dims that all parts have, but for the one at `place`."""
    shape = graph.output_shape(call)
    dims = [graph.new(size) for size in shape]
    dims[place] = graph.forbidden(shape[place], call)
    for part in parts:
        for at, (dim, own) in enumerate(zip(dims, part, strict=True)):
            if at != place:
                graph.unite(dim, own, call)
    graph.give(call, dims)


def index_selected(graph: Graph, call: TracedCall) -> None:
    """`index_select`: some elements of a dim, which is forbidden."""
    place, dims = dim_of(graph, call, 1), [*graph.of(input_of(call))]
    for dim in (dims[place], *graph.of(tensor(call, 2, "index"))):
        graph.forbid(dim, call)
    dims[place] = graph.forbidden(graph.output_shape(call)[place], call)
    graph.give(call, dims)


def selected(graph: Graph, call: TracedCall) -> None:
    place, dims = dim_of(graph, call, 1), [*graph.of(input_of(call))]
    graph.forbid(dims.pop(place), call)
    graph.give(call, dims)


# --------------------------------------------------------------------------------------------------------- contractions

Labels = Sequence[Hashable]


def contract(graph: Graph, call: TracedCall, operands: Sequence[tuple[Ref, Labels]], output: Labels) -> Dims:
    """Products summed over the labels that `output` lacks, as `einsum` does: dims of one label are united.

    What is summed of an activation and a weight may be split, its output is then summed over ranks; of two
    activations, or within one, it is forbidden.
    """
    by_label: dict[Hashable, Dim] = {}
    for ref, labels in operands:
        if len({*labels}) != len(graph.of(ref)):
            raise NoRule
        for label, dim, size in zip(labels, graph.of(ref), graph.shape(ref), strict=True):
            if size != 1:
                by_label[label] = joined(graph, call, by_label.get(label), dim)
    for label, dim in by_label.items():
        if label not in output:
            carriers = [ref for ref, labels in operands if label in labels]
            if len(carriers) == 2 and sum(graph.is_weight(ref) for ref in carriers) == 1:
                graph.ends_in_sum(dim, "sum")
            else:
                graph.forbid(dim, call)
            graph.multiplies(graph.factors.length(dim))
    return [by_label.get(label, ()) for label in output]


def linear(graph: Graph, call: TracedCall) -> None:
    x, weight, bias = input_of(call), tensor(call, 1, "weight"), argument(call, 2, "bias")
    batch = [*range(len(graph.shape(x)) - 1)]
    if len(graph.shape(weight)) != 2:
        raise NoRule
    dims = contract(graph, call, [(x, [*batch, "in"]), (weight, ["out", "in"])], [*batch, "out"])
    if isinstance(bias, Ref):
        graph.unite(dims[-1], aligned(graph, call, [bias], graph.output_shape(call)[-1:])[0], call)
    graph.give(call, dims)


def product(graph: Graph, call: TracedCall, first: Ref, second: Ref) -> Dims:
    """The dims of `first @ second`."""
    ranks = len(graph.shape(first)), len(graph.shape(second))
    if min(ranks) < 2:
        raise NoRule  # of a vector: too little to be worth a rule
    batches = [[*range(-(rank - 2), 0)] for rank in ranks]  # counted from the right, as they are broadcast
    operands = [(first, [*batches[0], "row", "in"]), (second, [*batches[1], "in", "column"])]
    return contract(graph, call, operands, [*max(batches, key=len), "row", "column"])


def matmul(graph: Graph, call: TracedCall) -> None:
    operands = input_of(call), tensor(call, 1, "other", "mat2", "tensor2")
    graph.give(call, product(graph, call, *(operands if call.function != "__rmatmul__" else operands[::-1])))


def grouped_product(graph: Graph, call: TracedCall) -> None:
    """`grouped_mm`: rows of x [S, K], by groups, times one matrix each of [G, K, N]."""
    x, weight, bias = input_of(call), tensor(call, 1, "mat2", "mat_b"), argument(call, 3, "bias")
    if (len(graph.shape(x)), len(graph.shape(weight))) != (2, 3) or bias is not None:
        raise NoRule
    graph.forbid(graph.of(weight)[0], call)
    graph.forbid(graph.of(x)[0], call)
    graph.give(call, contract(graph, call, [(x, ["row", "in"]), (weight, ["group", "in", "out"])], ["row", "out"]))


def matmul_added(graph: Graph, call: TracedCall) -> None:
    """`addmm`, `baddbmm`: a tensor, and a product added to it."""
    first, second = tensor(call, 1, "mat1", "batch1"), tensor(call, 2, "mat2", "batch2")
    dims = product(graph, call, first, second)
    added = aligned(graph, call, [input_of(call)], graph.output_shape(call))
    graph.give(call, dims)
    for dim, own in zip(dims, added, strict=True):
        graph.unite(dim, own, call)


def einsum(graph: Graph, call: TracedCall) -> None:
    equation, refs = argument(call, 0), [*refs_in(call.arguments[1:])]
    if not isinstance(equation, str) or "->" not in equation:
        raise NoRule
    inputs, output = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    if len(terms) != len(refs):
        raise NoRule
    repeated = [len(graph.shape(ref)) - len(term.replace("...", "")) for ref, term in zip(refs, terms, strict=True)]
    labels = [_labels(term, count) for term, count in zip(terms, repeated, strict=True)]
    graph.give(call, contract(graph, call, [*zip(refs, labels, strict=True)], _labels(output, max(repeated))))


def _labels(term: str, repeated: int) -> list[Hashable]:
    """One per dim; those of `...` are numbers from the right."""
    before, dots, after = term.partition("...")
    return [*before, *(range(-repeated, 0) if dots else ()), *after]


def attention(graph: Graph, call: TracedCall) -> None:
    """`scaled_dot_product_attention`: batch and heads together; heads of keys may serve several of queries."""
    query, key, value = input_of(call), tensor(call, 1, "key"), tensor(call, 2, "value")
    mask, shape = argument(call, 3, "attn_mask"), graph.output_shape(call)
    q, k, v = [*graph.of(query)], [*graph.of(key)], [*graph.of(value)]
    if argument(call, 7, "enable_gqa", default=False) and graph.shape(query)[-3] != graph.shape(key)[-3]:
        shared = graph.new(graph.shape(query)[-3] // graph.shape(key)[-3])
        k[-3], v[-3] = (*k[-3], *shared), (*v[-3], *shared)
    dims = [*_united(graph, call, q, k, v), q[-2], v[-1]]
    graph.unite(q[-1], k[-1], call)
    graph.unite(k[-2], v[-2], call)
    for dim in (q[-1], q[-2], k[-2]):
        graph.forbid(dim, call)
    graph.give(call, dims)
    if isinstance(mask, Ref):
        over = aligned(graph, call, [mask], (*shape[:-1], graph.shape(key)[-2]))
        for dim, own in zip((*dims[:-1], k[-2]), over, strict=True):
            graph.unite(dim, own, call)


def _united(graph: Graph, call: TracedCall, *tensors: Dims) -> Dims:
    """What all have before their last two dims, counted from the right."""
    columns = zip_longest(*(dims[-3::-1] for dims in tensors), fillvalue=())
    result: Dims = []
    for column in columns:
        factored = [dim for dim in column if dim]
        for dim in factored[1:]:
            graph.unite(factored[0], dim, call)
        result.insert(0, factored[0] if factored else ())
    return result


# ----------------------------------------------------------------------------------------------- lookups, norms, losses


def embedding(graph: Graph, call: TracedCall) -> None:
    """Rows of a table: of split rows each rank finds its own, and the outputs are summed."""
    ids, table = input_of(call), tensor(call, 1, "weight")
    rows, columns = graph.of(table)
    if argument(call, 3, "max_norm") is not None or argument(call, 5, "scale_grad_by_freq", default=False):
        raise NoRule
    if argument(call, 6, "sparse", default=False):
        raise NoRule
    graph.give(call, [*graph.of(ids), columns])
    if graph.is_weight(table):
        graph.ends_in_sum(rows, "sum")
    else:
        graph.forbid(rows, call)


def normalized(graph: Graph, call: TracedCall) -> None:
    """`layer_norm`, `rms_norm`: over the last dims, which the parameters have too."""
    x, shape = input_of(call), argument(call, 1, "normalized_shape")
    if not isinstance(shape, tuple):
        raise NoRule
    dims = graph.of(x)
    over = dims[len(dims) - len(shape) :]
    for parameter in (argument(call, 2, "weight"), argument(call, 3, "bias")):
        if isinstance(parameter, Ref):
            for dim, own in zip(over, graph.of(parameter), strict=True):
                graph.unite(dim, own, call)
    for dim in over:
        graph.forbid(dim, call)
    graph.give(call, dims)


def cross_entropy(graph: Graph, call: TracedCall) -> None:
    """Splits by classes: this needs three numbers per row from every rank."""
    scores, target = input_of(call), tensor(call, 1, "target")
    dims = graph.of(scores)
    at = 1 if len(dims) > 1 else 0
    others = [dim for place, dim in enumerate(dims) if place != at]
    plain = argument(call, 2, "weight") is None and not argument(call, 7, "label_smoothing", default=0.0)
    if graph.trace.values[target.index].dtype.is_floating_point or not plain:
        raise NoRule
    for dim, own in zip(others, graph.of(target), strict=True):
        graph.unite(dim, own, call)
    graph.ends_in_sum(dims[at], "classes")
    each = argument(call, 6, "reduction", default="mean") == "none"
    for dim in others if not each else ():
        graph.forbid(dim, call)
    graph.give(call, others if each else [])


def linear_cross_entropy(graph: Graph, call: TracedCall) -> None:
    """Splits by classes, as `cross_entropy`: the rows of the weight, with which the hidden states are multiplied."""
    hidden, weight, targets = (tensor(call, at, name) for at, name in enumerate(("hidden", "weight", "targets")))
    bias, reduction = call.keywords.get("bias"), call.keywords.get("reduction")
    *rows, width = graph.of(hidden)
    classes, columns = graph.of(weight)
    graph.unite(width, columns, call)
    if isinstance(bias, Ref):
        graph.unite(classes, graph.of(bias)[0], call)
    for dim in (width, *rows, *graph.of(targets)):
        graph.forbid(dim, call)
    graph.ends_in_sum(classes, "classes")
    elements = graph.trace.values[hidden.index].elements * graph.shape(weight)[0]
    graph.multiplies(elements // max(graph.trace.values[call.outputs[0]].elements, 1))
    graph.give(call, rows if reduction == "none" else [])
