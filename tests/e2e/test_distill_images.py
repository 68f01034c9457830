"""Distillation about images in whole runs: what the teacher tells equals transformers' with the stored pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hpcrl.config import TinyModel
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.batch import Batch
from hpcrl.rollout.store import RolloutReader
from hpcrl.spec.image_rows import image_spans
from hpcrl.system.exit_codes import ExitCode
from tests.e2e.program import Start
from tests.e2e.test_parity import LOGPROBS
from tests.engines.test_token_divergence import plain

pytestmark = [pytest.mark.slow, pytest.mark.numerics, pytest.mark.timeout(400)]

WORDS = """
pipeline=distill data.train=task:shapes data.max_prompt_tokens=32 rollout.max_new_tokens=4 rollout.num_prompts=4
rollout.group_size=2 rollout.temperature=0.8 generator.max_num_seqs=16 trackers=[] cluster.device=cpu
""".split()  # noqa: SIM905
APART = "layout.trainer.num_ranks=1 layout.teacher.colocate_with=null layout.teacher.num_ranks=2".split()  # noqa: SIM905
AHEAD = [
    "rollout.max_staleness=1",
    "rollout.extra_prompts=2",
    "rollout.extra_members=1",
    "generator.decode_chunk_tokens=1",
]

K = 5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(policy, teacher), which has another size and more rows of the vocabulary. Both see."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {"num_heads": 2, "num_kv_heads": 1, "intermediate_size": 64, "initializer_range": 0.2}
    sight = {"architecture": "qwen2_5_vl", "corpus": ["colour?", "number?"]}
    make_tiny_model(TinyModel(hidden_size=32, **sizes, **sight), folder / "policy")
    make_tiny_model(TinyModel(hidden_size=48, num_layers=3, seed=7, **sizes, **sight), folder / "teacher")
    return folder / "policy", folder / "teacher"


def run(folder: Path, models: Sequence[Path], *words: str) -> None:
    start = Start(folder, [f"model.path={models[0]}", f"teacher.path={models[1]}", *WORDS, *words])
    assert start.wait(200) == ExitCode.DONE, start.text


def log_softmaxes(folder: Path, batch: Batch) -> Tensor:
    """float64 [M, V] before each trained token, from transformers and its own processor."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    processor, cu, found = Qwen2VLImageProcessorPil.from_pretrained(folder), batch.cu("images").tolist(), []
    split = (values.split(batch.lengths.tolist()) for values in (batch.token_ids, batch.loss_mask))
    for row, (tokens, mask) in enumerate(zip(*split, strict=True)):
        spans = image_spans(batch.images[cu[row] : cu[row + 1]].numpy())
        shown = [np.frombuffer(batch.pictures[s.digest], np.uint8).reshape(s.height, s.width, 3) for s in spans]
        given = dict(processor(images=[Image.fromarray(image) for image in shown], return_tensors="pt"))
        kinds = torch.zeros(1, len(tokens), dtype=torch.int32)
        for span in spans:
            kinds[0, span.start : span.start + span.length] = 1
        with torch.no_grad():
            logits = model(input_ids=tokens[None].long(), mm_token_type_ids=kinds, **given).logits[0].double()
        found.append((logits[:-1] / 0.8).log_softmax(-1)[mask[1:]])
        model.model.rope_deltas = None
    return torch.cat(found)


def check_drawn(batch: Batch, teacher: Path) -> None:
    """The stored values are the teacher's of the tokens that the policy drew."""
    drawn = batch.token_ids[batch.loss_mask].long()[:, None]
    wanted = log_softmaxes(teacher, batch).gather(1, drawn)[:, 0].float()
    assert torch.allclose(batch.teacher_logprobs[batch.loss_mask], wanted, rtol=0, atol=LOGPROBS)
    assert not batch.teacher_logprobs[~batch.loss_mask].any()


def check_divergence(run: Path, models: Sequence[Path], step: int, form: str, beta: float) -> None:
    """The metric is the mean of what transformers' distributions give; the policy's is that of the step before."""
    batch = RolloutReader(run).batch(step)
    log_q, log_p = (log_softmaxes(folder, batch) for folder in models)
    if form == "top_k":
        values, ids = log_p.topk(K)
        pair = log_q.gather(1, ids), values
        log_q, log_p = (torch.cat([some, (1 - some.exp().sum(-1, keepdim=True)).log()], -1) for some in pair)
    (found,) = [row["distill/divergence"] for row in read_metrics(run) if row["step"] == step]
    assert found == pytest.approx(plain(log_q, log_p, beta).mean().item(), rel=1e-4) and found > 0.1


def test_a_teacher_apart_sees_rollouts_ahead(tmp_path: Path, models: tuple[Path, Path]) -> None:
    """Redundant prompts and responses, and rollouts of earlier weights. No weight changes, so every step is known."""
    folder = tmp_path / "run"
    words = ["teacher.form=top_k", f"teacher.top_k={K}", "teacher.beta=0.5", "trainer.lr=1e-9"]
    run(folder, models, *APART, *AHEAD, *words, "max_steps=3", "save_every=0")
    rows = [row for row in read_metrics(folder) if row["step"]]
    assert sum(row.get("scheduler/redundant") or 0 for row in rows) > 0
    assert max(row.get("scheduler/staleness/max") or 0 for row in rows) == 1
    for step in (1, 3):
        batch = RolloutReader(folder).batch(step)
        assert len(batch.sample_ids) == 8 and len(batch.pictures) == 4 and not batch.advantages.any()
        check_divergence(folder, models, step, "top_k", 0.5)


@pytest.mark.soak
def test_deepspeed_compares_whole_distributions(tmp_path: Path, models: tuple[Path, Path]) -> None:
    """As trainer and as teacher."""
    words = ["layout=single", "teacher.form=full", "trainer.engine=deepspeed", "max_steps=1", "save_every=0"]
    run(tmp_path / "run", models, *words, "teacher.beta=0.5")
    check_divergence(tmp_path / "run", models, 1, "full", 0.5)


@pytest.mark.soak
def test_a_resumed_teacher_sees_the_pictures_of_waiting_rollouts(tmp_path: Path, models: tuple[Path, Path]) -> None:
    folder = tmp_path / "run"
    for steps in (2, 4):
        run(folder, models, *APART, *AHEAD, "save_every=1", f"max_steps={steps}")
    for step in (2, 3, 4):
        check_drawn(RolloutReader(folder).batch(step), models[1])


@pytest.mark.soak
@pytest.mark.parametrize("source", ["base", "policy"])
def test_the_policy_teaches_itself_about_images(tmp_path: Path, models: tuple[Path, Path], source: str) -> None:
    """Without its adapters, and as a copy with the processor's files."""
    folder = tmp_path / "run"
    more = {"base": ["trainer.lora.rank=4"], "policy": ["teacher.sync_every=1"]}[source]
    words = [f"model.path={models[0]}", *WORDS, "layout=single", "max_steps=2", "save_every=0", "trainer.lr=1e-2"]
    start = Start(folder, [*words, f"teacher.source={source}", *more])
    assert start.wait(200) == ExitCode.DONE, start.text
    teacher = models[0] if source == "base" else folder / "teacher" / "step_000001"
    check_drawn(RolloutReader(folder).batch(2), teacher)
