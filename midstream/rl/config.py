"""What a training run is made of: one frozen dataclass, read from a TOML recipe or from the command line."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from midstream.config import EngineConfig, check_types
from midstream.errors import InvalidInput
from midstream.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Every number of a run. Recipes (TOML) use these names; an unknown name is an error that lists them."""

    model: str
    """A checkpoint directory or GGUF file; engine and trainer both start from it."""
    task: str
    """reverse, addition, sort, reasoning_gym:NAME, FILE.jsonl, FILE.jsonl:FILE.py:REWARD or FILE.py:FUNCTION."""
    task_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the task."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the engine computes in. The trainer keeps float32 masters and runs its forward on their cast to this."""
    seed: int = 0
    """Decides problems, sampling seeds and order."""

    steps: int = 100
    """Optimizer steps."""
    groups_per_step: int = 16
    """Prompts per optimizer step; all of them useful ones when dynamic_sampling is on."""
    samples_per_group: int = 8
    """Completions per prompt."""
    max_staleness: int = 1
    """Optimizer steps that the weights behind a token may lag behind the weights being trained. 0: synchronous."""
    sync: bool = False
    """Generate only between optimizer steps, one batch at a time. The result is max_staleness = 0's, bit for bit."""

    max_tokens: int = 16
    """Longest completion, stop tokens included: of all the model's turns together, the environment's tokens aside."""
    temperature: float = 1.0
    """Of the rollouts. Evaluation samples at 1 and greedily."""
    top_p: float = 1.0
    top_k: int = 0
    replay_routed_experts: bool = False
    """The trainer's forward takes the experts that the engine took, token by token. For a model with experts: while
    weights change, a router's close calls fall otherwise, and the token was drawn by other experts."""
    max_num_seqs: int = 64
    """Completions that each rank of the engine runs at once: the concurrency."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Other options of the engine, by their names in EngineConfig: data_parallel_size, enable_expert_parallel, …"""

    lr: float = 1e-4
    """Constant after the warm-up."""
    warmup_steps: int = 5
    """Linear from lr / warmup_steps."""
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    """The gradient of a step is scaled down to this norm."""
    max_micro_batch_tokens: int = 4096
    """Prompt and completion tokens that go through the trainer's model at once."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    """DAPO's clip-higher: the ratio to the proximal policy is clipped to [1 - clip_low, 1 + clip_high]."""
    tis_cap: float = 2.0
    """Truncated importance sampling: the weight of a token is min(proximal / sampler probability, tis_cap)."""
    sequence_mask: tuple[float, float] | None = None
    """Leave out a completion whose geometric mean of proximal / sampler probability is outside these bounds."""
    dynamic_sampling: bool = True
    """Replace groups whose rewards are all equal."""
    overlong_buffer_tokens: int = 0
    """Soft overlong punishment over the last so many tokens of max_tokens. 0: off."""
    overlong_factor: float = 1.0
    """The punishment at max_tokens."""

    eval_problems: int = 512
    """Held-out problems, before and after. 0: no evaluation."""
    checkpoint_every: int = 0
    """Steps between checkpoints; the last step always makes one. 0: only the last."""
    keep_versions: bool = False
    """Keep the weights of every version (tiny models), so that `check exact --run` can recompute every token."""
    reward_timeout_s: float = 10.0
    """For one call of the task's reward or reply."""
    group_timeout_s: float = 300.0
    """From a group's submission to its last reward, all turns included."""
    step_timeout_s: float = 600.0
    """A step waits at most so long for its groups."""
    update_timeout_s: float = 120.0
    """Any one call of a weight update."""

    def __post_init__(self) -> None:
        check_types(self)
        positive = (
            "steps groups_per_step samples_per_group max_tokens max_num_seqs max_micro_batch_tokens "
            "lr max_grad_norm tis_cap reward_timeout_s group_timeout_s step_timeout_s update_timeout_s"
        )
        for name in positive.split():
            if getattr(self, name) <= 0:
                raise InvalidInput(f"{name} must be positive, got {getattr(self, name)!r}")
        others = (
            "seed max_staleness warmup_steps weight_decay clip_low clip_high overlong_buffer_tokens "
            "overlong_factor eval_problems checkpoint_every"
        )
        for name in others.split():
            if getattr(self, name) < 0:
                raise InvalidInput(f"{name} must be >= 0, got {getattr(self, name)!r}")
        if self.temperature <= 0:
            raise InvalidInput(f"temperature must be positive: a greedy policy has no gradient, got {self.temperature}")
        own = {"model", "dtype", "max_num_seqs", "step_log", "initial_version"} & self.engine.keys()
        if own:
            raise InvalidInput(f"engine: {', '.join(sorted(own))} must not be given there: the run sets it itself")
        EngineConfig.from_options({"model": self.model, **self.engine})
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise InvalidInput(f"dtype must be auto, float32 or bfloat16, got {self.dtype!r}")
        if self.clip_low >= 1:
            raise InvalidInput(f"clip_low must be below 1, got {self.clip_low}")
        if self.overlong_buffer_tokens > self.max_tokens:
            raise InvalidInput(
                f"overlong_buffer_tokens {self.overlong_buffer_tokens} must not exceed max_tokens {self.max_tokens}"
            )
        if self.samples_per_group > self.max_num_seqs:
            raise InvalidInput(
                f"samples_per_group {self.samples_per_group} must not exceed max_num_seqs {self.max_num_seqs}: a "
                "group is admitted whole"
            )
        if self.samples_per_group < 2 and self.dynamic_sampling:
            raise InvalidInput(
                "samples_per_group must be at least 2: with one sample all rewards of a group are equal, and "
                "dynamic_sampling would look for a useful group for ever"
            )
        if self.sequence_mask is not None:
            bounds = self.sequence_mask
            numbers = isinstance(bounds, (list, tuple)) and all(isinstance(b, (int, float)) for b in bounds)
            if not numbers or len(bounds) != 2 or not 0 < bounds[0] < 1 < bounds[1]:
                raise InvalidInput(f"sequence_mask must be (low, high) with 0 < low < 1 < high, got {bounds!r}")
            object.__setattr__(self, "sequence_mask", tuple(bounds))
        if self.sync and self.max_staleness:
            object.__setattr__(self, "max_staleness", 0)

    @property
    def num_ranks(self) -> int:
        """Of the engine."""
        return int(self.engine.get("data_parallel_size", 1))

    @property
    def rollouts_per_step(self) -> int:
        return self.groups_per_step * self.samples_per_group

    @property
    def sampling(self) -> SamplingParams:
        """How training rollouts are drawn; the trainer's logprobs are of the same distribution."""
        return SamplingParams(
            n=self.samples_per_group,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            return_routed_experts=self.replay_routed_experts,
            logprobs_mode="processed_logprobs",
            detokenize=False,
            final_only=True,
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """Raises ``InvalidInput`` for an unknown or a missing key."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise InvalidInput(f"unknown key(s) in the recipe: {', '.join(unknown)}; allowed: {', '.join(known)}")
        missing = [name for name in ("model", "task") if name not in values]
        if missing:
            raise InvalidInput(f"the recipe lacks {' and '.join(missing)}")
        return cls(**values)

    @classmethod
    def from_toml(cls, path: str | Path, **overrides: Any) -> TrainConfig:
        """A recipe; ``overrides`` that are not None win. Model and files of the task are looked for beside it."""
        path = Path(path)
        try:
            values = tomllib.loads(path.read_text())
        except OSError as error:
            raise InvalidInput(f"recipe {path} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidInput(f"recipe {path} is not valid TOML: {error}") from error
        values |= {name: value for name, value in overrides.items() if value is not None}
        for name, pattern in (("model", ".+"), ("task", r"[^:]+\.(jsonl|py)(?=:|$)")):  # looked for beside it first
            if name in values and overrides.get(name) is None:
                values[name] = re.sub(
                    pattern, lambda m: str(found) if (found := path.parent / m[0]).exists() else m[0], str(values[name])
                )
        return cls.from_dict(values)

    def scaled_to_tiny(self, model: str) -> TrainConfig:
        """The same algorithm on a tiny model and the reversal task, for a test on a laptop: ``--scale tiny``."""
        most = {"steps": 4, "groups_per_step": 4, "samples_per_group": 8, "max_num_seqs": 16, "eval_problems": 16}
        most |= {"overlong_buffer_tokens": 2, "checkpoint_every": 0}
        changes: dict[str, Any] = {name: min(getattr(self, name), limit) for name, limit in most.items()}
        changes |= {"model": model, "task": "reverse", "task_options": {}, "dtype": "float32", "max_tokens": 10}
        changes |= {"replay_routed_experts": False, "engine": {}}  # the tiny model is dense
        return dataclasses.replace(self, **changes)
