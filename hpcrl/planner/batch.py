"""The batch size: sequences per optimizer step."""

from __future__ import annotations

from hpcrl.config import Config


def samples_of_an_update(config: Config) -> int:
    """Sequences per optimizer step."""
    if (batch_size := config.pipeline_spec.batch_size) is not None:
        return batch_size(config)
    return config.rollout.num_prompts * config.rollout.group_size // config.algorithm.num_mini_batches
