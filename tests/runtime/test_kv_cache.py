"""The KV cache as a state machine, against sequences kept as plain lists."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from effinfer import _core

PAGE = _core.KvCache.page_size
NUM_PAGES = 12


def make_cache(dtype="bf16", num_pages=NUM_PAGES):
    return _core.KvCache(
        num_layers=2, num_kv_heads=1, head_dim=16, dtype=dtype, num_pages=num_pages
    )


class KvCacheMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.cache = make_cache()
        self.tokens = {}

    @rule(target=sequences, start=st.integers(0, 1), length=st.integers(0, 260))
    def create(self, start, length):
        prompt = list(range(start, start + length))
        sequence, cached = self.cache.create(prompt)
        assert cached % PAGE == 0
        assert cached == 0 or cached < length
        self.tokens[sequence] = prompt[:cached]
        return sequence

    @rule(sequence=sequences, count=st.integers(0, 150))
    def append(self, sequence, count):
        tokens = self.tokens[sequence]
        first = tokens[-1] + 1 if tokens else 0
        more = list(range(first, first + count))
        if self.cache.can_append(sequence, count):
            self.cache.append(sequence, more)
            tokens += more
        else:
            with pytest.raises(_core.OutOfMemoryError, match="append"):
                self.cache.append(sequence, more)

    @rule(sequence=sequences)
    def commit(self, sequence):
        pending = self.cache.length(sequence) - self.cache.committed(sequence)
        self.cache.commit(sequence, pending)

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence):
        self.commit(sequence)
        forked = self.cache.fork(sequence)
        assert self.cache.pages(forked) == self.cache.pages(sequence)
        self.tokens[forked] = list(self.tokens[sequence])
        return forked

    @rule(sequence=sequences, fraction=st.floats(0, 1))
    def rollback(self, sequence, fraction):
        count = int(fraction * len(self.tokens[sequence]))
        self.cache.rollback(sequence, count)
        self.tokens[sequence] = self.tokens[sequence][: len(self.tokens[sequence]) - count]

    @rule(sequence=sequences)
    def publish(self, sequence):
        self.cache.publish(sequence)

    @rule(sequence=consumes(sequences), keep_prefix=st.booleans())
    def release(self, sequence, keep_prefix):
        self.cache.release(sequence, keep_prefix)
        del self.tokens[sequence]

    @rule()
    def clear_prefixes(self):
        self.cache.clear_prefixes()
        assert self.cache.cached_prefix_pages == 0

    @invariant()
    def is_whole(self):
        self.cache.check_integrity()
        assert self.cache.free_pages <= self.cache.available_pages <= NUM_PAGES
        for sequence, tokens in self.tokens.items():
            assert self.cache.tokens(sequence) == tokens
            assert len(self.cache.pages(sequence)) == -(-len(tokens) // PAGE)


KvCacheMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestKvCache = KvCacheMachine.TestCase


def test_pages_are_writable_and_copied_before_they_diverge():
    cache = make_cache("f32")
    a, _ = cache.create([])
    cache.append(a, np.arange(70))
    for page in cache.pages(a):
        cache.k_page(1, page)[:] = 5
        cache.v_page(0, page)[:] = 6
    cache.commit(a, 70)
    b = cache.fork(a)
    cache.append(b, [1])
    own = cache.pages(b)[1]
    assert own != cache.pages(a)[1]
    assert (cache.k_page(1, own) == 5).all() and (cache.v_page(0, own) == 6).all()
    cache.k_page(1, own)[:] = 9
    assert (cache.k_page(1, cache.pages(a)[1]) == 5).all()
    for layer in (-1, 2):
        with pytest.raises(IndexError, match="layer"):
            cache.k_page(layer, own)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"head_dim": 8}, "head_dim"),
        ({"dtype": "q4_0"}, "dtype"),
        ({"num_pages": 0}, "num_pages"),
        ({"num_layers": -1}, "num_layers"),
    ],
)
def test_bad_configurations_are_refused(change, match):
    config = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 16, "num_pages": 1} | change
    with pytest.raises(_core.InvalidArgumentError, match=match):
        _core.KvCache(**config)


@pytest.mark.parametrize("tokens", [[0.5], [[1, 2]], "text", [2**40]])
def test_tokens_are_integers(tokens):
    with pytest.raises(_core.InvalidArgumentError, match="tokens"):
        make_cache().create(tokens)
