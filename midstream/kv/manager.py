"""The KV of one request: its block table, its cursor, and the record of which version computed what.

Blocks of equal content are found through a chain of digests: that of a full block covers its tokens and the digest of
the block before it, and the chain starts from (version number, cache salt). So a prefix computed by other weights is
never found, and nothing has to be flushed when the weights change.

The version number is always an argument: the scheduler owns it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from midstream.kv.block_pool import BlockPool
from midstream.types import Request, RequestStatus


def root_digest(number: int, cache_salt: str) -> bytes:
    """Where the chain of one weight version and one cache salt begins."""
    return blake2b(f"{number}:{cache_salt}".encode(errors="surrogatepass"), digest_size=32).digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Digest of a full block, given that of the block before it."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=32).digest()


class Reuse(NamedTuple):
    """KV that a request without any can start from: ``num_tokens`` positions, the full blocks of which it shares.

    If they are the prompt of a running ``source`` and end inside a block, that block is ``copy_from``.
    """

    num_tokens: int
    block_ids: list[int]
    source: Request | None = None
    copy_from: int | None = None


class KVManager:
    """The only writer of a request's block table, cursor, hash chain and ``kv_*`` fields."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool

    def find_reuse(self, request: Request, siblings: Sequence[Request], number: int) -> Reuse | None:
        """Where a request without KV starts: from a sibling's prompt, from the prefix cache, or from nothing.

        None: a sibling is about to compute the prompt; wait for it.
        """
        num_shared = request.num_prompt_tokens - 1  # the last prompt token is computed by each: it gives the logits
        source = self._fork_source(request, siblings, number)
        cached: list[int] = []
        if source is None or request.num_output_tokens:  # what was generated before a preemption may be cached too
            cached = self._lookup(request, number)
        num_cached = len(cached) * self.pool.block_size
        if source is None or num_cached > num_shared:
            return Reuse(num_cached, cached)
        if source.num_computed_tokens < num_shared:
            return None
        num_full, num_rest = divmod(num_shared, self.pool.block_size)
        return Reuse(num_shared, source.block_ids[:num_full], source, source.block_ids[num_full] if num_rest else None)

    def is_awaited(self, request: Request, siblings: Sequence[Request], number: int) -> bool:
        """A running sibling without KV waits for ``request`` to compute the prompt."""
        return any(
            sibling.num_computed_tokens == 0
            and sibling.status is RequestStatus.RUNNING
            and self._fork_source(sibling, siblings, number) is request
            for sibling in siblings
        )

    def share(self, request: Request, reuse: Reuse) -> None:
        """Begin the table of a request without KV with the blocks found, before anything is allocated."""
        self.pool.take(reuse.block_ids)
        request.block_ids = list(reuse.block_ids)

    def adopt(self, request: Request, reuse: Reuse, number: int) -> list[tuple[int, int]]:
        """Set the cursor to what ``share`` began, once the table has grown. Returns the block copy it takes, if any."""
        if reuse.num_tokens:
            self._record(request, number, 0, reuse.num_tokens)
        if reuse.source is None:
            if not request.num_dropped_tokens:
                request.num_cached_tokens = reuse.num_tokens
        else:
            if len(request.prompt_logprobs) < len(reuse.source.prompt_logprobs):
                request.prompt_logprobs = list(reuse.source.prompt_logprobs)
            if reuse.source.hash_root == (number, request.cache_salt):  # spares hashing the prompt again
                request.hash_root = reuse.source.hash_root
                request.block_hashes = reuse.source.block_hashes[: len(reuse.block_ids)]
        return [] if reuse.copy_from is None else [(reuse.copy_from, request.block_ids[len(reuse.block_ids)])]

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make the table hold ``num_tokens`` positions. False, and nothing changed, if too few blocks are free."""
        missing = self.pool.blocks_for(num_tokens) - len(request.block_ids)
        if missing > 0:
            block_ids = self.pool.allocate(missing)
            if block_ids is None:
                return False
            request.block_ids += block_ids
        return True

    def computed(self, request: Request, number: int, start: int, end: int) -> None:
        """A step under version ``number`` has written positions [start, end): advance the cursor, publish full blocks.

        A request that also holds KV of other versions publishes nothing: what it computes now depends on that.
        """
        self._record(request, number, start, end)
        size = self.pool.block_size
        if start // size < end // size and self.pool.enable_prefix_caching and self._is_pure(request, number):
            for index in range(start // size, end // size):
                self.pool.publish(request.block_ids[index], self._digest(request, number, index))

    def keep(self, request: Request) -> None:
        """The weights change and the request's KV stays: from now on ``kv_history`` logs what is computed when."""
        if request.num_computed_tokens:
            request.kv_kept = True
            if not request.kv_history:
                request.kv_history = list(request.kv_spans)

    def drop(self, request: Request) -> None:
        """The request gives up its KV and starts over from position 0. Its tokens stay."""
        request.num_dropped_tokens = max(request.num_dropped_tokens, request.num_computed_tokens)
        self.release(request)
        request.num_computed_tokens = 0
        request.kv_spans = []
        request.kv_kept = False

    def release(self, request: Request) -> None:
        """Free the blocks of a request that has ended; the record of its KV stays for the last output."""
        self.pool.free(request.block_ids)
        request.block_ids = []  # a new list: the plan of the step in flight may still hold the old one

    def _is_pure(self, request: Request, number: int) -> bool:
        """All KV the request holds, if any, was computed under version ``number``."""
        spans = request.kv_spans
        return not spans or (len(spans) == 1 and spans[0][0] == number)

    def _fork_source(self, request: Request, siblings: Sequence[Request], number: int) -> Request | None:
        """The earliest sibling before ``request`` whose prompt it can share, now or once it is computed."""
        for sibling in siblings:
            if sibling is request:
                return None
            if sibling.status is RequestStatus.RUNNING and self._is_pure(sibling, number):
                return sibling
        return None

    def _lookup(self, request: Request, number: int) -> list[int]:
        """Cached blocks that hold the longest known prefix, at least one token short of the end: its logits are what
        the request needs. Prompt logprobs need all of the prompt's, so such a request finds nothing."""
        found: list[int] = []
        if not self.pool.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return found
        for index in range((request.num_tokens - 1) // self.pool.block_size):
            block_id = self.pool.lookup(self._digest(request, number, index))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def _record(self, request: Request, number: int, start: int, end: int) -> None:
        request.num_computed_tokens = end
        _extend(request.kv_spans, number, start, end)
        if request.kv_history:
            _extend(request.kv_history, number, start, end)

    def _digest(self, request: Request, number: int, index: int) -> bytes:
        """Digest of full block ``index``; the chain up to it is computed once and kept in the request."""
        root = (number, request.cache_salt)
        if request.hash_root != root:
            request.hash_root = root
            request.block_hashes = []
        chain = request.block_hashes
        size = self.pool.block_size
        while len(chain) <= index:
            parent = chain[-1] if chain else root_digest(*root)
            start = len(chain) * size
            chain.append(block_digest(parent, request.token_ids[start : start + size]))
        return chain[index]

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Raise ``AssertionError`` unless the tables, cursors and records of all live requests agree with the pool."""
        self.pool.check_integrity([request.block_ids for request in requests])
        for request in requests:
            cursor, name = request.num_computed_tokens, request.request_id
            if not 0 <= cursor < request.num_tokens:
                raise AssertionError(f"{name}: cursor {cursor} outside its {request.num_tokens} tokens")
            if len(request.block_ids) != self.pool.blocks_for(cursor):
                raise AssertionError(f"{name}: {len(request.block_ids)} blocks for {cursor} computed tokens")
            edges = [0, *(end for _, _, end in request.kv_spans)]
            if [start for _, start, _ in request.kv_spans] != edges[:-1] or edges[-1] != cursor:
                raise AssertionError(f"{name}: kv_spans {request.kv_spans} do not cover [0, {cursor})")


def _extend(spans: list[tuple[int, int, int]], number: int, start: int, end: int) -> None:
    if spans and spans[-1][0] == number and spans[-1][2] == start:
        spans[-1] = (number, spans[-1][1], end)
    else:
        spans.append((number, start, end))
