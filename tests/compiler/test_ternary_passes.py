"""`ternary_linear` through the passes: text in, text out."""

import pytest

from effinfer import _core
from effinfer.graph import GraphBuilder
from tests.compiler.test_passes import attributes

HEADER = """graph g {
  meta context_length = 64
  input %token_ids : i32[T]
  input %positions : i32[T]
  input %logit_rows : i32[R]
  weight %embed = "embed" : f16[64, 256]
  weight %w = "w" : f32[256]
  weight %b = "b" : f32[256]
  weight %a = "a" : tq2_0[256, 256]
  weight %c = "c" : tq1_0[256, 256]
  weight %d = "d" : i2_s[256, 256]
  weight %q = "q" : q8_0[256, 256]
  %x : f32[T, 256] = embedding(%token_ids, %embed)
"""
TOKEN = {"decode": "int8_token", "prefill": "int8_token"}


def run(names, body, **options):
    """The nodes after some passes, one "outputs = op(inputs)" a line, and the graph."""
    graph = _core.Graph.parse(HEADER + body + "}")
    for name in names.split():
        graph = _core.run_pass(name, graph, _core.CompileOptions(**options))
    nodes = graph.nodes[1:]
    return [
        f"{', '.join(n['outputs'])} = {n['op']}({', '.join(n['inputs'])})" for n in nodes
    ], graph


def arithmetic(graph, output):
    facts = attributes(graph, output)
    return {key: facts[key] for key in ("decode", "prefill") if key in facts}


def test_the_text_form_round_trips():
    text = HEADER + "  %y : f32[T, 256] = ternary_linear(%x, %d, %b)\n  return %y\n}\n"
    graph = _core.Graph.parse(text)
    assert "%y : f32[T, 256] = ternary_linear(%x, %d, %b)" in str(graph)
    assert _core.Graph.parse(str(graph)) == graph


def test_the_builder_checks_what_it_is_given():
    g = GraphBuilder("g")
    x = g.embedding(g.input("token_ids", "i32", ["T"]), g.weight("e", "f16", [8, 256]))
    y = g.ternary_linear(x, g.weight("a", "i2_s", [128, 256]))
    assert y.shape == ("T", 128)
    with pytest.raises(_core.InvalidArgumentError, match="ternary_linear.*weight.*q8_0"):
        g.ternary_linear(x, g.weight("q", "q8_0", [128, 256]))
    with pytest.raises(_core.InvalidArgumentError, match="ternary_linear.*256 columns"):
        g.ternary_linear(x, g.weight("n", "tq2_0", [128, 512]))


def test_canonicalize_keeps_kinds_of_operands_apart():
    lines, graph = run(
        "canonicalize",
        """
  %y : f32[T, 256] = ternary_linear(%x, %a, %b)
  %z : f32[T, 256] = linear(%x, %c)
  %u : f32[T, 256] = ternary_linear(%x, %d)
  return %u
""",
    )
    assert lines == [
        "x.token_act = to_act(x)",
        "y = matmul(x.token_act, a, b)",
        "x.act = to_act(x)",
        "z = matmul(x.act, c)",
        "u = matmul(x.token_act, d)",
    ]
    assert arithmetic(graph, "x.token_act") == TOKEN
    assert arithmetic(graph, "x.act") == {}


@pytest.mark.parametrize(
    "options", [{}, {"precision": "f32"}, {"deterministic": True}], ids=["fast", "f32", "same"]
)
def test_choose_arithmetic_leaves_the_model_s_arithmetic_alone(options):
    body = """
  %y : f32[T, 256] = ternary_linear(%x, %a)
  %z : f32[T, 256] = linear(%y, %c)
  return %z
"""
    _, graph = run("canonicalize choose_arithmetic", body, **options)
    assert arithmetic(graph, "x.token_act") == TOKEN
    assert arithmetic(graph, "y.act")["decode"] == ("f32" if "precision" in options else "int8")


def test_hoist_select_rows_moves_above_ternary_layers():
    lines, _ = run(
        "hoist_select_rows",
        """
  %y : f32[T, 256] = ternary_linear(%x, %a)
  %s : f32[R, 256] = select_rows(%y, %logit_rows)
  return %s
""",
    )
    assert lines == ["x.rows = select_rows(x, logit_rows)", "y = ternary_linear(x.rows, a)"]


def test_norm_and_quantisation_are_one_node():
    lines, graph = run(
        "canonicalize merge_projections fuse_norm",
        """
  %n : f32[T, 256] = rms_norm(%x, %w) {eps = 1e-06}
  %y : f32[T, 256] = ternary_linear(%n, %a)
  %z : f32[T, 256] = ternary_linear(%n, %d)
  %s : f32[T, 256] = add(%y, %z)
  return %s
""",
    )
    assert lines == [
        "n.token_act = rms_norm(x, w)",
        "y, z = matmul(n.token_act, a, d)",
        "s = add(y, z)",
    ]
    assert attributes(graph, "n.token_act") == {
        "eps": 1e-6,
        "groups": 1,
        "as_operand": True,
        **TOKEN,
    }


BLOCK = """
  %n : f32[T, 256] = rms_norm(%x, %w) {eps = 1e-06}
  %g : f32[T, 256] = ternary_linear(%n, %a)
  %u : f32[T, 256] = ternary_linear(%n, %c)
  %r : f32[T, 256] = relu_squared(%g)
  %m : f32[T, 256] = mul(%r, %u)
  %l : f32[T, 256] = rms_norm(%m, %b) {eps = 1e-06}
  %d0 : f32[T, 256] = ternary_linear(%l, %d)
  %y : f32[T, 256] = add(%x, %d0)
  %o : f32[T, 256] = rms_norm(%y, %w) {eps = 1e-06}
  %p : f32[T, 256] = ternary_linear(%o, %a)
  %z : f32[T, 256] = add(%p, %o)
  return %z
"""
FUSING = "canonicalize merge_projections fuse_norm fuse_activation fuse_residual"


def test_a_squared_relu_block_with_a_sub_norm():
    lines, graph = run(FUSING, BLOCK)
    assert lines == [
        "n.token_act = rms_norm(x, w)",
        "m = matmul_glu(n.token_act, a, c)",
        "l.token_act = rms_norm(m, b)",
        "y = matmul(l.token_act, d, x)",
        "o = rms_norm(y, w)",
        "o.token_act = to_act(o)",
        "z = matmul(o.token_act, a, o)",
    ]
    assert attributes(graph, "m")["activation"] == "relu_squared"
    assert attributes(graph, "m")["as_operand"] is False
    for operand in ("n.token_act", "l.token_act", "o.token_act"):
        assert arithmetic(graph, operand) == TOKEN


def test_a_fused_sum_and_norm_keep_the_arithmetic():
    body = BLOCK.replace(
        "%y : f32[T, 256] = add(%x, %d0)",
        "%h : f32[T, 256] = silu(%d0)\n  %y : f32[T, 256] = add(%x, %h)",
    )
    body = body.replace("%z : f32[T, 256] = add(%p, %o)", "%z : f32[T, 256] = silu(%p)")
    lines, graph = run(FUSING, body)
    assert "y, o.token_act = add_rms_norm(x, h, w)" in lines
    assert arithmetic(graph, "o.token_act") == TOKEN


def test_what_is_written_by_blocks_of_columns_writes_floats():
    """One scale a row: nobody can quantise a block before the row is whole."""
    body = """
  %g : f32[T, 256] = ternary_linear(%x, %a)
  %u : f32[T, 256] = ternary_linear(%x, %c)
  %r : f32[T, 256] = silu(%g)
  %m : f32[T, 256] = mul(%r, %u)
  %y : f32[T, 256] = ternary_linear(%m, %d)
  %kv : kv[0, 4, 64] = kv_append(%y, %y) {layer = 0, heads = 4, head_dim = 64}
  %o : f32[T, 256] = attention(%y, %kv) {layer = 0, heads = 4, kv_heads = 4, head_dim = 64,
                                        sm_scale = 0.125}
  %z : f32[T, 256] = ternary_linear(%o, %d)
  return %z
"""
    lines, graph = run(FUSING + " fuse_attention", body)
    assert lines == [
        "x.token_act = to_act(x)",
        "m = matmul_glu(x.token_act, a, c)",
        "m.token_act = to_act(m)",
        "y = matmul(m.token_act, d)",
        "kv = kv_append(y, y)",
        "o = attention(y, kv)",
        "o.token_act = to_act(o)",
        "z = matmul(o.token_act, d)",
    ]
    assert attributes(graph, "o")["as_operand"] is False
    # With other operands both do.
    lines, _ = run(FUSING + " fuse_attention", body.replace("ternary_linear", "linear"))
    assert "m.act = matmul_glu(x.act, a, c)" in lines
    assert "o.act = attention(y, kv)" in lines
