"""The KV blocks of one engine: who holds which, which are free, and which can be found again by content.

A block is a number in [0, num_blocks). Its state is two facts: how many block tables hold it, and the digest of the
tokens whose KV it stores (none until it is published). A free block with a digest is the prefix cache: it is found
by its digest until its turn comes to be allocated again, oldest first.

This class knows nothing of requests, versions or tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from midstream.errors import InvalidInput


class BlockPool:
    """Reference counts, the free list and the digests of ``num_blocks`` blocks of ``block_size`` tokens."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise InvalidInput(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._num_refs = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._by_digest: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now; the prefix cache is among them."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by digest, held or free."""
        return len(self._by_digest)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` positions."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks held once each, or None, and nothing taken, if fewer are free. Their content is garbage."""
        if count > len(self._free):
            return None
        block_ids = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            self._forget(block_id)
            self._num_refs[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def take(self, block_ids: Iterable[int]) -> None:
        """One more holder for each of these blocks, which are held already or found by ``lookup``."""
        for block_id in block_ids:
            if not self._num_refs[block_id]:
                del self._free[block_id]
            self._num_refs[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """One holder less for each. Without a digest a block is the next to be used again, with one the last; the
        end of a prefix goes before its beginning, which more requests may share."""
        for block_id in reversed(block_ids):
            self._num_refs[block_id] -= 1
            if self._num_refs[block_id] < 0:
                raise AssertionError(f"block {block_id} was freed more often than it was taken")
            if not self._num_refs[block_id]:
                self._free[block_id] = None
                if self._digests[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def publish(self, block_id: int, digest: bytes) -> None:
        """Let a held, completely computed block be found. Of two with one content the first stays the known one."""
        if self.enable_prefix_caching and self._digests[block_id] is None and digest not in self._by_digest:
            self._digests[block_id] = digest
            self._by_digest[digest] = block_id

    def lookup(self, digest: bytes) -> int | None:
        """The block with this content, not yet held for the caller: ``take`` it before anything is allocated."""
        return self._by_digest.get(digest)

    def count_free(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks nobody holds."""
        return sum(not self._num_refs[block_id] for block_id in block_ids)

    def reset_cache(self) -> None:
        """Nothing is found by digest any more; holders keep their blocks."""
        for block_id in list(self._by_digest.values()):
            self._forget(block_id)

    def _forget(self, block_id: int) -> None:
        digest = self._digests[block_id]
        if digest is not None:
            del self._by_digest[digest]
            self._digests[block_id] = None

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raise ``AssertionError`` unless ``block_tables`` account for every reference and all indexes agree."""
        held = Counter(block_id for table in block_tables for block_id in table)
        for block_id, num_refs in enumerate(self._num_refs):
            if num_refs != held[block_id]:
                raise AssertionError(f"block {block_id} has {num_refs} references, the tables hold {held[block_id]}")
            if (num_refs == 0) != (block_id in self._free):
                raise AssertionError(f"block {block_id} with {num_refs} references is wrongly in or off the free list")
            digest = self._digests[block_id]
            if digest is not None and self._by_digest.get(digest) != block_id:
                raise AssertionError(f"block {block_id} has a digest under which another block is found")
        if len(held) and max(held) >= self.num_blocks:
            raise AssertionError(f"a table holds block {max(held)} of a pool of {self.num_blocks}")
        if len(self._by_digest) != sum(digest is not None for digest in self._digests):
            raise AssertionError("the digest index and the digests of the blocks differ")
