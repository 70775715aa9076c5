"""The trainer: rollouts, rewards, advantages, DAPO's loss and the loop that keeps changing the engine's weights.

Reading order: ``types`` (the nouns), ``buffer`` (which group trains when, and why nothing is ever too stale),
``advantage`` and ``loss`` (the algorithm), ``env`` and ``sampler`` (what a task is, and one group of it), ``rollout``
and ``sync`` (the two things that run beside the optimizer), ``trainer`` (the loop), ``report`` (what its files say).
"""
