"""The arena: values that live at the same time never overlap, and the peak is what is reported."""

import hypothesis.strategies as st
from hypothesis import given, settings

from effinfer import _core
from effinfer.graph import GraphBuilder

MAX_TOKENS = 7
MAX_ROWS = 3
IN_PLACE = {"add": (0, 1), "mul": (0, 1), "silu": (0,), "scale": (0,), "rms_norm": (0,)}


@st.composite
def graphs(draw):
    """Elementwise operators, norms, matmuls and row selections over values of a few widths."""
    builder = GraphBuilder("g")
    ids = builder.input("token_ids", "i32", ["T"])
    rows = builder.input("logit_rows", "i32", ["R"])
    widths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=3, unique=True))
    values = [builder.embedding(ids, builder.weight(f"e{w}", "f32", [9, w])) for w in widths]
    for _ in range(draw(st.integers(1, 25))):
        x = draw(st.sampled_from(values))
        width = x.shape[1]
        op = draw(st.sampled_from(["add", "mul", "silu", "scale", "norm", "linear", "rows"]))
        if op in ("add", "mul"):
            other = draw(st.sampled_from([v for v in values if v.shape == x.shape]))
            values.append(builder.node(op, x, other))
        elif op == "norm":
            values.append(
                builder.rms_norm(x, builder.weight(f"n{width}", "f32", [width]), eps=1e-6)
            )
        elif op == "linear":
            out = draw(st.sampled_from(widths))
            weight = builder.weight(f"w{width}_{out}", "f32", [out, width])
            values.append(builder.linear(x, weight))
        elif op == "rows" and x.shape[0] == "T":
            values.append(builder.select_rows(x, rows))
        else:
            values.append(builder.scale(x, factor=2.0) if op == "scale" else builder.silu(x))
    return builder.finish(values[-1])


def compiled(graph):
    options = _core.CompileOptions(max_tokens=MAX_TOKENS, max_rows=MAX_ROWS, precision="f32")
    for name in _core.pass_names():
        graph = _core.run_pass(name, graph, options)
    return graph


def num_bytes(value):
    rows = {"T": MAX_TOKENS, "R": MAX_ROWS}[value["shape"][0]]
    if value["dtype"] == "act":  # f32 operands: rows of whole 64-float blocks
        return rows * ((value["shape"][1] + 63) // 64 * 64) * 4
    return rows * value["shape"][1] * 4


def lifetimes(graph):
    """(first, last, offset, bytes) by value, of those in the arena."""
    last = {}
    for index, node in enumerate(graph.nodes):
        for name in (*node["inputs"], *node["outputs"]):
            last[name] = index
    table = {}
    for index, node in enumerate(graph.nodes):
        for name, offset in zip(node["outputs"], node["attributes"]["arena"], strict=True):
            if offset >= 0:
                table[name] = (index, last[name], offset, num_bytes(graph.values[name]))
    return table


def may_share(graph, maker, old, new):
    """Whether `new`, made by a node, may lie over its input `old`."""
    node = graph.nodes[maker]
    if old not in node["inputs"]:
        return False
    place = node["inputs"].index(old)
    output = node["outputs"].index(new)
    if node["op"] == "matmul":
        first_residual = 1 + node["attributes"]["parts"] + len(node["attributes"]["bias"])
        residuals = node["attributes"]["residual"]
        return place >= first_residual and residuals[place - first_residual] == output
    if node["op"] == "add_rms_norm":
        return output == 0 and place in (0, 1)
    return place in IN_PLACE.get(node["op"], ())


@settings(max_examples=120, deadline=None)
@given(graphs())
def test_values_alive_together_do_not_overlap(graph):
    graph = compiled(graph)
    table = lifetimes(graph)
    peak = 0
    for name, (first, last, offset, size) in table.items():
        assert offset % 64 == 0
        peak = max(peak, (offset + size + 63) // 64 * 64)
        for other, (first2, last2, offset2, size2) in table.items():
            if first2 <= first or offset + size <= offset2 or offset2 + size2 <= offset:
                continue
            # `other` is made later, over the same bytes: `name` is gone, or ends right there in a
            # node that works in place.
            over = last < first2 or (last == first2 and may_share(graph, first2, name, other))
            assert over, f"{name} {table[name]} and {other} {table[other]}\n{graph}"
            assert last2 >= first2
    # Logits are the caller's and not in the arena. A graph that returns rows of tokens has none.
    output = graph.outputs[0]
    assert (output in table) == (graph.values[output]["shape"][0] == "T")
    assert graph.metadata["arena_bytes"] == peak


@settings(max_examples=40, deadline=None)
@given(graphs())
def test_peak_is_at_most_the_sum_and_at_least_the_live_bytes(graph):
    graph = compiled(graph)
    table = lifetimes(graph)
    total = sum((size + 63) // 64 * 64 for _, _, _, size in table.values())
    live = 0
    for index in range(len(graph.nodes)):
        spans = {offset: size for f, last, offset, size in table.values() if f <= index <= last}
        live = max(live, sum(spans.values()))
    assert live <= graph.metadata["arena_bytes"] <= total


def test_a_chain_works_in_place():
    builder = GraphBuilder("g")
    ids = builder.input("token_ids", "i32", ["T"])
    rows = builder.input("logit_rows", "i32", ["R"])
    x = builder.embedding(ids, builder.weight("e", "f32", [9, 16]))
    for _ in range(10):
        x = builder.silu(x)
    y = builder.softcap(builder.select_rows(x, rows), cap=3.0)
    graph = compiled(builder.finish(y))
    assert graph.metadata["arena_bytes"] == MAX_TOKENS * 64
    # The selected rows are written where the caller wants the logits, and capped there.
    assert [node["attributes"]["arena"] for node in graph.nodes[-2:]] == [[-1], [-1]]
