"""The sections of engines: `trainer`, `generator` and `judge`. Each contains a section of every engine in its table."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeVar

from pydantic import AfterValidator, Field

from hpcrl.config.part_names import own_section, section_name
from hpcrl.spec.fields import NUMBER, Natural, NonEmpty, NonNegative, Positive, PositiveFloat, Section, Share
from hpcrl.spec.freeze import freezable
from hpcrl.spec.lora import matched, regular
from hpcrl.spec.tables import GEN_ENGINES, TRAIN_ENGINES

S = TypeVar("S", bound=Section)


class LoRAConfig(Section):
    """Training low-rank adapters for frozen linear layers (LoRA, arXiv 2106.09685) instead of all weights."""

    rank: Annotated[int, Field(ge=0, le=512), NUMBER] = 0
    """Rank of the adapters; 0: train all weights."""
    alpha: PositiveFloat = 32.0
    """The product of an adapter's two matrices is multiplied by alpha / rank."""
    rank_pattern: dict[Annotated[str, AfterValidator(regular)], Annotated[int, Field(ge=1, le=512), NUMBER]] = {}
    """Ranks of some layers, by a regular expression for the end of their names ({k_proj: 4, "layers.0.mlp.*": 64}); the
    first that matches counts, as in peft."""
    alpha_pattern: dict[Annotated[str, AfterValidator(regular)], PositiveFloat] = {}
    """Values of alpha of some layers, as in rank_pattern. A layer's scale is its alpha / its rank."""
    dropout: Annotated[float, Field(ge=0, lt=1), NUMBER] = 0.0
    """Share of an adapter's inputs that is set to 0 in a training step; the rest is divided by 1 - dropout. Log-probs
    are computed without dropout. The draws depend on seed, step, micro-batch and rank only."""
    target_modules: Annotated[list[str], Field(min_length=1)] | None = None
    """Last parts of the names of linear layers that get an adapter ([q_proj, v_proj]); null: all linear layers of
    `parts`. The embedding, the vocabulary projection, and a mixture's routers never get an adapter."""
    parts: Annotated[list[Literal["decoder", "experts", "vision", "merger"]], Field(min_length=1)] = ["decoder"]
    """Parts of the model that get adapters. decoder: without experts; experts: the stacked matrices of a mixture, with
    an adapter for each expert (peft's target_parameters); vision: the vision tower without its merger; merger: the
    layers between tower and decoder. All other weights are frozen. With experts, generators get no adapters but all
    matrices that have one, merged."""

    def rank_of(self, module: str) -> int:
        """The rank of a layer's adapter."""
        return matched(self.rank_pattern, module, self.rank)

    def alpha_of(self, module: str) -> float:
        """The alpha of a layer's adapter."""
        return matched(self.alpha_pattern, module, self.alpha)

    def scale_of(self, module: str) -> float:
        """A layer's alpha / rank."""
        return self.alpha_of(module) / self.rank_of(module)

    @property
    def are_merged(self) -> bool:
        """Whether generators get matrices with adapters merged, since none applies adapters of experts."""
        return "experts" in self.parts

    @property
    def max_rank(self) -> int:
        """The largest rank that a layer can have."""
        return max([self.rank, *self.rank_pattern.values()])


class TrainerConfig(Section):
    """The training engine and its optimizer."""

    engine: str = "fsdp2"
    """Training engine."""
    optimizer: Literal["adamw", "adamw8bit", "muon", "adafactor"] = "adamw"
    """Optimizer of the layers' matrices; embedding, vocabulary projection, norms and biases use AdamW. muon: Muon,
    scaled to AdamW's learning rates (arXiv 2502.16982). adamw8bit: AdamW with moments in 8 bits (arXiv 2110.02861).
    adafactor: second moments by row and column (arXiv 1804.04235)."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    min_lr: NonNegative = 0.0
    """Final learning rate of a schedule."""
    lr_warmup_steps: Natural = 0
    """Optimizer steps of linear learning-rate warm-up."""
    lr_schedule: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    """Learning-rate schedule after the warm-up; wsd: constant, and linear to min_lr in the last lr_decay_steps
    (warm-up, stable, decay; arXiv 2404.06395)."""
    lr_decay_steps: Positive | None = None
    """Optimizer steps of the decay of lr_schedule=wsd; null: a tenth of all steps."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of matrices."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """AdamW's beta_1 and beta_2."""
    eps: Annotated[float, Field(gt=0, le=1), NUMBER] = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: Annotated[float, Field(gt=0, allow_inf_nan=True), NUMBER] = 1.0
    """Maximum gradient norm, to which gradients are clipped; inf: off."""
    max_tokens_per_micro_batch: Positive = 16384
    """Maximum tokens of one forward and backward pass on one rank."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype, by default bfloat16 if the configuration requests GPUs; the master weights have model.dtype. With
    lora, also the type of the frozen weights."""
    head_dtype: Literal["float32"] | None = None
    """Type of the vocabulary projection, also in the reference; null: param_dtype. float32 with param_dtype=bfloat16
    brings log-probs closer to the generator's (set generator.head_dtype to float32 as well)."""
    router_replay: bool = False
    """Mixture of experts: for each response token, replay the generator's choice of experts (arXiv 2510.11370)."""
    max_mismatch: Share | None = None
    """Maximum mean difference between the trainer's and the generator's probabilities of a step's tokens, counting only
    tokens from the weights being trained (mismatch/diff/mean); a step above it ends the run unsaved; null: no bound."""
    logits_chunk_tokens: Positive = 4096
    """Tokens per chunk of the vocabulary projection."""
    freeze: list[Annotated[str, AfterValidator(freezable)]] = []
    """Parameters that are not trained, as parts or as patterns of transformers' parameter names in which * stands for
    any characters (model.layers.[0-3].*). Parts: embeddings, with a tied vocabulary projection; router, of a mixture of
    experts; vision, the tower of a vision-language model without the merger; merger, the layers between the tower and
    the decoder (also called projector or connector)."""
    lora: LoRAConfig = LoRAConfig()
    """Low-rank adapters."""

    def section(self, kind: type[S]) -> S:
        """The section of the selected engine, which has this type."""
        return own_section(self, self.engine, TRAIN_ENGINES[self.engine], kind)

    def of_another_model(self) -> Self:
        """Without what the section sets for the policy only (TrainEngineSpec.policy_keys)."""
        spec = TRAIN_ENGINES[self.engine]
        if not spec.policy_keys:
            return self
        name = section_name(self.engine, spec)
        section = getattr(self, name)
        defaults = {key: type(section).model_fields[key].default for key in spec.policy_keys}
        return self.model_copy(update={name: section.model_copy(update=defaults)})


class GeneratorConfig(Section):
    """The generation engine of each replica."""

    engine: str = "native"
    """Generation engine."""
    max_num_seqs: Positive = 256
    """Maximum responses that a replica decodes at once."""
    max_requests: Positive | None = None
    """Maximum responses assigned to a replica, including those that wait for a slot; null: twice max_num_seqs."""
    decode_chunk_tokens: Positive = 16
    """Decode steps of a chunk; the inbox is read between two chunks."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and KV cache, by default bfloat16 if the configuration requests GPUs."""
    head_dtype: Literal["float32"] | None = None
    """Type of the vocabulary projection; null: dtype. float32 with dtype=bfloat16 brings log-probs closer to the
    trainer's (set trainer.head_dtype to float32 as well)."""

    def section(self, kind: type[S]) -> S:
        """The section of the selected engine, which has this type."""
        return own_section(self, self.engine, GEN_ENGINES[self.engine], kind)

    @property
    def most_requests(self) -> int:
        """max_requests, or its default."""
        return self.max_requests or 2 * self.max_num_seqs


class JudgeConfig(GeneratorConfig):
    """The model of the role judge and its engine, for rewards whose judge has `role: judge`. It is not trained."""

    path: NonEmpty | None = None
    """Folder in HF layout, with a tokenizer that has a chat template."""
    max_num_seqs: Positive = 32
    """Requests that a rank decodes at once."""
    max_requests: Positive | None = None
    """Requests that a rank accepts at once, including waiting ones; further requests are refused, and the reward
    repeats them; null: four times max_num_seqs."""
    decode_chunk_tokens: Positive = 4
    """Decode steps of a chunk; new requests join between two chunks."""
    max_prompt_tokens: Positive = 8192
    """Maximum length of a question, tokens; a longer one is refused, and the judge has no vote on its response."""
    max_new_tokens: Positive = 1024
    """Maximum length of an answer, tokens."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and KV cache, by default bfloat16 if the configuration requests GPUs."""
    head_dtype: Literal["float32"] | None = None
    """Type of the vocabulary projection; null: dtype."""

    @property
    def most_requests(self) -> int:
        """max_requests, or its default."""
        return self.max_requests or 4 * self.max_num_seqs
