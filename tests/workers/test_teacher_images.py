"""Teachers that see the policy's images: values in every form equal transformers' with its own image processor, also on
a prompt of the teacher's own, and of the trainer's engine as teacher."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import parse
from hpcrl.controller.teacher_client import widths_of
from hpcrl.engines.train.teacher_head import read_teacher_head
from hpcrl.messaging.messages import Teach
from hpcrl.models.families import vision_of
from hpcrl.models.vision import TINY
from hpcrl.rollout.batch import Batch
from hpcrl.spec.image_rows import image_spans
from hpcrl.spec.media import IMAGES
from hpcrl.spec.trajectory import declare
from hpcrl.workers.rank_loop import Worker
from hpcrl.workers.teacher import UNKNOWN, TeacherRole
from hpcrl.workers.teacher_reading import with_prompts
from hpcrl.workers.trainer import TrainerRole
from tests.dist.conftest import Threads
from tests.engines.test_images import batch_of
from tests.vlm import PAD, VOCAB, make_vlm
from tests.workers.conftest import LAYOUT

pytestmark = pytest.mark.numerics

EPOCHS = itertools.count()
TEMPERATURE, K = 0.7, 5
FAMILIES = ("qwen2_5_vl", "qwen3_vl_moe")
FORMS = ("sampled", "top_k", "full")
PLAN = [[4, 0, 2], [3, 1]]
BEFORE, AFTER = [*b"look: "], [*b" (it is red)"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family a teacher of one layer with other colours; the policies have two layers and padded vocabularies."""
    made = {f"{family} policy": {"text_config": {"vocab_size": VOCAB + 4}} for family in FAMILIES}
    made |= {family: {"text_config": {"num_hidden_layers": 1}} for family in FAMILIES}
    folder = tmp_path_factory.mktemp("vlm")
    found = {name: make_vlm(name.split()[0], folder / name, **changes) for name, changes in made.items()}
    for family in FAMILIES:
        processor = found[family] / "preprocessor_config.json"
        processor.write_text(processor.read_text().replace('"image_mean": [0.', '"image_mean": [0.1'))
    return found


@pytest.fixture
def make(threads: Threads) -> Iterator[Any]:
    def role(kind: Any, policy: Path, **settings: Any) -> Any:
        given = {"pipeline": "distill", "model": {"path": str(policy)}, "rollout": {"temperature": TEMPERATURE}}
        config = parse(given | settings)
        ranks = {**LAYOUT, "teacher": () if config.teacher_is_trainer else (2,)}
        worker = Worker(threads.worlds[2], config, RoleLayout(MappingProxyType(ranks), 3), policy, policy.parent)
        worker.world.default_group("training", [2], next(EPOCHS))
        return kind(worker)

    yield role
    if dist.is_initialized():
        dist.destroy_process_group()


def rows_for(folder: Path) -> Batch:
    """Rows with one image, the same one again, another one under the same text, two images, and none."""
    vision = vision_of(folder)
    assert vision is not None
    return batch_of(vision)


def prompts_for(batch: Batch) -> dict[int, list[int]]:
    """Group -> its prompt between further texts, so its images are at other places."""
    split = (values.split(batch.lengths.tolist()) for values in (batch.token_ids, batch.loss_mask))
    rows = zip(batch.group_ids.tolist(), *split, strict=True)
    return {group: [*BEFORE, *tokens[~mask].tolist(), *AFTER] for group, tokens, mask in rows}


def teach(role: Any, batch: Batch, prompts: Mapping[int, list[int]] | None = None) -> Batch:
    role._worker.batches[4] = batch
    sent = {group: np.array(prompt, np.int32).tobytes() for group, prompt in (prompts or {}).items()}
    role.handlers()[Teach](Teach(4, widths_of(role._worker.config), PLAN, prompts=sent), 1)
    return batch.check()


def of_form(role: Any, form: str) -> Any:
    """The role in another form, with the same engine."""
    config = role._worker.config
    teacher = config.teacher.model_copy(update={"form": form, "top_k": K})
    role._worker.config = config.model_copy(update={"teacher": teacher})
    return role


def log_softmaxes(folder: Path, batch: Batch, prompts: Mapping[int, list[int]] | None = None) -> Tensor:
    """[M, V] before each response token, from transformers and its own processor, a row at a time."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    found, cu = [], batch.cu("images").tolist()
    split = (values.split(batch.lengths.tolist()) for values in (batch.token_ids, batch.loss_mask))
    for row, (tokens, mask) in enumerate(zip(*split, strict=True)):
        prompt = tokens[~mask] if prompts is None else torch.tensor(prompts[int(batch.group_ids[row])])
        ids, given = torch.cat([prompt, tokens[mask]])[None], dict[str, Any]()
        if spans := image_spans(batch.images[cu[row] : cu[row + 1]].numpy()):
            shown = [np.frombuffer(batch.pictures[s.digest], np.uint8).reshape(s.height, s.width, 3) for s in spans]
            given = dict(processor(images=[Image.fromarray(image) for image in shown], return_tensors="pt"))
            given["mm_token_type_ids"] = (ids == PAD).int()
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False, **given).logits[0, len(prompt) - 1 : -1]
        found.append((logits / TEMPERATURE).log_softmax(-1))
        model.model.rope_deltas = None
    return torch.cat(found)


def check(batch: Batch, form: str, log_p: Tensor, folder: Path) -> None:
    """The batch's fields of this form tell these distributions, and nothing about prompts."""
    mask = batch.loss_mask
    if form == "sampled":
        wanted = log_p.gather(1, batch.token_ids[mask][:, None])[:, 0]
        torch.testing.assert_close(batch.teacher_logprobs[mask], wanted, rtol=0, atol=2e-5)
        assert not batch.teacher_logprobs[~mask].any()
    elif form == "top_k":
        values, ids = log_p.topk(K)
        assert torch.equal(batch.columns["teacher_topk_ids"][mask].long(), ids)
        torch.testing.assert_close(batch.columns["teacher_topk_logprobs"][mask], values, rtol=0, atol=2e-5)
        assert not batch.columns["teacher_topk_logprobs"][~mask].any()
    else:
        states, head = batch.columns["teacher_states"], read_teacher_head(folder, torch.float32)
        logits = states[mask] @ head.weight.T
        torch.testing.assert_close((logits / TEMPERATURE).log_softmax(-1), log_p, rtol=0, atol=2e-5)
        assert not states[~mask].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_sees_the_images(make: Any, folders: dict[str, Path], family: str) -> None:
    """With its own colours; the policy's pixels, at their places in the policy's prompt and in the teacher's."""
    folder = folders[family]
    role = make(TeacherRole, folders[f"{family} policy"], teacher={"path": str(folder), "context": "{prompt}"})
    log_p = log_softmaxes(folder, rows_for(folder))
    for form in FORMS:
        check(batch := teach(of_form(role, form), rows_for(folder)), form, log_p, folder)
        if form == "sampled":
            firsts = batch.cu_seqlens[:-1] + batch.prefix_lengths()
            one, other = firsts[[0, 2]].tolist()
            assert batch.token_ids[one] == batch.token_ids[other]
            assert abs(batch.teacher_logprobs[one] - batch.teacher_logprobs[other]) > 1e-3, "of other images"
    prompts = prompts_for(batch)
    in_context = log_softmaxes(folder, batch, prompts)
    check(teach(role, rows_for(folder), prompts), "full", in_context, folder)
    assert (log_p - in_context).abs().max() > 1e-2


def test_a_token_that_the_teacher_lacks_keeps_the_images(make: Any, folders: dict[str, Path]) -> None:
    folder = folders["qwen2_5_vl"]
    role, batch = make(TeacherRole, folders["qwen2_5_vl policy"], teacher={"path": str(folder)}), rows_for(folder)
    drawn = int(batch.cu_seqlens[1]) - 1  # the last token of a row, on which no other depends
    wanted = teach(role, rows_for(folder)).teacher_logprobs.clone()
    batch.token_ids = batch.token_ids.clone()
    batch.token_ids[drawn] = VOCAB + 2
    found = teach(role, batch).teacher_logprobs
    wanted[drawn] = UNKNOWN
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


def test_the_base_of_adapters_sees_the_images(make: Any, folders: dict[str, Path]) -> None:
    folder = folders["qwen2_5_vl policy"]
    teacher = {"source": "base", "context": "{prompt}"}
    role = make(TrainerRole, folder, teacher=teacher, trainer={"lora": {"rank": 2}})
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in role.engine.model.parameters():
            parameter += 0.3 * torch.randn_like(parameter) * parameter.requires_grad
    batch = rows_for(folder)
    prompts = prompts_for(batch)
    check(teach(role, batch, prompts), "sampled", log_softmaxes(folder, batch, prompts), folder)
    base = teach(role, batch).teacher_logprobs
    assert (role.engine.logprobs(batch, PLAN, TEMPERATURE) - base).abs().max() > 0.1, "the adapters are on again"


def test_images_move_with_their_prompt() -> None:
    """Which begins with further tokens; also of two images, and of none, and without rows."""
    declare(IMAGES)
    batch = batch_of(TINY)
    prompts = {group: np.array(ids, np.int32).tobytes() for group, ids in prompts_for(batch).items()}
    read = with_prompts(batch, prompts).check()
    before, after = (image_spans(some.images.numpy()) for some in (batch, read))
    assert [span.start + len(BEFORE) for span in before] == [span.start for span in after]
    assert [span.digest for span in before] == [span.digest for span in after] and read.pictures
    assert read.cu("images").tolist() == [0, 1, 2, 3, 5, 5]
    none = with_prompts(batch.select([]), prompts)
    assert none.num_sequences == 0 and none.images is not None and len(none.images) == 0
