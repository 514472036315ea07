"""Each pass: text in, text out. The expected nodes leave out the attributes that a test is not
about."""

import os
import subprocess
import sys

import pytest

from effinfer import _core

HEADER = """graph g {
  meta context_length = 64
  input %token_ids : i32[T]
  input %positions : i32[T]
  input %logit_rows : i32[R]
  weight %w = "w" : f32[64]
  weight %hw = "hw" : f32[16]
  weight %b = "b" : f32[64]
  weight %q = "q" : q4_0[64, 64]
  weight %k = "k" : q8_0[32, 64]
  weight %v = "v" : f16[32, 64]
  weight %big = "big" : bf16[64, 64]
"""
X = "  %x : f32[T, 64] = embedding(%token_ids, %q)\n"


def run(name, body, **options):
    """The nodes after the pass, one "outputs = op(inputs)" a line, and the graph."""
    graph = _core.run_pass(name, _core.Graph.parse(HEADER + body + "}"), options_of(options))
    lines = [
        f"{', '.join(n['outputs'])} = {n['op']}({', '.join(n['inputs'])})" for n in graph.nodes
    ]
    return lines, graph


def options_of(options):
    return _core.CompileOptions(**options)


def attributes(graph, output):
    return next(n["attributes"] for n in graph.nodes if output in n["outputs"])


def test_hoist_select_rows_leaves_what_others_need():
    lines, _ = run(
        "hoist_select_rows",
        X
        + """
  %n : f32[T, 64] = rms_norm(%x, %w) {eps = 1e-06}
  %c : f32[T, 32] = linear(%n, %k)
  %kv : kv[0, 2, 16] = kv_append(%c, %c) {layer = 0, heads = 2, head_dim = 16}
  %h : f32[T, 64] = linear(%n, %q, %b)
  %s : f32[T, 64] = add(%h, %x)
  %g : f32[T, 64] = silu(%s)
  %d : f32[T, 64] = mul(%g, %s)
  %e : f32[T, 64] = add(%d, %s)
  %y : f32[R, 64] = select_rows(%e, %logit_rows)
  %z : f32[R, 64] = rms_norm(%y, %w) {eps = 1e-06}
  return %z
""",
    )
    assert lines == [
        "x = embedding(token_ids, q)",
        "n = rms_norm(x, w)",
        "c = linear(n, k)",
        "kv = kv_append(c, c)",
        "n.rows = select_rows(n, logit_rows)",
        "h = linear(n.rows, q, b)",
        "x.rows = select_rows(x, logit_rows)",
        "s = add(h, x.rows)",
        "g = silu(s)",
        "d = mul(g, s)",
        "e = add(d, s)",
        "z = rms_norm(e, w)",
    ]


def test_hoist_select_rows_keeps_a_selection_of_what_attention_reads():
    body = X + "  %y : f32[R, 64] = select_rows(%x, %logit_rows)\n  return %y\n"
    lines, _ = run("hoist_select_rows", body)
    assert lines == ["x = embedding(token_ids, q)", "y = select_rows(x, logit_rows)"]


def test_canonicalize_shares_one_operand():
    lines, graph = run(
        "canonicalize",
        X
        + """
  %y : f32[T, 64] = linear(%x, %q, %b)
  %z : f32[T, 32] = linear(%x, %k)
  %u : f32[T, 64] = linear(%y, %big)
  return %u
""",
    )
    assert lines == [
        "x = embedding(token_ids, q)",
        "x.act = to_act(x)",
        "y = matmul(x.act, q, b)",
        "z = matmul(x.act, k)",
        "y.act = to_act(y)",
        "u = matmul(y.act, big)",
    ]
    assert attributes(graph, "y") == {"parts": 1, "bias": [0], "residual": []}
    assert attributes(graph, "z") == {"parts": 1, "bias": [], "residual": []}


ACT = X + "  %a : act[T, 64] = to_act(%x)\n"


def test_merge_projections():
    lines, graph = run(
        "merge_projections",
        ACT
        + """
  %y : f32[T, 64] = matmul(%a, %q) {parts = 1}
  %s : f32[T, 64] = silu(%y)
  %z : f32[T, 32] = matmul(%a, %k) {parts = 1}
  %u : f32[T, 32] = matmul(%a, %v) {parts = 1}
  %l : f32[T, 64] = matmul(%a, %big, %b) {parts = 1, bias = [0]}
  %m : f32[T, 64] = matmul(%a, %big) {parts = 1}
  return %s
""",
    )
    # Five projections: four share a node, the fifth does not fit.
    assert lines[2:] == [
        "y, z, u, l = matmul(a, q, k, v, big, b)",
        "s = silu(y)",
        "m = matmul(a, big)",
    ]
    assert attributes(graph, "y") == {"parts": 4, "bias": [3], "residual": []}


def test_fuse_norm():
    body = X + "  %n : f32[T, 64] = rms_norm(%x, %w) {eps = 1e-06}\n"
    body += "  %a : act[T, 64] = to_act(%n)\n  %y : f32[T, 64] = matmul(%a, %q) {parts = 1}\n"
    lines, graph = run("fuse_norm", body + "  return %y\n")
    assert lines[1:] == ["a = rms_norm(x, w)", "y = matmul(a, q)"]
    assert attributes(graph, "a") == {"eps": 1e-6, "groups": 1, "as_operand": True}
    # The floats are wanted too: nothing to fuse.
    used = body + "  %z : f32[T, 64] = add(%y, %n)\n  return %z\n"
    assert run("fuse_norm", used)[0][1:3] == ["n = rms_norm(x, w)", "a = to_act(n)"]
    assert "n = rms_norm(x, w)" in run("fuse_norm", body + "  return %y, %n\n")[0]


GATED = """  %g, %u = matmul
  %s : f32[T, 64] = ACTIVATION(%g)
  %m : f32[T, 64] = mul(ORDER)
""".replace("%g, %u = matmul", "%g : f32[T, 64], %u : f32[T, 64] = matmul(%a, PARTS) {parts = 2}")


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "sigmoid"])
@pytest.mark.parametrize("order", ["%s, %u", "%u, %s"])
def test_fuse_activation(activation, order):
    gated = GATED.replace("ACTIVATION", activation).replace("ORDER", order)
    body = ACT + gated.replace("PARTS", "%q, %big")
    lines, graph = run("fuse_activation", body + "  return %m\n")
    assert lines[2:] == ["m = matmul_glu(a, q, big)"]
    assert attributes(graph, "m")["activation"] == activation
    # As the operand of the next matmul.
    down = "  %c : act[T, 64] = to_act(%m)\n  %d : f32[T, 64] = matmul(%c, %q) {parts = 1}\n"
    lines, graph = run("fuse_activation", body + down + "  return %d\n")
    assert lines[2:] == ["c = matmul_glu(a, q, big)", "d = matmul(c, q)"]
    assert attributes(graph, "c")["as_operand"] is True


def test_fuse_activation_orders_the_parts():
    body = ACT + GATED.replace("PARTS", "%big, %q").replace("ACTIVATION", "silu")
    swapped = body.replace("%g : f32[T, 64], %u : f32[T, 64]", "%u : f32[T, 64], %g : f32[T, 64]")
    lines, _ = run("fuse_activation", swapped.replace("ORDER", "%s, %u") + "  return %m\n")
    assert lines[2:] == ["m = matmul_glu(a, q, big)"]


@pytest.mark.parametrize("extra", ["%g", "%u", "%s"])
def test_fuse_activation_keeps_values_that_others_use(extra):
    body = ACT + GATED.replace("PARTS", "%q, %big").replace("ACTIVATION", "silu")
    body = body.replace("ORDER", "%s, %u") + f"  %o : f32[T, 64] = add(%m, {extra})\n  return %o\n"
    assert "m = mul(s, u)" in run("fuse_activation", body)[0]


def test_fuse_residual_into_a_matmul():
    matmul = "  %y : f32[T, 64] = matmul(%a, %q) {parts = 1}\n"
    lines, graph = run(
        "fuse_residual", ACT + matmul + "  %r : f32[T, 64] = add(%x, %y)\n return %r"
    )
    assert lines[2:] == ["r = matmul(a, q, x)"]
    assert attributes(graph, "r")["residual"] == [0]
    # A residual that is made after the matmul: the matmul moves down.
    late = "  %l : f32[T, 64] = silu(%x)\n  %r : f32[T, 64] = add(%y, %l)\n return %r"
    assert run("fuse_residual", ACT + matmul + late)[0][2:] == [
        "l = silu(x)",
        "r = matmul(a, q, l)",
    ]
    # One of two parts; and a product that is used twice stays.
    two = "  %y : f32[T, 64], %z : f32[T, 32] = matmul(%a, %q, %k) {parts = 2}\n"
    lines, graph = run(
        "fuse_residual", ACT + two + "  %r : f32[T, 64] = add(%y, %x)\n return %r, %z"
    )
    assert lines[2:] == ["r, z = matmul(a, q, k, x)"]
    twice = "  %r : f32[T, 64] = add(%y, %x)\n  %t : f32[T, 64] = mul(%r, %y)\n return %t"
    assert run("fuse_residual", ACT + matmul + twice)[0][3] == "r = add(y, x)"


def test_fuse_residual_into_a_norm():
    body = (
        X
        + """
  %n : f32[T, 64] = rms_norm(%x, %w) {eps = 1e-06}
  %s : f32[T, 64] = add(%x, %n)
  %m : act[T, 64] = rms_norm(%s, %b) {eps = 1e-05, as_operand = true}
  %y : f32[T, 64] = matmul(%m, %q, %s) {parts = 1, residual = [0]}
  return %y
"""
    )
    lines, graph = run("fuse_residual", body)
    assert lines[2:] == ["s, m = add_rms_norm(x, n, b)", "y = matmul(m, q, s)"]
    assert attributes(graph, "m") == {"eps": 1e-5, "as_operand": True}


QKV = (
    X
    + """
  %q0 : f32[T, 64] = mul(%x, %x)
  %a : act[T, 64] = to_act(%x)
  %k0 : f32[T, 32], %v0 : f32[T, 32] = matmul(%a, %k, %v) {parts = 2}
  %t : f32[T, 16] = rope_table(%positions) {dims = 16, theta = 10000.0}
"""
)
NORMS = """
  %qn : f32[T, 64] = rms_norm(%q0, %hw) {eps = 1e-06, groups = 4}
  %kn : f32[T, 32] = rms_norm(%k0, %hw) {eps = 1e-06, groups = 2}
"""
ROPES = """
  %qr : f32[T, 64] = rope(QIN, %t) {heads = 4, head_dim = 16, interleaved = true}
  %kr : f32[T, 32] = rope(KIN, %t) {heads = 2, head_dim = 16, interleaved = true}
"""
READ = """
  %kv : kv[3, 2, 16] = kv_append(KOUT, %v0) {layer = 3, heads = 2, head_dim = 16}
  %o : f32[T, 64] = attention(QOUT, %kv) {layer = 3, heads = 4, kv_heads = 2, head_dim = 16,
                                          sm_scale = 0.25}
  return %o
"""


def attention_block(*, norms, ropes):
    body = QKV + (NORMS if norms else "") + (ROPES if ropes else "") + READ
    q = ("%qn" if norms else "%q0", "%kn" if norms else "%k0")
    out = ("%qr", "%kr") if ropes else q
    for name, value in zip(("QIN", "KIN", "QOUT", "KOUT"), (*q, *out), strict=True):
        body = body.replace(name, value)
    return body


def test_fuse_rope_append():
    lines, graph = run("fuse_rope_append", attention_block(norms=False, ropes=True))
    assert lines[-2:] == ["qr, kv = rope_append(q0, k0, v0, t)", "o = attention(qr, kv)"]
    facts = attributes(graph, "kv")
    assert facts["rope"] is True
    assert facts["interleaved"] is True
    assert (facts["layer"], facts["heads"], facts["kv_heads"], facts["head_dim"]) == (3, 4, 2, 16)

    lines, graph = run("fuse_rope_append", attention_block(norms=True, ropes=True))
    assert lines[-2:] == ["qr, kv = rope_append(q0, k0, v0, t, hw, hw)", "o = attention(qr, kv)"]
    assert attributes(graph, "kv")["eps"] == 1e-6

    lines, graph = run("fuse_rope_append", attention_block(norms=True, ropes=False))
    assert lines[-2:] == ["qn, kv = rope_append(q0, k0, v0, hw, hw)", "o = attention(qn, kv)"]
    assert attributes(graph, "kv")["rope"] is False


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%kr : f32[T, 32] = rope(%k0, %t)", "%kr : f32[T, 32] = rope(%k0, %t2)"),
        ("head_dim = 16, interleaved = true}\n  %kv", "head_dim = 16}\n  %kv"),
        ("return %o", "%z : f32[T, 64] = add(%o, %qr)\n  return %z"),
    ],
)
def test_fuse_rope_append_needs_agreement(old, new):
    body = attention_block(norms=False, ropes=True)
    body = body.replace("\n\n", "\n")
    table = "  %t2 : f32[T, 16] = rope_table(%positions) {dims = 16, theta = 500.0}\n"
    body = body.replace("  %qr", table + "  %qr", 1)
    assert old in body
    lines, _ = run("fuse_rope_append", body.replace(old, new))
    assert any("kv_append" in line for line in lines)


OPERAND = """%p : act[T, 64] = to_act(%o)
  %y : f32[T, 64] = matmul(%p, %big) {parts = 1}
  return %y"""


def test_fuse_attention():
    block = attention_block(norms=False, ropes=False).replace("return %o", OPERAND)
    lines, graph = run("fuse_attention", block)
    assert lines[-2:] == ["p = attention(q0, kv)", "y = matmul(p, big)"]
    assert attributes(graph, "p")["as_operand"] is True

    # A KV head of one head of 16 columns is half a block of the operand.
    half = block.replace("heads = 4, kv_heads = 2", "heads = 4, kv_heads = 4")
    half = half.replace("heads = 2, head_dim", "heads = 4, head_dim").replace(
        "[3, 2, 16]", "[3, 4, 16]"
    )
    half = half.replace("f32[T, 32]", "f32[T, 64]").replace("(%a, %k, %v)", "(%a, %big, %big)")
    lines, _ = run("fuse_attention", half)
    assert lines[-2:] == ["p = to_act(o)", "y = matmul(p, big)"]


def test_fuse_regions():
    read = attention_block(norms=False, ropes=True).replace("return %o", OPERAND)
    body = _core.run_pass("fuse_rope_append", _core.Graph.parse(HEADER + read + "}"))
    marked = {
        node["outputs"][0]: {
            key for key in ("every_member", "in_attention") if key in node["attributes"]
        }
        for node in _core.run_pass("fuse_regions", body).nodes
    }
    assert marked["q0"] == marked["a"] == marked["t"] == marked["p"] == {"every_member"}
    assert marked["qr"] == {"in_attention"}
    assert marked["k0"] == marked["o"] == marked["y"] == set()

    # What is returned, and what becomes it row by row, goes to the caller once.
    tail = read.replace(
        "return %y",
        "%z : f32[T, 64] = silu(%y)\n  %l : f32[T, 64] = scale(%z) {factor = 2.0}\n  return %l",
    )
    _, graph = run("fuse_regions", tail)
    assert "every_member" not in attributes(graph, "z") | attributes(graph, "l")
    assert attributes(graph, "q0")["every_member"] is True


MASS = """%m : kv[3, 2, 16] = attention_mass(%qr, %kv) {layer = 3, heads = 4, kv_heads = 2,
    head_dim = 16, sm_scale = 0.25, plane = "mass"}
  %o :"""


def test_what_sums_attention_up_leaves_the_append_fused():
    block = attention_block(norms=False, ropes=True).replace("%o :", MASS, 1)
    lines, graph = run("fuse_rope_append", block)
    assert lines[-3:] == [
        "qr, kv = rope_append(q0, k0, v0, t)",
        "m = attention_mass(qr, kv)",
        "o = attention(qr, kv)",
    ]
    assert attributes(_core.run_pass("fuse_regions", graph), "qr")["in_attention"] is True
    wrong = HEADER + block.replace('plane = "mass"', 'plane = ""') + "}"
    with pytest.raises(_core.FormatError, match=r"attention_mass.* plane: expected a name"):
        _core.Graph.parse(wrong).verify()


OPERANDS = (
    ACT
    + """
  %c : act[T, 64] = rms_norm(%x, %w) {eps = 1e-06, as_operand = true}
  %y : f32[T, 64], %z : f32[T, 32] = matmul(%a, %q, %k) {parts = 2}
  %u : f32[T, 64], %l : f32[T, 32] = matmul(%c, %q, %v) {parts = 2}
  return %y
"""
)


def panel_arithmetic():
    """What a quantised matmul uses in prefill on this machine at the current level."""
    level = _core.current_isa()
    return "bf16" if level == "amx" or (level == "avx512" and _core.has_fast_bf16()) else "f32"


def test_choose_arithmetic(isa):
    fast = panel_arithmetic()
    choices = {
        (): (("int8", fast), ("f32", fast)),
        ("deterministic",): (("int8", "int8"), ("f32", "f32")),
        ("f32",): (("f32", "f32"), ("f32", "f32")),
    }
    for flags, expected in choices.items():
        precision = "f32" if "f32" in flags else "fast"
        deterministic = "deterministic" in flags
        _, graph = run(
            "choose_arithmetic", OPERANDS, precision=precision, deterministic=deterministic
        )
        for output, choice in zip("ac", expected, strict=True):
            facts = attributes(graph, output)
            assert (facts["decode"], facts["prefill"]) == choice


@pytest.mark.parametrize("width", [64, 4096])
def test_choose_arithmetic_of_what_is_added_or_gated(isa, width):
    """Many rows are multiplied as integers in place of float32, and in place of bfloat16 in large
    products, but not for what is returned."""
    body = (
        ACT
        + """
  %h : f32[T, 64] = matmul(%a, %q) {parts = 1}
  %c : act[T, 64] = rms_norm(%h, %w) {eps = 1e-06, as_operand = true}
  %y : f32[T, 64] = matmul(%c, %q) {parts = 1}
  return %y
"""
    )
    text = (HEADER + body + "}").replace("64", str(width))
    graph = _core.run_pass("choose_arithmetic", _core.Graph.parse(text))
    floats = panel_arithmetic()
    integers = _core.current_isa() in ("avx2", "avx512") and (floats == "f32" or width == 4096)
    assert attributes(graph, "a")["prefill"] == ("int8" if integers else floats)
    assert attributes(graph, "c")["prefill"] == floats


@pytest.mark.parametrize(
    ("options", "narrow"),
    [
        ({}, True),
        ({"kv_dtype": "bf16"}, True),
        ({"kv_dtype": "f16"}, False),
        ({"deterministic": True}, False),
        ({"precision": "f32"}, False),
    ],
)
def test_choose_arithmetic_of_attention(isa, options, narrow):
    """In prefill it multiplies bfloat16 where the machine does and the pages hold it."""
    body = """
  %c : f32[T, 32] = linear(%x, %k)
  %kv : kv[0, 1, 32] = kv_append(%c, %c) {layer = 0, heads = 1, head_dim = 32}
  %o : f32[T, 32] = attention(%c, %kv) {layer = 0, heads = 1, kv_heads = 1, head_dim = 32,
                                       sm_scale = 0.25}
  return %o
"""
    _, graph = run("canonicalize", X + body)
    graph = _core.run_pass("choose_arithmetic", graph, options_of(options))
    expected = "bf16" if narrow and panel_arithmetic() == "bf16" else None
    assert attributes(graph, "o").get("prefill_products") == expected


def test_passes_that_cannot_be_turned_off():
    graph = _core.Graph.parse(
        HEADER + X + "  %y : f32[R, 64] = select_rows(%x, %logit_rows)\n  return %y\n}"
    )
    weights = _core.MemoryWeights()
    for name in ("plan_memory", "lowr"):
        with pytest.raises(_core.InvalidArgumentError, match=name):
            _core.compile(
                graph, weights, _core.ThreadPool(1), _core.CompileOptions(disabled_passes={name})
            )
    with pytest.raises(
        _core.InvalidArgumentError, match="expected one of hoist_select_rows, canonicalize, merge"
    ):
        _core.run_pass("nothing", graph)


def test_environment_turns_passes_off():
    text = HEADER + X + "  %y : f32[R, 64] = select_rows(%x, %logit_rows)\n  return %y\n}"
    program = (
        "from effinfer import _core\n"
        f"graph = _core.Graph.parse({text!r})\n"
        "_core.compile(graph, _core.MemoryWeights(), _core.ThreadPool(1))\n"
    )
    env = {**os.environ, "EFFINFER_PASSES": "-plan_memory"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "plan_memory makes the graph runnable and cannot be turned off" in done.stderr


def test_pass_list():
    assert _core.pass_names() == [
        "hoist_select_rows",
        "canonicalize",
        "merge_projections",
        "fuse_norm",
        "fuse_activation",
        "fuse_residual",
        "fuse_rope_append",
        "fuse_attention",
        "fuse_regions",
        "choose_arithmetic",
        "plan_memory",
    ]
