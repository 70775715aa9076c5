"""The whole of async DAPO in one file, against midstream's public API.

    python examples/rl_loop.py

A tiny model (0.8 M parameters, in the repository) learns to reverse words. The engine is a process of its own and
never stops: requests stay in flight while the optimizer steps and while new weights are committed under them. Every
token comes back with the version that made it and with the very logprob that this trainer would compute for it.

What is left out, against `midstream train`: the exact staleness bound and the fixed order of groups (here whatever
finishes first is trained on), checkpoints, evaluation on held-out problems, the run directory.
"""

from __future__ import annotations

import queue
import random
from pathlib import Path

import torch

import midstream
from midstream import AsyncLLM, SamplingParams
from midstream.rl.engine_thread import EngineThread
from midstream.rl.policy import Policy
from midstream.rl.sync import open_transfer

MODEL = str(Path(midstream.__file__).parent / "rl" / "models" / "reverse")
STEPS, GROUPS, SAMPLES, AHEAD = 40, 4, 8, 12  # 4 x 8 rollouts a step; 12 groups launched and not yet trained on
CLIP_LOW, CLIP_HIGH, TIS_CAP, LR = 0.2, 0.28, 2.0, 1e-4


def problem(rng: random.Random) -> tuple[str, str]:
    word = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(5, 8)))
    return f"{word}=", word[::-1]


def main(steps: int = STEPS) -> None:
    torch.set_num_threads(1)
    rng = random.Random(0)
    loop = EngineThread()  # an asyncio loop in a thread: generation goes on beside the optimizer
    llm = AsyncLLM(model=MODEL, max_num_seqs=16, num_threads=1)
    loop.run(llm.start(), 120, "starting the engine")
    policy = Policy(MODEL)  # fp32 masters; its forward is the engine's own code
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
    transfer = open_transfer("ipc", llm, loop, policy, timeout_s=60)

    finished: queue.Queue[tuple[list[int], list[tuple[list[int], list[float], float]], list[int]]] = queue.Queue()

    async def rollout(prompt: str, answer: str, seed: int) -> None:
        """One group: n samples of one prompt, with rewards. The reward can be anything that awaits."""
        ids = llm.text.encode(prompt)
        output = await llm.generate_one(ids, SamplingParams(n=SAMPLES, max_tokens=10, seed=seed))
        rewards = [float(c.finish_reason == "stop" and llm.text.decode(c.token_ids) == answer) for c in output.outputs]
        scored = [(c.token_ids, c.processed_logprobs, r) for c, r in zip(output.outputs, rewards, strict=True)]
        versions = [span.number for c in output.outputs for span in c.weight_versions]
        finished.put((ids, scored, versions))

    def launch() -> None:
        loop.submit(rollout(*problem(rng), seed=rng.getrandbits(62)))

    for _ in range(AHEAD):
        launch()
    for step in range(steps):
        # Dynamic sampling: a group whose rewards are all equal teaches nothing; take another.
        groups, rewards, crossed = [], [], 0
        while len(groups) < GROUPS:
            ids, scored, versions = finished.get(timeout=60)
            launch()
            rewards += [reward for _, _, reward in scored]
            crossed += len(set(versions)) > 1
            if 0 < sum(reward for _, _, reward in scored) < SAMPLES:
                groups.append((ids, scored))

        # Group advantages, one per token.
        advantages, sampler = [], []
        for _, scored in groups:
            r = torch.tensor([reward for _, _, reward in scored])
            for a, (tokens, logprobs, _) in zip((r - r.mean()) / (r.std() + 1e-6), scored, strict=True):
                advantages += [float(a)] * len(tokens)
                sampler += logprobs

        # DAPO: token-level mean, clip-higher, truncated importance weight against the sampler, no KL term.
        sequences = [(ids, [tokens for tokens, _, _ in scored]) for ids, scored in groups]
        logprobs = policy.logprobs(sequences, SamplingParams())
        advantage, proximal = torch.tensor(advantages), logprobs.detach()
        weight = torch.exp(proximal - torch.tensor(sampler)).clamp(max=TIS_CAP)
        ratio = torch.exp(logprobs - proximal)
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        loss = -(weight * torch.minimum(ratio * advantage, clipped * advantage)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()

        # Change models midstream: staged beside the steps, verified, swapped in between two of them.
        reply = transfer.send_weights(weight_version=f"step {step + 1}")
        print(
            f"step {step + 1:3}  reward {sum(rewards) / len(rewards):.3f}  groups over 2+ versions {crossed}  "
            f"version {reply['number']} ({reply['weights_id'][:8]})  stall {reply['stall_ms']:.2f} ms"
        )
    transfer.shutdown()
    loop.run(llm.aclose(), 30, "closing the engine")
    loop.close()


if __name__ == "__main__":
    main()
