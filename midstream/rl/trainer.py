"""The loop: take a batch, take a step, send the weights, while the engine goes on sampling.

::

    engine thread   groups g, g+1, … sampled and scored all the time ──► buffer
                                                                          │ take: the next G useful groups, by g
    this thread     ┌─────────────────────────────────────────────────────┘
                    └► advantages ► forward, backward ► wait(last push) ► AdamW ► push ─┐ ► log ► again
    update thread   start, chunks, finish ◄──────────────────────────────────────────────┘
                      └► commit: the engine holds the new weights ► release the step's slots ► new groups start

| loop          | consumes           | waits for                              | is unblocked by               |
|---------------|--------------------|----------------------------------------|-------------------------------|
| engine thread | free slots         | fewer than (S + 1) G unreleased groups | a release, or a useless group |
| trainer       | G useful groups    | every group below the last of them     | rewards                       |
| update thread | one policy version | the engine's commit                    | at most one prefill           |

``config.sync`` takes the engine thread's part away: the same loop, with generation inside ``take`` and nothing in
flight during the step. One seed gives the same weights, bit for bit, with ``sync`` and with ``max_staleness = 0``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from midstream.errors import InvalidInput
from midstream.rl import report
from midstream.rl.advantage import build_batch
from midstream.rl.buffer import RolloutBuffer
from midstream.rl.config import TrainConfig
from midstream.rl.engine_thread import EngineThread
from midstream.rl.env import Task, heldout_problems
from midstream.rl.loss import LossStats, clip_grad_norm, dapo_loss
from midstream.rl.rollout import GroupSource, RolloutWorker, SyncRollouts
from midstream.rl.run_directory import RunDirectory
from midstream.rl.sampler import Sampler, sampling_params
from midstream.rl.sync import Sends, UpdateRecord, WeightSync
from midstream.rl.types import EvalResult, MicroBatch, TakenGroups, TrainBatch
from midstream.types import SamplingParams
from midstream.weights.manifest import digest, weights_id
from midstream.weights.source import WeightSource

if TYPE_CHECKING:
    from midstream.serving.client import EngineClient


class Policy(Protocol):
    """The model being trained: float32 masters, and a forward that computes the engine's bits."""

    def logprobs(self, sequences: list[tuple[list[int], list[list[int]]]], params: SamplingParams) -> Tensor:
        """[T] float32 with gradient: the logprob of every completion token, in the order of ``sequences``, under the
        distribution that ``params`` (temperature, top_k, top_p) samples from. Each entry is a prompt and the
        completions that share it."""

    def parameters(self) -> Iterable[Tensor]:
        """The float32 masters, always in the same order."""

    def source(self) -> WeightSource:
        """What the engine gets: the masters cast to its dtype, under checkpoint names."""

    def save(self, directory: Path) -> None:
        """A model directory that transformers opens."""

    def state(self) -> dict[str, Tensor]:
        """The masters by name, for a checkpoint."""

    def load_state(self, state: dict[str, Tensor]) -> None: ...


class AsyncTrainer:
    """One training run. ``train`` runs it from start to end and returns the summary.

    The caller owns the engine, its client, and the engine thread that the client lives on; ``transfer`` is the trainer
    half of the weight transfer, its channel open. ``checker`` recomputes a finished run and returns the number of
    tokens whose logprob came out exact; None leaves ``exact_tokens`` unset. ``step_log`` is the file that the engine
    logs its steps to. ``resume`` is a checkpoint of an earlier run (a directory under ``checkpoints/``).
    ``max_model_len``: the engine's, where an episode of several turns shall end at it.

    Whatever fails (an optimizer step, a reward, an update, the engine) ends ``train`` with that error; generation is
    stopped, and the checkpoints and lines written so far stay.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        policy: Policy,
        client: EngineClient,
        engine: EngineThread,
        transfer: Sends,
        task: Task,
        run_directory: str | Path,
        step_log: str | Path | None = None,
        resume: str | Path | None = None,
        max_model_len: int | None = None,
        on_step: Callable[[dict[str, Any]], None] | None = None,
        checker: Callable[[Path], int] | None = None,
    ) -> None:
        self.config = config
        self.policy = policy
        self._engine = engine
        self._params = sampling_params(config)
        self._sampler = Sampler.from_config(client, task, config, max_model_len)
        self._problems = heldout_problems(task, config.eval_problems)
        self._step_log = Path(step_log) if step_log is not None else None
        self._on_step = on_step
        self._checker = checker
        self._optimizer = torch.optim.AdamW(
            policy.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
        )
        self.step = 0
        """Optimizer steps taken: the policy's version."""
        self._next_group = 0
        self._totals = {"requests": 0, "requests_spanning_versions": 0}
        self._updates: list[UpdateRecord] = []
        if resume is not None:
            self._load(Path(resume))
        if self.step >= config.steps:
            raise InvalidInput(f"the checkpoint is at step {self.step} already; steps is {config.steps}")
        self._files = RunDirectory(run_directory)
        self._files.write_json("config.json", config.to_dict() | {"resumed_from": str(resume) if resume else None})
        self._sync = WeightSync(transfer, timeout_s=4 * config.update_timeout_s, on_update=self._log_update)
        self._source = self._make_source()

    # -- the run -----------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        started = time.monotonic()
        try:
            # The first push makes the engine hold this policy's very bytes, whatever it was started from.
            self._sync.push(self.step)
            self._sync.wait()
            before = self._evaluate("before")
            self._source.start()
            t0 = time.monotonic()
            while self.step < self.config.steps:
                self._train_step(started)
            self._sync.wait()
            seconds = time.monotonic() - t0
            self._close_source()
            after = self._evaluate("after")
            return self._summarise(before, after, seconds, started)
        finally:
            with contextlib.suppress(Exception):  # whatever ended the run is the error to see
                self._source.close()
            self._sync.close()
            self._files.close()

    def _train_step(self, started: float) -> None:
        asked = time.monotonic()
        taken = self._source.take(self.config.step_timeout_s)
        began = time.monotonic()
        step = self.step
        assert taken.step == step, f"the source served step {taken.step} to step {step}"
        self._log_groups(taken)
        batch = build_batch(step, taken.groups, self.config.max_micro_batch_tokens)
        metrics = self._optimize(batch)
        self._next_group = taken.next_group
        self._sync.push(step + 1, on_commit=lambda: self._source.release(step), on_error=self._source.fail)
        ended = time.monotonic()
        if self.step == self.config.steps or (
            self.config.checkpoint_every and self.step % self.config.checkpoint_every == 0
        ):
            self._save()
        line = {"step": step, "time_s": ended - started, "t0": began, "t1": ended, "wait_s": began - asked}
        line |= metrics | report.describe_groups(taken)
        last = self._updates[-1]  # there is one: the push before the first step
        line |= {"updates": len(self._updates), "stall_ms": last.stall_ms, "update_s": last.seconds}
        line["tokens_per_s"] = line["tokens"] / max(ended - asked, 1e-9)
        self._files.log_step(line)
        if self._on_step is not None:
            self._on_step(line)

    # -- one optimizer step ------------------------------------------------------------------------------------------

    def _optimize(self, batch: TrainBatch) -> dict[str, Any]:
        """Gradient of the whole batch, micro-batch by micro-batch, then one AdamW step. Returns its metrics."""
        self._optimizer.zero_grad(set_to_none=True)
        loss, stats, fresh, fresh_exact = 0.0, None, 0, 0
        for micro_batch in batch.micro_batches:
            loss_sum, part, tokens, equal = self._loss(micro_batch)
            (loss_sum / batch.num_tokens).backward()
            loss += loss_sum.item() / batch.num_tokens
            stats = part if stats is None else stats + part
            fresh += tokens
            fresh_exact += equal
        assert stats is not None
        norm = clip_grad_norm(self.policy.parameters(), self.config.max_grad_norm)
        lr = self.config.lr * min(1.0, (self.step + 1) / max(self.config.warmup_steps, 1))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        waiting = time.monotonic()
        self._sync.wait()  # the weights are at rest until the last push is committed
        stalled = time.monotonic() - waiting
        self._optimizer.step()
        self.step += 1
        return {
            "loss": loss,
            "grad_norm": norm,
            "lr": lr,
            "update_wait_s": stalled,
            "micro_batches": len(batch.micro_batches),
            "fresh_tokens": fresh,
            "fresh_tokens_exact": fresh_exact,
            **stats.means(),
        }

    def _loss(self, micro_batch: MicroBatch) -> tuple[Tensor, LossStats, int, int]:
        """The loss summed over the micro-batch, and how many tokens drawn from the very weights being trained there
        are, and for how many of them trainer and engine computed the same bits (all of them, where it is exact)."""
        rollouts, config = micro_batch.rollouts, self.config
        lengths = [len(rollout.logprobs) for rollout in rollouts]
        logprobs = self.policy.logprobs(micro_batch.sequences(), self._params)
        device = logprobs.device
        ends = list(itertools.accumulate((len(rollout.output_token_ids) for rollout in rollouts), initial=0))
        if logprobs.numel() != ends[-1]:
            raise InvalidInput(f"the policy gave {logprobs.numel()} logprobs for {ends[-1]} completion tokens")
        if ends[-1] != sum(lengths):  # what the environment said is context: it has no part in the loss
            sampled = [start + i for start, rollout in zip(ends, rollouts, strict=False) for i in rollout.sampled]
            logprobs = logprobs.index_select(0, torch.tensor(sampled, device=device))
        sampler = torch.tensor([p for r in rollouts for p in r.logprobs], dtype=torch.float32, device=device)
        advantages = torch.tensor(micro_batch.advantages, dtype=torch.float32, device=device)
        advantages = advantages.repeat_interleave(torch.tensor(lengths, device=device))
        proximal = logprobs.detach()
        loss_sum, stats = dapo_loss(
            logprobs,
            proximal,
            sampler,
            advantages,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            tis_cap=config.tis_cap,
            sequence_mask=config.sequence_mask,
            lengths=lengths,
        )
        current = torch.tensor([v == self.step for r in rollouts for v in r.policy_versions], device=device)
        return loss_sum, stats, int(current.sum()), int(((proximal == sampler) & current).sum())

    # -- around it ---------------------------------------------------------------------------------------------------

    def _make_source(self) -> GroupSource:
        config = self.config
        if config.sync:
            return SyncRollouts(
                self._sampler,
                config.groups_per_step,
                self._engine,
                dynamic_sampling=config.dynamic_sampling,
                next_group=self._next_group,
                next_step=self.step,
            )
        buffer = RolloutBuffer(
            config.groups_per_step,
            config.max_staleness,
            dynamic_sampling=config.dynamic_sampling,
            next_group=self._next_group,
            next_step=self.step,
            last_step=config.steps,
        )
        return RolloutWorker(self._sampler, buffer, self._engine)

    def _close_source(self) -> None:
        left_over = self._source.close()
        for group in left_over:
            self._files.log_rollouts("left over", group.rollouts, self._params, None)

    def _evaluate(self, when: str) -> tuple[EvalResult, EvalResult] | None:
        """Held-out problems, one completion each: sampled at temperature 1, and greedily."""
        if not self._problems:
            return None
        results = []
        for name, temperature in (("eval", 1.0), ("greedy", 0.0)):
            coroutine = self._sampler.evaluate(self._problems, temperature, f"{name}-{when}")
            result = self._engine.run(coroutine, self.config.step_timeout_s, f"evaluation {when} training")
            params = SamplingParams(temperature=temperature)
            self._files.log_rollouts(f"{name} {when}", result.rollouts, params, None)
            results.append(result)
        return results[0], results[1]

    def _log_groups(self, taken: TakenGroups) -> None:
        for kind, groups in (("train", taken.groups), ("useless", taken.useless)):
            for group in groups:
                self._files.log_rollouts(kind, group.rollouts, self._params, taken.step)
                self._totals["requests"] += len(group.rollouts)
                self._totals["requests_spanning_versions"] += sum(r.spans_versions for r in group.rollouts)

    def _log_update(self, record: UpdateRecord) -> None:
        self._updates.append(record)
        self._files.log_update(record)
        if self.config.keep_versions:
            self._files.save_version(record, self.policy.source())

    def _save(self) -> None:
        with self._files.checkpoint(self.step) as directory:
            self.policy.save(directory)
            torch.save(
                {"optimizer": self._optimizer.state_dict(), "policy": self.policy.state()}, directory / "trainer.pt"
            )
            state = {"step": self.step, "next_group": self._next_group, "seed": self.config.seed}
            (directory / "trainer.json").write_text(json.dumps(state) + "\n")

    def _load(self, directory: Path) -> None:
        try:
            state = json.loads((directory / "trainer.json").read_text())
            tensors = torch.load(directory / "trainer.pt", weights_only=True)
        except OSError as error:
            raise InvalidInput(f"{directory} is not a checkpoint to resume from: {error}") from error
        if state["seed"] != self.config.seed:
            raise InvalidInput(
                f"checkpoint {directory} belongs to seed {state['seed']}, not {self.config.seed}; groups depend on it"
            )
        self.policy.load_state(tensors["policy"])
        self._optimizer.load_state_dict(tensors["optimizer"])
        self.step, self._next_group = state["step"], state["next_group"]

    def weight_digest(self) -> str:
        """One hash over the float32 masters: equal if and only if two runs ended with the same bits."""
        return weights_id({name: digest(tensor) for name, tensor in self.policy.state().items()})

    def _summarise(
        self,
        before: tuple[EvalResult, EvalResult] | None,
        after: tuple[EvalResult, EvalResult] | None,
        training_s: float,
        started: float,
    ) -> dict[str, Any]:
        summary: dict[str, Any] = {"steps": self.step, "steps_taken": len(self._updates) - 1, "training_s": training_s}
        for when, results in (("before", before), ("after", after)):
            if results is not None:
                sampled, greedy = results
                summary[f"accuracy_{when}"] = sampled.accuracy
                summary[f"greedy_accuracy_{when}"] = greedy.accuracy
                summary[f"reward_{when}"] = sampled.reward
                summary[f"greedy_reward_{when}"] = greedy.reward
                summary["eval_problems"] = sampled.num_problems
        summary |= self._totals
        summary["tokens"] = self._files.num_tokens
        summary["weight_digest"] = self.weight_digest()
        if self._step_log is not None:
            log = report.StepLog.read(self._step_log)
            training = report.read_lines(self._files.path / "metrics.jsonl")
            summary |= report.engine_figures(log, training, self.config.max_num_seqs)
        summary["exact_tokens"] = self._checker(self._files.path) if self._checker is not None else None
        summary["total_s"] = time.monotonic() - started
        self._files.write_json("summary.json", summary)
        return summary
