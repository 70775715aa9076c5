"""The command line: ``midstream serve``, ``train`` and ``check``. The only module that may import every layer."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midstream.errors import InvalidInput, MidstreamError

if TYPE_CHECKING:
    from midstream.rl.config import TrainConfig

_MODELS = Path(__file__).parent / "rl" / "models"
QUICKSTART = _MODELS / "reverse" / "quickstart.toml"
PRETRAINED = _MODELS / "chain_sum.toml"
"""Where ``--model`` without ``--recipe`` starts from: settings for a pretrained model of some 100 M parameters."""


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done; 1 a check found something, or an error that is said in one line; 2 a wrong command line."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except MidstreamError as error:
        print(f"midstream: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # whoever read our output has left, as `| head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        else:
            print(f"midstream: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("midstream: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="midstream",
        description="An exact LLM inference engine for online RL, and the async trainer that drives it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  midstream serve DIR                                an OpenAI-compatible rollout server with RL routes\n"
        "  midstream train                                    the quick start: a tiny model learns on this CPU\n"
        "  midstream train --sync --steps 40                  the synchronous algorithm\n"
        "  midstream train --model M.gguf --task reasoning_gym:chain_sum\n"
        '  midstream train --model DIR --task prompts.jsonl   one {"prompt": …, "answer": …} per line\n'
        "  midstream check exact --run runs/quickstart        recompute every logprob of a run, bit for bit\n"
        "  midstream check exact --model DIR                  the same for any model, under varied batching\n"
        "  midstream check protocol                           every interleaving of a pause in a small group, tried\n",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_train(commands)
    _add_check(commands)
    return parser


# -- train -------------------------------------------------------------------------------------------------------------


def _add_train(commands: Any) -> None:
    p = commands.add_parser(
        "train",
        help="train a model with async DAPO while the engine serves it",
        description="Engine process + trainer process on this machine. Without options: the quick start, a 0.8 M "
        "parameter model that learns to reverse words. Everything a run says goes into its directory (--out).",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Any setting of a recipe can be given as --set NAME=VALUE; the settings are\n" + _settings_help(),
    )
    p.add_argument("--recipe", metavar="FILE", help="TOML file of settings (default: the quick start's)")
    p.add_argument("--model", metavar="MODEL", help="model directory, GGUF file, or Hub id org/name[@revision]")
    p.add_argument(
        "--task",
        metavar="TASK",
        help="reverse, addition, sort, reasoning_gym:NAME, FILE.py:FUNCTION (returns a task), or FILE.jsonl: an object "
        "with `prompt` (or `messages`) and `answer` per line, paid 1 for exactly the answer and an end; or "
        "FILE.jsonl:FILE.py:REWARD, your own `async def reward(problem, completion)`, the line in problem.data",
    )
    p.add_argument("--steps", type=int, metavar="N", help="optimizer steps")
    p.add_argument("--max-staleness", type=int, metavar="N", help="optimizer steps a token's weights may lag behind")
    p.add_argument("--sync", action="store_true", default=None, help="generate only between optimizer steps")
    p.add_argument("--seed", type=int, metavar="N")
    p.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any other setting, see below")
    p.add_argument("--out", metavar="DIR", default="runs/train", help="run directory (default: %(default)s)")
    p.add_argument("--force", action="store_true", help="replace what another run left in --out")
    p.add_argument("--resume", metavar="CHECKPOINT", help="go on from a checkpoint of an earlier run")
    p.add_argument("--scale", choices=["tiny"], help="the recipe's algorithm on the tiny model, for a laptop")
    p.add_argument("--dry-run", action="store_true", help="print shapes, memory and bytes per update; load nothing")
    p.add_argument("--no-check", action="store_true", help="do not recompute every logprob at the end")
    p.set_defaults(run=_train)


def _settings_help() -> str:
    from midstream.rl.config import TrainConfig

    names = [f.name for f in dataclasses.fields(TrainConfig)]
    lines, line = [], " "
    for name in names:
        if len(line) + len(name) > 100:
            lines.append(line)
            line = " "
        line += " " + name
    return "\n".join([*lines, line])


def _train_config(a: argparse.Namespace) -> TrainConfig:
    from midstream.models.hub import locate
    from midstream.rl.config import TrainConfig

    overrides: dict[str, Any] = {
        "model": a.model, "task": a.task, "steps": a.steps, "max_staleness": a.max_staleness, "sync": a.sync,
        "seed": a.seed,
    }  # fmt: skip
    for text in a.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidInput(f"--set takes NAME=VALUE, got {text!r}")
        try:
            overrides[name] = json.loads(value)
        except json.JSONDecodeError:
            overrides[name] = value
    recipe = Path(a.recipe) if a.recipe else QUICKSTART if a.model is None else PRETRAINED
    if a.task is not None and a.task != TrainConfig.from_toml(recipe).task:
        overrides.setdefault("task_options", {})  # the recipe's belong to its own task
    config = TrainConfig.from_toml(recipe, **overrides)
    if a.scale == "tiny":
        return config.scaled_to_tiny(str(QUICKSTART.parent))
    path, commit = locate(config.model, weights=not a.dry_run)
    if commit is None:
        return config
    print(f"model: {config.model} at {commit}", flush=True)
    return dataclasses.replace(config, model=path)


def _train(a: argparse.Namespace) -> int:
    from midstream.models.loader import open_checkpoint

    config = _train_config(a)
    if a.dry_run:
        from midstream.rl.dry_run import describe

        print(describe(config))
        return 0
    out = Path(a.out)
    if (out / "metrics.jsonl").exists():
        if not a.force:
            raise InvalidInput(f"{out} holds another run; give another --out, or --force to replace it")
        if a.resume and Path(a.resume).resolve().is_relative_to(out.resolve()):
            raise InvalidInput(f"--force would replace {out}, where --resume points to; give another --out")
        open_checkpoint(config.model)  # what cannot be loaded must not cost the old run
    from midstream.rl.report import draw

    aside = out.with_name(f".{out.name}.replaced-{os.getpid()}")
    is_replacing = (out / "metrics.jsonl").exists()
    if is_replacing:
        os.replace(out, aside)
    try:
        out.mkdir(parents=True, exist_ok=True)
        summary = run_training(config, out, resume=a.resume, check=not a.no_check)
    except BaseException:
        if is_replacing and not (out / "metrics.jsonl").exists():  # it never came to a first step: the old run stays
            shutil.rmtree(out, ignore_errors=True)
            os.replace(aside, out)
        raise
    finally:
        if is_replacing:
            shutil.rmtree(aside, ignore_errors=True)
    draw(out)
    _print_summary(summary, config, out)
    checked = summary.get("exact_tokens")
    return 0 if checked is None or checked == summary["tokens"] else 1


def run_training(config: TrainConfig, out: Path, resume: str | None = None, check: bool = True) -> dict[str, Any]:
    """Engine process, trainer in this one, until the last step; returns the summary. See ``rl.trainer``."""
    import torch

    from midstream.ops.numerics import difference
    from midstream.rl.engine_thread import EngineThread
    from midstream.rl.exact import check_run
    from midstream.rl.policy import Policy
    from midstream.rl.report import LiveDisplay
    from midstream.rl.sync import open_transfer
    from midstream.rl.tasks import make_task
    from midstream.rl.trainer import AsyncTrainer
    from midstream.serving.async_llm import AsyncLLM

    cores = len(os.sched_getaffinity(0))
    trainer_threads = max(cores // 2, 1)
    torch.set_num_threads(trainer_threads)
    sys.setswitchinterval(0.0005)  # rollouts and updates must not wait Python's default 5 ms for the trainer's thread
    engine = EngineThread()
    options = {"num_threads": max((cores - trainer_threads) // config.num_ranks, 1), **config.engine}
    llm = AsyncLLM(
        model=config.model,
        dtype=config.dtype,
        max_num_seqs=config.max_num_seqs,
        step_log=str(out / "steps.jsonl"),
        initial_version="start",
        **options,
    )
    try:
        print(f"engine: starting {config.model} …", flush=True)
        status = engine.run(llm.start(), config.step_timeout_s, "starting the engine")
        policy = Policy(config.model, config.dtype, llm.config.block_size)
        if gap := difference(policy.fingerprint, status["fingerprint"]):
            print(f"exact: no (trainer and engine compute differently: {gap})", flush=True)
        task = make_task(config.task, TaskText(llm.text, policy.config.eos_token_ids), config.seed, config.task_options)
        backend = llm.config.weight_transfer_backend
        transfer = open_transfer(backend, llm, engine, policy, timeout_s=config.update_timeout_s)
        if config.keep_versions:
            (out / "versions").mkdir(exist_ok=True)
            policy.save_config(out / "versions")
            (out / "versions" / "engine.json").write_text(json.dumps(status["fingerprint"], indent=2) + "\n")

        def checker(path: Path) -> int:
            print("checking: every sampled token's logprob under the version that made it …", flush=True)
            report = check_run(path)
            print(report.describe(), flush=True)
            return report.exact

        with LiveDisplay(config.steps) as show:
            trainer = AsyncTrainer(
                config,
                policy=policy,
                client=llm,
                engine=engine,
                transfer=transfer,
                task=task,
                run_directory=out,
                resume=resume,
                max_model_len=status["max_model_len"],
                on_step=show,
                checker=checker if check and config.keep_versions else None,
            )
            try:
                return trainer.train()
            finally:
                transfer.shutdown()
    finally:
        with contextlib.suppress(MidstreamError):  # what ended the run is the error to see
            engine.run(llm.aclose(), 30.0, "closing the engine")
        engine.close()


class TaskText:
    """A tokenizer as tasks want it, over ``serving.text``."""

    def __init__(self, text: Any, eos_token_ids: tuple[int, ...]) -> None:
        self._text = text
        self.eos_token_ids = eos_token_ids

    def encode(self, text: str) -> list[int]:
        return self._text.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]

    def prompt(self, text: str) -> list[int]:
        return self._text.encode(text)  # type: ignore[no-any-return]

    def decode(self, token_ids: Any) -> str:
        return self._text.decode(list(token_ids))  # type: ignore[no-any-return]

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self._text.apply_chat_template(messages)  # type: ignore[no-any-return]


def _print_summary(s: dict[str, Any], config: TrainConfig, out: Path) -> None:
    def number(key: str, form: str) -> str:
        return "–" if s.get(key) is None else format(s[key], form)

    def change(key: str, form: str = ".3f") -> str:
        return f"{number(key + '_before', form)} → {number(key + '_after', form)}"

    met = f"commits met ≥ half of {config.num_ranks * config.max_num_seqs} running"
    rows = [
        ("held-out accuracy, sampled (T=1)", change("accuracy")),
        ("held-out accuracy, greedy", change("greedy_accuracy")),
        ("held-out reward, sampled", change("reward")),
        ("updates in flight", f"{number('updates_in_flight', 'd')} of {number('updates', 'd')} {met}"),
        ("rollouts over 2+ versions", f"{s['requests_spanning_versions']} of {s['requests']}"),
        ("commit stall, median", f"{number('stall_ms_median', '.2f')} ms"),
        ("decode step, median", f"{number('step_ms_median', '.2f')} ms"),
        ("generation / optimizer time", number("generation_to_training_ratio", ".2f")),
        ("re-prefilled tokens per update", number("reprefill_tokens_per_update", ".0f")),
        ("training", f"{number('training_s', '.1f')} s for {s['steps_taken']} steps"),
    ]  # fmt: skip
    print()
    for name, value in rows:
        print(f"  {name:34} {value}")
    if s.get("exact_tokens") is not None:
        print(f"  exact: {s['exact_tokens']} of {s['tokens']} tokens")
    print(f"  weight digest {s['weight_digest'][:16]}…   files in {out} (look at {out / 'report.png'})")


# -- serve -------------------------------------------------------------------------------------------------------------


def _add_serve(commands: Any) -> None:
    from midstream.serving import command

    p = commands.add_parser(
        "serve",
        help="serve a model over HTTP to RL clients",
        description=command.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=command.EPILOG,
    )
    command.add_arguments(p)
    p.set_defaults(run=command.run)


# -- check -------------------------------------------------------------------------------------------------------------


def _add_check(commands: Any) -> None:
    p = commands.add_parser("check", help="prove it: recompute logprobs bit for bit, explore the pause protocol")
    kinds = p.add_subparsers(required=True, metavar="WHAT")
    e = kinds.add_parser(
        "exact",
        help="recompute every token's logprob and compare bits",
        description="With --run: every token of a run, under the stored version that made it. With --model: samples "
        "under varied batching, chunking, preemption and pauses, then recomputes. Exit code 0 only if all are equal.",
    )
    what = e.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", dest="run_directory", metavar="DIR", help="directory of a finished run")
    what.add_argument("--model", metavar="MODEL", help="model directory, GGUF file, or Hub id org/name[@revision]")
    e.add_argument("--flip", choices=["logprob", "weight"], help="with --run: flip one bit first; it must be found")
    e.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="with --model")
    e.add_argument("--prompts", type=int, default=6, metavar="N", help="with --model (default: %(default)s)")
    e.add_argument("--max-tokens", type=int, default=32, metavar="N", help="with --model (default: %(default)s)")
    e.set_defaults(run=_check_exact)
    t = kinds.add_parser(
        "protocol",
        help="try every interleaving of pauses, commits, requests and losses in a small group",
        description="Explores the classes that the engine runs, completely up to the bounds printed, and mutants of "
        "them that must fail. Exit code 0 only if all is complete, nothing is violated and every mutant is found.",
    )
    t.add_argument("--deep", action="store_true", help="three at a time and three ranks as well (some minutes)")
    t.set_defaults(run=_check_protocol)


def _check_protocol(a: argparse.Namespace) -> int:
    from midstream.check.scenarios import check, deep_list, default_list

    scenarios = [*default_list(), *(deep_list() if a.deep else ())]
    return 0 if check(scenarios, lambda line: print(line, flush=True)) else 1


def _check_exact(a: argparse.Namespace) -> int:
    from rich.progress import Progress

    from midstream.rl.exact import check_run

    if a.model:
        if a.prompts < 1:
            raise InvalidInput(f"--prompts must be at least 1, got {a.prompts}")
        return _check_model(a)
    with Progress(transient=True) as bar:
        task = bar.add_task("recomputing", total=None)
        report = check_run(a.run_directory, a.flip, lambda done, total: bar.update(task, completed=done, total=total))
    print(report.describe())
    return 0 if report.is_exact else 1


def _check_model(a: argparse.Namespace) -> int:
    from midstream.models.hub import locate
    from midstream.models.loader import open_checkpoint
    from midstream.rl.exact import ExactReport, check_version
    from midstream.rl.types import Rollout
    from midstream.serving.varied import prompts_for, sample_varied
    from midstream.types import SamplingParams

    model, _ = locate(a.model)
    config = open_checkpoint(model).config
    prompts = prompts_for(config.vocab_size, a.prompts, 48, seed=0)
    params = SamplingParams(n=4, max_tokens=a.max_tokens, seed=1, ignore_eos=True, detokenize=False)
    options = {"dtype": a.dtype, "max_model_len": min(config.max_position_embeddings, 2048)}
    first: list[Rollout] | None = None
    failed, dtype = False, a.dtype
    for name, outputs, llm in sample_varied(model, prompts, params, options):
        samples = [
            Rollout(
                group=i,
                index=c.index,
                prompt_token_ids=output.prompt_token_ids,
                output_token_ids=c.token_ids,
                logprobs=c.processed_logprobs,
                spans=c.weight_versions,
                seed=c.seed,
                finish_reason=c.finish_reason or "error",
                reward=0.0,
                kv_versions=c.kv_versions,
                params=params,
            )
            for i, output in enumerate(outputs)
            for c in output.outputs
        ]
        worker = llm.core.worker
        dtype = worker.fingerprint["dtype"]
        report = ExactReport(tokens=sum(len(s.logprobs) for s in samples))
        named = [(f"prompt {s.group}, sample {s.index}", s) for s in samples]
        check_version(report, worker.runner.model, worker.weights, named, 0, llm.config.block_size)
        first = first or samples
        same = [(s.output_token_ids, s.logprobs) for s in samples] == [(s.output_token_ids, s.logprobs) for s in first]
        print(f"{name:22} {report.describe()}{'' if same else '; DIFFERS from the first circumstance'}", flush=True)
        failed |= not same or not report.is_exact
    print("exact: no" if failed else f"exact: yes ({dtype}, every circumstance, every token)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
