"""The nouns of midstream, as plain data. No torch here.

Shapes in this project's docstrings use one legend: T tokens, D hidden, H query heads, K kv heads, F head dim,
V vocabulary, B blocks, S block size, R requests (or rows).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from midstream.config import check_types
from midstream.errors import InvalidInput

PauseMode = Literal["abort", "wait", "keep"]
PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")
KVPolicy = Literal["recompute", "keep"]
KV_POLICIES: tuple[KVPolicy, ...] = ("recompute", "keep")
FinishReason = Literal["stop", "length", "abort", "error"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]

MAX_SEED = (1 << 63) - 1
MAX_N = 1024
"""Most samples of one prompt."""
_RANGES: dict[str, tuple[float, float]] = {
    "n": (1, MAX_N),
    "temperature": (0, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (-1, math.inf),
    "repetition_penalty": (0.01, 100),
    "max_tokens": (1, math.inf),
    "seed": (0, MAX_SEED),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "routed_experts_prompt_start": (0, math.inf),
}
"""Of the sampling parameters, both ends included."""
_MAX_STRUCTURE_CHARS = 1 << 18
_U64 = (1 << 64) - 1


def mix64(x: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014): a bijection on 64 bits."""
    x = (x + 0x9E3779B97F4A7C15) & _U64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _U64
    return x ^ (x >> 31)


def child_seed(seed: int, index: int) -> int:
    """Seed of child ``index`` of n samples; child 0 has the request's own seed, so n=1 and n=8 agree on it."""
    return seed if index == 0 else mix64(seed ^ mix64(index)) & MAX_SEED


def child_id(request_id: str, index: int, n: int) -> str:
    """What the core calls sample ``index`` of a request for n."""
    return request_id if n == 1 else f"{index}_{request_id}"


class RequestStatus(enum.Enum):
    """Where a request stands. The scheduler is the only writer."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    @property
    def is_finished(self) -> bool:
        return self.name.startswith("FINISHED")


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """The weights an engine holds.

    ``number`` counts commits in this engine and is never used twice; ``label`` is the trainer's string; ``weights_id``
    is the hash over the sorted digests of all tensors held, the same in every engine that holds the same bytes.
    """

    number: int
    label: str
    weights_id: str = ""


@dataclass(frozen=True, slots=True)
class WeightVersionSpan:
    """Output tokens [start, end) were sampled under ``version`` (the label) = commit ``number``."""

    version: str
    number: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ParamMeta:
    """A tensor by its checkpoint name, before any byte of it: torch's dtype name without the prefix, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What the text must match; exactly one is given."""

    json: str | None = None
    """A JSON schema, as text."""
    regex: str | None = None
    choice: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(self.choice))
        given = [value for value in (self.json, self.regex, self.choice) if value is not None]
        if len(given) != 1:
            raise InvalidInput(f"structured_outputs takes exactly one of json, regex and choice, got {len(given)}")
        texts: Sequence[Any] = self.choice if self.choice is not None else given
        for text in texts:
            if not isinstance(text, str) or not text:
                raise InvalidInput(f"structured_outputs: json, regex and each choice are non-empty text, got {text!r}")
        if self.choice == ():
            raise InvalidInput("structured_outputs: choice is empty: give at least one text")
        size = sum(len(text) + 1 for text in texts)
        if size > _MAX_STRUCTURE_CHARS:
            raise InvalidInput(f"structured_outputs: {size} characters are over the limit of {_MAX_STRUCTURE_CHARS}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample; vLLM's names and defaults.

    Raises ``InvalidInput`` for any value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    """0 is greedy; then top_k, top_p and min_p have no effect and the processed logprob is 0."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: no limit."""
    min_p: float = 0.0
    """Least probability kept, as a share of the most likely token's."""
    repetition_penalty: float = 1.0
    """Over 1: tokens of prompt and output so far become less likely (logit / penalty; below 0 logit * penalty)."""
    max_tokens: int | None = 16
    """None: up to the model's length."""
    seed: int | None = None
    """63 bits. Without one the engine chooses, and returns it."""
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Texts that end the output; found where text is made, so they need ``detokenize``."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no logprobs in the output. k: the sampled token's, and the k most likely ones."""
    prompt_logprobs: int | None = None
    """As ``logprobs``, for the prompt; such a request takes no prefix-cache hit."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """raw: log-softmax of the model's logits. processed: of the distribution really sampled from."""
    structured_outputs: StructuredOutputs | None = None
    return_sampling_mask: bool = False
    """The ids that each token could have been: those the truncated distribution keeps."""
    return_routed_experts: bool = False
    """Which experts served each token of prompt and output, in every layer that has some."""
    routed_experts_prompt_start: int = 0
    """Prompt tokens to leave out there, from the first on."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    final_only: bool = False
    """One output at the end instead of a stream of increments."""

    def __post_init__(self) -> None:
        ids: Any = self.stop_token_ids
        if not isinstance(ids, (list, tuple, set, frozenset)) or any(type(i) is not int or i < 0 for i in ids):
            raise InvalidInput(f"stop_token_ids must be a list of ids >= 0, got {ids!r}")
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        stop: Any = self.stop or ()
        stop = (stop,) if isinstance(stop, str) else stop
        if not isinstance(stop, (list, tuple)) or not all(isinstance(text, str) and text for text in stop):
            raise InvalidInput(f"stop must be a text or a list of texts, none of them empty, got {stop!r}")
        object.__setattr__(self, "stop", tuple(stop))
        check_types(self)
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                limit = "" if high == math.inf else f" and <= {high}"
                raise InvalidInput(f"{name} must be >= {low}{limit}, got {value}")
        if self.top_p == 0:
            raise InvalidInput("top_p must be in (0, 1], got 0")
        if self.stop and not self.detokenize:
            raise InvalidInput("stop texts need detokenize=True: they are found in the text")
        if self.return_sampling_mask and not self.is_truncated:
            raise InvalidInput("return_sampling_mask: every id is kept; set top_k, top_p, min_p or temperature=0")
        if self.logprobs_mode not in get_args(LogprobsMode):
            modes = " or ".join(get_args(LogprobsMode))
            raise InvalidInput(f"logprobs_mode must be {modes}, got {self.logprobs_mode!r}")

    @property
    def is_truncated(self) -> bool:
        """Some ids can not be sampled."""
        limited = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return limited or self.temperature == 0 or self.structured_outputs is not None


@dataclass(slots=True)
class RoutedExperts:
    """Which experts served some tokens of a request: those at positions from ``start`` on.

    ``data``: ids [tokens, MoE layers, k], little-endian uint16 in row-major order; of a token and layer ascending.
    """

    start: int
    num_layers: int
    top_k: int
    data: bytearray

    @property
    def row_bytes(self) -> int:
        """Of one token."""
        return 2 * self.num_layers * self.top_k

    @property
    def end(self) -> int:
        return self.start + len(self.data) // self.row_bytes

    def part(self, start: int, end: int | None = None) -> RoutedExperts:
        """Of positions [start, end)."""
        at = self.row_bytes * (max(start, self.start) - self.start)
        until = None if end is None else self.row_bytes * max(end - self.start, 0)
        return RoutedExperts(max(start, self.start), self.num_layers, self.top_k, self.data[at:until])

    def put(self, new: RoutedExperts) -> None:
        """``new`` takes the place of what is here for its positions, which begin within these or right after."""
        at, until = (self.row_bytes * (position - self.start) for position in (new.start, new.end))
        self.data[at:until] = new.data


@dataclass(slots=True)
class Request:
    """One sequence being generated. Mutable, owned by the scheduler, never leaves the core.

    Of n samples each is a ``Request`` with the same ``parent_id`` and its ``index``. ``num_computed_tokens`` is the
    one cursor: KV for positions [0, num_computed_tokens) stands in ``block_ids``.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_total_tokens: int
    """prompt + output may not grow beyond this (max_tokens and the model's length)."""
    stop_token_ids: frozenset[int] = frozenset()
    grammar: Any = None
    """``engine.grammar.Grammar`` of a request with structured outputs: one step further with each token."""
    is_ready: bool = True
    """False while its grammar is being compiled: it is live and not in the queue."""
    parent_id: str = ""
    index: int = 0
    cache_salt: str = ""
    priority: int = 0
    """A lower number is more urgent."""
    arrival: int = -1
    """Order of admission into the engine, set by the scheduler once it is ready. Decides among equal priorities."""
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    """prompt followed by output; set from prompt_token_ids at creation."""
    sampled: list[SampledToken] = field(default_factory=list)
    """The output's tokens with all that is known of each."""
    prompt_logprobs: list[tuple[float, int, list[tuple[int, float]]]] = field(default_factory=list)
    """For prompt positions 1..: (logprob, rank, top k)."""
    routes: RoutedExperts | None = None
    """Where asked for: the experts behind each position's KV, as it was computed last."""
    num_sent_routes: int = 0
    """Positions of ``routes`` that were reported and have not changed since."""
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache at first admission."""
    num_reprefilled_tokens: int = 0
    """Tokens computed again because a commit or a preemption dropped their KV."""
    num_dropped_tokens: int = 0
    """Most positions whose KV was ever lost to a commit or a preemption: below it, computing means computing again."""
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Hash chain of this request's full blocks under ``hash_root``."""
    hash_root: tuple[int, str] | None = None
    """(version number, cache salt) that block_hashes were computed under."""
    version_spans: list[WeightVersionSpan] = field(default_factory=list)
    kv_spans: list[tuple[int, int, int]] = field(default_factory=list)
    """(version number, start, end): which positions of the KV now held were computed under which version."""
    kv_kept: bool = False
    """Crossed a commit with its KV kept: publishes nothing until a full recompute, and reports kv_versions."""
    kv_history: list[tuple[int, int, int]] = field(default_factory=list)
    """kv_spans of every life of the KV since the first kept commit; what ``kv_versions`` reports."""
    num_sent_tokens: int = 0
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)
        if not self.parent_id:
            self.parent_id = self.request_id

    @property
    def place(self) -> tuple[int, int]:
        """Requests are served in ascending order of this."""
        return (self.priority, self.arrival)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]


@dataclass(slots=True)
class ScheduledRequest:
    """One request's share of a step: ``token_ids`` at positions [start, start + len) with KV in ``block_ids``."""

    request_id: str
    token_ids: list[int]
    start: int
    num_again: int
    """How many of these tokens were computed before, and lost."""
    block_ids: list[int]
    sample: bool
    """The last of these tokens is the newest one, so the step samples its successor."""
    seed: int
    params: SamplingParams
    prompt_targets: list[int] = field(default_factory=list)
    """For prompt logprobs: the token that follows each scheduled position, as far as it lies in the prompt."""
    history: list[int] | None = None
    """All tokens so far, where a repetition penalty needs them."""
    routes_from: int | None = None
    """Where routed experts are asked for: the first position whose experts are to be reported."""
    allowed: bytes | None = None
    """What the grammar lets come next: a bit for each token id, the least significant first."""


@dataclass(slots=True)
class SchedulerOutput:
    """One step's plan, plain data. ``block_copies`` (source, destination) are done before the forward."""

    requests: list[ScheduledRequest] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    num_tokens: int = 0
    num_reprefilled_tokens: int = 0

    @property
    def is_empty(self) -> bool:
        return not self.requests


@dataclass(slots=True)
class SampledToken:
    """What the sampler drew for one request: raw and processed logprob of that very token, and what was asked for."""

    token_id: int
    raw_logprob: float
    processed_logprob: float
    rank: int = 0
    """1: it was the most likely one."""
    top: list[tuple[int, float]] = field(default_factory=list)
    """The ``params.logprobs`` most likely (id, logprob), in the request's mode."""
    kept: list[int] | None = None
    """With ``params.return_sampling_mask``: the ids that the token could have been."""


@dataclass(slots=True)
class ModelRunnerOutput:
    """A step's results by request id; requests in the middle of a prefill have no entry in ``sampled``."""

    sampled: dict[str, SampledToken] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[tuple[float, int, list[tuple[int, float]]]]] = field(default_factory=dict)
    routes: dict[str, RoutedExperts] = field(default_factory=dict)


@dataclass(slots=True)
class RequestIncrement:
    """What the core reports of one request after a step: the tokens not reported yet, and the end if it is over."""

    parent_id: str
    index: int
    tokens: list[SampledToken]
    weight_versions: list[WeightVersionSpan]
    """All spans so far, from output token 0."""
    seed: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token's id, or why it ended with "error"."""
    prompt_logprobs: list[tuple[float, int, list[tuple[int, float]]]] | None = None
    kv_versions: list[tuple[int, int, int]] | None = None
    routes: RoutedExperts | None = None
    """Of the positions that are new, or were computed again."""
    num_cached_tokens: int = 0
    num_reprefilled_tokens: int = 0
    num_preemptions: int = 0

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


@dataclass(slots=True)
class Logprob:
    """vLLM's shape: one candidate's log-probability."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[int, Logprob]] | None = None
    """Per output token: {token id: Logprob}; the sampled token is always the first entry."""
    token_logprobs: list[float] = field(default_factory=list)
    """Of the sampled tokens, in the request's logprobs_mode; always filled."""
    processed_logprobs: list[float] = field(default_factory=list)
    """Of the sampled tokens under the distribution really sampled from; always filled. What a trainer needs."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token's id, the stop text, or why a grammar could not go on; None: end of text, length or abort."""
    sampling_mask: list[list[int]] | None = None
    """Per output token the ids it could have been, ascending; with ``return_sampling_mask``."""
    weight_versions: list[WeightVersionSpan] = field(default_factory=list)
    kv_versions: list[tuple[int, int, int]] | None = None
    """(version number, start, end) over positions of prompt + output, in the order computed; None where every
    position was computed under the version that sampled on it."""
    routed_experts: RoutedExperts | None = None
    """With ``return_routed_experts``: of every token that was computed, so all but the last one sampled; as its KV was
    computed last. From ``routed_experts_prompt_start`` on."""
    seed: int = 0
    num_cached_tokens: int = 0
    num_reprefilled_tokens: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """vLLM's shape: a prompt and its n completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


def extend_spans(spans: list[WeightVersionSpan], version: WeightVersion, position: int) -> None:
    """Record in place that output token ``position`` (the next one) was made under ``version``."""
    if spans and spans[-1].number == version.number and spans[-1].version == version.label:
        last = spans[-1]
        spans[-1] = WeightVersionSpan(last.version, last.number, last.start, position + 1)
    else:
        spans.append(WeightVersionSpan(version.label, version.number, position, position + 1))
