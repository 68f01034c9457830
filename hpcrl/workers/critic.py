"""The critic role: computes a batch's values, and is trained on its returns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcrl.algorithms.factory import make_value_loss
from hpcrl.engines.train.training_engine import TrainEngine, ValueEngine, check_objective
from hpcrl.messaging.messages import Done, ExportCritic, SetSampleWeights, TrainCritic, Values
from hpcrl.rollout.batch import Norms
from hpcrl.spec.tables import TRAIN_ENGINES
from hpcrl.workers.role import Rank
from hpcrl.workers.trainer import EngineRole


class CriticRole(EngineRole):
    """The critic, on the trainer's ranks or on separate ranks."""

    name, state_folder = "critic", "critic"

    def __init__(self, worker: Rank):
        self._objective = make_value_loss(worker.config)
        super().__init__(worker)
        check_objective(self.engine, self._objective)

    def _make_engine(self, model_path: Path) -> TrainEngine:
        config = self._worker.config
        path = Path(config.critic.path) if config.critic.path else model_path
        make = TRAIN_ENGINES[config.critic_engine].load_critic()
        engine: TrainEngine = make(config.of_critic(), path, config.max_steps * self._objective.optimizer_steps)
        return engine

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        return super().handlers() | {
            Values: self._values,
            SetSampleWeights: self._set_sample_weights,
            TrainCritic: self._train,
            ExportCritic: self.export,
        }

    def _values(self, command: Values, seq: int) -> Done:
        batch, engine = self._worker.batches[command.batch], self.engine
        assert isinstance(engine, ValueEngine), "the specification says that it makes critics"
        batch.values = self._ranks.outputs(engine.values(batch, command.micro_batches), batch.num_tokens)
        return Done(seq)

    def _set_sample_weights(self, command: SetSampleWeights, seq: int) -> Done:
        batch, weights = self._worker.batches[command.batch], dict(command.weights)
        given = [weights.get(sample, 1.0) for sample in batch.sample_ids.tolist()]
        batch.weights = batch.weights.new_tensor(given)
        return Done(seq)

    def _train(self, command: TrainCritic, seq: int) -> Done:
        norms = Norms(command.tokens, command.sequences)
        batch = self._worker.batches[command.batch]
        stats = self.engine.train_step(batch, command.micro_batches, self._objective, norms)
        renamed = {name.replace("actor/", "critic/"): values for name, values in stats.items()}
        return Done(seq, stats=renamed if self._ranks.holds_outputs else {})
