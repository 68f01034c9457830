"""How much there is to train on: the sequences of an optimizer step."""

from __future__ import annotations

from hpcrl.config import Config


def samples_of_an_update(config: Config) -> int:
    """Sequences of one optimizer step."""
    if (batch_size := config.pipeline_spec.batch_size) is not None:
        return batch_size(config)
    return config.rollout.num_prompts * config.rollout.group_size // config.algorithm.num_mini_batches
