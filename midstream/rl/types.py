"""The nouns of the trainer, as plain data. No torch here.

A *group* is one prompt and its n sampled completions; a *rollout* is one of these. Groups are numbered g = 0, 1, 2, …
over a whole run, and everything about group g (problem, seed, place in a batch) is a function of the run's seed and g.
A *policy version* counts optimizer steps: version v is what v steps have made; step s trains version s into s + 1.
The trainer labels the weights it sends with that number, so every token of a run says which version made it.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field

from midstream.errors import InvalidInput
from midstream.types import MAX_SEED, FinishReason, RoutedExperts, SamplingParams, WeightVersionSpan


def derive_seed(run_seed: int, purpose: str, index: int) -> int:
    """63 bits for the ``index``-th use of ``purpose``. Purposes never share randomness: how often one evaluates
    ("eval") changes nothing that is trained on ("group"). Child k of a group has ``child_seed``, given by the engine.
    """
    digest = hashlib.blake2b(f"{purpose}/{run_seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled completion with everything a step needs to train on it, and a checker to recompute it.

    In a task of several turns it is the whole episode after the first prompt: the model's tokens, and between them the
    environment's replies. Output tokens that no span covers are the environment's: context, and nothing else.
    """

    group: int
    index: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    """Ends with the stop token where ``finish_reason`` is "stop"."""
    logprobs: list[float]
    """Of the sampled tokens, in order: as the sampler recorded them, of the distribution it drew from; float32."""
    spans: list[WeightVersionSpan]
    """Which weights made which output tokens; half-open, in order, from the first output token to the last."""
    seed: int
    """The seed of this very completion (child ``index`` of the group's seed)."""
    finish_reason: FinishReason
    reward: float
    """What the task says."""
    penalty: float = 0.0
    """Soft overlong punishment, <= 0; training uses ``reward + penalty``."""
    kv_versions: list[tuple[int, int, int]] | None = None
    """(version, start, end) over prompt + output, of each turn's request that kept KV across an update."""
    routes: RoutedExperts | None = None
    """Which experts served its tokens, prompt included, where they are to be replayed."""
    params: SamplingParams = field(default_factory=SamplingParams)
    """What it was drawn with; temperature, top_p and top_k count. Of greedy tokens the logprobs are the model's own."""

    def __post_init__(self) -> None:
        edges = [edge for span in self.spans for edge in (span.start, span.end)]
        whole = bool(edges) and edges == sorted(edges) and edges[0] == 0 and edges[-1] == len(self.output_token_ids)
        if not whole or not self.output_token_ids or len(self.sampled) != len(self.logprobs):
            raise InvalidInput(
                f"rollout {self.index} of group {self.group} is malformed: {len(self.output_token_ids)} tokens, "
                f"{len(self.logprobs)} logprobs, version spans {[(span.start, span.end) for span in self.spans]}; "
                "every sampled token needs a logprob and exactly one version"
            )

    @property
    def sampled(self) -> list[int]:
        """The places of the sampled tokens in the output."""
        return [i for span in self.spans for i in range(span.start, span.end)]

    @property
    def policy_versions(self) -> list[int]:
        """The policy version of each sampled token, from the trainer's labels."""
        return [policy_version(span) for span in self.spans for _ in range(span.start, span.end)]

    @property
    def spans_versions(self) -> bool:
        """Its weights changed while it was being generated."""
        return len({span.number for span in self.spans}) > 1


def policy_version(span: WeightVersionSpan) -> int:
    """The number of optimizer steps behind the weights of a span. Raises ``InvalidInput`` for a foreign label."""
    try:
        return int(span.version)
    except ValueError:
        raise InvalidInput(
            f"weight version label {span.version!r} (commit {span.number}) is not a policy version; while a trainer "
            "runs, only the trainer may update the engine's weights"
        ) from None


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """A prompt and its n completions, all finished and scored."""

    index: int
    """g: the group's number in the run."""
    rollouts: list[Rollout]

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward + rollout.penalty for rollout in self.rollouts]

    @property
    def oldest_version(self) -> int:
        return min(policy_version(span) for rollout in self.rollouts for span in rollout.spans)


@dataclass(frozen=True, slots=True)
class TakenGroups:
    """What one optimizer step gets: the groups it trains on, and the useless ones it passed over, both by g."""

    step: int
    groups: list[RolloutGroup]
    useless: list[RolloutGroup] = field(default_factory=list)

    @property
    def next_group(self) -> int:
        """Where the following step begins: right after the last group consumed."""
        return self.groups[-1].index + 1


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Consecutive rollouts of a batch (by g, then index) that go through the model together."""

    rollouts: list[Rollout]
    advantages: list[float]

    def sequences(self) -> list[tuple[list[int], list[list[int]]]]:
        """(prompt, completions) with neighbours of one group sharing their prompt, in order."""
        groups = self._groups()
        return [(group[0].prompt_token_ids, [rollout.output_token_ids for rollout in group]) for group in groups]

    def routes(self) -> list[list[RoutedExperts | None]] | None:
        """The experts to replay, for :meth:`sequences`; None where there are none."""
        if all(rollout.routes is None for rollout in self.rollouts):
            return None
        return [[rollout.routes for rollout in group] for group in self._groups()]

    def _groups(self) -> list[list[Rollout]]:
        def shared(rollout: Rollout) -> tuple[int, bytes]:
            """A prompt's experts depend on the weights it was computed by last."""
            prompt = rollout.routes.part(0, len(rollout.prompt_token_ids)).data if rollout.routes else b""
            return rollout.group, bytes(prompt)

        return [list(group) for _, group in itertools.groupby(self.rollouts, key=shared)]
