"""One trainer and one generator in one process: weights need no transfer, and perhaps not even a second copy."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import cast

from torch import Tensor

from hpcrl.engines.gen.generation_engine import GenEngine, KeepsWeights, SharesWeights
from hpcrl.engines.train.training_engine import LocalWeights, TrainEngine
from hpcrl.planner.generator import in_one_process, shares_weights
from hpcrl.workers.role import Rank
from hpcrl.workers.trainer import TrainerRole


class OneProcess:
    """Gives the generator access to the trainer in its process. If they share weights (shares_weights), an optimizer
    step changes the generator's weights at once, and nothing may be decoded until they are published as a new version.
    """

    def __init__(self, generator: GenEngine, trainer: TrainEngine, shared: bool):
        self._generator, self._trainer, self._local = generator, trainer, cast(LocalWeights, trainer)
        assert not self._local.sharded, "the specification says that it is whole"
        self._shared, self._loaded_at = shared, -1
        if shared:
            assert isinstance(generator, SharesWeights), "the specification says that it shares"
            self._local.move_into(generator.share_weights())

    @classmethod
    def of(cls, rank: Rank, generator: GenEngine) -> OneProcess | None:
        """None if this rank does not train, if other ranks train or generate, or if weights are not plain tensors."""
        if not in_one_process(rank.config, rank.layout) or "trainer" not in rank.roles:
            return None
        trainer = cast(TrainerRole, rank.roles["trainer"]).engine
        return cls(generator, trainer, shares_weights(rank.config, rank.layout))

    def weights(self) -> Collection[tuple[str, Tensor]]:
        """The trainer's parameters themselves, for load()."""
        return self._local.local_weights().items()

    def load(self, named: Iterable[tuple[str, Tensor]], version: int, kept: Collection[str] = ()) -> None:
        """Load all of weights() but `kept` (KeepsWeights) into the generator as this version."""
        if kept:
            cast(KeepsWeights, self._generator).load_weights(named, version, kept)
        else:
            self._generator.load_weights(named, version)
        self._loaded_at = self._trainer.optimizer_step

    def check(self) -> None:
        """RuntimeError if decoding now would use weights newer than the generator's version."""
        if self._shared and self._loaded_at != self._trainer.optimizer_step and self._generator.progress():
            raise RuntimeError(
                f"the weights changed at optimizer step {self._trainer.optimizer_step} and were published at "
                f"{self._loaded_at}: tokens decoded now would have the wrong version"
            )
