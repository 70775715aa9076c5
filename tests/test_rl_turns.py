"""Tasks of several turns: one training sequence, in which the environment's tokens are context and nothing else."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fakes_rl import EOS, FakeEngineClient, LetterTokenizer, SuccessorTask, TablePolicy, logprobs_from_bits
from midstream import AsyncLLM
from midstream.cli import QUICKSTART, TaskText
from midstream.errors import InvalidInput, RewardError, TimedOut
from midstream.rl.engine_thread import EngineThread
from midstream.rl.env import Completion, Problem, user_turn
from midstream.rl.policy import Policy
from midstream.rl.sampler import Sampler
from midstream.rl.tasks import DrawnTask
from midstream.rl.types import MicroBatch, RolloutGroup
from midstream.serving.text import Text
from midstream.types import WeightVersion, child_seed
from test_rl_trainer import a_run, config, consumed, train

MODEL = str(QUICKSTART.parent)


class Replies(SuccessorTask):
    """Every turn that the model ends is answered by what ``say`` gives; the reward tells episodes apart."""

    def __init__(self, say: Callable[[Completion], Any], max_turns: Any = 2) -> None:
        super().__init__(LetterTokenizer(), 1)
        self.say, self.max_turns = say, max_turns

    async def reply(self, problem: Problem, completion: Completion) -> Any:
        said = self.say(completion)
        return await said if asyncio.iscoroutine(said) else said

    async def reward(self, problem: Problem, completion: Completion) -> float:
        return await super().reward(problem, completion) + 0.25 * len(completion.earlier)


def ask(completion: Completion) -> list[int]:
    return [2, EOS, completion.token_ids[0] % EOS, EOS]  # the fake model tells a turn's begin by the EOS before it


@pytest.fixture
def engine() -> Iterator[EngineThread]:
    thread = EngineThread()
    yield thread
    thread.close()


def group(engine: EngineThread, task: Any, client: FakeEngineClient | None = None, **values: Any) -> RolloutGroup:
    client = client or FakeEngineClient()
    client.version = WeightVersion(1, "0")
    client.table = TablePolicy().table.detach()
    room = values.pop("max_model_len", None)
    cfg = config(**{"samples_per_group": 8, "max_tokens": 12, "seed": 5, **values})
    return engine.run(Sampler(client, task, cfg, room).group(0), 5.0, "group")  # type: ignore[arg-type]


@pytest.mark.parametrize("sync", [False, True])
def test_one_turn_by_the_way_of_several_is_the_task_of_one_turn(tmp_path: Path, sync: bool) -> None:
    runs = [
        train(tmp_path / name, config(max_staleness=0, sync=sync, seed=1), task=task)
        for name, task in {"plain": None, "none": Replies(lambda _: None, 9), "one": Replies(ask, 1)}.items()
    ]
    assert all(consumed(run) == consumed(runs[0]) for run in runs)
    assert len({run.summary["weight_digest"] for run in runs}) == 1
    assert [[line["loss"] for line in run.metrics] for run in runs] == 3 * [[line["loss"] for line in runs[0].metrics]]


def test_case_102_the_next_turns_prompt_is_all_ids_so_far_and_the_replys(engine: EngineThread) -> None:
    """Nothing is decoded and encoded again: here decoding drops every EOS, so that it could not come back."""
    client = FakeEngineClient()
    task = Replies(ask, 3)
    found = group(engine, task, client)
    turns = 0
    for r in found.rollouts:
        assert r.prompt_token_ids == task.problem("train", 0).prompt_token_ids == client.prompts["group-0"]
        borders = [(a.end, b.start) for a, b in zip(r.spans, r.spans[1:], strict=False) if a.end < b.start]
        for turn, (end, start) in enumerate(borders, 2):
            assert client.prompts[f"group-0-{r.index}-turn-{turn}"] == r.prompt_token_ids + r.output_token_ids[:start]
            first = r.output_token_ids[0 if turn == 2 else borders[turn - 3][1]]
            assert r.output_token_ids[end:start] == [2, EOS, first % EOS, EOS]
        turns += len(borders)
        assert r.seed == child_seed(found.rollouts[0].seed, r.index)
        assert len(r.logprobs) == len(r.policy_versions) == len(r.sampled) <= 12
        assert r.reward - 0.25 * len(borders) in (0.0, 1.0), "the reward sees the turns before the last"
    assert turns > 4 and client.requests.count("group-0") == 1, "the first turn is one request of n samples"


def test_what_ends_an_episode_is_its_finish_reason(engine: EngineThread) -> None:
    whole = group(engine, Replies(ask, 3)).rollouts
    assert {(r.finish_reason, len(r.spans)) for r in whole} >= {("stop", 3)}
    assert all(r.finish_reason == "length" or r.output_token_ids[-1] == EOS for r in whole)
    first = [r.spans[0].end for r in whole]
    room = len(whole[0].prompt_token_ids) + min(first) + 4
    for values in ({"max_tokens": min(first)}, {"max_model_len": room}):
        short = group(engine, Replies(ask, 3), **values).rollouts
        assert all(r.finish_reason == "length" for r in short), "no room, for this turn or for the next one"
        ended = [(a, b) for a, b in zip(short, whole, strict=True) if b.spans[0].end == min(first)]
        assert ended and all(a.output_token_ids == b.output_token_ids[: min(first)] for a, b in ended)
    over = group(engine, Replies(lambda _: None, 3)).rollouts
    assert {r.finish_reason for r in over if r.output_token_ids[-1] == EOS} == {"stop"}
    one_more = group(engine, Replies(ask, 3), max_model_len=room + 1).rollouts
    assert max(len(r.spans) for r in one_more) == 2, "with room for one more token the turn is made"


def test_the_budget_is_for_all_turns_together_and_the_punishment_for_it(engine: EngineThread) -> None:
    found = group(engine, Replies(ask, 9), max_tokens=5, overlong_buffer_tokens=5).rollouts
    assert max(len(r.logprobs) for r in found) == 5 < max(len(r.output_token_ids) for r in found)
    assert all(r.penalty == -len(r.logprobs) / 5 for r in found)


async def too_late() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("say", "says"),
    [
        (lambda c: c.nothing, "reply of task successor for train problem 0 .* raised AttributeError"),
        (lambda c: too_late(), "reply of task successor .* longer than 0.05 s; raise reward_timeout_s"),
        (lambda c: [], r"must be a text or a list of token ids, not empty, or None, got \[\]"),
        (lambda c: "", r"not empty, or None, got \[\]"),
        (lambda c: [1.0], r"got \[1.0\]"),
        (lambda c: "A letter of no alphabet", "raised ValueError"),
    ],
)
def test_a_bad_reply_is_one_clear_error(engine: EngineThread, say: Any, says: str) -> None:
    with pytest.raises(RewardError, match=says):
        group(engine, Replies(say), reward_timeout_s=0.05)


@pytest.mark.parametrize("turns", [0, "2", 1.0, None])
def test_a_number_of_turns_is_a_number(tmp_path: Path, turns: Any) -> None:
    with pytest.raises(InvalidInput, match="max_turns of task successor must be an int of at least 1"):
        train(tmp_path, config(), task=Replies(ask, turns))


def test_the_groups_time_limit_is_for_the_whole_episode(engine: EngineThread) -> None:
    client = FakeEngineClient()

    async def hold(request: str, position: int) -> None:
        if "turn-2" in request:
            await asyncio.Event().wait()

    client.hold = hold
    with pytest.raises(TimedOut, match="group-0 was not generated and scored within 0.05 s"):
        group(engine, Replies(ask), client, group_timeout_s=0.05)
    assert client.running == 0


def test_a_pause_between_turns_is_waited_out(engine: EngineThread) -> None:
    client = FakeEngineClient()

    def say(completion: Completion) -> list[int]:
        client.cut_short = 1
        return ask(completion)

    found = group(engine, Replies(say), client)
    assert any("turn-2-retry-1" in name for name in client.requests)
    assert found == group(engine, Replies(ask))


def test_every_token_of_every_turn_is_exact_whatever_version_made_it(tmp_path: Path) -> None:
    cfg = config(max_staleness=2, dynamic_sampling=False, keep_versions=True, steps=6, max_tokens=8)
    with a_run(tmp_path / "run", cfg, task=Replies(ask, 3)) as run:

        async def hold(request: str, position: int) -> None:  # step 1's second turns wait for step 0's weights
            while position == 0 and re.match("group-[345]-.-turn-2", request) and run.client.version.number == 1:
                await asyncio.sleep(0)

        run.client.hold = hold
        run.train()
    tables = {int(p.stem): load_file(p)["table"] for p in (tmp_path / "run" / "versions").iterdir()}
    policy, checked, crossed = TablePolicy(), 0, 0
    for line in run.rollouts:
        stored = logprobs_from_bits(line["logprobs"])
        for number, start, end in line["spans"]:
            policy.load_state({"table": tables[number]})
            again = policy.logprobs([(line["prompt"], [line["output"]])], cfg.sampling).tolist()
            assert again[start:end] == stored[: end - start]
            stored = stored[end - start :]
            checked += end - start
        assert not stored
        crossed += len({number for number, _, _ in line["spans"]}) > 1
    assert checked == run.summary["tokens"] and crossed == run.summary["requests_spanning_versions"] > 0
    assert max(line["staleness_max"] for line in run.metrics) in (1, 2)
    assert all(line["fresh_tokens"] == line["fresh_tokens_exact"] for line in run.metrics)


class Disturbed(TablePolicy):
    """Gives other logprobs for the tokens of ``places``; -inf is what top-k gives a token that it would not draw."""

    places: list[int]

    def logprobs(self, *args: Any) -> torch.Tensor:
        logprobs = super().logprobs(*args)
        return logprobs.index_fill(0, torch.tensor(self.places), -torch.inf) if self.places else logprobs


@pytest.mark.parametrize("sequence_mask", [None, (0.9, 1.1)])
def test_the_loss_does_not_depend_on_the_environments_tokens(
    tmp_path: Path, engine: EngineThread, sequence_mask: Any
) -> None:
    found = group(engine, Replies(ask, 3))
    other = [replace(r, index=i, group=i, output_token_ids=r.output_token_ids[: r.spans[0].end], spans=r.spans[:1],
                     logprobs=r.logprobs[: r.spans[0].end]) for i, r in enumerate(found.rollouts)]  # fmt: skip
    rollouts = [r for pair in zip(found.rollouts, other, strict=True) for r in pair]
    batch = MicroBatch([replace(r, group=i) for i, r in enumerate(rollouts)], [0.1 * i - 0.7 for i in range(16)])
    results = []
    for disturb in (False, True):
        with a_run(tmp_path / str(disturb), config(sequence_mask=sequence_mask)) as run:
            run.trainer.policy = policy = Disturbed()
            policy.places, at = [], 0
            for rollout in batch.rollouts:
                outside = set(range(len(rollout.output_token_ids))) - set(rollout.sampled)
                policy.places += [at + i for i in sorted(outside)] if disturb else []
                at += len(rollout.output_token_ids)
            assert bool(policy.places) == disturb
            loss, sums, fresh, exact = run.trainer._loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            assert sum(len(r.logprobs) for r in batch.rollouts) == fresh == exact
            results.append((loss.item(), policy.table.grad, sums))
    assert results[0][0] == results[1][0] and results[0][2] == results[1][2]
    assert torch.equal(results[0][1], results[1][1]) and results[0][1].abs().sum() > 0


# -- against the engine and the trainer's model ------------------------------------------------------------------------


class Reversals(DrawnTask):
    """Two words to reverse; the second comes as ids that no text encodes to (the unknown token, padding)."""

    name, max_turns = "reversals", 3

    def draw(self, rng: Any) -> tuple[str, None]:
        return "".join(rng.choice("abcdefgh") for _ in range(6)) + "=", None

    async def reply(self, problem: Problem, completion: Completion) -> list[int] | str:
        return "hgfa=" if completion.earlier else [3, 0, 5, 8, 7, 41]

    async def reward(self, problem: Problem, completion: Completion) -> float:
        return float(len(completion.text))


def test_a_later_turn_is_what_one_request_with_all_of_it_as_its_prompt_gives(engine: EngineThread) -> None:
    llm = AsyncLLM(model=MODEL, max_num_seqs=16, num_threads=1, max_num_batched_tokens=16)
    try:
        status = engine.run(llm.start(), 120, "starting the engine")
        policy = Policy(MODEL)
        task = Reversals(TaskText(llm.text, policy.config.eos_token_ids), 0)
        cfg = config(samples_per_group=6, max_tokens=40, temperature=1.3, top_k=12, seed=3)
        params = cfg.sampling
        sampler = Sampler(llm, task, cfg, max_model_len=status["max_model_len"])
        engine.run(llm.update_weight_version("0"), 20, "naming the version")
        rollouts = engine.run(sampler.group(0), 60, "group").rollouts
        later = 0
        for r in rollouts:
            for span in r.spans[1:]:
                engine.run(llm.reset_prefix_cache(), 20, "dropping what the first turn left")
                once = replace(params, n=1, seed=r.seed, max_tokens=span.end - span.start)
                whole = r.prompt_token_ids + r.output_token_ids[: span.start]
                (alone,) = engine.run(llm.generate_one(whole, once), 20, "the whole as one prompt").outputs
                before = sum(s.end - s.start for s in r.spans if s.end <= span.start)
                assert alone.token_ids == r.output_token_ids[span.start : span.end]
                assert alone.token_logprobs == r.logprobs[before : before + span.end - span.start]
                later += 1
        assert later > 6
        # and the trainer's forward over all of them at once gives the same bits; the others' are finite or -inf
        found = policy.logprobs([(rollouts[0].prompt_token_ids, [r.output_token_ids for r in rollouts])], params)
        parts = found.split([len(r.output_token_ids) for r in rollouts])
        assert [part[r.sampled].tolist() for part, r in zip(parts, rollouts, strict=True)] == [
            r.logprobs for r in rollouts
        ]
        assert found.isinf().any(), "top-k would not have drawn some of the replies' tokens"
        sum(part[r.sampled].sum() for part, r in zip(parts, rollouts, strict=True)).backward()
        assert all(p.grad.isfinite().all() for p in policy.parameters())
    finally:
        engine.run(llm.aclose(), 30, "closing the engine")


CHAT = (
    "{% for m in messages %}{{ '<bos>' + m.role + '=' + m.content + '<eos>,' }}{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant={% endif %}"
)


def test_a_users_turn_in_the_middle_is_the_chat_templates() -> None:
    text = Text(MODEL)
    theirs = text.tokenizer()
    theirs.chat_template = CHAT
    tokenizer = TaskText(text, (theirs.eos_token_id,))
    chat = [{"role": "user", "content": "say abc"}]
    ids = tokenizer.chat(chat)
    for said, answer in (("abc", "no, again"), ("a", "a"), ("b,", "?b")):
        ids += tokenizer.encode(said) + [theirs.eos_token_id] + user_turn(tokenizer, answer)
        chat += [{"role": "assistant", "content": said}, {"role": "user", "content": answer}]
        assert ids == tokenizer.chat(chat)
    theirs.chat_template = CHAT.replace("'<eos>,'", "',<eos>'")
    with pytest.raises(InvalidInput, match=r"ends the assistant's turn with token \[42\], and the model stops at \(2,"):
        user_turn(tokenizer, "again")
