"""The critic on FSDP2: the decoder of a causal language model with a linear head, which gives each token a value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import GenericForTokenClassification

from hpcrl.algorithms.interface import Objective, Outputs
from hpcrl.config import Config
from hpcrl.engines.hf_folder import padding_id
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine, arguments, spread
from hpcrl.engines.train.fsdp2.exchange import assemble
from hpcrl.engines.train.fsdp2.images import ImageInputs
from hpcrl.engines.train.fsdp2.logits import token_logprobs
from hpcrl.engines.train.fsdp2.model import PackedCausalLM, empty_model, read_model
from hpcrl.engines.train.fsdp2.model_kind import HEAD, Kind, body_of
from hpcrl.engines.train.fsdp2.packed_attention import PackedLayout
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.models.head_labels import label_keys
from hpcrl.rollout.batch import Batch, MicroBatches

CRITIC = Kind(
    AutoModelForTokenClassification,
    "critic (transformers' model for token classification)",
    MappingProxyType({"num_labels": 1}),
    frozenset({f"{HEAD}.weight", f"{HEAD}.bias"}),
)


SCORER = Kind(
    AutoModelForSequenceClassification,
    "reward model (transformers' model for sequence classification)",
    MappingProxyType({"num_labels": 1}),
    frozenset({f"{HEAD}.weight"}),
)


def make(config: Config, model_path: Path, total_steps: int) -> FSDP2Critic:
    """The critic's engine; `config` is Config.of_critic(), or that of a pipeline that trains a head. Collective over
    the default group."""
    own = config.trainer.section(FSDP2Config)
    given = arguments(config, total_steps)
    if scores_sequences(config):
        return FSDP2Scorer(config.trainer, model_path, own=own, labels=labels_of(config), **given)
    return FSDP2Critic(config.trainer, model_path, own=own, **given)


def labels_of(config: Config) -> tuple[str, ...]:
    """The names of a reward model's heads; none for one head without a name."""
    return () if config.head_training.heads == 1 else tuple(config.head_training.labels)


def scores_sequences(config: Config) -> bool:
    """Whether the model is exported for sequence classification: a reward model, except one that scores steps."""
    return config.trains_head and config.head_training.rows != "steps"


def add_critic_class(model_path: Path) -> None:
    """Add the critic's class for a vision-language model, of which transformers has none, to
    AutoModelForTokenClassification."""
    config = type(AutoConfig.from_pretrained(model_path, local_files_only=True))
    tables: tuple[Any, ...] = (AutoModel._model_mapping, AutoModelForImageTextToText._model_mapping)
    base, seeing = (table[config] for table in tables)
    name = f"{base.__name__.removesuffix('Model')}ForTokenClassification"
    made = type(name, (GenericForTokenClassification, base.__mro__[1]), {"config_class": config})
    AutoModelForTokenClassification.register(config, made, exist_ok=True)
    # Files name tensors as for the vision-language model.
    renamings = map(get_checkpoint_conversion_mapping, (seeing.__name__, config.model_type))
    register_checkpoint_conversion_mapping(name, next(filter(None, renamings), []), overwrite=True)


class PackedCritic(PackedCausalLM):
    """The critic's model. For the packing probe (hpcrl.engines.train.fsdp2.probe), it is a language model that projects
    with its embedding, since a new head's values are all zero and would show no differences."""

    other_forwards = ("own_logprobs", "values")

    def in_float32(self) -> Iterator[nn.Module]:
        """See PackedCausalLM."""
        yield self.hf.get_submodule(HEAD)

    def projection(self) -> tuple[Tensor, Tensor | None]:
        embedding: Any = self.hf.get_input_embeddings()
        return embedding.weight, None

    def own_logprobs(self, token_ids: Tensor) -> Tensor:
        """See PackedCausalLM."""
        self._begin(None)
        hidden = body_of(self.hf)(input_ids=token_ids[None], use_cache=False).last_hidden_state[0, :-1]
        weight, bias = self.projection()
        return token_logprobs(
            hidden,
            weight,
            bias,
            token_ids[1:],
            head=self.head,
            temperature=1.0,
            chunk_tokens=self.chunk_tokens,
            entropy=False,
        )[0]

    def values(
        self,
        token_ids: Tensor,
        positions: Tensor,
        layout: PackedLayout | None,
        before: Tensor,
        images: ImageInputs | None,
    ) -> Tensor:
        """float32 [N], or [N, heads] with several heads: the values of the states after the tokens `before`; arguments
        and ranks as in forward()."""
        states, mine = self._states(token_ids, positions, layout, before, images)
        values: Tensor = self.hf.get_submodule(HEAD)(states.float())
        values = values.sum(1) if values.shape[1] == 1 else values  # not a view, for FSDP
        return values if layout is None or mine is None else assemble(values, mine, len(before), layout.ranks.all)


class FSDP2Critic(FSDP2Engine):
    """TrainEngine and ValueEngine (hpcrl.engines.train.training_engine) on the default process group.

    The head is stored and computed in float32. It starts at zero unless the folder has one, as an exported critic does.
    With adapters, the whole head is trained and saved beside them, and exports are merged.
    """

    computes = frozenset({"values"})
    kind = CRITIC
    trains_routers = False
    model_class = tried_class = PackedCritic

    def _empty_model(self, dtype: torch.dtype) -> PreTrainedModel:
        if self.vision is not None:
            add_critic_class(self.model_path)
        return self._with_head(empty_model(self.model_path, dtype, self.kind))

    def _read_model(self, dtype: torch.dtype) -> PreTrainedModel:
        return self._with_head(read_model(self.model_path, dtype, self.kind))

    def _with_head(self, hf: PreTrainedModel) -> PreTrainedModel:
        if not isinstance(head := getattr(hf, HEAD, None), nn.Linear):
            raise ValueError(f"critic: the head of {hf.config.model_type} is not supported; take another model")
        head.float()
        return hf

    def _to_train(self, hf: PreTrainedModel, seed: int) -> PreTrainedModel:
        found = super()._to_train(hf, seed)
        if self.trainable:
            found.get_submodule(HEAD).requires_grad_(True)
        return found

    def _outputs(self, batch: Batch, objective: Objective) -> Outputs:
        values = self._values(batch)
        return Outputs(torch.zeros_like(values), values=values)

    def _values(self, batch: Batch) -> Tensor:
        """float32 [T], or [T, heads], 0 outside loss_mask."""
        inputs, places = self._inputs(batch)
        return spread(self.model.values(*inputs), places, batch)

    @torch.no_grad()
    def values(self, batch: Batch, micro_batches: MicroBatches) -> Tensor:
        """See ValueEngine."""
        return self._by_row(batch, micro_batches, self._values)


class FSDP2Scorer(FSDP2Critic):
    """The critic's engine for a reward model: its head has no bias and may have several labels, and its exports have a
    padding token, with which transformers finds a sequence's end."""

    kind = SCORER

    def __init__(self, *given: Any, labels: Sequence[str] = (), **named: Any):
        """As FSDP2Engine. `labels` are the names of the heads, if they have names or there are several."""
        if labels:
            self.kind = SCORER._replace(options=MappingProxyType(label_keys(labels)))
        super().__init__(*given, **named)

    def _with_head(self, hf: PreTrainedModel) -> PreTrainedModel:
        found = super()._with_head(hf)
        config = found.config.get_text_config()
        config.pad_token_id = padding_id(self.model_path, config.vocab_size)
        return found
