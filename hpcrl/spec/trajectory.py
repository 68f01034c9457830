"""The table of all fields of a rollout. It defines what generator ranks keep and transfer, the trainer's Batch and its
checks, the HDF5 files and their reader, and the table in docs/rollouts.md. Imports no torch and no module of hpcrl.

Engines and algorithms add fields with declare(), in a module imported by every rank that handles the field:
`declare(Field("entropies", "float32", Level.TOKEN, Origin.TRAINING, "entropy of each token"))`. Files describe their
fields, so a reader needs no declaration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

MAX_REWARD = 1e30
"""Largest magnitude of a reward or score; sums of larger ones overflow in float32."""
TEXT = "text"
"""dtype of a field that holds one string per row."""


class Level(StrEnum):
    """The unit that has one value of a field."""

    TOKEN = "token"
    TURN = "turn"  # of the model, counted from 0 in each row
    ROW = "row"


class Origin(StrEnum):
    """Where a field is filled."""

    GENERATOR = "generator"  # by the generating rank, which keeps it until the rollout transfer
    SCORER = "scorer"  # by rewards and environments; sent through the controller
    PACKING = "packing"  # derived from other fields when a batch is formed
    TRAINING = "training"  # by a command on a batch; absent before it


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a rollout.

    Args:
        dtype: NumPy's name of the dtype in a Batch, or TEXT.
        optional: Whether a run may lack the field.
        wire: A smaller dtype for generators and transfers, if any.
        fill: Value for tokens that the model did not write.
        width: Numbers per value; if above 1, arrays have a second dimension.
        any_width: Whether arrays may have a second dimension of any size.
        ragged: Whether a row has any number of values, also none; declare() adds `<name>_counts` with that number.
        stored: Whether files of rollouts have it.
    """

    name: str
    dtype: str
    level: Level
    origin: Origin
    meaning: str
    optional: bool = False
    wire: str = ""
    fill: float = 0
    width: int = 1
    any_width: bool = False
    ragged: bool = False
    stored: bool = True

    def shape(self, count: int) -> tuple[int, ...]:
        """Shape of an array of this many values."""
        return (count,) if self.width == 1 else (count, self.width)

    @property
    def counts(self) -> Field:
        """For a ragged field, the field with each row's number of values."""
        meaning = f"values of {self.name} per row"
        return Field(f"{self.name}_counts", "int64", Level.ROW, self.origin, meaning, optional=self.optional)

    @property
    def travels_as(self) -> str:
        """dtype of transfers between ranks."""
        return self.wire or self.dtype


FIELDS: dict[str, Field] = {}
"""All fields by name, in the order of transfers and documentation."""


def declare(*fields: Field) -> None:
    """Add fields. ValueError for a name that is not an identifier, is reserved, or was declared differently before. A
    field is optional only as long as all its declarations are: the reader of a file declares every field so."""
    for given in fields:
        known = FIELDS.get(given.name, given)
        field = replace(given, optional=given.optional and known.optional)
        if replace(known, optional=field.optional) != field:
            raise ValueError(f"field {field.name!r} is declared twice and differently: {known} and {field}")
        if not field.name.isidentifier() or field.name in _RESERVED:
            raise ValueError(f"field {field.name!r}: this name cannot be used; take another identifier")
        if field.dtype == TEXT and field.level is not Level.ROW:
            raise ValueError(f"field {field.name!r}: texts are fields of rows, not of a {field.level}")
        if field.ragged and (field.dtype == TEXT or field.level is not Level.ROW or field.origin is Origin.SCORER):
            raise ValueError(f"field {field.name!r}: ragged fields hold numbers of rows, and scorers cannot send them")
        if field.ragged:
            declare(field.counts)
        FIELDS[field.name] = field


def fields_of(origin: Origin, *levels: Level) -> list[Field]:
    """The numeric fields of an origin and of these levels (none: all)."""
    return [
        field
        for field in FIELDS.values()
        if field.origin is origin and field.dtype != TEXT and (not levels or field.level in levels)
    ]


def generated_fields(truncated: bool, by_steps: bool, *levels: Level) -> list[Field]:
    """The numeric fields that a run's generators fill, with `truncated` sampling (top-p, top-k or min-p) or with an
    environment `by_steps`, whose turns are separate sequences."""
    present = {"states": by_steps}
    return [f for f in fields_of(Origin.GENERATOR, *levels) if not f.optional or present.get(f.name, truncated)]


_RESERVED = {
    *(
        "cu_seqlens",
        "cu_turns",
        "columns",
        "texts",
        "pictures",
        "facts",
        "lengths",
        "row_ids",
        "num_sequences",
        "num_tokens",
    ),
    *("cu_segments", "segment_lengths", "segment_ids", "segment_indices", "cu"),
    *("id", "finish_reason", "reward", "score", "error", "text"),
}
"""Names with another meaning in Batch, Sample or the files."""

declare(
    Field("token_ids", "int64", Level.TOKEN, Origin.GENERATOR, "prompt and response", wire="int32"),
    Field("loss_mask", "bool", Level.TOKEN, Origin.GENERATOR, "true: trained on; written by the model or an expert"),
    Field(
        "gen_logprobs",
        "float32",
        Level.TOKEN,
        Origin.GENERATOR,
        "the generator's log-softmax(logits / T), without truncation",
    ),
    Field(
        "versions",
        "int32",
        Level.TOKEN,
        Origin.GENERATOR,
        "version of the weights that generated the token; -1: none, also in an expert's turns",
        fill=-1,
    ),
    Field("turn_ids", "int32", Level.TOKEN, Origin.GENERATOR, "turn of the model, from 0; -1: the prompt", fill=-1),
    Field(
        "gen_logprobs_behaviour",
        "float32",
        Level.TOKEN,
        Origin.GENERATOR,
        "log-probs under the distribution truncated by top-p, top-k or min-p; only with truncation",
        optional=True,
    ),
    Field(
        "states",
        "int32",
        Level.TOKEN,
        Origin.GENERATOR,
        "at the first token of each turn's own prompt a hash of what the environment showed last, else 0; only if "
        "episodes are by steps",
        optional=True,
    ),
    Field("status", "int8", Level.ROW, Origin.GENERATOR, "why the response ended: 0 stop, 1 length, 2 abort"),
    Field(
        "messages",
        TEXT,
        Level.ROW,
        Origin.GENERATOR,
        "prompt, turns and messages of environments and tools, in chat form as JSON",
        optional=True,
    ),
    Field("rewards", "float32", Level.ROW, Origin.SCORER, "reward, from which advantages are computed"),
    Field("scores", "float32", Level.ROW, Origin.SCORER, "score, from which accuracy is computed"),
    Field(
        "baselines",
        "float32",
        Level.ROW,
        Origin.SCORER,
        "reward of the greedy response to the row's prompt, which is not trained on; only with a greedy baseline",
        optional=True,
    ),
    Field(
        "decoupled_rewards",
        "float32",
        Level.ROW,
        Origin.SCORER,
        "weighted sum of the parts of the reward, each normalised within the group; only with algorithm=gdpo",
        optional=True,
    ),
    Field(
        "failed",
        "bool",
        Level.ROW,
        Origin.SCORER,
        "true: the environment of the episode has failed, so nothing is learned from the row; only if one has in the "
        "step",
        optional=True,
    ),
    Field(
        "turn_rewards",
        "float32",
        Level.TURN,
        Origin.SCORER,
        "rewards of turns, which add up to the row's reward",
        optional=True,
    ),
    Field(
        "token_rewards",
        "float32",
        Level.TOKEN,
        Origin.SCORER,
        "rewards of tokens, which add up to the turn's reward; the turn's last token has the rest",
        optional=True,
    ),
    Field(
        "position_ids",
        "int64",
        Level.TOKEN,
        Origin.PACKING,
        "position in the sequence, from 0 in each turn by steps",
        any_width=True,
    ),
    Field("group_ids", "int64", Level.ROW, Origin.PACKING, "prompt of the row, the same in all rows of its group"),
    Field("sample_ids", "int64", Level.ROW, Origin.PACKING, "`uid << 24 | attempt << 14 | member`"),
    Field("weights", "float32", Level.ROW, Origin.PACKING, "weight of the row in the loss"),
    Field(
        "chosen",
        "bool",
        Level.ROW,
        Origin.PACKING,
        "true: the chosen part of a pair or a good answer, false: the rejected part or a bad answer; both parts of a "
        "pair have the same group id; only of rows that are pairs or labelled",
        optional=True,
    ),
    Field(
        "targets",
        "float32",
        Level.TOKEN,
        Origin.PACKING,
        "at trained tokens what the value before the token learns: a pair's margin, a score (with several heads, the "
        "score of each) or a step's label; only of rows for a value head",
        optional=True,
        any_width=True,
    ),
    Field(
        "on_policy",
        "bool",
        Level.TOKEN,
        Origin.TRAINING,
        "true: generated with the weights that are trained, on a KV cache of only these; only in rollouts of this run",
    ),
    Field("old_logprobs", "float32", Level.TOKEN, Origin.TRAINING, "the trainer's log-probs before the step"),
    Field(
        "old_entropies",
        "float32",
        Level.TOKEN,
        Origin.TRAINING,
        "the trainer's entropies before the step, nats; only with `algorithm.entropy_share`",
    ),
    Field("ref_logprobs", "float32", Level.TOKEN, Origin.TRAINING, "the reference's log-probs"),
    Field(
        "teacher_topk_ids",
        "int32",
        Level.TOKEN,
        Origin.TRAINING,
        "the teacher's k most probable tokens, descending, [T, k]; only with a teacher's top-k; not in files",
        optional=True,
        any_width=True,
        stored=False,
    ),
    Field(
        "teacher_topk_logprobs",
        "float32",
        Level.TOKEN,
        Origin.TRAINING,
        "the teacher's log-softmax(logits / T) of these tokens, [T, k]; only with a teacher's top-k; not in files",
        optional=True,
        any_width=True,
        stored=False,
    ),
    Field(
        "teacher_states",
        "float32",
        Level.TOKEN,
        Origin.TRAINING,
        "the teacher's state before the token, after the final norm, [T, D]; only with a teacher's whole vocabulary; "
        "not in files",
        optional=True,
        any_width=True,
        stored=False,
    ),
    Field(
        "teachers",
        "int32",
        Level.ROW,
        Origin.TRAINING,
        "number of the teacher that judged the row; only with several teachers' whole vocabularies; not in files",
        optional=True,
        stored=False,
    ),
    Field("values", "float32", Level.TOKEN, Origin.TRAINING, "the critic's values"),
    Field("advantages", "float32", Level.TOKEN, Origin.TRAINING, "advantage of each token"),
    Field("returns", "float32", Level.TOKEN, Origin.TRAINING, "returns of each token"),
    Field(
        "teacher_logprobs",
        "float32",
        Level.TOKEN,
        Origin.TRAINING,
        "the teacher's log-softmax(logits / T) of the token; only with `teacher.form=sampled`",
    ),
    Field(
        "policy_weights",
        "float32",
        Level.TOKEN,
        Origin.TRAINING,
        "weight of the policy loss, 1 if absent; only with `loss.DOMAIN.policy`",
    ),
    Field(
        "ce_weights",
        "float32",
        Level.TOKEN,
        Origin.TRAINING,
        "weight of the cross-entropy, 0 if absent; only with `loss.DOMAIN.ce`",
    ),
    Field(
        "divergence_weights",
        "float32",
        Level.TOKEN,
        Origin.TRAINING,
        "weight of the divergence from the teacher, 0 if absent; only with `loss.DOMAIN.divergence`",
    ),
    Field("marked", "bool", Level.TOKEN, Origin.TRAINING, "tokens for which Clip-Cov or KL-Cov changes the surrogate"),
    Field(
        "high_entropy",
        "bool",
        Level.TOKEN,
        Origin.TRAINING,
        "true: in the policy loss; only with `algorithm.entropy_share`",
    ),
    Field(
        "correction_scale",
        "float32",
        Level.ROW,
        Origin.TRAINING,
        "1 over the step's mean importance weight; only with `algorithm.correction_normalize`",
    ),
)
