"""Which experts served a token: always those of the KV that stands there, however it came to be; and their replay."""

from __future__ import annotations

import base64
import io
import pathlib
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import config_of, random_weights, write_checkpoint
from cores import Driver
from midstream.errors import InvalidInput
from midstream.models.config import ModelConfig
from midstream.models.llama import Llama
from midstream.models.weights import assemble
from midstream.ops.attention import AttentionMetadata
from midstream.rl.policy import Policy
from midstream.serving.llm import LLM
from midstream.serving.outputs import OutputBuilder
from midstream.types import CompletionOutput, RoutedExperts, SamplingParams
from servers import served
from test_serving_http_client import engine, run
from test_serving_stop import Pieces, increment

pytestmark = pytest.mark.usefixtures("one_thread")

NAME = "qwen3-moe"
CHANGES: dict[str, Any] = {"num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts_per_tok": 3}
W0, W1 = (random_weights(NAME, seed, **CHANGES) for seed in (0, 1))
CONFIG = ModelConfig.from_hf(config_of(NAME, **CHANGES))
PROMPT = [(7 * i * i + 3 * i) % 158 + 2 for i in range(37)]
SIZE = 16


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_checkpoint(tmp_path_factory.mktemp("m") / "w0", NAME, **CHANGES)


def ids_of(routes: RoutedExperts | None) -> np.ndarray:
    assert routes is not None
    return np.frombuffer(routes.data, "<u2").reshape(-1, routes.num_layers, routes.top_k).astype(np.int64)


@torch.inference_mode()
def expected(weights: dict[str, torch.Tensor], tokens: list[int]) -> np.ndarray:
    """The routes of every token but the last, in one forward of its own."""
    count, blocks = len(tokens) - 1, -(-len(tokens) // SIZE)
    shapes = ((CONFIG.head_dim, SIZE), (SIZE, CONFIG.head_dim))
    caches = [torch.zeros(CONFIG.num_layers, blocks, CONFIG.num_kv_heads, *shape) for shape in shapes]
    lengths = torch.tensor([0, count], dtype=torch.int32)
    tables = torch.arange(blocks, dtype=torch.int32)[None]
    meta = AttentionMetadata(tables, lengths, lengths[1:].clone(), torch.arange(count))
    routes: list[torch.Tensor] = []
    ids = torch.tensor(tokens[:-1])
    Llama(CONFIG).serve(assemble(CONFIG, weights), ids, torch.arange(count), *caches, meta, routes)
    return torch.stack(routes, 1).numpy()


def check(driver: Driver, name: str, weights: dict[str, torch.Tensor] = W0) -> None:
    output = driver.output(name)
    for out in output.outputs:
        wanted = expected(weights, output.prompt_token_ids + out.token_ids)
        assert np.array_equal(ids_of(out.routed_experts), wanted), name


def test_case_110_routes_are_those_of_the_tokens_however_they_were_computed(path: pathlib.Path) -> None:
    def asked(driver: Driver, prompt: list[int] = PROMPT, **options: Any) -> str:
        return driver.add(prompt, max_tokens=20, return_routed_experts=True, **options)

    plain = Driver(path, max_num_batched_tokens=200)
    names = [asked(plain)]
    plain.run()
    names += [asked(plain), asked(plain, PROMPT[:33] + [9, 9], final_only=True), asked(plain, n=4)]
    plain.add(PROMPT, n=2)  # nobody asked here
    plain.run()
    assert [plain.output(name).outputs[0].num_cached_tokens for name in names] == [0, 32, 32, 32]
    assert plain.output("r4").outputs[1].routed_experts is None
    chunked = Driver(path, max_num_batched_tokens=8, enable_prefix_caching=False)
    chunked_names = [asked(chunked, n=3), asked(chunked, PROMPT[:5])]
    tight = Driver(path, num_blocks=8, max_num_batched_tokens=24)
    tight_names = [asked(tight, PROMPT[: 30 + i], seed=i) for i in range(5)]
    for driver, of in ((plain, names), (chunked, chunked_names), (tight, tight_names)):
        driver.run()
        for name in of:
            check(driver, name)
        driver.close()
    assert sum(tight.output(name).outputs[0].num_preemptions for name in tight_names) > 0
    assert len({tuple(out.token_ids) for out in plain.output(names[3]).outputs}) > 1


def test_after_a_commit_they_are_of_the_weights_that_the_kv_is_of(path: pathlib.Path) -> None:
    driver = Driver(path, max_num_batched_tokens=200)
    names = [driver.add(PROMPT, max_tokens=20, n=2, return_routed_experts=True) for _ in range(2)]
    driver.steps(9)
    driver.update(W1)
    driver.run()
    for name in names:
        assert len(driver.output(name).outputs[0].weight_versions) == 2
        check(driver, name, W1)
    name = driver.add(PROMPT, max_tokens=20, return_routed_experts=True)
    driver.steps(9)
    made = len(driver.tokens(name))
    driver.update(W0, kv_policy="keep")
    driver.run()
    out = driver.output(name).outputs[0]
    found, before = ids_of(out.routed_experts), expected(W1, PROMPT + out.token_ids)
    assert np.array_equal(found[: len(PROMPT) + made - 1], before[: len(PROMPT) + made - 1])
    assert not np.array_equal(found, before) and len(found) == len(before)
    driver.core.add("cut", PROMPT, SamplingParams(max_tokens=20, return_routed_experts=True, ignore_eos=True))
    for _ in range(5):
        driver.core.step()
    driver.core.abort(["cut"])
    (*_, last) = driver.core.take_outputs().increments
    assert last.finish_reason == "abort" and last.routes is not None
    driver.close()


def test_parts_of_the_answer_and_of_the_wire(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    params = SamplingParams(
        max_tokens=8, seed=2, ignore_eos=True, detokenize=False, return_routed_experts=True, logprobs=0
    )
    part = SamplingParams(
        max_tokens=8, seed=2, n=2, ignore_eos=True, detokenize=False, return_routed_experts=True, logprobs=0,
        routed_experts_prompt_start=30,
    )  # fmt: skip

    async def body() -> None:
        async with engine(path) as (http, llm):
            for asked in (params, part):
                theirs = await http.generate_one(PROMPT, asked)
                ours = await llm.generate_one(PROMPT, asked)
                for a, b in zip(theirs.outputs, ours.outputs, strict=True):
                    wanted = expected(W0, PROMPT + a.token_ids)[asked.routed_experts_prompt_start :]
                    assert np.array_equal(ids_of(a.routed_experts), wanted)
                    assert a.routed_experts == b.routed_experts
                    assert a.routed_experts.start == asked.routed_experts_prompt_start

    run(body())
    dense = write_checkpoint(tmp_path / "dense", "qwen3")
    with LLM(str(dense), num_blocks=50) as llm, pytest.raises(InvalidInput, match="the model has no experts"):
        llm.generate([PROMPT], params)


def test_a_server_can_return_them_always(path: pathlib.Path) -> None:
    """As vLLM's flag does, whose clients say only where the prompt's rows may begin."""
    with served(path, {"num_threads": 1, "num_blocks": 64}, enable_return_routed_experts=True) as server:
        sampling = {"max_tokens": 6, "ignore_eos": True, "routed_experts_prompt_start": 36, "logprobs": 1}
        body: dict[str, Any] = {"token_ids": PROMPT, "sampling_params": sampling}
        choice = server.post("/inference/v1/generate", body).json()["choices"][0]
        ids = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
        assert ids.dtype == np.uint16 and ids.shape == (1 + 6 - 1, 2, 3)
        assert np.array_equal(ids, expected(W0, PROMPT + choice["token_ids"])[36:])
        sampling["return_routed_experts"] = False
        assert "routed_experts" not in server.post("/inference/v1/generate", body).json()["choices"][0]
        flat = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, "stream": True, "return_routed_experts": True}
        lines = server.post("/v1/completions", flat).text.splitlines()
        assert sum('"routed_experts"' in line for line in lines) == 1


def test_parts_fit_together_and_a_stop_text_cuts_them_too() -> None:
    routes = RoutedExperts(0, 1, 1, bytearray(range(20)))
    assert ids_of(routes.part(3, 6)).flatten().tolist() == [7 * 256 + 6, 9 * 256 + 8, 11 * 256 + 10]
    assert routes.part(0, 10) == routes and routes.end == 10
    grown = routes.part(0, 4)
    grown.put(routes.part(2))
    assert grown == routes
    params = SamplingParams(stop=("c",), return_routed_experts=True)
    builder = OutputBuilder("r", None, [9, 9], params, Pieces(list("abcd")))  # type: ignore[arg-type]
    builder.add(increment([0, 1, 2, 3], 0, "length", routes=routes.part(0, 5)))
    assert builder.output.outputs[0].token_ids == [0, 1, 2]
    assert builder.output.outputs[0].routed_experts == routes.part(0, 4)


# -- replay ------------------------------------------------------------------------------------------------------------


def drawn(path: pathlib.Path, **options: Any) -> list[tuple[list[int], list[CompletionOutput]]]:
    params = SamplingParams(
        max_tokens=12, seed=2, n=3, ignore_eos=True, detokenize=False, return_routed_experts=True, **options
    )
    with LLM(str(path), num_blocks=100) as llm:
        found = llm.generate([PROMPT, PROMPT[:9]], params)
    return [(output.prompt_token_ids, output.outputs) for output in found]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replay_under_the_same_weights_changes_no_bit(tmp_path: pathlib.Path, dtype: str) -> None:
    path = write_checkpoint(tmp_path / "m", NAME, dtype=getattr(torch, dtype), **CHANGES)
    found = drawn(path)
    sequences = [(prompt, [out.token_ids for out in outputs]) for prompt, outputs in found]
    routes = [[out.routed_experts for out in outputs] for _, outputs in found]
    served = torch.tensor([p for _, outputs in found for out in outputs for p in out.processed_logprobs])
    policy = Policy(path)
    for given in (None, routes, [[None, *of[1:]] for of in routes], [[r and r.part(20) for r in of] for of in routes]):
        assert torch.equal(policy.logprobs(sequences, SamplingParams(), given).detach(), served)
    turned = [
        [RoutedExperts(r.start, 2, 3, bytearray(np.flip(ids_of(r), -1).astype("<u2").tobytes())) for r in of]
        for of in routes
    ]
    assert torch.equal(policy.logprobs(sequences, SamplingParams(), turned).detach(), served)  # ids in any order


def test_replay_takes_the_given_experts_and_weighs_them_by_the_trainers_router(path: pathlib.Path) -> None:
    policy = Policy(path)
    completion = PROMPT[:5]
    count = len(PROMPT) + 4
    ids = np.tile(np.array([[0, 3, 6], [1, 2, 7]], "<u2"), (count, 1, 1))
    routes = [[RoutedExperts(0, 2, 3, bytearray(ids.tobytes()))]]
    found = policy.logprobs([(PROMPT, [completion])], SamplingParams(), routes)
    own = policy.logprobs([(PROMPT, [completion])], SamplingParams())
    assert not torch.equal(found, own)
    found.sum().backward()
    for layer, chosen in ((0, {0, 3, 6}), (2, {1, 2, 7})):
        at = f"model.layers.{layer}.mlp."
        assert policy.masters[at + "gate.weight"].grad.abs().sum() > 0
        trained = {e for e in range(8) if policy.masters[f"{at}experts.{e}.down_proj.weight"].grad is not None}
        assert trained == chosen
    # as if the other experts were not there: their logits far below, and the same choice
    with torch.no_grad():
        for layer, chosen in ((0, [0, 3, 6]), (2, [1, 2, 7])):
            gate = policy.masters[f"model.layers.{layer}.mlp.gate.weight"]
            gate.copy_(torch.zeros_like(gate).index_copy(0, torch.tensor(chosen), gate[chosen]))
        again = policy.logprobs([(PROMPT, [completion])], SamplingParams(), routes)
    assert torch.allclose(again, found, atol=1e-4)  # normalised over the chosen ones alone
    for wrong in ((1, 3), (2, 2)):
        bad = [[RoutedExperts(0, *wrong, bytearray(2 * wrong[0] * wrong[1] * count))]]
        with pytest.raises(InvalidInput, match="routed experts"):
            policy.logprobs([(PROMPT, [completion])], SamplingParams(), bad)
    ids[0, 0, 0] = 8
    with pytest.raises(InvalidInput, match="ids up to 8"):
        bad = [[RoutedExperts(0, 2, 3, bytearray(ids.tobytes()))]]
        policy.logprobs([(PROMPT, [completion])], SamplingParams(), bad)
