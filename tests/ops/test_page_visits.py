"""Lists of generated rows over pages: attention over them, and pages chosen by the bounds of their
keys, against float64."""

import numpy as np
import pytest

from effinfer import _core
from tests.ops.attention_reference import PAGE, Batch, fill, make_batch, reference
from tests.ops.test_visits import SHAPES, random_words, unpack, visited
from tests.tolerance import assert_close

KV_LENS = [1, 63, 64, 200, 1030, 2000, 900, 333]
QO_LENS = [1, 2, 1, 1, 63, 1, 5, 65]  # the last one is a prompt's
GENERATED = len(KV_LENS) - 1


def make_visits(batch: Batch, heads: int, kv_heads: int) -> _core.Visits:
    return _core.Visits(batch.qo_indptr, batch.kv_len, heads, kv_heads, generated=True)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "i8"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_each_row_sees_what_its_list_has(isa, dtype, heads, kv_heads, head_dim):
    rng = np.random.default_rng(head_dim)
    batch = make_batch(rng, KV_LENS, QO_LENS)
    kv, keys, values = fill(rng, batch, kv_heads, head_dim, dtype)
    q = rng.standard_normal((sum(QO_LENS), heads, head_dim), np.float32)
    visits = make_visits(batch, heads, kv_heads)
    assert len(visits.blocks) == 2 + sum(QO_LENS[:GENERATED])
    visits.words[:] = random_words(rng, visits.words.shape)
    lists = visited(visits, batch, kv_heads)
    scale = np.float32(head_dim**-0.5)
    out = _core.paged_attention(q, kv, *batch.lists, sm_scale=scale, visits=visits)
    expected, magnitude = reference(q, keys, values, batch, scale, visited=lists)
    assert_close(out, expected, terms=head_dim + max(KV_LENS), magnitude=magnitude)


def test_lists_of_everything_are_dense_attention(isa):
    rng = np.random.default_rng(3)
    batch = make_batch(rng, KV_LENS, QO_LENS)
    kv, _, _ = fill(rng, batch, 3, 64, "bf16")
    q = rng.standard_normal((sum(QO_LENS), 9, 64), np.float32)
    visits = make_visits(batch, 9, 3)
    visits.words[:] = ~np.uint64(0)
    dense = _core.paged_attention(q, kv, *batch.lists)
    np.testing.assert_array_equal(_core.paged_attention(q, kv, *batch.lists, visits=visits), dense)


def rounded_away(values: np.ndarray, up: bool) -> np.ndarray:
    """To bfloat16, in float64."""
    bits = values.astype(np.float32).view(np.uint32)
    outwards = ((bits & 0xFFFF) != 0) & ((bits >> 31 == 0) == up)
    return ((((bits >> 16) + outwards) << 16).view(np.float32)).astype(np.float64)


def page_scores(q: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, float]:
    """float64 [pages] for the heads q [group, dim], which have their scale, of whole pages of keys
    [pages, 64, dim]; and how far roundings to float32 may move them."""
    least, most = rounded_away(keys.min(1), False), rounded_away(keys.max(1), True)
    x = q.astype(np.float64)[:, None]
    logits = np.maximum(x * least, x * most).sum(-1)
    magnitude = np.maximum(abs(x * least), abs(x * most)).sum(-1).max()
    error = 2.0**-23 * (2 * q.shape[1] + 100) * magnitude
    if len(q) == 1:
        return logits[0], error
    highest = logits.max(-1, keepdims=True)
    sums = highest + np.log(np.exp(logits - highest).sum(-1, keepdims=True))
    return (logits - sums).max(0), 2 * error + 1e-5


def check_row(bits: np.ndarray, row, q: np.ndarray, keys: np.ndarray, options: dict) -> bool:
    """One list [kv_len]; whether something was left out."""
    position = row[3]
    sinks, own = options.get("sink_tokens", 0), position // PAGE
    first = sinks // PAGE
    count = max(0, own - 1 - first)
    budget = max(options.get("pages", 0), int(np.ceil(options.get("share", 0.0) * count)))
    if position + 1 < options.get("min_tokens", 0) or budget >= count:
        assert bits[: position + 1].all()
        return False
    pages = keys[first * PAGE : (first + count) * PAGE].reshape(count, PAGE, -1)
    scores, error = page_scores(q, pages)
    always = np.zeros(position + 1, bool)
    always[:sinks] = True
    local = options.get("local_tokens", 0)
    always[max(0, position + 1 - local) if local else position :] = True
    always[(own - 1) * PAGE :] = True
    chosen = bits[first * PAGE : (first + count) * PAGE].reshape(count, PAGE)
    free = ~always[first * PAGE : (first + count) * PAGE].reshape(count, PAGE).any(1)
    assert (chosen.all(1) | ~chosen.any(1))[free].all()
    assert bits[: position + 1][always].all()
    order = np.sort(scores)[::-1]
    sure = scores > order[budget] + 2 * error
    maybe = (scores >= order[budget - 1] - 2 * error) & (budget > 0)
    assert chosen[sure].all()
    assert not chosen[free & ~maybe].any()
    assert chosen[free].all(1).sum() <= budget
    if local == 0:
        assert chosen.all(1).sum() == budget
    return True


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [*SHAPES, (5, 1, 32), (7, 1, 48)])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("f32", {"pages": 2, "sink_tokens": 64}),
        ("bf16", {"share": 0.3, "sink_tokens": 3}),
        ("f16", {"pages": 1, "share": 0.2, "local_tokens": 200}),
        ("i8", {"pages": 3, "min_tokens": 1000, "sink_tokens": 130}),
        ("bf16", {}),
    ],
)
def test_pages_by_their_bounds(isa, dtype, options, heads, kv_heads, head_dim):
    rng = np.random.default_rng(heads)
    batch = make_batch(rng, KV_LENS, QO_LENS)
    kv, keys, _ = fill(rng, batch, kv_heads, head_dim, dtype)
    q = rng.standard_normal((sum(QO_LENS), heads, head_dim), np.float32)
    visits = make_visits(batch, heads, kv_heads)
    visits.words[:] = random_words(rng, visits.words.shape)
    before = visits.words.copy()
    _core.page_visits(visits, q, kv, *batch.lists, **options)
    np.testing.assert_array_equal(visits.words[:2], before[:2])  # those of the prompt's blocks
    scaled = (q * np.float32(head_dim**-0.5)).reshape(len(q), kv_heads, -1, head_dim)
    left_out = 0
    for row, words in zip(visits.blocks[2:], visits.words[2:], strict=True):
        for head, bits in enumerate(unpack(words, int(batch.kv_len[row[0]]))):
            of_head = keys[row[0]][:, head]
            left_out += check_row(bits, row, scaled[row[1], head], of_head, options)
    assert left_out > 0


def test_a_row_chooses_alike_alone_and_behind_others(isa):
    rng = np.random.default_rng(5)
    batch = make_batch(rng, [700, 1500], [60, 63])
    kv, _, _ = fill(rng, batch, 2, 64, "bf16")
    q = rng.standard_normal((123, 6, 64), np.float32)
    visits = make_visits(batch, 6, 2)
    _core.page_visits(visits, q, kv, *batch.lists, pages=2, sink_tokens=64)
    for row, words in zip(visits.blocks, visits.words, strict=True):
        sequence, first, _, position = map(int, row)
        part = batch.part(sequence, position, position + 1)
        alone = make_visits(part, 6, 2)
        _core.page_visits(alone, q[first : first + 1], kv, *part.lists, pages=2, sink_tokens=64)
        size = position // PAGE + 1
        np.testing.assert_array_equal(alone.words[0, :, :size], words[:, :size])


def test_numbers_that_are_none_do_no_harm(isa):
    rng = np.random.default_rng(7)
    batch = make_batch(rng, [900], [1])
    kv, _, _ = fill(rng, batch, 1, 16, "f32")
    q = np.full((1, 2, 16), np.nan, np.float32)
    visits = make_visits(batch, 2, 1)
    _core.page_visits(visits, q, kv, *batch.lists, pages=3)
    assert np.isnan(_core.paged_attention(q, kv, *batch.lists, visits=visits)).all()


def test_refused():
    rng = np.random.default_rng(6)
    batch = make_batch(rng, [300], [1])
    kv, _, _ = fill(rng, batch, 1, 16, "f32")
    q = rng.standard_normal((1, 2, 16), np.float32)
    visits = make_visits(batch, 2, 1)
    error = _core.InvalidArgumentError
    for name, value in (
        ("pages", -1),
        ("share", 1.5),
        ("share", float("nan")),
        ("sink_tokens", -1),
        ("local_tokens", -1),
        ("min_tokens", -1),
        ("sm_scale", float("inf")),
    ):
        with pytest.raises(error, match=rf"\[page_visits\] {name}"):
            _core.page_visits(visits, q, kv, *batch.lists, **{name: value})
    with pytest.raises(error, match=r"\[page_visits\] visits: expected lists of this batch"):
        _core.page_visits(make_visits(batch, 3, 1), q, kv, *batch.lists)
    with pytest.raises(error, match=r"\[paged_attention\] parents: expected none with visits"):
        parents = np.array([-1], np.int32)
        _core.paged_attention(q, kv, *batch.lists, visits=visits, parents=parents)
