from __future__ import annotations

import random

import pytest

from midstream.errors import InvalidInput
from midstream.kv.block_pool import BlockPool
from midstream.kv.manager import block_digest, root_digest


def test_allocate_is_all_or_nothing() -> None:
    pool = BlockPool(4, 16)
    taken = pool.allocate(3)
    assert taken is not None and len(set(taken)) == 3
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    pool.check_integrity([taken])


def test_a_shared_block_is_free_when_its_last_holder_leaves() -> None:
    pool = BlockPool(4, 16)
    table = pool.allocate(2)
    assert table is not None
    pool.take(table)
    pool.free(table)
    assert pool.num_used == 2
    pool.check_integrity([table])
    pool.free(table)
    assert pool.num_used == 0
    pool.check_integrity([])


def test_freeing_too_often_is_noticed() -> None:
    pool = BlockPool(2, 16)
    table = pool.allocate(1)
    assert table is not None
    pool.free(table)
    with pytest.raises(AssertionError, match="more often"):
        pool.free(table)


def test_published_blocks_are_found_until_they_are_needed() -> None:
    pool = BlockPool(4, 16)
    table = pool.allocate(3)
    assert table is not None
    for block_id, digest in zip(table, (b"a", b"b", b"c"), strict=True):
        pool.publish(block_id, digest)
    pool.free(table)
    assert [pool.lookup(digest) for digest in (b"a", b"b", b"c")] == table
    pool.allocate(1)  # the one that never had a digest goes first
    assert pool.num_cached == 3
    pool.allocate(1)  # then the end of the prefix
    assert [pool.lookup(digest) is not None for digest in (b"a", b"b", b"c")] == [True, True, False]


def test_a_found_block_is_protected_once_taken() -> None:
    pool = BlockPool(2, 16)
    table = pool.allocate(1)
    assert table is not None
    pool.publish(table[0], b"a")
    pool.free(table)
    pool.take(table)
    assert pool.num_free == 1
    assert pool.allocate(2) is None
    assert pool.lookup(b"a") == table[0]


def test_the_first_of_two_equal_blocks_stays_the_known_one() -> None:
    pool = BlockPool(2, 16)
    table = pool.allocate(2)
    assert table is not None
    pool.publish(table[0], b"a")
    pool.publish(table[1], b"a")
    assert pool.lookup(b"a") == table[0]
    pool.check_integrity([table])


def test_reset_forgets_every_digest_and_no_holder() -> None:
    pool = BlockPool(4, 16)
    table = pool.allocate(2)
    assert table is not None
    pool.publish(table[0], b"a")
    pool.reset_cache()
    assert pool.lookup(b"a") is None and pool.num_cached == 0
    pool.check_integrity([table])


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(2, 16, enable_prefix_caching=False)
    table = pool.allocate(1)
    assert table is not None
    pool.publish(table[0], b"a")
    assert pool.lookup(b"a") is None


def test_sizes_are_checked() -> None:
    with pytest.raises(InvalidInput, match="num_blocks"):
        BlockPool(0, 16)


def test_check_integrity_sees_a_lost_reference() -> None:
    pool = BlockPool(2, 16)
    table = pool.allocate(1)
    assert table is not None
    with pytest.raises(AssertionError, match="1 references, the tables hold 0"):
        pool.check_integrity([])


def test_digests_depend_on_everything_before() -> None:
    roots = {root_digest(0, ""), root_digest(1, ""), root_digest(0, "1"), root_digest(0, ":"), root_digest(1, "0")}
    assert len(roots) == 5
    parent = root_digest(0, "")
    assert block_digest(parent, [1, 2]) == block_digest(parent, [1, 2])
    others = {block_digest(parent, [1, 2]), block_digest(parent, [2, 1]), block_digest(root_digest(1, ""), [1, 2])}
    assert len(others | {block_digest(block_digest(parent, [1]), [2])}) == 4


def test_random_operations_keep_the_books() -> None:
    rng = random.Random(0)
    pool = BlockPool(16, 4)
    tables: list[list[int]] = []
    for i in range(2000):
        what = rng.randrange(5)
        if what == 0 and (table := pool.allocate(rng.randrange(1, 5))) is not None:
            tables.append(table)
        elif what == 1 and tables:
            pool.free(tables.pop(rng.randrange(len(tables))))
        elif what == 2 and tables:
            pool.publish(rng.choice(rng.choice(tables)), str(rng.randrange(50)).encode())
        elif what == 3 and (block_id := pool.lookup(str(rng.randrange(50)).encode())) is not None:
            pool.take([block_id])
            tables.append([block_id])
        elif what == 4 and i % 50 == 0:
            pool.reset_cache()
        pool.check_integrity(tables)
    for table in tables:
        pool.free(table)
    pool.check_integrity([])
    assert pool.num_free == 16
