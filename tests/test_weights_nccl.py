"""Backend nccl over TCP: the wire of the stand-in for vLLM's trainer half, our own trainer half, and every way in
which one side is missing, dies or says something else than it sends."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from checkpoints import random_weights, write_checkpoint
from cores import LIMIT_S, TINY, digests_of
from fakes_weights import DictSource, FakeEngine
from fakes_weights import random_weights as fake_weights
from midstream.errors import Conflict, InvalidInput, MidstreamError, TimedOut, UpdateConflict, WeightUpdateError
from midstream.models.weights import EMBEDDING, HEAD
from midstream.serving.llm import LLM
from midstream.types import SamplingParams
from midstream.weights.base import trainer_engines, worker_engines
from midstream.weights.nccl import NCCLTrainerWeightTransferEngine, NCCLWeightTransferEngine

torch.set_num_threads(1)

SHIM = pathlib.Path(os.environ.get("MIDSTREAM_VLLM_SHIM", "no-such-folder"))
"""A folder with another project's trainer half of this wire (its ``vllm`` package); without it, its wire by hand."""
W0, W1, W2 = (random_weights("llama", seed, **TINY) for seed in range(3))
PARAMS = SamplingParams(max_tokens=8, seed=3, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        write_checkpoint(root / f"w{seed}", "llama", seed, **TINY)
        write_checkpoint(root / f"tied{seed}", "qwen3", seed, **TINY)
    return root


def engine(model: pathlib.Path, **options: Any) -> LLM:
    timeout_s = options.pop("timeout_s", 5.0)
    return LLM(
        str(model), num_blocks=64, weight_transfer_backend="nccl", extra={"timeout_s": timeout_s}, **options
    )


def ask(llm: LLM) -> Any:
    out = llm.generate([[5, 6, 7, 8]], PARAMS, use_tqdm=False)[0].outputs[0]
    return out.token_ids, out.token_logprobs


def held(llm: LLM) -> dict[str, str]:
    return llm._call("weight_digests")["digests"]  # type: ignore[no-any-return]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Shim:
    """The trainer's end as the shim's callers use it: their module where the folder is there, or its wire by hand."""

    def __init__(self, use_files: bool) -> None:
        self._modules: dict[str, Any] = {}
        if use_files:
            for name in ("nccl_common", "packed_tensor"):
                path = SHIM / "vllm" / "distributed" / "weight_transfer" / f"{name}.py"
                spec = importlib.util.spec_from_file_location(f"shim_{name}", path)
                assert spec is not None and spec.loader is not None
                self._modules[name] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(self._modules[name])

    def open(self, init_info: dict[str, Any]) -> Any:
        if self._modules:
            return self._modules["nccl_common"].trainer_init(init_info)
        with socket.create_server((init_info["master_address"], init_info["master_port"])) as listener:
            return [listener.accept()[0] for _ in range(init_info["world_size"] - 1)]

    def send(self, group: Any, tensors: dict[str, torch.Tensor]) -> None:
        if self._modules:
            produce = self._modules["packed_tensor"].packed_nccl_broadcast_producer
            produce(iterator=iter(tensors.items()), group=group, src=0, post_iter_func=lambda item: item[1])
            return
        for tensor in tensors.values():
            for connection in group:
                connection.sendall(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)

    def close(self, group: Any) -> None:
        for connection in group.conns if self._modules else group:
            connection.close()


@pytest.fixture(params=["files", "by hand"])
def shim(request: pytest.FixtureRequest) -> Shim:
    if request.param == "files" and not SHIM.is_dir():
        pytest.skip("MIDSTREAM_VLLM_SHIM names no folder with a foreign trainer half")
    return Shim(request.param == "files")


def info_of(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        "shapes": [list(t.shape) for t in tensors.values()],
    }


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def open_channel(llm: Any, shim: Shim, pool: ThreadPoolExecutor, **more: Any) -> Any:
    init_info = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2, **more}
    opened = pool.submit(shim.open, init_info)
    reply = llm.init_weight_transfer_engine({"init_info": init_info})
    assert reply["transport"] == "tcp" and reply["rank"] == 1
    return opened.result(LIMIT_S)


@pytest.mark.parametrize("packed_in", ["init", "update", "nowhere"])
def test_an_unmodified_trainer_moves_weights_twice_and_back(
    models: pathlib.Path, shim: Shim, pool: ThreadPoolExecutor, packed_in: str
) -> None:
    with engine(models / "w0") as llm, engine(models / "w1") as other:
        before, expected = ask(llm), ask(other)
        group = open_channel(llm, shim, pool, **({"packed": True} if packed_in == "init" else {}))
        extra: dict[str, Any] = {}
        if packed_in == "update":
            extra = {"packed": True, "packed_buffer_size_bytes": 4096, "packed_num_buffers": 2}
        for number, tensors in enumerate((W1, W1, W0), 1):
            assert llm.start_weight_update()["mode"] == "full"
            sent = pool.submit(shim.send, group, tensors)
            reply = llm.update_weights({"update_info": {**info_of(tensors), **extra}})
            assert reply == {"received": 12, "bytes": sum(t.nbytes for t in tensors.values())}
            sent.result(LIMIT_S)
            assert llm.finish_weight_update()["number"] == number
            assert held(llm) == digests_of(tensors)
            assert ask(llm) == (before if tensors is W0 else expected)
        shim.close(group)


def test_empty_metadata_is_the_round_befores(models: pathlib.Path, pool: ThreadPoolExecutor) -> None:
    shim = Shim(False)
    with engine(models / "w0") as llm:
        group = open_channel(llm, shim, pool)
        for tensors, info in ((W1, info_of(W1)), (W2, {"names": [], "dtype_names": [], "shapes": []}), (W0, {})):
            llm.start_weight_update()
            sent = pool.submit(shim.send, group, tensors)
            llm.update_weights({"update_info": info})
            sent.result(LIMIT_S)
            llm.finish_weight_update()
            assert held(llm) == digests_of(tensors)
        shim.close(group)
        group = open_channel(llm, shim, pool)  # a new channel knows of no round before
        llm.start_weight_update()
        with pytest.raises(InvalidInput, match="no round before"):
            llm.update_weights({"update_info": {}})
        shim.close(group)


def test_tied_heads_are_not_sent_and_an_update_needs_no_start(
    models: pathlib.Path, shim: Shim, pool: ThreadPoolExecutor
) -> None:
    tied = random_weights("qwen3", 1, **TINY)
    assert HEAD not in tied
    with engine(models / "tied0") as llm, engine(models / "tied1") as other:
        group = open_channel(llm, shim, pool)
        sent = pool.submit(shim.send, group, tied)
        reply = llm.update_weights({"update_info": {**info_of(tied), "packed": True}})
        sent.result(LIMIT_S)
        assert reply["updated"] == reply["of"] == len(tied) and reply["number"] == 1
        assert ask(llm) == ask(other) and llm.status()["update"] is None
        with pytest.raises(UpdateConflict, match="start_weight_update first"):
            llm.finish_weight_update()
        # a part of it, on its own: refused as it stands, taken by a partial session
        part = {EMBEDDING: tied[EMBEDDING] * 2}
        for _ in range(2):  # the stream is read to its end, so the channel lives
            sent = pool.submit(shim.send, group, part)
            with pytest.raises(WeightUpdateError, match="never received"):
                llm.update_weights({"update_info": info_of(part)})
            sent.result(LIMIT_S)
        llm.start_weight_update(mode="partial")
        sent = pool.submit(shim.send, group, part)
        llm.update_weights({"update_info": info_of(part)})
        sent.result(LIMIT_S)
        assert llm.finish_weight_update()["updated"] == 1
        assert held(llm) == {**digests_of(tied), **digests_of(part)}
        shim.close(group)


def test_the_defaults_of_the_configuration_hold_for_updates_that_name_none(
    models: pathlib.Path, pool: ThreadPoolExecutor
) -> None:
    shim = Shim(False)
    part = {EMBEDDING: W1[EMBEDDING].to(torch.bfloat16)}
    with engine(models / "w0", default_update_mode="partial", default_cast="allow") as llm:
        group = open_channel(llm, shim, pool)
        sent = pool.submit(shim.send, group, part)
        assert llm.update_weights({"update_info": info_of(part)})["updated"] == 1
        sent.result(LIMIT_S)
        assert held(llm) == {**digests_of(W0), **digests_of({EMBEDDING: part[EMBEDDING].float()})}
        reply = llm.start_weight_update(mode="full", cast="deny")
        assert (reply["mode"], reply["cast"]) == ("full", "deny")
        llm.abort_weight_update()
        shim.close(group)
    with pytest.raises(InvalidInput, match="default_update_mode must be full or partial, got 'some'"):
        engine(models / "w0", default_update_mode="some")


def test_our_two_halves_move_weights_of_any_dtype(models: pathlib.Path) -> None:
    with engine(models / "w0") as llm, engine(models / "w1") as other:
        trainer = NCCLTrainerWeightTransferEngine.trainer_init(
            {"timeout_s": 10.0}, client=llm, source=DictSource({n: t.double() for n, t in W1.items()}, torch.float32)
        )
        for number in (1, 2):
            reply = trainer.send_weights(f"v{number}", manifest=number == 1)
            assert (reply["version"], reply["updated"]) == (f"v{number}", 12)
            assert ask(llm) == ask(other)
        trainer.source = DictSource(W0)
        trainer.send_weights()
        assert held(llm) == digests_of(W0)
        trainer.shutdown()
        trainer.shutdown()
        with pytest.raises(Conflict, match="shut down"):
            trainer.send_weights()
        assert llm.status()["update"] is None
        llm.shutdown_weight_transfer_engine()


def test_a_trainer_whose_update_is_refused_hears_why_and_the_next_init_works(models: pathlib.Path) -> None:
    with engine(models / "w0") as llm:
        before = ask(llm)
        trainer = connect(llm, {**W1, "nobody": torch.zeros(1 << 22)})
        with pytest.raises(WeightUpdateError, match="nobody is no tensor of this model"):
            trainer.send_weights(manifest=False)
        trainer = connect(llm, W1)  # nothing of it was read, so the channel is gone
        assert trainer.send_weights()["number"] == 1
        # one whose bytes nobody can count breaks the channel off, at both ends, at once
        trainer.source = Strange(W0, "float31")
        start = time.monotonic()
        with pytest.raises(InvalidInput, match="float31"):
            trainer.send_weights(manifest=False)
        with pytest.raises(Conflict, match="trainer_init again"):
            trainer.send_weights(manifest=False)
        assert time.monotonic() - start < 4 and llm.status()["update"] is None
        trainer = connect(llm, W0)
        trainer.send_weights()
        assert ask(llm) == before
        trainer.shutdown()


class Strange(DictSource):
    """Announces a dtype that there is none of, and sends floats."""

    def __init__(self, tensors: dict[str, torch.Tensor], dtype: str) -> None:
        super().__init__(tensors)
        self._dtype_name = dtype

    def metadata(self) -> Any:
        import dataclasses

        return [dataclasses.replace(meta, dtype=self._dtype_name) for meta in super().metadata()]


def connect(client: Any, tensors: dict[str, torch.Tensor], **info: Any) -> NCCLTrainerWeightTransferEngine:
    return NCCLTrainerWeightTransferEngine.trainer_init(
        {"timeout_s": 5.0, **info}, client=client, source=DictSource(tensors)
    )


def test_case_025_a_trainer_that_never_comes_ends_init_in_time(models: pathlib.Path) -> None:
    with engine(models / "w0", timeout_s=0.5) as llm:
        port = free_port()
        start = time.monotonic()
        with pytest.raises(TimedOut, match=rf"init: rank 1 found no trainer .* 127\.0\.0\.1:{port} within 0\.5 s"):
            llm.init_weight_transfer_engine({"init_info": {"master_address": "127.0.0.1", "master_port": port}})
        assert time.monotonic() - start < 3
        trainer = connect(llm, W1)
        assert trainer.send_weights()["number"] == 1
        trainer.shutdown()


def test_case_025_a_worker_that_never_comes_ends_the_trainers_init_in_time(models: pathlib.Path) -> None:
    with engine(models / "w0") as llm:
        with pytest.raises(TimedOut, match=r"init: ranks \[2\] did not connect within 0\.5 s"):
            connect(llm, W1, world_size=3, timeout_s=0.5)
        trainer = connect(llm, W1)
        trainer.send_weights()
        trainer.shutdown()


def test_case_025_fewer_tensors_than_announced_end_the_update_in_time(
    models: pathlib.Path, pool: ThreadPoolExecutor
) -> None:
    shim = Shim(False)
    with engine(models / "w0", timeout_s=0.5) as llm:
        before = ask(llm)
        group = open_channel(llm, shim, pool)
        llm.start_weight_update()
        shim.send(group, dict(list(W1.items())[:4]))
        start = time.monotonic()
        with pytest.raises(TimedOut, match="update: tensor 5 of 12, .* rank 1 waited 0.5 s") as late:
            llm.update_weights({"update_info": info_of(W1)})
        assert late.value.details["tensors"] == list(W1)[4:] and time.monotonic() - start < 3
        assert llm.status()["update"] is None and ask(llm) == before
        with pytest.raises(UpdateConflict, match="aborted"):  # the rest of a broken-off update opens nothing
            llm.update_weights({"update_info": info_of(W1)})
        shim.close(group)
        trainer = connect(llm, W1)
        trainer.send_weights()
        assert held(llm) == digests_of(W1)
        trainer.shutdown()


def test_case_025_a_trickle_of_bytes_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import midstream.weights.nccl as module

    worker = NCCLWeightTransferEngine({}, {"timeout_s": 0.4})
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        port = listener.getsockname()[1]
        opened = pool.submit(listener.accept)
        worker.init_transfer_engine(
            worker.parse_init_info({"master_address": "127.0.0.1", "master_port": str(port), "world_size": 2})
        )
        trainer = opened.result(LIMIT_S)[0]
        monkeypatch.setattr(module, "_SLOWEST_BYTES_PER_S", 1 << 30)
        stop = threading.Event()

        def trickle() -> None:
            while not stop.wait(0.1):
                trainer.send(b"x")

        dripping = pool.submit(trickle)
        info = worker.parse_update_info({"names": ["a"], "dtype_names": ["float32"], "shapes": [[1000]]})
        start = time.monotonic()
        with pytest.raises(TimedOut, match="tensor 1 of 1, a"):
            list(worker.receive_weights(info))
        assert time.monotonic() - start < 3
        stop.set()
        dripping.exception(LIMIT_S)
        trainer.close()


TRAINER = """
import socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
connection = listener.accept()[0]
connection.sendall(bytes(1000))
print("sent", flush=True)
sys.stdin.read()
"""


def test_case_025_case_026_a_trainer_that_is_killed_and_comes_back(models: pathlib.Path) -> None:
    """20 rounds: the error comes at once, the next init works, and no descriptor or thread is left."""
    with engine(models / "w0", timeout_s=10.0) as llm:
        before = ask(llm)
        seen = []
        for round_ in range(20):
            port = free_port()
            dead = subprocess.Popen(
                [sys.executable, "-c", TRAINER, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            try:
                llm.init_weight_transfer_engine({"init_info": {"master_address": "127.0.0.1", "master_port": port}})
                assert dead.stdout is not None and dead.stdout.readline() == b"sent\n"
                os.kill(dead.pid, signal.SIGKILL)
                start = time.monotonic()
                with pytest.raises(WeightUpdateError, match=r"update: tensor 1 of 12, .* \(rank 0\) is gone"):
                    llm.update_weights({"update_info": info_of(W1)})
                assert time.monotonic() - start < 2
            finally:
                dead.kill()
                dead.communicate()
            if round_ == 0:
                assert ask(llm) == before
            trainer = connect(llm, (W1, W0)[round_ % 2])
            assert trainer.send_weights(manifest=False)["number"] == round_ + 1
            trainer.shutdown()
            if round_ >= 3:
                seen.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
        assert len({fds for fds, _ in seen}) == 1 and max(threads for _, threads in seen) <= seen[0][1] + 1, seen
        assert ask(llm) == before


def test_an_init_ends_a_reader_that_still_waits_for_the_old_trainer(
    models: pathlib.Path, pool: ThreadPoolExecutor
) -> None:
    """The old trainer neither sends nor dies; the new one does not wait out its time limit."""
    shim = Shim(False)
    with engine(models / "w0", timeout_s=LIMIT_S) as llm:
        group = open_channel(llm, shim, pool)
        llm.start_weight_update()
        stuck = pool.submit(llm.update_weights, {"update_info": info_of(W1)})
        while not llm.core.updates._in_flight:
            pass
        start = time.monotonic()
        trainer = connect(llm, W1)
        assert time.monotonic() - start < LIMIT_S / 2
        with pytest.raises(UpdateConflict, match="aborted"):
            stuck.result(LIMIT_S)
        assert trainer.send_weights()["number"] == 1
        trainer.shutdown()
        shim.close(group)
        # so does an abort, and so does the end of the engine
        group = open_channel(llm, shim, pool)
        llm.start_weight_update()
        stuck = pool.submit(llm.update_weights, {"update_info": info_of(W1)})
        while not llm.core.updates._in_flight:
            pass
        llm.abort_weight_update()
        with pytest.raises(UpdateConflict, match="aborted"):
            stuck.result(LIMIT_S / 2)
        llm.abort_weight_update()  # nothing is open now: the next call is no late chunk
        with pytest.raises(Conflict, match="init again"):
            llm.update_weights({"update_info": info_of(W1)})
        group = open_channel(llm, shim, pool)
        llm.start_weight_update()
        llm.core.call(99, "update_weights", {"request": {"update_info": info_of(W1)}})
        start = time.monotonic()
    assert time.monotonic() - start < 3
    shim.close(group)


def test_a_refused_update_takes_its_bytes_with_it(models: pathlib.Path, pool: ThreadPoolExecutor) -> None:
    """They lie in the connection already; read as the next update's they would be garbage that fits."""
    shim = Shim(False)
    with engine(models / "w0") as llm:
        before = ask(llm)
        group = open_channel(llm, shim, pool)
        llm.start_weight_update()
        llm.abort_weight_update()
        sent = pool.submit(shim.send, group, {n: torch.full_like(t, 7.0) for n, t in W1.items()})
        with pytest.raises(UpdateConflict):
            llm.update_weights({"update_info": {**info_of(W1), "update": "update-1"}})
        sent.exception(LIMIT_S)
        llm.start_weight_update()
        with pytest.raises(Conflict, match="init again"):
            llm.update_weights({"update_info": info_of(W1)})
        assert ask(llm) == before
        shim.close(group)


@pytest.mark.parametrize("sent", ["one byte", "float64", "after the answer"])
def test_bytes_that_nobody_announced_fail_the_update_that_left_them(
    models: pathlib.Path, pool: ThreadPoolExecutor, sent: str
) -> None:
    """Read as the beginning of the next update they would make another model of it, without a word."""
    with engine(models / "w0") as llm:
        before = ask(llm)
        for _ in range(2):
            (connection,) = open_channel(llm, Shim(False), pool)
            tensors = {n: t.double() for n, t in W1.items()} if sent == "float64" else W1
            data = b"".join(t.numpy().tobytes() for t in tensors.values()) + b"\1" * (sent == "one byte")
            llm.start_weight_update()
            connection.sendall(data)
            if sent == "after the answer":
                llm.update_weights({"update_info": info_of(W1)})
                connection.sendall(b"\1")
            with pytest.raises(WeightUpdateError, match="more bytes than its update_info announced"):
                if sent == "after the answer":
                    llm.finish_weight_update()
                else:
                    llm.update_weights({"update_info": info_of(W1)})
            assert llm.status()["update"] is None and llm.status()["number"] == 0 and ask(llm) == before
            llm.start_weight_update()
            with pytest.raises(Conflict, match="more bytes than .* announced: init again"):
                llm.update_weights({"update_info": info_of(W1)})
            connection.close()


def test_an_update_from_disk_does_not_mind_the_channel(models: pathlib.Path, pool: ThreadPoolExecutor) -> None:
    with engine(models / "w0") as llm:
        (connection,) = open_channel(llm, Shim(False), pool)
        data = b"".join(t.numpy().tobytes() for t in W2.values())
        connection.sendall(data)  # early, for the update after the next
        llm.update_weights({"weight_dir": str(models / "w1")})
        assert held(llm) == digests_of(W1)
        llm.update_weights({"update_info": info_of(W2)})
        assert held(llm) == digests_of(W2)
        connection.close()


@pytest.mark.parametrize(
    "shape", [[10**13], [10**19], [10**30], [2**31, 2**31, 2**31], [0, 2**62, 2**62], [0], [], [1] * 200]
)
def test_an_announced_shape_is_checked_before_memory_is_taken(
    models: pathlib.Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, shape: list[int]
) -> None:
    with engine(models / "w0") as llm:
        before = ask(llm)
        (connection,) = open_channel(llm, Shim(False), pool)
        info = info_of(W1)
        info["shapes"][0] = shape
        info["dtype_names"][1] = "float64"
        for own in (False, True):
            if own:
                llm.start_weight_update()
            with pytest.raises(WeightUpdateError, match="shape") as caught:
                llm.update_weights({"update_info": info})
            assert caught.value.tensors == info["names"][:2]
        assert ask(llm) == before and llm.status()["update"] is None
        assert connection.recv(1) == b""  # the trainer sees it at once
        connection.close()


@pytest.mark.parametrize("address", ["a" * 300, "..", ".a", "\ud800", "a..b", "no.such.host.invalid", "\0"])
def test_an_address_that_is_none_is_bad_input(address: str) -> None:
    worker = NCCLWeightTransferEngine({}, {"timeout_s": 0.2})
    info = {"master_address": address, "master_port": free_port()}
    with pytest.raises(InvalidInput, match="master_address"):
        worker.init_transfer_engine(worker.parse_init_info(info))
    with pytest.raises(InvalidInput, match="can not listen|master_address"):
        connect(FakeEngine(fake_weights(0), backend="nccl"), fake_weights(1), master_address=address)


@pytest.mark.parametrize(
    ("info", "match"),
    [
        ({}, "master_address and master_port are needed"),
        ({"master_address": "127.0.0.1"}, "master_address and master_port"),
        ({"master_address": "127.0.0.1", "master_port": 70000}, "master_port must be in"),
        ({"master_address": "127.0.0.1", "master_port": "x"}, "master_port must be in"),
        ({"master_address": "127.0.0.1", "master_port": "9" * 5000}, "master_port must be in"),
        ({"master_address": "127.0.0.1", "master_port": 5, "timeout_s": 1e300}, "timeout_s must be a positive"),
        ({"master_address": "127.0.0.1", "master_port": True}, "master_port must be in"),
        ({"master_address": "127.0.0.1", "master_port": 5, "world_size": 1}, "rank 0 is the trainer"),
        ({"master_address": "127.0.0.1", "master_port": 5, "rank_offset": 2}, "rank_offset must be in"),
        ({"master_address": "127.0.0.1", "master_port": 5, "rank_offset": 0}, "rank_offset must be in"),
        ({"master_address": "127.0.0.1", "master_port": 5, "timeout_s": 0}, "timeout_s must be a positive"),
        ({"nccl_unique_id_b64": "AAAA"}, "needs NCCL between GPUs"),
        ({"color": 1}, "unknown \\['color'\\]"),
    ],
)
def test_a_bad_init_is_refused_and_says_why(info: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidInput, match=match):
        NCCLWeightTransferEngine.parse_init_info(info)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"names": "abc"}, "names must be a list"),
        ({"shapes": [[1]]}, "equally long, got \\[2, 2, 1\\]"),
        ({"names": [1, 2]}, "names must be a list of strings"),
        ({"shapes": [[1], [-1]]}, "integers >= 0"),
        ({"is_checkpoint_format": False}, "checkpoint names"),
        ({"ipc_handles": []}, "unknown \\['ipc_handles'\\]"),
    ],
)
def test_a_bad_update_is_refused_and_says_why(change: dict[str, Any], match: str) -> None:
    good = {"names": ["a", "b"], "dtype_names": ["float32", "float32"], "shapes": [[2], []]}
    assert [m.shape for m in NCCLWeightTransferEngine.parse_update_info(good).metas] == [(2,), ()]
    with pytest.raises(InvalidInput, match=match):
        NCCLWeightTransferEngine.parse_update_info({**good, **change})


def test_it_is_registered_on_both_sides_and_works_without_an_engine() -> None:
    assert worker_engines.lookup("nccl") is NCCLWeightTransferEngine
    assert trainer_engines.lookup("nccl") is NCCLTrainerWeightTransferEngine
    old, new = fake_weights(0), {**fake_weights(1), "empty": torch.empty(0, 3)}
    fake = FakeEngine({**old, "empty": torch.empty(0, 3)}, backend="nccl")
    trainer = connect(fake, new)
    reply = trainer.send_weights("v1")
    assert reply["updated"] == len(new) and fake.digests() == digests_of(new)
    trainer.shutdown()
    with pytest.raises(MidstreamError):
        trainer.send_weights()


def test_a_channel_that_is_not_open_says_so(models: pathlib.Path) -> None:
    with engine(models / "w0") as llm:
        llm.start_weight_update()
        with pytest.raises(Conflict, match="never initialised"):
            llm.update_weights({"update_info": info_of(W1)})
        trainer = connect(llm, W1)
        llm.shutdown_weight_transfer_engine()
        llm.start_weight_update()
        with pytest.raises(Conflict, match="shut down"):
            llm.update_weights({"update_info": info_of(W1)})
        trainer.shutdown()


def test_numerics_that_the_trainer_tells_decide_what_status_says(models: pathlib.Path) -> None:
    with engine(models / "w0") as llm:
        assert llm.status()["exact"] == "no (trainer numerics unknown)"
        ours = llm.status()["fingerprint"]
        gap = "no (engine and trainer differ in dtype: float32 / bfloat16)"
        for theirs, said in ((ours, "yes"), ({**ours, "dtype": "bfloat16"}, gap)):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
                init_info = {"master_address": "127.0.0.1", "master_port": port}
                llm.init_weight_transfer_engine({"init_info": init_info, "fingerprint": theirs})
                assert llm.status()["exact"] == said
        with pytest.raises(InvalidInput, match="fingerprint"):
            llm.init_weight_transfer_engine({"init_info": init_info, "fingerprint": 5})
