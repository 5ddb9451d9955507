from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gpu_worker.engine.kv.prefix_cache import PrefixCache, longest_hit
from penstock.gpu_worker.engine.sequence import Sequence
from penstock.shared.protocol.sampling_options import SamplingOptions

short_ids = st.lists(st.integers(0, 1), min_size=1, max_size=9)


def sequence(token_ids: list[int], table: list[int], salt: bytes = b"") -> Sequence:
    seq = Sequence(id="s", prompt_ids=token_ids, options=SamplingOptions(), cache_salt=salt)
    seq.block_tables = (table,)
    return seq


def match(cache: PrefixCache, seq: Sequence) -> list[int]:
    return cache.hit_blocks(seq, cache.num_hit_blocks(seq, longest_hit(seq, 2)))


def publish(cache: PrefixCache, seq: Sequence, num_full: int) -> None:
    cache.publish(seq, seq.block_tables[0], num_full)
    seq.num_published_blocks = num_full


@settings(deadline=None)
@given(first=short_ids, second=short_ids, salts=st.tuples(st.booleans(), st.booleans()))
def test_matches_exactly_the_common_full_blocks(
    first: list[int], second: list[int], salts: tuple[bool, bool]
) -> None:
    cache, size = PrefixCache(2), 2
    salt = [b"salt" if salted else b"" for salted in salts]
    publish(cache, sequence(first, [10, 11, 12, 13, 14], salt[0]), len(first) // size)
    num_equal = 0
    while (
        salt[0] == salt[1]
        and (num_equal + 1) * size <= min(len(first), len(second) - 1)
        and first[num_equal * size :][:size] == second[num_equal * size :][:size]
    ):
        num_equal += 1
    assert match(cache, sequence(second, [], salt[1])) == [10, 11, 12, 13, 14][:num_equal]


def test_the_first_block_with_a_content_stays_the_one() -> None:
    cache = PrefixCache(2)
    publish(cache, sequence([1, 2], [7]), 1)
    publish(cache, sequence([1, 2], [8]), 1)
    assert match(cache, sequence([1, 2, 3], [])) == [7]
    assert (7 in cache, 8 in cache, len(cache)) == (True, False, 1)


def test_a_forgotten_block_ends_the_match() -> None:
    cache = PrefixCache(2)
    publish(cache, sequence([1, 2, 3, 4], [7, 8]), 2)
    cache.forget(7)
    assert match(cache, sequence([1, 2, 3, 4, 5], [])) == []
    publish(cache, sequence([1, 2], [9]), 1)
    assert match(cache, sequence([1, 2, 3, 4, 5], [])) == [9, 8]


def test_digests_are_kept_and_grow_with_the_sequence() -> None:
    cache, seq = PrefixCache(2), sequence([1, 2, 3], [7])
    publish(cache, seq, 1)
    digests = list(seq.block_digests)
    seq.token_ids += [4, 5]
    seq.block_tables[0].append(8)
    publish(cache, seq, 2)
    assert seq.block_digests[:1] == digests
    assert [len(digest) for digest in seq.block_digests] == [16, 16]


def test_content_is_not_confused_with_its_neighbours() -> None:
    """Ids are packed with a fixed width: (1, 256) is not (257, 0) or the like."""
    cache = PrefixCache(2)
    publish(cache, sequence([1, 256], [7]), 1)
    for ids in ([257, 0], [0, 1 << 24], [65537, 0], [256, 1], [1, 256 << 8]):
        assert match(cache, sequence([*ids, 3], [])) == []
