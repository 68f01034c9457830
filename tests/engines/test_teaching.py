"""Teachers and students in the training engines, against transformers: what a teacher tells, and the divergence with
its gradient, of every engine and split."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hpcrl.algorithms.interface import Objective, Outputs, TeacherHead
from hpcrl.engines.train.teacher_head import read_teacher_head
from hpcrl.engines.train.training_engine import Teaches
from hpcrl.metrics.stats import Stats, stat
from hpcrl.rollout.batch import Batch, Norms
from hpcrl.spec.divergence import Divergence, DivergenceForm
from hpcrl.spec.tables import TRAIN_ENGINES
from tests.contracts.splits import Split
from tests.engines.test_token_divergence import plain, scores, with_rest
from tests.engines.worlds import VOCAB, make_batch, make_model_folder, norms_of, run_ranks, worst_difference

pytestmark = pytest.mark.numerics

LENGTHS = (9, 21, 4, 14, 5, 17)
TEMPERATURE, K = 0.7, 6
WORDS, PADDED = VOCAB + 1, VOCAB + 9
"""Words of the student, which two ranks cannot divide evenly, and of the teacher."""
SPLITS = [
    ("fsdp2", Split(2, {"context_parallel": 2})),
    ("fsdp2", Split(2, {"tensor_parallel": 2})),
    ("deepspeed", Split(2, {"zero_stage": 3})),
    ("megatron", Split(2, {"tensor_parallel": 2, "sequence_parallel": True})),
    ("megatron", Split(2, {"context_parallel": 2})),
    ("megatron", Split(2, {"pipeline_parallel": 2})),
]
BETAS: dict[DivergenceForm, tuple[float, ...]] = {"top_k": (0.0, 1.0), "full": (0.5,)}
ASKED = [Divergence(form, beta, K, TEMPERATURE) for form, betas in BETAS.items() for beta in betas]


class Distilling(Objective):
    """A loss whose gradient differs from token to token."""

    outputs = frozenset({"divergence"})

    def __init__(self, divergence: Divergence, teacher_head: TeacherHead | None):
        self.divergence, self.teacher_head = divergence, teacher_head

    def loss(self, outputs: Outputs, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        assert outputs.divergence is not None and outputs.divergence.dtype == torch.float32
        assert not outputs.divergence[~batch.loss_mask].any()
        weights = torch.cos(batch.token_ids.float() + batch.position_ids) + 0.5
        loss = (outputs.divergence * weights - 0.1 * outputs.logprobs)[batch.loss_mask].sum() / norms.tokens
        return loss, {"actor/divergence": stat(outputs.divergence * weights, batch.loss_mask)}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wider, and with a padded vocabulary."""
    sizes = {"hidden_size": 40, "vocab_size": PADDED}
    return make_model_folder("qwen2", tmp_path_factory.mktemp("teacher") / "model", **sizes)


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"tie_word_embeddings": False, "vocab_size": WORDS}
    return make_model_folder("qwen2", tmp_path_factory.mktemp("student") / "model", **sizes)


def told(folder: Path, batch: Batch) -> tuple[Tensor, Tensor]:
    """(states [T, D], logits [T, V]) before each token, from transformers; 0 for the first token of a sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    found: list[tuple[Tensor, Tensor]] = []
    for tokens in batch.token_ids.split(batch.lengths.tolist()):
        output = model(tokens[None], output_hidden_states=True)
        pair = output.hidden_states[-1][0, :-1], output.logits[0, :-1]
        found.append(tuple(torch.cat([some.new_zeros(1, some.shape[1]), some]) for some in pair))  # type: ignore[arg-type]
    states, logits = zip(*found, strict=True)
    return torch.cat(states), torch.cat(logits)


def taught(folder: Path, form: DivergenceForm) -> Batch:
    """A batch with what transformers' teacher tells. It may be any number outside loss_mask, where no engine looks."""
    batch = make_batch(LENGTHS)
    with torch.no_grad():
        states, logits = told(folder, batch)
    if form == "full":
        batch.teacher_states = states
    else:
        best = (logits[:, :WORDS] / TEMPERATURE).log_softmax(-1).topk(K)
        batch.teacher_topk_ids, batch.teacher_topk_logprobs = best.indices.int(), best.values
    return batch


def wanted(folder: Path, teacher: Path, batch: Batch, asked: Divergence) -> tuple[float, dict[str, Tensor]]:
    """(sum of weighted divergences, gradients) from transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        log_p = (told(teacher, batch)[1][:, :WORDS] / TEMPERATURE).log_softmax(-1).double()
    rows = [model(tokens[None]).logits[0] for tokens in batch.token_ids.split(batch.lengths.tolist())]
    logits = torch.cat([torch.cat([row[:1], row[:-1]]) for row in rows])
    log_q = (logits / TEMPERATURE).double().log_softmax(-1)
    if asked.form == "top_k":
        ids = log_p.topk(K).indices
        values = plain(with_rest(log_q, ids), with_rest(log_p, ids), asked.beta)
    else:
        values = plain(log_q, log_p, asked.beta)
    logprobs = logits.log_softmax(-1).gather(1, batch.token_ids.long()[:, None])[:, 0] * batch.loss_mask
    loss, stats = Distilling(asked, None).loss(
        Outputs(logprobs, divergence=values.float() * batch.loss_mask), batch, norms_of(batch)
    )
    loss.backward()
    return stats["actor/divergence"].total, {name: p.grad for name, p in model.named_parameters()}


Found = tuple[float, dict[str, Tensor]]


class Run:
    """An engine on the ranks of the default group."""

    def __init__(self, engine: str, split: Split, folder: Path, trainable: bool = True):
        self.name, self.spec, self.folder = engine, TRAIN_ENGINES[engine], folder
        config, rank = split.config(engine, folder), dist.get_rank()
        self.division = self.spec.division(config, split.num_ranks)
        self.group = next(i for i, ranks in enumerate(self.division.groups) if rank in ranks)
        self.counts = rank in self.division.outputs
        self.engine = self.spec.load()(config, folder, 8, trainable)

    def rows(self, whole: Batch) -> tuple[Batch, list[list[int]]]:
        """This data-parallel rank's rows, and their micro-batches, of which the last is empty."""
        batch = whole.select(list(range(len(LENGTHS)))[self.group :: len(self.division.groups)])
        return batch, [[0], list(range(1, batch.num_sequences)), []]

    def learn(self, batches: list[Batch], head: TeacherHead) -> list[Found]:
        """For each divergence: the sum of weighted divergences and the gradients, of this rank."""
        gradients, found = import_module(f"tests.contracts.train.{self.name}").gradients, []
        for whole, asked in zip(batches, ASKED, strict=True):
            given = *self.rows(whole), Distilling(asked, head), norms_of(whole)
            stats = self.engine.accumulate(*given)
            if self.name != "megatron":
                self.engine.discard_gradients()
            total = stats["actor/divergence"].total if self.counts else 0.0
            found.append((total, gradients(self.engine, *given)))
        return found

    def teach(self, num_words: int) -> list[Tensor] | None:
        """What the engine tells as a teacher about its rows: token ids, their loss mask and lengths, the most probable
        tokens, their log-probs, and states; None on ranks that hold no outputs."""
        assert isinstance(self.engine, Teaches) and self.spec.teaches == {"sampled", "top_k", "full"}
        batch, plan = self.rows(make_batch(LENGTHS))
        best, states = self.engine.top_k(batch, plan, K, TEMPERATURE), self.engine.final_states(batch, plan)
        error = rf"^teacher: top_k={num_words + 1} of a vocabulary of {num_words} words; take 1 to {num_words}$"
        with pytest.raises(ValueError, match=error):
            self.engine.top_k(batch, plan, num_words + 1, 1.0)
        none = self.engine.top_k(batch.select([]), [], K, 1.0)
        assert none is None or [[*some.shape] for some in none] == [[0, K], [0, K]]
        if not self.counts:
            return None
        assert best is not None and states is not None
        return [torch.tensor(self.group), *best, states]


def check_told(answer: list[Tensor], folder: Path, num_groups: int) -> None:
    """What a teacher tells about a data-parallel rank's rows."""
    group, ids, logprobs, states = answer
    batch = make_batch(LENGTHS).select(list(range(len(LENGTHS)))[int(group) :: num_groups])
    with torch.no_grad():
        wanted_states, logits = told(folder, batch)
    best = (logits / TEMPERATURE).log_softmax(-1).topk(K)
    trained = batch.loss_mask[:, None]
    assert ids.dtype == torch.int32 and torch.equal(ids, (best.indices * trained).int())
    torch.testing.assert_close(logprobs, best.values * trained, rtol=0, atol=2e-5)
    torch.testing.assert_close(states, wanted_states * trained, rtol=0, atol=2e-5)


def check_learned(of_ranks: list[Found], golden: Found) -> None:
    gradients = {name: tensor for _, found in of_ranks for name, tensor in found.items()}
    assert sum(total for total, _ in of_ranks) == pytest.approx(golden[0], rel=1e-5)
    difference = worst_difference(gradients, golden[1])
    assert difference < 2e-5, f"gradients differ by {difference:.2g}"


def both(student: Path, batches: list[Batch], head: TeacherHead) -> list[tuple[int, list[Found], list[Tensor] | None]]:
    """For each split: its number of data-parallel ranks, and what this rank has learned and told. Collective."""
    runs = (Run(*case, student) for case in SPLITS)
    return [(len(run.division.groups), run.learn(batches, head), run.teach(WORDS)) for run in runs]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_engine_on_two_ranks_equals_transformers(student: Path, teacher: Path) -> None:
    batches = [taught(teacher, asked.form) for asked in ASKED]
    goldens = [wanted(student, teacher, *case) for case in zip(batches, ASKED, strict=True)]
    by_rank = run_ranks(2, both, student, batches, read_teacher_head(teacher, torch.float32))
    for case, results in zip(SPLITS, zip(*by_rank, strict=True), strict=True):
        (num_groups, _), learned, answers = zip(*results, strict=True)
        for golden, of_ranks in zip(goldens, zip(*learned, strict=True), strict=True):
            check_learned(list(of_ranks), golden)
        told_by = [answer for answer in answers if answer is not None]
        assert told_by, case
        for answer in told_by:
            check_told(answer, student, num_groups)


@pytest.mark.usefixtures("world_of_one")
def test_fsdp2_on_one_rank_equals_transformers_and_sees_a_swapped_word(student: Path, teacher: Path) -> None:
    run, head = Run("fsdp2", Split(1), student), read_teacher_head(teacher, torch.float32)
    batches = [taught(teacher, asked.form) for asked in ASKED]
    goldens = [wanted(student, teacher, *case) for case in zip(batches, ASKED, strict=True)]
    for found, golden in zip(run.learn(batches, head), goldens, strict=True):
        check_learned([found], golden)
    ids = batches[0].teacher_topk_ids
    assert ids is not None
    batches[0].teacher_topk_ids = ids.flip(1)
    total, gradients = run.learn(batches, head)[0]
    assert abs(total - goldens[0][0]) > 1e-2 and worst_difference(gradients, goldens[0][1]) > 1e-2
    answer = Run("fsdp2", Split(1), teacher, trainable=False).teach(PADDED)
    assert answer is not None
    check_told(answer, teacher, 1)


@pytest.mark.usefixtures("world_of_one")
def test_what_the_objective_or_the_batch_lacks_is_named(student: Path, teacher: Path) -> None:
    engine = Run("fsdp2", Split(1), student).engine
    batch, head = make_batch(LENGTHS), read_teacher_head(teacher, torch.float32)
    top_k, full = Divergence("top_k", 0.0, K, 1.0), Divergence("full", 0.0, 0, 1.0)

    def refused(asked: Divergence | None, head: TeacherHead | None, batch: Batch, error: str) -> None:
        objective = Distilling(top_k, head)
        objective.divergence = asked
        with pytest.raises(ValueError, match=error):
            engine.accumulate(batch, [range(len(LENGTHS))], objective, norms_of(batch))

    refused(None, None, batch, "^the objective Distilling uses a divergence, and its own is none; give it one of top_k")
    refused(Divergence("sampled", 0.0, 0, 1.0), None, batch, "is of the form sampled, which needs no engine")
    refused(top_k, None, batch, "^batch.teacher_topk_ids must be filled for the divergence over the teacher's 6 most")
    refused(full, head, batch, "^batch.teacher_states must be filled for the divergence over the whole vocabulary")
    narrow = taught(teacher, "top_k")
    refused(replace(top_k, top_k=4), None, narrow, r"teacher_topk_logprobs \[70, 6\] must both have the width top_k=4")
    refused(full, None, taught(teacher, "full"), "needs Distilling.teacher_head, which is not set")
    other = TeacherHead(torch.zeros(VOCAB, 7))
    refused(full, other, taught(teacher, "full"), r"teacher_states \[70, 40\] are not of the teacher whose head .*7\]")


@pytest.mark.parametrize("family", ["gemma2", "qwen2", "cohere"])
def test_a_head_makes_the_teachers_logits_of_its_states(family: str, tmp_path: Path) -> None:
    """Tied with a softcap, untied, and with a scale."""
    changes = {"qwen2": {"tie_word_embeddings": False}, "cohere": {"logit_scale": 0.25}}.get(family, {})
    folder, batch = make_model_folder(family, tmp_path / family, **changes), make_batch((5,))
    head = read_teacher_head(folder, torch.bfloat16)
    assert head.weight.dtype == torch.bfloat16 and head.weight.shape == (VOCAB, 32)
    with torch.no_grad():
        states, logits = told(folder, batch)
    head = read_teacher_head(folder, torch.float32)
    torch.testing.assert_close(scores(states, head.weight, head.bias, head.softcap, head.scale)[1:].float(), logits[1:])


def test_a_folder_without_a_readable_head_is_refused(student: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^teacher: model.path .*: no config.json; give a folder in Hugging Face layout"
    ):
        read_teacher_head(tmp_path, torch.float32)
    tensors, file = load_file(student / "model.safetensors"), tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text((student / "config.json").read_text())
    at = f"^teacher: {re.escape(str(tmp_path))}: the output head cannot be read: "
    for changed, error in (
        (
            {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"},
            "no file has lm_head.weight; ",
        ),
        (
            tensors | {"lm_head.weight": tensors["lm_head.weight"][1:].clone()},
            r"lm_head.weight has shape \[100, 32\]",
        ),
    ):
        save_file(changed, file)
        with pytest.raises(ValueError, match=at + error):
            read_teacher_head(tmp_path, torch.float32)
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=at):
        read_teacher_head(tmp_path, torch.float32)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard"}))
    with pytest.raises(ValueError, match=r"^teacher: model.path .*: config.json makes no causal language model: "):
        read_teacher_head(tmp_path, torch.float32)
