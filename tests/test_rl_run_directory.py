from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from fakes_rl import TablePolicy, logprobs_from_bits
from midstream.errors import Conflict, InvalidInput
from midstream.rl.run_directory import RunDirectory, logprob_bits
from midstream.rl.sync import UpdateRecord


def test_logprobs_keep_their_bits() -> None:
    values = torch.randn(100).tolist() + [0.0, -0.0, -float("inf"), 2.0**-149]
    back = logprobs_from_bits(logprob_bits(values))
    assert torch.tensor(back).view(torch.int32).equal(torch.tensor(values).view(torch.int32))
    assert logprob_bits([-1.0]) == "bf800000" and logprob_bits([]) == ""
    with pytest.raises(InvalidInput, match="not a float32"):
        logprob_bits([0.1])


def test_a_version_is_kept_with_its_name(tmp_path: Path) -> None:
    files, policy = RunDirectory(tmp_path / "run"), TablePolicy()
    files.save_version(UpdateRecord(3, 4, "abc", 1, 1, 0.0, 1.0, 0.0, 0.0), policy)
    with safe_open(tmp_path / "run" / "versions" / "4.safetensors", "pt") as file:
        assert file.metadata() == {"weights_id": "abc", "label": "3", "number": "4"}
        assert file.get_tensor("table").equal(policy.table.detach())
    assert len(list((tmp_path / "run" / "versions").iterdir())) == 1
    files.close()


def test_a_checkpoint_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    files = RunDirectory(tmp_path)
    with pytest.raises(OSError, match="disk full"), files.checkpoint(7) as directory:
        (directory / "half").write_text("x")
        raise OSError("disk full")
    assert not list((tmp_path / "checkpoints").iterdir())
    for text in ("one", "two"):  # written again after a resume: the newer one stands
        with files.checkpoint(7) as directory:
            (directory / "file").write_text(text)
    (only,) = (tmp_path / "checkpoints").iterdir()
    assert only.name == "step-000007" and (only / "file").read_text() == "two"
    files.close()


def test_a_directory_holds_one_run(tmp_path: Path) -> None:
    RunDirectory(tmp_path).close()
    with pytest.raises(Conflict, match="holds another run"):
        RunDirectory(tmp_path)
