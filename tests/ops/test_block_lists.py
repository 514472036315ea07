"""The lists and masks of sparse and tree attention, against loops over their elements."""

import numpy as np
import pytest

from effinfer import InvalidArgumentError, _core


def i32(*values):
    return np.array(values, np.int32)


def bits_of(packed):
    return np.unpackbits(packed, bitorder="little")


def visited(spans, num_columns):
    row = np.zeros(num_columns, bool)
    end = -1
    for begin, next_end in spans:
        assert 0 <= end < begin or end == -1
        assert begin < next_end <= num_columns
        row[begin:next_end] = True
        end = next_end
    return row


def random_matrix(rng, rows, columns, density=0.4):
    block_map = rng.random((rows, columns)) < density
    counts = block_map.sum(1)
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    indices = np.concatenate([rng.permutation(np.flatnonzero(row)) for row in block_map])
    return block_map, indptr, indices.astype(np.int32)


@pytest.mark.parametrize(("R", "C"), [(1, 1), (3, 5), (64, 16)])
def test_spans_of_blocks(R, C):
    rng = np.random.default_rng(R)
    block_map, indptr, indices = random_matrix(rng, 7, 11)
    list_indptr, spans, lists, span_masks = _core.block_sparse_lists(
        indptr, indices, 7 * R, 11 * C, R, C, 2
    )
    assert span_masks.size == 0
    seen = set()
    for number, (sequence, head, first, rows) in enumerate(lists):
        assert sequence == 0
        assert rows == R
        row = visited(spans[list_indptr[number] : list_indptr[number + 1]], 11 * C)
        np.testing.assert_array_equal(row, np.repeat(block_map[first // R], C))
        # Adjacent blocks are one span.
        edges = np.diff(row.astype(int), prepend=0) == 1
        assert list_indptr[number + 1] - list_indptr[number] == edges.sum()
        seen.add((head, first))
    assert seen == {(head, i * R) for head in range(2) for i in range(7)}


@pytest.mark.parametrize("packed", [False, True])
def test_bits_of_blocks(packed):
    rng = np.random.default_rng(1)
    R, C = 3, 5
    _, indptr, indices = random_matrix(rng, 6, 8)
    mask = rng.random((len(indices), R, C)) < 0.5
    if packed:
        rows = [mask[indptr[i] : indptr[i + 1]].swapaxes(0, 1).reshape(-1) for i in range(6)]
        segments = np.concatenate([np.packbits(row, bitorder="little") for row in rows])
        bits = bits_of(_core.block_mask(indptr, indices, 6 * R, 8 * C, R, C, segments))
    else:
        bits = mask.reshape(-1)
    list_indptr, spans, lists, span_masks = _core.block_sparse_lists(
        indptr, indices, 6 * R, 8 * C, R, C, 1, masked=True
    )
    assert len(span_masks) == len(spans) == len(indices)
    for number, (_, _, first, rows) in enumerate(lists):
        block_row = first // R
        columns = list(indices[indptr[block_row] : indptr[block_row + 1]])
        for span in range(list_indptr[number], list_indptr[number + 1]):
            place = indptr[block_row] + columns.index(spans[span, 0] // C)
            for r in range(rows):
                begin = span_masks[span] + r * C
                np.testing.assert_array_equal(bits[begin : begin + C], mask[place, r])


MATRIX = {
    "indptr": i32(0, 1, 3),
    "indices": i32(0, 0, 2),
    "M": 8,
    "N": 6,
    "R": 4,
    "C": 2,
    "num_kv_heads": 1,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"M": 9}, "M: expected a multiple of R = 4, got 9"),
        ({"N": 7}, "N: expected a multiple of C = 2, got 7"),
        ({"R": 0}, "R: expected a positive number, got 0"),
        ({"C": -1}, "C: expected a positive number"),
        ({"M": -4}, "M: expected"),
        ({"M": 4}, r"indptr: expected shape \[2\]"),
        ({"indptr": i32(0, 3, 1)}, "indptr: expected values that never decrease"),
        ({"indptr": i32(1, 1, 3)}, "indptr: expected 0 first"),
        ({"indptr": i32(0, 1, 2)}, "indptr: expected 3 last"),
        ({"indices": i32(0, 0, 3)}, r"indices\[2\]: expected a value in \[0, 3\), got 3"),
        ({"indices": i32(-1, 0, 2)}, r"indices\[0\]"),
        ({"indices": i32(0, 2, 2)}, r"indices\[2\]: expected no block of the row twice"),
        ({"num_kv_heads": 0}, "num_kv_heads: expected a positive number"),
    ],
)
def test_errors_of_blocks(changes, message):
    with pytest.raises(InvalidArgumentError, match=r"^\[block_sparse_attention\] " + message):
        _core.block_sparse_lists(**(MATRIX | changes))


def test_errors_of_packed_masks():
    arguments = {name: value for name, value in MATRIX.items() if name != "num_kv_heads"}
    with pytest.raises(InvalidArgumentError, match="packed_mask: expected 3 bytes"):
        _core.block_mask(**arguments, packed=np.zeros(4, np.uint8))


def test_spans_of_variable_blocks():
    rng = np.random.default_rng(2)
    heads, MB, NB, M, N = 3, 5, 7, 40, 90

    def sizes(blocks, total):
        cuts = np.sort(rng.integers(0, total + 1, (heads, blocks - 1)))
        return np.diff(cuts, prepend=0, append=total).astype(np.int32)

    rows, columns = sizes(MB, M), sizes(NB, N)
    block_map = rng.random((heads, MB, NB)) < 0.5
    (list_indptr, spans, lists, _), num_rows, num_columns = _core.variable_block_lists(
        block_map, rows, columns
    )
    assert (num_rows, num_columns) == (M, N)
    got = np.zeros((heads, M, N), bool)
    covered = np.zeros((heads, M), int)
    for number, (_, head, first, count) in enumerate(lists):
        row = visited(spans[list_indptr[number] : list_indptr[number + 1]], N)
        got[head, first : first + count] = row
        covered[head, first : first + count] += 1
    assert (covered == 1).all()
    for head in range(heads):
        expected = np.repeat(np.repeat(block_map[head], columns[head], 1), rows[head], 0)
        np.testing.assert_array_equal(got[head], expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.ones((1, 2, 2), bool), i32(1, 2)[None], i32(1)[None]), "block_col_sz: expected shape"),
        ((np.ones((2, 2), bool), i32(1, 2)[None], i32(1)[None]), "block_mask_map: expected 3"),
        ((np.ones((1, 1, 1), bool), i32(-1)[None], i32(1)[None]), "block_row_sz: expected no neg"),
        (
            (np.ones((2, 1, 1), bool), np.array([[2], [3]], np.int32), np.ones((2, 1), np.int32)),
            "block_row_sz: expected the sum of each head to be that of the first, 2, got 3",
        ),
    ],
)
def test_errors_of_variable_blocks(arguments, message):
    with pytest.raises(InvalidArgumentError, match=message):
        _core.variable_block_lists(*arguments)


def test_ancestors():
    rng = np.random.default_rng(3)
    rows, lengths = [1, 0, 9, 70, 4], [1, 5, 9, 90, 67]
    parents = np.concatenate(
        [[int(rng.integers(-1, i)) if i else -1 for i in range(n)] for n in rows]
    ).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    packed, indptr = _core.ancestor_mask(parents, starts, i32(*lengths))
    assert packed.dtype == np.uint8
    for s, (n, m) in enumerate(zip(rows, lengths, strict=True)):
        expected = np.zeros((n, m), bool)
        for i in range(n):
            expected[i, : m - n] = True
            ancestor = i
            while ancestor >= 0:
                expected[i, m - n + ancestor] = True
                ancestor = parents[starts[s] + ancestor]
        segment = packed[indptr[s] : indptr[s + 1]]
        assert len(segment) == -(-n * m // 8)
        np.testing.assert_array_equal(bits_of(segment)[: n * m], expected.reshape(-1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((i32(-1, 1), i32(0, 2), i32(5)), r"parents\[1\]: expected -1 to 0, got 1"),
        ((i32(-2, 0), i32(0, 2), i32(5)), r"parents\[0\]: expected -1 to -1, got -2"),
        ((i32(-1), i32(0, 2), i32(5)), r"parents: expected shape \[2\]"),
        ((i32(-1, 0), i32(0, 2), i32(1)), r"kv_len\[0\]: expected at least its 2 query rows"),
        ((i32(-1, 0), i32(0, 2, 1), i32(5, 5)), "qo_indptr: expected values that never decrease"),
    ],
)
def test_errors_of_trees(arguments, message):
    with pytest.raises(InvalidArgumentError, match=r"^\[tree_attention\] " + message):
        _core.ancestor_mask(*arguments)
