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
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from midstream.errors import InvalidInput
from midstream.rl import report
from midstream.rl.advantage import build_batch
from midstream.rl.config import TrainConfig
from midstream.rl.engine_thread import EngineThread
from midstream.rl.env import Task, heldout_problems
from midstream.rl.loss import clip_grad_norm, dapo_loss
from midstream.rl.policy import Policy
from midstream.rl.rollout import GroupSource, RolloutWorker, SyncRollouts
from midstream.rl.run_directory import RunDirectory
from midstream.rl.sampler import Sampler
from midstream.rl.sync import UpdateRecord, WeightSync
from midstream.rl.types import MicroBatch
from midstream.weights.base import TrainerWeightTransferEngine
from midstream.weights.manifest import digest, weights_id

if TYPE_CHECKING:
    from midstream.serving.client import EngineClient


class AsyncTrainer:
    """One training run. ``train`` runs it from start to end and returns the summary.

    The caller owns the engine, its client, and the engine thread that the client lives on; ``transfer`` is the trainer
    half of the weight transfer, its channel open. ``checker`` recomputes a finished run and returns the number of
    tokens whose logprob came out exact; None leaves ``exact_tokens`` unset. ``resume`` is a checkpoint of an earlier
    run (a directory under ``checkpoints/``). ``max_model_len``: the engine's, where an episode of several turns shall
    end at it.

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
        transfer: TrainerWeightTransferEngine,
        task: Task,
        run_directory: str | Path,
        resume: str | Path | None = None,
        max_model_len: int | None = None,
        on_step: Callable[[dict[str, Any]], None] = lambda line: None,
        checker: Callable[[Path], int] | None = None,
    ) -> None:
        self.config = config
        self.policy = policy
        self._engine = engine
        self._sampler = Sampler(client, task, config, max_model_len)
        self._problems = heldout_problems(task, config.eval_problems)
        self._on_step = on_step
        self._checker = checker
        self._optimizer = torch.optim.AdamW(
            policy.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
        )
        self.step = 0
        """Optimizer steps taken: the policy's version."""
        self._next_group = 0
        self._updates: list[UpdateRecord] = []
        self._summary: dict[str, Any] = {}
        if resume is not None:
            self._load(Path(resume))
        if self.step >= config.steps:
            raise InvalidInput(f"the checkpoint is at step {self.step} already; steps is {config.steps}")
        self._files = RunDirectory(run_directory)
        self._files.write_json("config.json", asdict(config) | {"resumed_from": str(resume) if resume else None})
        self._sync = WeightSync(transfer, timeout_s=4 * config.update_timeout_s)
        source = SyncRollouts if config.sync else RolloutWorker
        self._source: GroupSource = source(self._sampler, engine, self._next_group, self.step)

    # -- the run -----------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        started = time.monotonic()
        try:
            # The first push makes the engine hold this policy's very bytes, whatever it was started from.
            self._sync.push(self.step, on_commit=self._log_update)
            self._sync.wait()
            self._evaluate("before")
            t0 = time.monotonic()
            while self.step < self.config.steps:
                self._train_step(started)
            self._sync.wait()
            self._summary["training_s"] = time.monotonic() - t0
            for group in self._source.close():
                self._files.log_rollouts("left over", group.rollouts)
            self._evaluate("after")
            return self._summarise(started)
        finally:
            with contextlib.suppress(Exception):  # whatever ended the run is the error to see
                self._source.close()
            self._sync.close()
            self._files.close()

    def _train_step(self, started: float) -> None:
        asked = time.monotonic()
        if self.config.sync:
            self._sync.wait()  # nothing is generated before the engine holds the last step's weights
        taken = self._source.take(self.config.step_timeout_s)
        began = time.monotonic()
        step = self.step
        assert taken.step == step, f"the source served step {taken.step} to step {step}"
        for kind, groups in (("train", taken.groups), ("useless", taken.useless)):
            for group in groups:
                self._files.log_rollouts(kind, group.rollouts, step)
        metrics = self._optimize(build_batch(taken.groups, self.config.max_micro_batch_tokens))
        self._next_group = taken.next_group

        def committed(record: UpdateRecord) -> None:
            self._source.release(step)  # first, so that generation need not wait for what follows
            self._log_update(record)

        self._sync.push(self.step, committed, self._source.fail)
        ended = time.monotonic()
        every = self.config.checkpoint_every
        if self.step == self.config.steps or (every and self.step % every == 0):
            self._save()
        line = {"step": step, "time_s": ended - started, "t0": began, "t1": ended, "wait_s": began - asked}
        line |= metrics | report.describe_groups(taken)
        last = self._updates[-1]  # there is one: the push before the first step
        line |= {"updates": len(self._updates), "stall_ms": last.stall_ms, "update_s": last.seconds}
        line["tokens_per_s"] = line["tokens"] / max(ended - asked, 1e-9)
        self._files.log("metrics", line)
        self._on_step(line)

    # -- one optimizer step ------------------------------------------------------------------------------------------

    def _optimize(self, micro_batches: list[MicroBatch]) -> dict[str, Any]:
        """Gradient of the whole batch, micro-batch by micro-batch, then one AdamW step. Returns its metrics."""
        num_tokens = sum(len(rollout.logprobs) for batch in micro_batches for rollout in batch.rollouts)
        self._optimizer.zero_grad(set_to_none=True)
        means: dict[str, float] = defaultdict(float)
        fresh, fresh_exact = 0, 0
        for micro_batch in micro_batches:
            loss_sum, sums, tokens, equal = self._loss(micro_batch)
            (loss_sum / num_tokens).backward()
            for name, value in (sums | {"loss": loss_sum.item()}).items():
                means[name] += value / num_tokens
            fresh += tokens
            fresh_exact += equal
        norm = clip_grad_norm(self.policy.parameters(), self.config.max_grad_norm)
        lr = self.config.lr * min(1.0, (self.step + 1) / max(self.config.warmup_steps, 1))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        waiting = time.monotonic()
        self._sync.wait()  # the weights are at rest until the last push is committed
        stalled = time.monotonic() - waiting
        self._optimizer.step()
        self.step += 1
        return means | {
            "grad_norm": norm,
            "lr": lr,
            "update_wait_s": stalled,
            "micro_batches": len(micro_batches),
            "fresh_tokens": fresh,
            "fresh_tokens_exact": fresh_exact,
        }

    def _loss(self, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, float], int, int]:
        """The loss summed over the micro-batch, the sums of what is reported, and how many tokens drawn from the very
        weights being trained there are, and for how many of them trainer and engine computed the same bits (all of
        them, where it is exact)."""
        rollouts, config = micro_batch.rollouts, self.config
        lengths = [len(rollout.logprobs) for rollout in rollouts]
        logprobs = self.policy.logprobs(micro_batch.sequences(), config.sampling, micro_batch.routes())
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
        loss_sum, sums = dapo_loss(
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
        return loss_sum, sums, int(current.sum()), int(((proximal == sampler) & current).sum())

    # -- around it ---------------------------------------------------------------------------------------------------

    def _evaluate(self, when: str) -> None:
        """Held-out problems, one completion each, sampled at temperature 1 and greedily: figures for the summary."""
        if not self._problems:
            return
        for name, key, temperature in (("eval", "", 1.0), ("greedy", "greedy_", 0.0)):
            coroutine = self._sampler.evaluate(self._problems, temperature, f"{name}-{when}")
            rollouts = self._engine.run(coroutine, self.config.step_timeout_s, f"evaluation {when} training")
            self._files.log_rollouts(f"{name} {when}", rollouts)
            self._summary[f"{key}accuracy_{when}"] = fmean(rollout.reward >= 1.0 for rollout in rollouts)
            self._summary[f"{key}reward_{when}"] = fmean(rollout.reward for rollout in rollouts)
        self._summary["eval_problems"] = len(self._problems)

    def _log_update(self, record: UpdateRecord) -> None:
        self._updates.append(record)
        self._files.log("updates", asdict(record) | {"seconds": record.seconds})
        if self.config.keep_versions:
            self._files.save_version(record, self.policy)

    def _save(self) -> None:
        with self._files.checkpoint(self.step) as directory:
            self.policy.save(directory)
            place = {"step": self.step, "next_group": self._next_group, "seed": self.config.seed}
            tensors = {"optimizer": self._optimizer.state_dict(), "policy": self.policy.state()}
            torch.save(place | tensors, directory / "trainer.pt")

    def _load(self, directory: Path) -> None:
        try:
            state = torch.load(directory / "trainer.pt", weights_only=True)
            seed = state["seed"]
        except (OSError, KeyError) as error:
            raise InvalidInput(f"{directory} is not a checkpoint to resume from: {error}") from error
        if seed != self.config.seed:
            raise InvalidInput(
                f"checkpoint {directory} belongs to seed {seed}, not {self.config.seed}; groups depend on it"
            )
        self.policy.load_state(state["policy"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self._next_group = state["step"], state["next_group"]

    def _summarise(self, started: float) -> dict[str, Any]:
        """Everything else of summary.json. ``weight_digest`` is a hash over the float32 masters: equal if and only if
        two runs ended with the same bits."""
        run, summary = self._files.path, self._summary
        summary |= {"steps": self.step, "steps_taken": len(self._updates) - 1, "tokens": self._files.num_tokens}
        summary["weight_digest"] = weights_id({name: digest(tensor) for name, tensor in self.policy.state().items()})
        metrics = report.read_lines(run / "metrics.jsonl")
        summary["requests"] = sum(line["rollouts"] for line in metrics)
        summary["requests_spanning_versions"] = sum(line["rollouts_spanning"] for line in metrics)
        summary |= report.engine_figures(report.StepLog.read(run), metrics, self.config.max_num_seqs)
        summary["exact_tokens"] = self._checker(run) if self._checker is not None else None
        summary["total_s"] = time.monotonic() - started
        self._files.write_json("summary.json", summary)
        return summary
