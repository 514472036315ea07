"""Lists of generated rows over pages: attention over them, units of keys chosen by their bounds and
single keys by their logits, against float64."""

from functools import partial

import numpy as np
import pytest

from effinfer import _core
from tests.ops.attention_reference import PAGE, fill, make_batch, reference
from tests.ops.visit_lists import CHOOSING, SHAPES, random_words, row_visits, unpack, visited
from tests.tolerance import assert_close

KV_LENS = [1, 63, 64, 200, 1030, 2000, 900, 333]
QO_LENS = [1, 2, 1, 1, 63, 1, 5, 65]  # the last one is a prompt's
GENERATED = len(KV_LENS) - 1


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "i8"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_each_row_sees_what_its_list_has(isa, dtype, heads, kv_heads, head_dim):
    rng = np.random.default_rng(head_dim)
    batch = make_batch(rng, KV_LENS, QO_LENS)
    kv, keys, values = fill(rng, batch, kv_heads, head_dim, dtype)
    q = rng.standard_normal((sum(QO_LENS), heads, head_dim), np.float32)
    visits = row_visits(batch, heads, kv_heads)
    assert len(visits.blocks) == 2 + sum(QO_LENS[:GENERATED])
    visits.words[:] = random_words(rng, visits.words.shape)
    lists = visited(visits, batch, kv_heads)
    scale = np.float32(head_dim**-0.5)
    out = _core.paged_attention(q, kv, *batch.lists, sm_scale=scale, visits=visits)
    expected, magnitude = reference(q, keys, values, batch, scale, visited=lists)
    assert_close(out, expected, terms=head_dim + max(KV_LENS), magnitude=magnitude)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i8"])
@pytest.mark.parametrize(("window", "sinks"), [(0, 0), (63, 0), (100, 70), (700, 0), (1500, 65)])
def test_of_its_list_each_row_sees_what_its_window_shows(isa, dtype, window, sinks):
    rng = np.random.default_rng(window)
    batch = make_batch(rng, KV_LENS, QO_LENS)
    kv, keys, values = fill(rng, batch, 3, 64, dtype)
    q = rng.standard_normal((sum(QO_LENS), 9, 64), np.float32)
    visits = row_visits(batch, 9, 3)
    visits.words[:] = random_words(rng, visits.words.shape)
    lists = visited(visits, batch, 3)
    scale, seen = np.float32(64**-0.5), {"window_left": window, "sink_tokens": sinks}
    out = _core.paged_attention(q, kv, *batch.lists, sm_scale=scale, visits=visits, **seen)
    expected, magnitude = reference(
        q, keys, values, batch, scale, window, sinks=sinks, visited=lists
    )
    assert_close(out, expected, terms=64 + max(KV_LENS), magnitude=magnitude)


@pytest.mark.parametrize("window", [-1, 90, 700])
def test_lists_of_everything_are_dense_attention(isa, window):
    rng = np.random.default_rng(3)
    batch = make_batch(rng, KV_LENS, QO_LENS)
    kv, _, _ = fill(rng, batch, 3, 64, "bf16")
    q = rng.standard_normal((sum(QO_LENS), 9, 64), np.float32)
    visits = row_visits(batch, 9, 3)
    visits.words[:] = ~np.uint64(0)
    dense = _core.paged_attention(q, kv, *batch.lists, window_left=window)
    actual = _core.paged_attention(q, kv, *batch.lists, window_left=window, visits=visits)
    np.testing.assert_array_equal(actual, dense)


def rounded_away(values: np.ndarray, up: bool) -> np.ndarray:
    """To bfloat16, in float64."""
    bits = values.astype(np.float32).view(np.uint32)
    outwards = ((bits & 0xFFFF) != 0) & ((bits >> 31 == 0) == up)
    return ((((bits >> 16) + outwards) << 16).view(np.float32)).astype(np.float64)


def unit_logits(x: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, float]:
    """float64 [group, units] for the heads x [group, 1, dim] of units of keys [units, size, dim];
    and what their terms add up to."""
    if keys.shape[1] == 1:
        return (x * keys[:, 0]).sum(-1), abs(x * keys[:, 0]).sum(-1).max()
    least, most = rounded_away(keys.min(1), False), rounded_away(keys.max(1), True)
    terms = np.maximum(x * least, x * most)
    return terms.sum(-1), np.maximum(abs(x * least), abs(x * most)).sum(-1).max()


def unit_scores(q: np.ndarray, keys: np.ndarray, vote: str) -> tuple[np.ndarray, np.ndarray]:
    """float64 [units] for the heads q [group, dim], which have their scale; and how far roundings
    to float32 may move each."""
    logits, magnitude = unit_logits(q.astype(np.float64)[:, None], keys.astype(np.float64))
    error = 2.0**-23 * (2 * q.shape[1] + 100) * magnitude
    if len(q) == 1:
        return logits[0], np.full(logits.shape[1], error)
    highest = logits.max(-1, keepdims=True)
    sums = highest + np.log(np.exp(logits - highest).sum(-1, keepdims=True))
    error = 2 * error + 1e-5
    if vote == "sum":
        shares = np.exp(logits - sums).sum(0)
        return shares, shares * error
    return (logits - sums).max(0), np.full(logits.shape[1], error)


def scores_of_means(
    q: np.ndarray, means: np.ndarray, keys: np.ndarray, vote: str
) -> tuple[np.ndarray, np.ndarray]:
    """The same of means that bfloat16 numbers make, where sums in float32 may round one or two of
    these, which are as large as the greatest of `keys`, to the other neighbour."""
    scores, error = unit_scores(q, means[:, None], vote)
    rounding = 2.0**-7 * (abs(q)[:, None] * abs(keys)).max()
    is_share = vote == "sum" and len(q) > 1
    return scores, error + (rounding * scores if is_share else rounding)


def window_scores(q: np.ndarray, keys: np.ndarray, vote: str) -> tuple[np.ndarray, np.ndarray]:
    """Of pages by means: those of 16 keys are bfloat16, and two neighbours a window's."""
    of_16 = keys.astype(np.float64).reshape(-1, 16, keys.shape[-1])
    means = bfloat16(of_16.mean(1))
    windows = (means[1:] + means[:-1]) / 2
    scores, error = scores_of_means(q, windows, means, vote)
    shared = [range(max(0, 4 * p - 1), min(len(windows), 4 * p + 4)) for p in range(len(keys))]
    pages = np.array([scores[each].max() for each in shared])
    return pages, np.array([error[each].max() for each in shared])


def mean_scores(q: np.ndarray, keys: np.ndarray, vote: str) -> tuple[np.ndarray, np.ndarray]:
    """Of units of 16 by their own means."""
    means = bfloat16(keys.astype(np.float64).mean(1))
    return scores_of_means(q, means, means, vote)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """The nearest ones, in float64."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return nearest.astype(np.uint32).view(np.float32).astype(np.float64)


def check_row(bits: np.ndarray, row, q: np.ndarray, keys: np.ndarray, options: dict) -> bool:
    """One list [kv_len]; whether something was left out."""
    position = row[3]
    sinks, own = options.get("sink_tokens", 0), position // PAGE
    window = options.get("window_left", -1)
    shown = max(0, position - window) if window >= 0 else 0
    first = max(sinks // PAGE, -(-shown // PAGE))
    unit = options.get("unit", PAGE)
    local = options.get("local_tokens", 0)
    behind_local = -(-max(0, position + 1 - local) // PAGE) if local else own
    count = max(0, min(own - 1, behind_local) - first) * PAGE // unit
    wanted = options.get("keys", 0) // unit
    budget = max(wanted, int(np.ceil(np.float32(options.get("share", 0.0)) * np.float32(count))))
    if position + 1 - shown < options.get("min_tokens", 0) or budget >= count:
        assert bits[: position + 1].all()
        return False
    behind = slice(first * PAGE, first * PAGE + count * unit)
    units = keys[behind].reshape(count, unit, -1)
    of_units = unit_scores
    if options.get("means"):
        of_units = window_scores if unit == PAGE else mean_scores
    scores, error = of_units(q, units, options.get("vote", "highest"))
    always = np.zeros(position + 1, bool)
    always[:sinks] = True
    always[shown : first * PAGE] = True
    assert not bits[sinks:shown].any()
    always[max(0, position + 1 - local) if local else position :] = True
    always[(own - 1) * PAGE :] = True
    chosen = bits[behind].reshape(count, unit)
    free = ~always[behind].reshape(count, unit).any(1)
    assert (chosen.all(1) | ~chosen.any(1))[free].all()
    assert bits[: position + 1][always].all()
    order = np.argsort(-scores, kind="stable")
    last, next_one = order[max(budget - 1, 0)], order[budget]
    sure = scores - error > scores[next_one] + error[next_one]
    maybe = (scores + error >= scores[last] - error[last]) & (budget > 0)
    assert chosen[sure].all()
    assert not chosen[free & ~maybe].any()
    assert budget - (~free).sum() <= chosen[free].all(1).sum() <= budget
    return True


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), CHOOSING)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("f32", {"keys": 128, "sink_tokens": 64}),
        ("bf16", {"share": 0.3, "sink_tokens": 3}),
        ("f16", {"keys": 64, "share": 0.2, "local_tokens": 200, "vote": "sum"}),
        ("i8", {"keys": 200, "min_tokens": 1000, "sink_tokens": 130}),
        ("bf16", {}),
        ("f32", {"unit": 16, "keys": 130, "sink_tokens": 64}),
        ("bf16", {"unit": 16, "share": 0.3, "sink_tokens": 3, "vote": "sum"}),
        ("f16", {"unit": 16, "keys": 16}),
        ("i8", {"unit": 32, "keys": 300, "sink_tokens": 130}),
        ("f32", {"means": True, "keys": 128, "sink_tokens": 64, "vote": "sum"}),
        ("bf16", {"means": True, "share": 0.3, "local_tokens": 300}),
        ("f16", {"means": True, "keys": 320, "sink_tokens": 64, "local_tokens": 64, "vote": "sum"}),
        ("i8", {"means": True, "keys": 64, "sink_tokens": 130}),
        ("f32", {"means": True, "unit": 16, "keys": 130, "sink_tokens": 64}),
        ("bf16", {"means": True, "unit": 16, "share": 0.3, "vote": "sum"}),
        ("f16", {"means": True, "unit": 16, "keys": 48, "sink_tokens": 64}),
        ("i8", {"means": True, "unit": 16, "keys": 200, "local_tokens": 200}),
        ("f32", {"keys": 128, "window_left": 700}),
        ("bf16", {"keys": 64, "sink_tokens": 64, "window_left": 511, "min_tokens": 512}),
        ("i8", {"unit": 16, "share": 0.3, "window_left": 600, "min_tokens": 500}),
        ("f16", {"means": True, "keys": 128, "window_left": 639, "vote": "sum"}),
        ("bf16", {"means": True, "unit": 16, "keys": 48, "window_left": 900}),
    ],
)
def test_units_by_bounds_and_means(isa, dtype, options, heads, kv_heads, head_dim):
    check_lists(_core.page_visits, dtype, options, (heads, kv_heads, head_dim))


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), CHOOSING)
@pytest.mark.parametrize("channels", [None, 5])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("f32", {"keys": 100, "sink_tokens": 64}),
        ("bf16", {"share": 0.1, "sink_tokens": 3, "vote": "sum"}),
        ("f16", {"keys": 1, "local_tokens": 200}),
        ("i8", {"keys": 300, "min_tokens": 1000, "sink_tokens": 130}),
        ("bf16", {"keys": 100, "window_left": 500}),
    ],
)
def test_keys_by_their_logits(isa, dtype, options, channels, heads, kv_heads, head_dim):
    some = None
    if channels is not None:
        rng = np.random.default_rng(channels)
        rows = [rng.choice(head_dim, channels, replace=False) for _ in range(kv_heads)]
        some = np.sort(np.array(rows, np.int32), axis=1)
    check_lists(_core.key_visits, dtype, options, (heads, kv_heads, head_dim), some)


def check_lists(choose, dtype, options, shape, channels=None):
    """channels [kv_heads, n]: that keys are chosen by, of key_visits; else None."""
    heads, kv_heads, head_dim = shape
    rng = np.random.default_rng(heads)
    batch = make_batch(rng, KV_LENS, QO_LENS)
    kv, keys, _ = fill(rng, batch, kv_heads, head_dim, dtype)
    q = rng.standard_normal((sum(QO_LENS), heads, head_dim), np.float32)
    visits = row_visits(batch, heads, kv_heads)
    visits.words[:] = random_words(rng, visits.words.shape)
    before = visits.words.copy()
    given = {} if channels is None else {"channels": channels}
    choose(visits, q, kv, *batch.lists, **given, **options)
    np.testing.assert_array_equal(visits.words[:2], before[:2])  # those of the prompt's blocks
    scaled = (q * np.float32(head_dim**-0.5)).reshape(len(q), kv_heads, -1, head_dim)
    if channels is not None:
        counts = np.zeros((kv_heads, head_dim), bool)
        np.put_along_axis(counts, channels, True, axis=1)
        scaled = scaled * counts[:, None]
    if choose is _core.key_visits:
        options = {**options, "unit": 1}
    left_out = 0
    for row, words in zip(visits.blocks[2:], visits.words[2:], strict=True):
        for head, bits in enumerate(unpack(words, int(batch.kv_len[row[0]]))):
            of_head = keys[row[0]][:, head]
            left_out += check_row(bits, row, scaled[row[1], head], of_head, options)
    assert left_out > 0


@pytest.mark.parametrize("unit", [1, 16, 32, 64])
def test_a_row_chooses_alike_alone_and_behind_others(isa, unit):
    choose = _core.key_visits if unit == 1 else partial(_core.page_visits, unit=unit)
    rng = np.random.default_rng(5)
    batch = make_batch(rng, [700, 1500], [60, 63])
    kv, _, _ = fill(rng, batch, 2, 64, "bf16")
    q = rng.standard_normal((123, 6, 64), np.float32)
    visits = row_visits(batch, 6, 2)
    choose(visits, q, kv, *batch.lists, keys=128, sink_tokens=64)
    for row, words in zip(visits.blocks, visits.words, strict=True):
        sequence, first, _, position = map(int, row)
        part = batch.part(sequence, position, position + 1)
        alone = row_visits(part, 6, 2)
        choose(alone, q[first : first + 1], kv, *part.lists, keys=128, sink_tokens=64)
        size = position // PAGE + 1
        np.testing.assert_array_equal(alone.words[0, :, :size], words[:, :size])


def test_numbers_that_are_none_do_no_harm(isa):
    rng = np.random.default_rng(7)
    batch = make_batch(rng, [900], [1])
    kv, _, _ = fill(rng, batch, 1, 16, "f32")
    q = np.full((1, 2, 16), np.nan, np.float32)
    visits = row_visits(batch, 2, 1)
    _core.page_visits(visits, q, kv, *batch.lists, keys=200)
    assert np.isnan(_core.paged_attention(q, kv, *batch.lists, visits=visits)).all()


def test_refused():
    rng = np.random.default_rng(6)
    batch = make_batch(rng, [300], [1])
    kv, _, _ = fill(rng, batch, 1, 16, "f32")
    q = rng.standard_normal((1, 2, 16), np.float32)
    visits = row_visits(batch, 2, 1)
    error = _core.InvalidArgumentError
    for name, value in (
        ("keys", -1),
        ("unit", 48),
        ("vote", "all"),
        ("share", 1.5),
        ("share", float("nan")),
        ("sink_tokens", -1),
        ("local_tokens", -1),
        ("min_tokens", -1),
        ("window_left", -2),
        ("sm_scale", float("inf")),
    ):
        with pytest.raises(error, match=rf"\[page_visits\] {name}"):
            _core.page_visits(visits, q, kv, *batch.lists, **{name: value})
    with pytest.raises(error, match=r"\[page_visits\] unit: expected 16 or 64 with means, got 32"):
        _core.page_visits(visits, q, kv, *batch.lists, unit=32, means=True)
    for wrong in ([[0], [0]], [[3, 3]], [[16]], [[-1]], [[2, 1]]):
        channels = np.array(wrong, np.int32)
        with pytest.raises(error, match=r"\[key_visits\] channels"):
            _core.key_visits(visits, q, kv, *batch.lists, channels=channels)
    with pytest.raises(error, match=r"\[page_visits\] visits: expected lists of this batch"):
        _core.page_visits(row_visits(batch, 3, 1), q, kv, *batch.lists)
    with pytest.raises(error, match=r"\[paged_attention\] parents: expected none with visits"):
        parents = np.array([-1], np.int32)
        _core.paged_attention(q, kv, *batch.lists, visits=visits, parents=parents)
