"""Pipelines: joined and step by step they give the distributions of their parts."""

import numpy as np
import pytest

from effinfer import InvalidArgumentError, UnsupportedError, _core, ops
from effinfer.ops.logits_pipe import (
    LogitsPipe,
    MinP,
    Sample,
    Softmax,
    TaggedTensor,
    Temperature,
    TensorType,
    TopK,
    TopP,
)
from tests.ops import row_reference as reference

LOGITS = np.random.default_rng(0).standard_normal((4, 90)).astype(np.float32) * 3
PIPES = [
    [Temperature()],
    [TopK()],
    [Temperature(), Softmax()],
    [TopK(), Temperature(), Softmax(), TopP()],
    [Temperature(), TopK(), Softmax(), TopP(), MinP()],
    [Temperature(), Softmax(), MinP(), TopP(), TopK()],
    [Softmax(), TopK(), TopP()],
]
VALUES = {"temperature": 0.6, "top_k": 12, "top_p": 0.8, "min_p": 0.05}


def apply(processors, x):
    """One after the other in float64; -inf marks what a filter of logits removed."""
    x = x.astype(np.float64)
    for processor in processors:
        match processor:
            case Temperature():
                x = x / VALUES["temperature"]
            case Softmax():
                x = reference.softmax(x)
            case TopK() if x.min() < 0:
                x = np.where(reference.top_k(np.exp(x - x.max()), VALUES["top_k"]) > 0, x, -np.inf)
            case TopK():
                x = reference.top_k(x, VALUES["top_k"])
            case TopP():
                x = reference.top_p(x, VALUES["top_p"])
            case MinP():
                x = reference.min_p(x, VALUES["min_p"])
    return x


@pytest.mark.parametrize("processors", PIPES, ids=str)
@pytest.mark.parametrize("compile", [True, False])
def test_rows(isa, processors, compile):
    kind = TensorType.LOGITS if isinstance(processors[0], TopK) else None
    pipe = LogitsPipe(processors, compile=compile, input_type=kind)
    expected = np.stack([apply(processors, row) for row in LOGITS])
    got = pipe(LOGITS, **VALUES)
    np.testing.assert_array_equal(
        np.isfinite(got) & (got != 0), np.isfinite(expected) & (expected != 0)
    )
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize("compile", [True, False])
def test_samples(compile):
    processors = [Temperature(), TopK(), Softmax(), TopP(), Sample()]
    pipe = LogitsPipe(processors, compile=compile)
    assert repr(pipe).count("+") == (4 if compile else 0)
    draws = pipe(LOGITS, **VALUES, indices=np.full(50_000, 2, np.int32), seed=3)
    reference.assert_follows(draws, apply(processors, LOGITS[2]))


def test_joint_filters_see_the_whole_row():
    p = reference.softmax(LOGITS[1])
    pipe = LogitsPipe([Softmax(), TopK(joint_topk_topp=True), TopP()])
    got = pipe(LOGITS[1:2], top_k=4, top_p=0.9)[0]
    np.testing.assert_allclose(got, reference.joint(p, 4, 0.9), rtol=2e-5)


def test_step_by_step_becomes_one_call():
    pipe = LogitsPipe([Temperature(), Softmax(), Sample()], compile=False)
    alone = pipe(LOGITS, temperature=0.5, seed=7)
    pipe.compile()
    assert "calls=[Temperature+Softmax+Sample]" in repr(pipe)
    joined = pipe(TaggedTensor(LOGITS, TensorType.LOGITS), temperature=0.5, seed=7)
    np.testing.assert_array_equal(alone, joined)
    np.testing.assert_array_equal(joined, ops.sampling_from_probs(ops.softmax(LOGITS, 0.5), seed=7))


def test_errors():
    for make, message in (
        (lambda: LogitsPipe([]), "processors: expected at least one"),
        (lambda: LogitsPipe([TopK()]), "input_type: expected a TensorType"),
        (lambda: LogitsPipe([Temperature(), TopP()]), "expected TopP to follow probs, got logits"),
        (lambda: LogitsPipe([Softmax(), Softmax()]), "expected Softmax to follow logits"),
        (
            lambda: LogitsPipe([Softmax(), Sample(), TopK()]),
            "TopK to follow logits or probs",
        ),
        (lambda: LogitsPipe(["softmax"]), "expected processors of effinfer"),
    ):
        with pytest.raises(_core.InvalidArgumentError, match=message):
            make()
    pipe = LogitsPipe([Temperature(), Softmax(), TopP()])
    for call, message in (
        (lambda: pipe(LOGITS, temperature=1.0), r"\[LogitsPipe\] top_p: expected a value for TopP"),
        (lambda: pipe(LOGITS, temperature=1.0, top_p=2.0), r"\[LogitsPipe\] top_p: expected a num"),
        (lambda: pipe(LOGITS, temperature=1.0, topp=2.0), "topp: expected one of temperature"),
        (lambda: pipe(TaggedTensor(LOGITS, TensorType.PROBS), temperature=1.0, top_p=0.5), "input"),
    ):
        with pytest.raises(_core.InvalidArgumentError, match=message):
            call()


def test_a_deterministic_pipe_is_the_same():
    pipe = LogitsPipe([Softmax(), TopP(), Sample()])
    x = np.random.default_rng(4).standard_normal((3, 500), np.float32)
    tokens = pipe(x, top_p=0.9, seed=1, offset=0)
    same = pipe(x, top_p=0.9, seed=1, offset=0, is_deterministic=True)
    np.testing.assert_array_equal(same, tokens)


def test_parameters_of_processors(isa):
    """A processor may have its parameter for all runs; that of a run comes first."""
    fixed = LogitsPipe([Temperature(temperature=0.6), TopK(top_k=12), Softmax(), TopP(top_p=0.8)])
    free = LogitsPipe([Temperature(), TopK(), Softmax(), TopP()])
    given = {"temperature": 0.6, "top_k": 12, "top_p": 0.8}
    np.testing.assert_array_equal(fixed(LOGITS), free(LOGITS, **given))
    np.testing.assert_array_equal(fixed(LOGITS, top_k=3), free(LOGITS, **(given | {"top_k": 3})))
    with pytest.raises(InvalidArgumentError, match="TopP: expected top_p, got top_k"):
        TopP(top_k=3)
    for name in ("custom_fusion_rules", "custom_validity_checks"):
        with pytest.raises(UnsupportedError, match=rf"^\[LogitsPipe\] {name}: expected None \("):
            LogitsPipe([Softmax()], **{name: [1]})
