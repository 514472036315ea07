"""The text form of graphs: round trip, errors with places, and the builder's checks."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effinfer import _core
from effinfer.graph import GraphBuilder

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.]{0,12}", fullmatch=True)
ATTRIBUTES = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
)

SMALL = """graph small {
  meta vocab_size = 8
  input %x : f32[T, 4]
  input %rows : i32[R]
  weight %w = "out.weight" : f32[8, 4]
  %h : f32[T, 4] = silu(%x)
  %s : f32[R, 4] = select_rows(%h, %rows)
  %y : f32[R, 8] = linear(%s, %w)
  return %y
}
"""


@st.composite
def graphs(draw):
    """A chain of random elementwise operators with random metadata."""
    builder = GraphBuilder(draw(NAMES))
    columns = draw(st.integers(1, 2**40))
    values = [builder.input(draw(NAMES), "f32", ["T", columns])]
    for key, value in draw(st.dictionaries(NAMES, ATTRIBUTES, max_size=4)).items():
        builder.set_metadata(key, value)
    for name in draw(st.lists(st.text(min_size=1, max_size=12), max_size=3, unique=True)):
        builder.weight(name, "f16", [columns])
    for _ in range(draw(st.integers(0, 12))):
        a, b = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        op = draw(st.sampled_from(["silu", "gelu", "sigmoid", "add", "mul", "scale", "softcap"]))
        number = draw(st.floats(allow_nan=False))
        attributes = {"scale": {"factor": number}, "softcap": {"cap": number}}.get(op, {})
        inputs = [a, b] if op in ("add", "mul") else [a]
        values.append(builder.node(op, *inputs, **attributes))
    return builder.finish(draw(st.sampled_from(values)))


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_round_trip(graph):
    text = graph.to_string()
    parsed = _core.Graph.parse(text)
    parsed.verify()
    assert parsed.to_string() == text
    assert parsed == graph
    assert parsed.metadata == graph.metadata
    assert parsed.nodes == graph.nodes
    assert parsed.values == graph.values


@pytest.mark.parametrize("number", [0.1, 1e-45, math.pi, 1e300, -0.0, 5e-324, math.inf, 3.0])
def test_numbers_keep_their_bits(number):
    builder = GraphBuilder("g")
    x = builder.input("x", "f32", ["T", 1])
    graph = _core.Graph.parse(str(builder.finish(builder.scale(x, factor=number))))
    factor = graph.nodes[0]["attributes"]["factor"]
    assert isinstance(factor, float)
    assert factor.hex() == number.hex()


def test_defaults_are_filled_and_integers_become_floats():
    graph = _core.Graph.parse(
        'graph g {\n input %i : i32[T]\n weight %w = "w" : q4_0[8, 32]\n'
        " %e : f32[T, 32] = embedding(%i, %w)  # a comment\n"
        " %s : f32[T, 32] = scale(%e) {factor = 2}\n return %s\n}"
    )
    graph.verify()
    assert graph.nodes[0]["attributes"] == {"scale": 1.0}
    assert graph.nodes[1]["attributes"] == {"factor": 2.0}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("graph small", "grap small", '1:1: expected "graph"'),
        ("silu(%x)", "silu(%q)", "6:26: %q is not defined"),
        ("silu(%x)", "silu(%h)", "6:26: %h is not defined"),
        ("%h : f32", "%x : f32", "6:4: %x is already defined"),
        ("vocab_size = 8", "vocab_size = 99999999999999999999", "2:21: expected a number"),
        ("f32[T, 4]\n", "f31[T, 4]\n", "3:14: "),
        ("[R]", "[R, 1, 2, 3, 4, 5]", "at most 5 dimensions"),
        ("[8, 4]", "[-8, 4]", "5:34: expected a dimension"),
        ("[8, 4]", "[8, 9999999999999]", "5:37: expected a dimension"),
        ('"out.weight"', '"out.weight', "unterminated string"),
        ('"out.weight"', '"out\\q"', "expected an escape"),
        ("return %y", "return %y return %y", "expected '}' after return"),
        ("return %y", "%z : f32[T, 4] = silu(%x", "10:1: expected ')', got '}'"),
        ("}\n", "", "10:1: expected a statement or '}', got the end of the text"),
        ("}\n", "} x", "10:3: expected the end"),
        ("input %rows", "inptu %rows", 'got "inptu"'),
    ],
)
def test_syntax_errors_have_line_and_column(old, new, message):
    assert old in SMALL
    with pytest.raises(_core.FormatError) as error:
        _core.Graph.parse(SMALL.replace(old, new, 1))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("silu", "sillu", 'got "sillu"'),
        ("silu(%x)", "silu(%x, %x)", "[silu] inputs: expected 1, got 2"),
        ("silu(%x)", "silu(%x) {a = 1}", "[silu] a: expected no such attribute"),
        ("silu(%x)", "scale(%x)", "[scale] factor: expected a float, got none"),
        ("silu(%x)", "scale(%x) {factor = true}", "expected a float, got another type"),
        ("%h : f32[T, 4]", "%h : f32[T, 5]", "expected f32[T, 4], got f32[T, 5]"),
        ("%h : f32[T, 4]", "%h : f32[T, 4], %k : f32[T, 4]", "expected 1 results, got 2"),
        ("linear(%s, %w)", "linear(%s, %s)", "[linear] weight: expected a weight"),
        ("f32[8, 4]", "f32[8, T]", "expected constant dimensions"),
        ("f32[8, 4]", "q8_0[8, 4]", "multiple of 32"),
        ("f32[8, 4]", "act[8, 4]", "cannot be stored"),
        ("  return %y\n", "", "expected at least one output"),
    ],
)
def test_verifier(old, new, message):
    _core.Graph.parse(SMALL).verify()
    with pytest.raises(_core.FormatError) as error:
        _core.Graph.parse(SMALL.replace(old, new, 1)).verify()
    assert message in str(error.value)


def test_hostile_texts_raise_and_never_crash():
    rng = random.Random(7)
    alphabet = SMALL + '\0\xff"\\{}[]@#-'
    read = 0
    for _ in range(3000):
        text = list(SMALL)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(text))
            action = rng.randrange(4)
            if action == 0:
                text[place] = rng.choice(alphabet)
            elif action == 1:
                del text[place : place + rng.randint(1, 20)]
            elif action == 2:
                text[place:place] = text[: rng.randint(1, 60)]
            else:
                text[place:] = []
            if not text:
                break
        try:
            graph = _core.Graph.parse("".join(text))
            graph.verify()
        except _core.FormatError:
            continue
        assert _core.Graph.parse(str(graph)) == graph
        read += 1
    assert 30 < read < 2970


def test_builder_names_operator_and_argument():
    builder = GraphBuilder("g")
    x = builder.input("x", "f32", ["T", 64])
    with pytest.raises(_core.InvalidArgumentError, match=r"\[linear\] weight: expected 64 columns"):
        builder.linear(x, builder.weight("w", "f32", [3, 32]))
    with pytest.raises(_core.InvalidArgumentError, match=r"\[attention\] kv: expected the handle"):
        builder.attention(x, x, layer=0, heads=4, kv_heads=2, head_dim=16, sm_scale=1.0)
    with pytest.raises(_core.InvalidArgumentError, match=r"\[weight\] w: expected the type"):
        builder.weight("w", "f16", [3, 32])
    with pytest.raises(_core.InvalidArgumentError, match="shape: expected"):
        builder.input("y", "f32", ["Q", 64])
    assert builder.weight("w", "f32", [3, 32]) == builder.weight("w", "f32", [3, 32])
