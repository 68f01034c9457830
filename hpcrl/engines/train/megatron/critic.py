"""The critic on Megatron-Core: the decoder of a causal language model with a linear head, which gives each token a
value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from hpcrl.algorithms.interface import Objective, Outputs
from hpcrl.config import Config
from hpcrl.engines.hf_folder import padding_id
from hpcrl.engines.train.megatron.engine import MegatronEngine
from hpcrl.engines.train.megatron.export import export
from hpcrl.engines.train.megatron.gpt_model import Description, Prediction
from hpcrl.engines.train.megatron.spec import MegatronConfig
from hpcrl.models.head_labels import label_keys
from hpcrl.rollout.batch import Batch, MicroBatches


def make(config: Config, model_path: Path, total_steps: int) -> MegatronCritic:
    """The critic's engine; `config` is Config.of_critic(), or that of a pipeline that trains a head. Collective over
    the default group."""
    given: dict[str, Any] = {
        "own": config.trainer.section(MegatronConfig),
        "total_steps": total_steps,
        "deterministic": config.deterministic,
    }
    if config.trains_head and config.head_training.rows != "steps":
        return MegatronScorer(config.trainer, model_path, labels=config.head_training.labels, **given)
    return MegatronCritic(config.trainer, model_path, **given)


class ValueHead(nn.Module):
    """Computes each state's value in float32. Every tensor-parallel rank has a copy, and computes the same values."""

    def __init__(self, config: TransformerConfig, bias: bool, num_heads: int):
        super().__init__()
        kind = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = nn.Parameter(torch.zeros(num_heads, config.hidden_size, **kind))  # type: ignore[arg-type]
        self.bias = nn.Parameter(torch.zeros(num_heads, **kind)) if bias else None  # type: ignore[arg-type]

    def forward(self, states: Tensor) -> Tensor:
        """float32 [N], or [N, heads] with several heads, of states [N, h]."""
        bias = None if self.bias is None else self.bias.float()
        values = nn.functional.linear(states.float(), self.weight.float(), bias)
        return values[:, 0] if len(self.weight) == 1 else values


class ValueModel(GPTModel):
    """GPTModel whose last stage returns the values, float32 [N] or [N, heads], of the states before the tokens of a
    Prediction, passed as its labels."""

    words: int  # vocabulary size without padding
    bias, num_heads = True, 1  # of the head

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any):
        super().__init__(config, *args, **options | {"share_embeddings_and_output_weights": False})
        if self.post_process:
            self.output_layer = ValueHead(config, self.bias, self.num_heads)

    def _postprocess(self, hidden_states: Tensor, labels: Prediction | None = None, **_: Any) -> Any:
        if not self.post_process:
            return hidden_states
        assert labels is not None
        if self.config.sequence_parallel:  # each rank computes all gradients, so they are split, not summed
            group = parallel_state.get_tensor_model_parallel_group()
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=group
            )
        return (self.output_layer(hidden_states[:, 0].index_select(0, labels.before)),)


class ScoreModel(ValueModel):
    """A reward model, whose head has no bias."""

    bias = False


class MegatronCritic(MegatronEngine):
    """TrainEngine and ValueEngine (hpcrl.engines.train.training_engine) on the default process group.

    The head starts at zero unless the folder has one, as an exported critic does.
    """

    computes = frozenset({"values"})
    chunk_class = ValueModel
    names: Mapping[str, str] = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
    """Family -> transformers' class, as which the model is exported."""
    exported_as = "token classification model of {}, as which a critic is exported; use another model as critic.path"
    labels: Sequence[str] = ("LABEL_0",)

    def _describe(self) -> Description:
        found = super()._describe()
        if (family := found.shape.family) not in self.names:
            raise ValueError(f"model.path {self.model_path}: transformers has no {self.exported_as.format(family)}")
        return found

    def values(self, batch: Batch, micro_batches: MicroBatches) -> Tensor | None:
        """See ValueEngine. None on ranks before the last stage."""
        return self._by_row(batch, micro_batches, 1.0)

    def _outputs(self, objective: Objective, *found: Tensor) -> tuple[Outputs, Tensor]:
        (values,) = found
        return Outputs(torch.zeros_like(values), values=values), values.sum()

    def export_hf(self, folder: Path) -> None:
        """See TrainEngine: writes transformers' model for token or sequence classification."""
        self._gather()
        export(self.weights, self.model_path, Path(folder), self.dtype, "drop", self._exported_config())

    def _exported_config(self) -> dict[str, Any]:
        return {"architectures": [self.names[self.description.shape.family]], **label_keys(self.labels)}


class MegatronScorer(MegatronCritic):
    """The critic's engine for a reward model, see FSDP2Scorer."""

    chunk_class, head_bias = ScoreModel, False
    names = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    exported_as = "sequence classification model of {}, as which a reward model is exported; use another model"

    def __init__(self, *given: Any, labels: Sequence[str] = ("LABEL_0",), **named: Any):
        """As MegatronEngine. `labels` are the names of the heads."""
        self.labels, self.num_heads = labels, len(labels)
        chunk_class: Any = type(ScoreModel.__name__, (ScoreModel,), {"num_heads": self.num_heads})
        self.chunk_class = chunk_class
        super().__init__(*given, **named)

    def _describe(self) -> Description:
        found = super()._describe()
        self._padding = padding_id(self.model_path, found.shape.vocab_size)
        return found

    def _exported_config(self) -> dict[str, Any]:
        return {**super()._exported_config(), "pad_token_id": self._padding}
