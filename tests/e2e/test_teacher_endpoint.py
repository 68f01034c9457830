"""Distillation from a teacher behind an endpoint: the run of the same teacher in a folder, also if the server dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hpcrl.config import TinyModel
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from tests.e2e.program import Start
from tests.e2e.test_parity import LOGPROBS
from tests.teacher_server import TeacherServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WORDS = """
pipeline=distill layout=single cluster.device=cpu data.train=task:sort_digits data.max_prompt_tokens=64
rollout.max_new_tokens=4 rollout.num_prompts=8 rollout.group_size=1 trainer.lr=1e-3 save_every=1 max_steps=3
""".split()  # noqa: SIM905
SIZES = {"num_heads": 2, "num_kv_heads": 2}
KEY, SECRET = "TEACHER_KEY", "open-barley-7"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "policy"
    make_tiny_model(TinyModel(hidden_size=16, num_layers=1, intermediate_size=32, **SIZES), folder)
    return folder


def test_a_run_whose_server_dies_ends_as_the_run_of_the_same_teacher_in_a_folder(tmp_path: Path, policy: Path) -> None:
    folder, run = tmp_path / "teacher", tmp_path / "run"
    sizes = {"hidden_size": 48, "num_layers": 2, "intermediate_size": 80, **SIZES}
    make_tiny_model(TinyModel(architecture="llama", initializer_range=0.2, seed=7, vocab_size=384, **sizes), folder)
    words = [f"model.path={policy}", *WORDS]
    whole = Start(tmp_path / "whole", [*words, f"teacher.path={folder}"])

    def until_dead(answer: dict[str, Any], number: int) -> Any:
        return answer if number <= 1 + 16 + 3 else None  # the check, two steps, and a part of the third

    server = TeacherServer(folder, key=SECRET)
    server.change = until_dead
    # Eight answers one after another need far less, also where the machine is busy.
    words += ["teacher.endpoint.model=teacher", f"teacher.endpoint.api_key_env={KEY}", "teacher.endpoint.retry_s=10"]
    start = Start(run, [*words, f"teacher.endpoint.url={server.url}"], {KEY: SECRET})
    assert start.wait() == ExitCode.RANK_FAILED, start.text
    server.close()
    (line,) = [line for line in start.text.splitlines() if "no answer in time" in line]
    assert "in command Teach" in line and f"teacher.endpoint: {server.url}/completions: no answer in time" in line, line
    assert read_metrics(run)[-1]["step"] in (1, 2)

    server = TeacherServer(folder, key=SECRET)
    last = Start(run, [*words, f"teacher.endpoint.url={server.url}"], {KEY: SECRET})
    assert last.wait() == ExitCode.DONE, last.text
    server.close()
    assert server.paths[:2] == ["/v1/models", "/v1/completions"] and len(server.prompts) in (1 + 8, 1 + 16, 1 + 24)
    assert whole.wait() == ExitCode.DONE, whole.text
    rows, expected = read_metrics(run), read_metrics(tmp_path / "whole")
    for step in (1, 2, 3):
        given, wanted = (RolloutReader(at).batch(step) for at in (run, tmp_path / "whole"))
        assert torch.equal(given.token_ids, wanted.token_ids)
        assert torch.allclose(given.teacher_logprobs, wanted.teacher_logprobs, rtol=0, atol=LOGPROBS)
        assert (given.teacher_logprobs[given.loss_mask] < 0).all()
        assert (rows[step]["teacher/requests"], rows[step]["teacher/retries"]) == (8, 0)
        for name in ("distill/reverse_kl", "actor/grad_norm"):
            assert rows[step][name] == pytest.approx(expected[step][name], rel=1e-3), name
    weights = [load_file(at / "hf" / "model.safetensors") for at in (run, tmp_path / "whole")]
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor, weights[1][name], rtol=0, atol=1e-5), name
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert SECRET.encode() not in path.read_bytes(), path
