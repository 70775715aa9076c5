"""10,000 random operations on a real tiny model: nothing is lost, ends twice, or carries a wrong logprob."""

from __future__ import annotations

import pathlib
import random
import threading
from typing import Any

import pytest
import torch

from checkpoints import random_weights, write_checkpoint
from cores import Driver, Teacher, digests_of
from midstream.engine.protocol import Fail
from midstream.errors import EnginePaused, MidstreamError
from midstream.types import SamplingParams

torch.set_num_threads(1)

SIZES = {"num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 32, "num_attention_heads": 2, "hidden_size": 64}
MODES = ("abort", "wait", "keep")


class Chaos:
    """One random walk. ``open``: the update under way; ``versions``: the weights of every number ever served."""

    def __init__(self, model: pathlib.Path, seed: int, prefix_caching: bool) -> None:
        self.random = random.Random(seed)
        self.driver = Driver(
            model,
            num_blocks=8,
            max_num_seqs=6,
            max_num_batched_tokens=24,
            max_model_len=96,
            enable_prefix_caching=prefix_caching,
        )
        self.weights = [random_weights("llama", s, **SIZES) for s in range(3)]
        self.versions: dict[int, dict[str, torch.Tensor]] = {0: self.weights[0]}
        self.expected = dict(self.weights[0])
        self.next: dict[str, torch.Tensor] | None = None
        self.finish: int | None = None
        self.calls: list[int] = []
        self.gates: list[threading.Event] = []
        self.dropped: set[str] = set()
        self.count = dict.fromkeys(("add", "refused", "abort", "pause", "resume", "commit", "failed", "drop"), 0)

    def add(self) -> None:
        r, d = self.random, self.driver
        shared = [1 + i % 60 for i in range(r.choice((0, 16, 20, 33)))]
        prompt = shared + [r.randrange(64) for _ in range(r.randrange(1, 12))]
        try:
            d.add(
                prompt,
                n=r.choice((1, 1, 1, 2, 4)),
                max_tokens=r.randrange(1, 40),
                seed=r.randrange(1 << 40),
                stop_token_ids=r.choice(((), (5, 9))),
                final_only=r.random() < 0.3,
                prompt_logprobs=r.choice((None, None, 0)),
            )
            self.count["add"] += 1
        except EnginePaused:
            assert d.core.protocol.mode in ("abort", "wait")
            self.count["refused"] += 1

    def abort(self) -> None:
        live = self.driver.core.scheduler.live
        if live:
            request = self.random.choice(list(live.values()))
            name = request.parent_id if self.random.random() < 0.5 else request.request_id
            self.driver.core.abort([name, "nobody"])
            self.driver.take()
            self.count["abort"] += 1

    def drop(self) -> None:
        """A client leaves: the abort is all the core hears, and it must have ended everything by then."""
        live = self.driver.core.scheduler.live
        if live:
            name = self.random.choice(list(live.values())).parent_id
            self.driver.core.abort([name])
            self.driver.take()
            assert self.driver.output(name).finished
            self.dropped.add(name)
            self.count["drop"] += 1

    def pause(self) -> None:
        arguments: dict[str, Any] = {"mode": self.random.choice(MODES), "clear_cache": self.random.random() < 0.5}
        if arguments["mode"] == "wait" and self.random.random() < 0.3:
            arguments["timeout_s"] = 0
        self.calls.append(self.driver.call("pause_generation", **arguments))
        self.count["pause"] += 1

    def resume(self) -> None:
        self.calls.append(self.driver.call("resume_generation"))
        self.count["resume"] += 1

    def start(self) -> None:
        """An update in any number of chunks, whole or partial; sometimes its last chunk waits on a gate."""
        r, d = self.random, self.driver
        if self.next is not None or self.finish is not None:
            return
        target = r.choice(self.weights)
        partial = r.random() < 0.4
        names = r.sample(list(target), r.randrange(1, 5)) if partial else list(target)
        r.shuffle(names)
        d.result(d.call("start_weight_update", mode="partial" if partial else "full"))
        cut = r.randrange(len(names) + 1)
        for part in (names[:cut], names[cut:]):
            pairs: list[tuple[str, Any]] = [(n, target[n]) for n in part]
            if r.random() < 0.2:
                self.gates.append(threading.Event())
                pairs.insert(0, ("gate", self.gates[-1]))
            self.calls.append(d.send(*pairs))
        self.next = {**self.expected, **{n: target[n] for n in names}}

    def finish_update(self) -> None:
        if self.next is not None and self.finish is None:
            policy = self.random.choice((None, None, "recompute", "keep"))
            self.finish = self.driver.call("finish_weight_update", kv_policy=policy)
            self.look()

    def fail_update(self) -> None:
        """A bad chunk, an abort, or a finish that must fail: the update ends and nothing changed."""
        d, kind = self.driver, self.random.randrange(3)
        if self.next is None or self.finish is not None or d.core.session.state.value != "open":
            return
        self.release()
        if kind == 0:
            self.calls.append(d.send(("nobody", torch.zeros(2))))
            d.settle()
            d.step()
        elif kind == 1:
            self.calls.append(d.send(("model.norm.weight", self.weights[0]["model.norm.weight"] + 1)))
            self.calls.append(d.send(("model.norm.weight", self.weights[0]["model.norm.weight"] + 2)))
        else:
            d.result(d.call("abort_weight_update"))
        while d.core.session.is_open:
            d.settle()
            d.step()
        self.next = None
        self.count["failed"] += 1

    def abort_update(self) -> None:
        self.driver.result(self.driver.call("abort_weight_update"))
        self.look()
        assert self.finish is None
        self.next = None

    def release(self) -> None:
        for gate in self.gates:
            gate.set()
        self.gates.clear()

    def look(self) -> None:
        """Has the finish been answered, and how?"""
        if self.finish is None or not self.driver.answered(self.finish):
            return
        reply = self.driver.replies[self.finish]
        self.finish = None
        if not isinstance(reply, Fail):
            assert self.next is not None
            self.expected, self.next = self.next, None
            self.versions[reply.value["number"]] = dict(self.expected)
            self.count["commit"] += 1
        else:
            assert reply.error.status == 409, reply.error
            if not self.driver.core.session.is_open:
                self.next = None

    def step(self) -> None:
        if self.random.random() < 0.2:
            self.release()
        self.driver.step()
        self.look()

    def operation(self) -> None:
        (name,) = self.random.choices(
            ("step", "add", "abort", "drop", "pause", "resume", "start", "finish", "fail", "abort_update"),
            (52, 14, 2, 1, 3, 9, 8, 8, 2, 1),
        )
        {
            "step": self.step,
            "add": self.add,
            "abort": self.abort,
            "drop": self.drop,
            "pause": self.pause,
            "resume": self.resume,
            "start": self.start,
            "finish": self.finish_update,
            "fail": self.fail_update,
            "abort_update": self.abort_update,
        }[name]()

    def end(self) -> None:
        self.release()
        self.resume()
        self.driver.run()
        self.look()
        if self.finish is not None:
            self.driver.step()
            self.look()
        assert self.finish is None


@pytest.mark.parametrize(("seed", "prefix_caching"), [(1, True), (2, False)])
def test_case_086_ten_thousand_random_operations(tmp_path: pathlib.Path, seed: int, prefix_caching: bool) -> None:
    """At the end nothing is held, every request ended once, and every logprob is what its version gives."""
    chaos = Chaos(write_checkpoint(tmp_path / "m", "llama", 0, **SIZES), seed, prefix_caching)
    driver = chaos.driver
    for index in range(10_000):
        chaos.operation()
        if index % 50 == 0:
            driver.core.scheduler.check_integrity()
    chaos.end()
    driver.check_idle()
    outputs = [b.output for b in driver.builders.values()]
    assert all(o.finished and all(c.finish_reason for c in o.outputs) for o in outputs)
    assert all(op in driver.replies for op in range(1, driver.ops + 1)), "a call without an answer"
    assert all(isinstance(r.error, MidstreamError) for r in driver.replies.values() if isinstance(r, Fail)), (
        "a foreign error"
    )
    assert driver.digests() == digests_of(chaos.expected)
    kept = [o for o in outputs if any(c.kv_versions for c in o.outputs)]
    pure = [o for o in outputs if not any(c.kv_versions for c in o.outputs)]
    checked = Teacher(driver, chaos.versions).check(pure, SamplingParams())
    reasons = {c.finish_reason for o in outputs for c in o.outputs}
    assert reasons == {"stop", "length", "abort"}
    assert all(chaos.count[name] > 20 for name in chaos.count), chaos.count
    assert len(kept) > 5 and checked > 3000
    assert sum(c.num_preemptions for o in outputs for c in o.outputs) > 50
    assert any(len(c.weight_versions) > 1 for o in pure for c in o.outputs)
    for output in outputs:
        for c in output.outputs:
            assert c.finish_reason != "length" or len(c.token_ids) == driver.params[output.request_id].max_tokens
            assert c.finish_reason != "stop" or c.token_ids[-1] in (5, 9)
    driver.close()
