"""The trainer and reference roles: their engines, and the commands for batches."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from hpcrl.algorithms.factory import make_algorithm
from hpcrl.algorithms.interface import AdvantageEstimator, Outputs, RewardTable
from hpcrl.algorithms.metrics import advantage_stats, batch_stats, domain_stats, expert_stats
from hpcrl.algorithms.token_losses import fill_teachers, fill_weights
from hpcrl.comm.data_parallel import DataParallel
from hpcrl.config import Config
from hpcrl.config.teacher_paths import teachers
from hpcrl.data import HeadRows, SFTRows, sft_rows
from hpcrl.data.answers import TrainedSequence, with_answer_of
from hpcrl.data.stored_logprobs import StoredLogprobs, write_part
from hpcrl.engines.expert_routes import routes_of
from hpcrl.engines.train.teacher_head import read_teacher_head
from hpcrl.engines.train.training_engine import (
    ComputesEntropies,
    TrainEngine,
    TrainsAdapters,
    ValueEngine,
    check_objective,
    check_segments,
)
from hpcrl.messaging.messages import (
    Advantages,
    BroadcastBatch,
    Done,
    Export,
    ExportCritic,
    LoadReference,
    LoadRollouts,
    LoadRows,
    LoadTeacherHead,
    Logprobs,
    LossStats,
    MixRows,
    ReadLogprobs,
    ReleaseReference,
    StoreLogprobs,
    TakePairs,
    Teach,
    TrainStep,
    WriteRollouts,
)
from hpcrl.metrics.stats import Stats
from hpcrl.models.families import vision_of
from hpcrl.rollout.batch import Batch, MicroBatches, Norms, batch_from_samples, group_ids
from hpcrl.rollout.pictures import joined, split
from hpcrl.rollout.store import RolloutReader, write_rollouts
from hpcrl.rollout.types import FinishReason, Sample
from hpcrl.spec.image_rows import image_rows
from hpcrl.spec.media import IMAGES
from hpcrl.spec.tables import TRAIN_ENGINES
from hpcrl.spec.trajectory import FIELDS, Level, Origin, fields_of
from hpcrl.workers.mixing import with_answers, without_answers
from hpcrl.workers.role import Rank
from hpcrl.workers.self_teaching import judge
from hpcrl.workers.teacher_reading import judge_reading


class EngineRole:
    """Common parts of trainer, reference and critic."""

    name: str
    state_folder: str | None = None
    """Folder of the role's state within a checkpoint (hpcrl.workers.checkpointing.Learns)."""
    trainable = False
    busy = False

    def __init__(self, worker: Rank):
        self._worker = worker
        routes_of(worker.config, worker.model_path)  # declares the field
        vision_of(worker.model_path)  # likewise
        self._algorithm = make_algorithm(worker.config)
        self.engine = self._make_engine(worker.model_path)
        check_segments(self.engine, worker.config.by_steps)
        self._ranks = DataParallel(worker.world, self.name, worker.layout.division(self.name))
        self._rows: dict[str, SFTRows] = {}

    @property
    def engines(self) -> list[TrainEngine]:
        """All engines of the role; none while a reference is freed."""
        return [self.engine] if hasattr(self, "engine") else []

    def _make_engine(self, model_path: Path) -> TrainEngine:
        return self._make(self._worker.config, model_path)

    def _make(self, config: Config, model_path: Path) -> TrainEngine:
        total_steps = (config.max_steps - config.policy_waits) * self._algorithm.objective.optimizer_steps
        engine: TrainEngine
        if config.trains_head:
            engine = TRAIN_ENGINES[config.train_engine].load_critic()(config, model_path, total_steps)
        else:
            engine = TRAIN_ENGINES[config.train_engine].load()(config, model_path, total_steps, self.trainable)
        return engine

    def poll(self) -> bool:
        return False

    def close(self) -> None:
        return None

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        return {
            LoadRollouts: self._load_rollouts,
            LoadRows: self._load_rows,
            TakePairs: self._take_pairs,
            BroadcastBatch: self._broadcast,
        }

    def _load_rows(self, command: LoadRows, seq: int) -> Done:
        if command.split not in self._rows:
            config, worker = self._worker.config, self._worker
            given = (worker.tokenizer, config.seed, config.row_kind, worker.model_path)
            self._rows[command.split] = (
                HeadRows(config, command.split, worker.tokenizer)
                if config.trains_head
                else sft_rows(config.data, command.split, *given)
            )
        rows = self._rows[command.split]
        batch = batch_of_rows(rows, command.sequences, command.answers, command.max_tokens)
        self._worker.batches[command.batch] = batch
        return Done(seq)

    def _load_rollouts(self, command: LoadRollouts, seq: int) -> Done:
        stored = RolloutReader(command.run_dir, provisional=True).batch(command.step)
        rows = torch.searchsorted(stored.sample_ids, torch.tensor(command.samples)).tolist()
        self._worker.batches[command.batch] = stored.select(rows).as_generated().check()
        return Done(seq)

    def _take_pairs(self, command: TakePairs, seq: int) -> Done:
        pairs = self._worker.batches[command.source].select(command.rows)
        pairs.chosen = torch.arange(pairs.num_sequences) % 2 == 0
        self._worker.batches[command.batch] = pairs
        return Done(seq)

    def logprobs(self, command: Logprobs, seq: int) -> Done:
        batch = self._worker.batches[command.batch]
        compute = self.engine.logprobs
        if command.into == "old_entropies":
            compute = cast(ComputesEntropies, self.engine).entropies  # check_objective
        elif command.role != self.name:  # the reference is the trainer's model without adapters
            compute = cast(
                TrainsAdapters, self.engine
            ).reference_logprobs  # the engine's specification declares adapters
        values = compute(batch, command.micro_batches, self._algorithm.objective.temperature)
        setattr(batch, command.into, self._ranks.outputs(values, batch.num_tokens))
        return Done(seq)

    def export(self, command: Export | ExportCritic, seq: int) -> Done:
        self.engine.export_hf(Path(command.folder))
        return Done(seq)

    def _broadcast(self, command: BroadcastBatch, seq: int) -> Done:
        batches, field = self._worker.batches, command.field
        given: dict[str, Tensor] = {}
        if self._ranks.is_head:
            batch = batches[command.batch]
            given = {field: getattr(batch, field)} if field else {"cu_seqlens": batch.cu_seqlens, **batch.columns}
            if not field and batch.images is not None:
                given["pictures"] = torch.from_numpy(joined(batch.images.numpy(), batch.pictures).copy())
        passed = self._ranks.broadcast(given)
        if field:
            setattr(batches[command.batch], field, passed[field])
        elif not self._ranks.is_head:
            pixels = passed.pop("pictures", None)
            batch = batches[command.batch] = Batch(passed.pop("cu_seqlens"), passed)
            if pixels is not None:
                batch.pictures = split(passed["images"].numpy(), pixels.numpy())
        return Done(seq)


class ReferenceRole(EngineRole):
    """The frozen initial policy, an earlier policy (algorithm.ref_update_steps), or the model in reference.path."""

    name = "reference"

    def _make_engine(self, model_path: Path) -> TrainEngine:
        own = self._worker.config.of_reference()
        return self._make(own, Path(self._worker.config.reference.path or model_path))

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        return super().handlers() | {LoadReference: self._load_reference, ReleaseReference: self._release}

    def _release(self, command: ReleaseReference, seq: int) -> Done:
        del self.engine
        gc.collect()
        return Done(seq)

    def _load_reference(self, command: LoadReference, seq: int) -> Done:
        if hasattr(self, "engine"):  # it may have been freed
            del self.engine
        gc.collect()  # frees the old engine's memory before the new engine needs it
        self.engine = self._make_engine(Path(command.folder))
        return Done(seq)


class TrainerRole(EngineRole):
    """The policy in training."""

    name, state_folder, trainable = "trainer", "", True

    def __init__(self, worker: Rank):
        super().__init__(worker)
        self._stored: StoredLogprobs | None = None
        check_objective(self.engine, self._algorithm.objective)
        divergence = self._algorithm.objective.divergence
        if divergence is not None and divergence.form == "full":
            folders = [Path(folder) for folder in teachers(worker.config.teacher)]
            self._read_heads(folders or [worker.model_path])

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        own = {Teach: self._teach} if self._worker.config.teacher_is_trainer else {}
        return (
            super().handlers()
            | own
            | {
                LoadTeacherHead: self._load_head,
                Advantages: self._advantages,
                TrainStep: self._train_step,
                MixRows: self._mix_rows,
                LossStats: self._loss_stats,
                WriteRollouts: self._write_rollouts,
                StoreLogprobs: self._store_logprobs,
                ReadLogprobs: self._read_logprobs,
                Export: self.export,
            }
        )

    def _read_heads(self, folders: Sequence[Path]) -> None:
        dtype = getattr(torch, self._worker.config.of_teacher().model.dtype)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        objective = self._algorithm.objective
        # The old ones' memory is free before the new ones need it.
        objective.teacher_head, objective.further_heads = None, ()
        heads = [read_teacher_head(folder, dtype, device) for folder in folders]
        objective.teacher_head, objective.further_heads = heads[0], tuple(heads[1:])

    def _load_head(self, command: LoadTeacherHead, seq: int) -> Done:
        self._read_heads([Path(command.folder)])
        return Done(seq)

    def _teach(self, command: Teach, seq: int) -> Done:
        batch, temperature = self._worker.batches[command.batch], self._algorithm.objective.temperature
        given = self._worker.config, self.engine
        judged = judge_reading(
            command.prompts, batch, lambda read: judge(*given, read, command.micro_batches, temperature)
        )
        for (name, width), values in zip(command.widths.items(), judged, strict=True):
            dtype = getattr(torch, FIELDS[name].dtype)
            setattr(batch, name, self._ranks.outputs(values, batch.num_tokens, width, dtype))
        return Done(seq)

    def _store_logprobs(self, command: StoreLogprobs, seq: int) -> Done:
        batch = self._worker.batches[command.batch]
        fields = getattr(batch, command.field), batch.loss_mask, batch.cu_seqlens
        values, mask, starts = (field.numpy() for field in fields)
        rows = [values[first:end][mask[first:end]] for first, end in pairwise(starts.tolist())]
        write_part(Path(command.folder), command.batch, self._worker.world.rank, batch.sample_ids.tolist(), rows)
        return Done(seq)

    def _read_logprobs(self, command: ReadLogprobs, seq: int) -> Done:
        batch, folder = self._worker.batches[command.batch], Path(command.folder)
        if self._stored is None:
            self._stored = StoredLogprobs(folder)
        sizes = torch.zeros(batch.num_sequences, dtype=torch.int64).index_add(0, batch.row_ids, batch.loss_mask.long())
        try:
            rows = [self._stored.values(sequence) for sequence in batch.sample_ids.tolist()]
        except KeyError as error:
            rows = []
            if len(sizes):
                raise ValueError(f"{folder} lacks the log-probs of sequence {error}: another run changed it") from error
        if list(map(len, rows)) != sizes.tolist():
            raise ValueError(f"{folder} has log-probs of other rows; remove it, and start again")
        values = torch.zeros(batch.num_tokens)
        if rows:
            values[batch.loss_mask] = torch.from_numpy(np.concatenate(rows))
        setattr(batch, command.into, values)
        return Done(seq)

    def _advantages(self, command: Advantages, seq: int) -> Done:
        batch, estimator = self._worker.batches[command.batch], self._algorithm.estimator
        self._algorithm.take(command.coefficients)
        table = _gather_rewards(batch, self._ranks, command.domains)
        if estimator is None:  # the pipeline has an objective of its own
            stats = batch_stats(batch, table) | domain_stats(batch, table)
            return Done(seq, stats=stats if self._ranks.is_head else {})
        own = _fill_advantages(estimator, batch, table, self._ranks)
        fill_weights(self._worker.config, batch, command.domains)
        fill_teachers(self._worker.config, batch, command.domains)
        own |= self._algorithm.objective.prepare(batch, self._ranks.all_sum)
        if not self._ranks.is_head:
            return Done(seq)
        changed = (batch.weights != 1).nonzero()[:, 0]
        weights = list(zip(batch.sample_ids[changed].tolist(), batch.weights[changed].tolist(), strict=True))
        stats = batch_stats(batch, table) | advantage_stats(batch) | domain_stats(batch, table)
        if self._worker.config.expert_plays:
            stats |= expert_stats(batch)
        return Done(seq, stats=stats | own, weights=weights)

    def _train_step(self, command: TrainStep, seq: int) -> Done:
        self._algorithm.take(command.coefficients)
        stats = self.engine.train_step(
            self._worker.batches[command.batch],
            command.micro_batches,
            self._algorithm.objective,
            Norms(command.tokens, command.sequences),
        )
        return Done(seq, stats=stats if self._ranks.holds_outputs else {})

    def _mix_rows(self, command: MixRows, seq: int) -> Done:
        config, batches = self._worker.config, self._worker.batches
        if "imitation" not in self._rows:
            mixed = config.of_imitation().data
            self._rows["imitation"] = sft_rows(mixed, "train", self._worker.tokenizer, config.seed)
        answers = batch_of_rows(self._rows["imitation"], command.sequences)
        batches[command.batch] = with_answers(batches[command.batch], answers, config.imitation.ce)
        return Done(seq)

    @torch.no_grad()
    def _loss_stats(self, command: LossStats, seq: int) -> Done:
        batch, objective = self._worker.batches[command.batch], self._algorithm.objective
        outputs = self._outputs(batch, command.micro_batches)
        if not self._ranks.is_head or not batch.num_sequences:
            return Done(seq)
        self._algorithm.take(command.coefficients)
        _, stats = objective.loss(outputs, batch, Norms(command.tokens, command.sequences))
        return Done(seq, stats=stats)

    def _outputs(self, batch: Batch, micro_batches: MicroBatches) -> Outputs:
        """The values of a model with a head, the log-probs of any other."""
        if not self._worker.config.trains_head:
            logprobs = self.engine.logprobs(batch, micro_batches, self._algorithm.objective.temperature)
            return Outputs(self._ranks.outputs(logprobs, batch.num_tokens))
        assert isinstance(self.engine, ValueEngine), "the pipeline trains a head"
        values = self._ranks.outputs(self.engine.values(batch, micro_batches), batch.num_tokens)
        return Outputs(torch.zeros_like(values), values=values)

    def _write_rollouts(self, command: WriteRollouts, seq: int) -> Done:
        batch = without_answers(self._worker.batches[command.batch])
        num_files, folder = self._ranks.num_data_parallel, Path(command.folder)
        write_rollouts(folder, self._worker.world.rank, num_files, batch, command.facts)
        return Done(seq)


def _fill_advantages(estimator: AdvantageEstimator, batch: Batch, table: RewardTable, ranks: DataParallel) -> Stats:
    """Compute advantages as if the batch had no failed episodes, and give failed episodes the weight 0. Collective over
    the trainer ranks."""
    if batch.failed is None:  # it is then None on all trainer ranks
        return estimator.assign(batch, table, ranks.all_sum)
    gone = ranks.all_gather(batch.sample_ids[batch.failed])
    kept = ~batch.failed
    part = batch.select(kept.nonzero()[:, 0].tolist())
    stats = estimator.assign(part, table.select(~torch.isin(table.sample_ids, gone)), ranks.all_sum)
    batch.weights = torch.zeros_like(batch.weights).masked_scatter(kept, part.weights)
    tokens = kept[batch.row_ids]
    for field in fields_of(Origin.TRAINING, Level.TOKEN):
        given = part.columns.get(field.name)
        if given is not None and (field.name not in batch.columns or field.name in ("advantages", "returns")):
            setattr(batch, field.name, given.new_zeros(field.shape(batch.num_tokens)).index_put((tokens,), given))
    return stats


def _gather_rewards(batch: Batch, ranks: DataParallel, domains: dict[str, list[int]]) -> RewardTable:
    """Gather the rewards of all trainer ranks' samples. Collective over the trainer ranks."""
    own = RewardTable.of(batch)
    ids = ranks.all_gather(own.sample_ids)
    order = torch.argsort(ids)
    rewards, scores, lengths = (ranks.all_gather(values)[order] for values in (own.rewards, own.scores, own.lengths))
    truncated = ranks.all_gather(own.truncated.byte())[order].bool()
    # A batch has the same fields filled on all ranks, even on ranks without rows.
    baselines, decoupled = (
        None if values is None else ranks.all_gather(values)[order] for values in (own.baselines, own.decoupled)
    )
    groups = group_ids(ids[order])
    return RewardTable(rewards, groups, ids[order], scores, lengths, truncated, domains, baselines, decoupled)


def batch_of_rows(rows: SFTRows, sequences: Sequence[int], answers: Sequence[int] = (), max_tokens: int = 0) -> Batch:
    """The batch of these sequences; sequence n belongs to row n // per_row, which is its group. With `answers`, each
    ends with the answer of the sequence given there, cut so that it has at most max_tokens."""
    groups = [sequence // rows.per_row for sequence in sequences]
    encoded = {row: rows.encode(row) for row in sorted({n // rows.per_row for n in (*sequences, *answers)})}
    parts = [(encoded[row], n % rows.per_row) for n, row in zip(sequences, groups, strict=True)]
    found = [row.sequences[k] for row, k in parts]
    if answers:
        others = (encoded[n // rows.per_row].sequences[n % rows.per_row] for n in answers)
        found = [with_answer_of(own, other, max_tokens) for own, other in zip(found, others, strict=True)]
    samples = [_supervised_sample(n, sequence) for n, sequence in zip(sequences, found, strict=True)]
    batch = batch_from_samples(samples, groups)
    if rows.kind != "answers":
        batch.chosen = torch.tensor([row.chosen[k] for row, k in parts], dtype=torch.bool)
    if isinstance(rows, HeadRows):
        batch.targets = torch.zeros(batch.num_tokens, *((rows.num_heads,) if rows.num_heads > 1 else ()))
        of_row = {row: rows.targets(row) for row in encoded}
        given = [of_row[row][n % rows.per_row] for n, row in zip(sequences, groups, strict=True)]
        targets = torch.tensor([target for each in given for target in each])
        batch.targets[batch.loss_mask] = targets.view(-1, *batch.targets.shape[1:])
    return batch


def _supervised_sample(number: int, sequence: TrainedSequence) -> Sample:
    count, mask = len(sequence.token_ids), np.array(sequence.loss_mask, dtype=bool)
    sample = Sample(
        id=number,
        token_ids=np.array(sequence.token_ids, dtype=np.int32),
        loss_mask=mask,
        gen_logprobs=np.zeros(count, dtype=np.float32),
        versions=np.full(count, -1, dtype=np.int32),
        turn_ids=np.where(mask, 0, -1).astype(np.int32),
        finish_reason=FinishReason.STOP,
    )
    if IMAGES.name in FIELDS:
        sample.put(IMAGES.name, image_rows(sequence.media))
        sample.pictures = {medium.digest: medium.content for medium in sequence.media}
    return sample
