"""The peer's half of the rollout benchmark, run by the peer's own interpreter: vLLM's offline engine.

One JSON line on standard input is one measurement, one JSON line on standard output its result.
"""

import json
import sys
import time


def main() -> None:
    out = sys.stdout
    sys.stdout = sys.stderr  # whatever the library prints is not an answer
    model, longest, most = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    start = time.perf_counter()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="bfloat16",
        max_model_len=longest,
        max_num_seqs=most,
        logprobs_mode="processed_logprobs",
    )
    print(json.dumps({"ready_s": time.perf_counter() - start}), file=out, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        params = SamplingParams(
            n=work["n"], max_tokens=work["max_tokens"], temperature=1.0, ignore_eos=True, logprobs=1, detokenize=False
        )
        prompts = [{"prompt_token_ids": ids} for ids in work["prompts"]]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(c.token_ids) for o in outputs for c in o.outputs)
        assert all(len(c.logprobs) == len(c.token_ids) for o in outputs for c in o.outputs)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=out, flush=True)


if __name__ == "__main__":
    main()
