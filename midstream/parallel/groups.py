"""Groups of ranks for collectives: processes that meet at an address and then exchange tensors under a time limit.

A group is its own: never torch's default one, of which a process has only one and which a trainer may have taken. Gloo
between CPUs, NCCL between GPUs. Every rank opens its groups in the same order, and names them alike.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from midstream.errors import InvalidInput, RankLost, TimedOut

dist: Any = torch.distributed  # its type stubs lack stores and backends


class Meeting:
    """Where ranks meet, served by the process that makes it: keep it until all of them have opened their groups, and
    as long as these live. ``address`` is what they are told; ``port`` 0: a free one."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, timeout_s: float = 60.0) -> None:
        limit = timedelta(seconds=timeout_s)
        try:
            self._store = dist.TCPStore(host, port, is_master=True, timeout=limit, wait_for_workers=False)
        except (RuntimeError, ValueError) as error:
            raise InvalidInput(f"ranks can not meet at {host}:{port}: {_first_line(error)}") from error
        self.address = f"tcp://{host}:{self._store.port}"


class Group:
    """This process as rank ``rank`` of ``size`` that opened a group of this ``name`` at ``address``.

    ``address``: of a :class:`Meeting`, or ``file:///path`` of a file that no group has used before, for ranks of one
    machine. ``host``: under which the other ranks reach this one. ``timeout_s`` bounds the opening (``TimedOut``: not
    all ranks came) and every exchange (``RankLost``). Collective: returns when all ranks are here.
    """

    def __init__(
        self,
        name: str,
        address: str,
        rank: int,
        size: int,
        timeout_s: float = 60.0,
        device: torch.device | str = "cpu",
        host: str = "127.0.0.1",
    ) -> None:
        if not 0 <= rank < size:
            raise InvalidInput(f"rank must be in [0, {size}), got {rank}")
        self.name, self.rank, self.size, self.timeout_s = name, rank, size, timeout_s
        self.device = torch.device(device)
        self._limit = timedelta(seconds=timeout_s)
        try:
            self._pg = self._connect(dist.PrefixStore(name, _store(address, size, self._limit)), host)
        except RuntimeError as error:
            raise TimedOut(
                f"group {name!r}: not all {size} ranks met at {address} within {timeout_s:g} s; this is rank {rank} "
                f"({_first_line(error)})"
            ) from error

    def _connect(self, store: Any, host: str) -> Any:
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._limit
            group = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
            group.eager_connect_single_device(self.device)
            return group
        gloo = dist.ProcessGroupGloo._Options()
        gloo._timeout = self._limit
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        return dist.ProcessGroupGloo(store, self.rank, self.size, gloo)

    def all_to_all(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """rows [sum(sent), …], the first ``sent[0]`` for rank 0, and so on → those that are for this rank
        [sum(received), …], by the rank that sent them. Every rank knows what it will receive. 0 rows are legal.

        Raises ``RankLost``: another rank is gone, or did not come within the time limit. The group is then of no use.
        """
        out: torch.Tensor = rows.new_empty(sum(received), *rows.shape[1:])
        try:
            work = self._pg.alltoall_base(out, rows.contiguous(), list(received), list(sent), dist.AllToAllOptions())
            work.wait(self._limit)
        except RuntimeError as error:
            raise RankLost(
                f"group {self.name!r}: rank {self.rank} of {self.size} lost another one, or it was silent for "
                f"{self.timeout_s:g} s ({_first_line(error)})"
            ) from error
        return out

    def close(self) -> None:
        """Let go; who is in an exchange with this rank has an error then. May be called twice."""
        with contextlib.suppress(RuntimeError):
            self._pg.abort()


def _store(address: str, size: int, limit: timedelta) -> Any:
    scheme, _, where = address.partition("://")
    if scheme == "file" and where:
        store = dist.FileStore(where, size)
        store.set_timeout(limit)
        return store
    host, _, port = where.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal():
        raise InvalidInput(f"a group's address is tcp://host:port or file:///path, got {address!r}")
    return dist.TCPStore(host, int(port), is_master=False, timeout=limit)


def _first_line(error: Exception) -> str:
    """Without the place in torch's source that it begins with, and the advice that it ends with."""
    line = re.sub(r"^\[[^\]]*\.cc:\d+\] *", "", str(error).partition("\n")[0])
    return line.partition(". ")[0][:200]
