"""One step: flat tensors from the plan, the forward, the draw. Owns the KV cache's memory."""

from __future__ import annotations

import itertools

import torch

from midstream.errors import InvalidInput
from midstream.models.config import ModelConfig
from midstream.models.llama import Llama
from midstream.models.weights import ModelWeights
from midstream.ops.attention import AttentionMetadata
from midstream.ops.cpu import want_huge_pages
from midstream.ops.sampling import prompt_logprobs, sample
from midstream.types import ModelRunnerOutput, RoutedExperts, SchedulerOutput

_LOGIT_ROWS = 64
"""Rows of prompt logits held at once: a vocabulary of 150,000 in fp32 is 600 kB a row."""


class ModelRunner:
    """Runs a SchedulerOutput on one device.

    The caches are [layers, B, K, F, S] for keys (tokens innermost: lanes of the kernel) and [layers, B, K, S, F] for
    values. They start as whatever the memory holds: no slot is read before it was written. Of a model with experts,
    ``routes`` [B, S, MoE layers, k] int16 holds which ones served the token of a slot: it goes where the KV goes.
    """

    def __init__(
        self, model: Llama, dtype: torch.dtype, device: torch.device, num_blocks: int, block_size: int
    ) -> None:
        c = model.config
        self.model, self.device, self.block_size = model, device, block_size
        self._dtype, self._shape = dtype, (c.num_layers, num_blocks, c.num_kv_heads)
        self.allocate()

    def allocate(self) -> None:
        """Memory for every block. Raises InvalidInput where there is not so much."""
        f, size = self.model.config.head_dim, self.block_size
        try:
            self.key_cache = torch.empty(*self._shape, f, size, dtype=self._dtype, device=self.device)
            self.value_cache = torch.empty(*self._shape, size, f, dtype=self._dtype, device=self.device)
        except RuntimeError as error:
            blocks = self._shape[1]
            needed = blocks * self.block_bytes(self.model.config, self._dtype, size)
            raise InvalidInput(f"no memory for {blocks} KV blocks ({needed} bytes): lower the KV cache") from error
        chosen = (len(self.model.config.moe_layers), self.model.config.num_experts_per_tok)
        self.routes = torch.zeros(self._shape[1], size, *chosen, dtype=torch.int16, device=self.device)
        if self.device.type == "cpu":
            want_huge_pages(self.key_cache, self.value_cache)

    def free(self) -> None:
        """Give the memory back; no step before :meth:`allocate`."""
        self.key_cache = self.value_cache = self.routes = torch.empty(0)

    @staticmethod
    def block_bytes(config: ModelConfig, dtype: torch.dtype, block_size: int) -> int:
        """Memory of one KV block over all layers, and of the experts its tokens went to."""
        chosen = 2 * len(config.moe_layers) * config.num_experts_per_tok
        kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
        return (kv + chosen) * block_size

    @torch.inference_mode()
    def execute_empty(self, weights: ModelWeights) -> None:
        """A step without a token: this rank's part of what the expert-parallel group does together."""
        self.model.attend_empty(weights)

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput, weights: ModelWeights) -> ModelRunnerOutput:
        """Copies, forward, draw; returns when the results are on the host."""
        if plan.block_copies:
            source, target = (torch.tensor(ids, device=self.device) for ids in zip(*plan.block_copies, strict=True))
            self.key_cache[:, target] = self.key_cache[:, source]
            self.value_cache[:, target] = self.value_cache[:, source]
            if self.routes.numel():
                self.routes[target] = self.routes[source]
        requests = plan.requests
        lengths = [len(r.token_ids) for r in requests]
        ends = list(itertools.accumulate(lengths, initial=0))
        size = self.block_size
        positions: list[int] = []
        slots: list[int] = []
        for r, n in zip(requests, lengths, strict=True):
            blocks = r.block_ids
            positions.extend(range(r.start, r.start + n))
            slots.extend(blocks[p // size] * size + p % size for p in range(r.start, r.start + n))
        width = max(len(r.block_ids) for r in requests)
        tables = [r.block_ids + [0] * (width - len(r.block_ids)) for r in requests]
        totals = [r.start + n for r, n in zip(requests, lengths, strict=True)]
        to = self.device
        metadata = AttentionMetadata(
            block_tables=torch.tensor(tables, dtype=torch.int32, device=to),
            cu_seqlens_q=torch.tensor(ends, dtype=torch.int32, device=to),
            seq_lens=torch.tensor(totals, dtype=torch.int32, device=to),
            slot_mapping=torch.tensor(slots, device=to),
        )

        ids = torch.tensor(list(itertools.chain.from_iterable(r.token_ids for r in requests)), device=to)
        at = torch.tensor(positions, device=to)
        routes: list[torch.Tensor] = []
        hidden = self.model.serve(weights, ids, at, self.key_cache, self.value_cache, metadata, routes)

        output = ModelRunnerOutput()
        if routes:
            self.routes.flatten(0, 1)[metadata.slot_mapping] = torch.stack(routes, 1).short()
            for r in requests:
                if r.routes_from is not None:
                    output.routes[r.request_id] = self._routes(r.block_ids, r.routes_from, r.start + len(r.token_ids))
        drawn = [(i, r) for i, r in enumerate(requests) if r.sample]
        if drawn:
            rows = torch.tensor([ends[i + 1] - 1 for i, _ in drawn], device=to)
            tokens = sample(
                self.model.logits(weights, hidden[rows]),
                [r.params for _, r in drawn],
                [r.seed for _, r in drawn],
                [r.start + len(r.token_ids) for _, r in drawn],
                [r.history for _, r in drawn],
                [r.allowed for _, r in drawn],
            )
            output.sampled = {r.request_id: token for (_, r), token in zip(drawn, tokens, strict=True)}
        for i, r in enumerate(requests):
            if r.prompt_targets:
                found = output.prompt_logprobs[r.request_id] = []
                count = r.params.prompt_logprobs or 0
                rows_of = hidden[ends[i] : ends[i] + len(r.prompt_targets)]
                targets = torch.tensor(r.prompt_targets, device=to)
                for part, ids_of in zip(rows_of.split(_LOGIT_ROWS), targets.split(_LOGIT_ROWS), strict=True):
                    found += prompt_logprobs(self.model.logits(weights, part), ids_of, count)
        return output

    def _routes(self, block_ids: list[int], start: int, end: int) -> RoutedExperts:
        """Of positions [start, end) of a request whose KV stands in these blocks."""
        first, size = start // self.block_size, self.block_size
        blocks = torch.tensor(block_ids[first : -(-end // size)], device=self.device)
        rows = self.routes[blocks].flatten(0, 1)[start - first * size : end - first * size]
        return RoutedExperts(start, rows.shape[1], rows.shape[2], bytearray(rows.contiguous().cpu().numpy()))
