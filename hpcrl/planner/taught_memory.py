"""Memory of what a teacher gives: its head and the divergence on trainer ranks, and fields of a step's tokens."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, RoleName
from hpcrl.config.teacher_paths import keys_of_teachers
from hpcrl.models.families import read_shape, shape_of
from hpcrl.models.shape import ModelShape
from hpcrl.planner.activations import FP32, INDEX, LOGITS_BLOCK, Tokens
from hpcrl.planner.memory_parts import BYTES, Part, samples_of_a_step
from hpcrl.spec.problems import dotted

HEAD = "teacher's head"
"""Name of the part that stays on the device when the rank's other weights are offloaded."""


def given_bytes(config: Config) -> int:
    """Bytes that a teacher gives about a token. CannotPlanError if they depend on a teacher's folder and it cannot be
    read."""
    if (divergence := config.divergence) is None:
        return 0
    match divergence.form:
        case "sampled":
            return FP32
        case "top_k":
            return 2 * FP32 * divergence.top_k
        case "full":
            return FP32 * states_width(config)


def states_width(config: Config) -> int:
    """Numbers of a token's state in the form full: the widest teacher's. CannotPlanError if a folder cannot be read."""
    return max(shape.hidden_size for shape in _taught_by(config))


def head_parts(config: Config) -> Iterator[Part]:
    """A trainer rank's copy of the teachers' output heads. CannotPlanError as given_bytes()."""
    if (divergence := config.divergence) is not None and divergence.form == "full":
        size = sum(shape.vocab_size * shape.hidden_size for shape in _taught_by(config))
        yield Part("trainer", HEAD, size * BYTES[config.trainer.param_dtype])


def field_parts(config: Config, layout: RoleLayout, role: RoleName) -> Iterator[Part]:
    """Host memory of a rank of teacher or trainer for the fields of its rows, which are there twice while they are
    assembled, three times if teachers of domains fill them; roles with equal ranks have one batch."""
    ranks = layout.ranks
    if config.divergence is None or (role == "teacher" and ranks["teacher"] == ranks["trainer"]):
        return
    rows = samples_of_a_step(config) + (config.imitation.num_rows if config.imitates else 0)
    of_rank = -(-rows // len(layout.division(role).groups))
    copies = 3 if config.teacher.paths else 2
    yield Part(role, "teacher's fields", copies * of_rank * config.max_row_tokens * given_bytes(config), on_host=True)


def divergence_bytes(config: Config, shape: ModelShape, tokens: Tokens, num_bytes: int) -> tuple[int, int]:
    """Bytes beside those of the log-probs in the head's forward and backward pass (logits_bytes): what the teacher gave
    about a micro-batch; states that are kept once more, with their gradient; the gradient of the matrix from the
    log-probs; and over the whole vocabulary a second chunk of logits, with several teachers a third, and four tensors
    of a block in place of the log-probs' two (COPIES in engines/train/fsdp2/token_divergence.py). `shape` has the
    rank's part of the vocabulary. CannotPlanError as given_bytes()."""
    divergence = config.divergence
    if divergence is None or divergence.form == "sampled":
        return 0, 0
    beside = tokens.predicted * given_bytes(config)
    chunk = 0
    if divergence.form == "top_k":  # ids as int64, and the slopes of all classes
        beside += tokens.predicted * divergence.top_k * INDEX
    else:
        numbers = min(config.trainer.logits_chunk_tokens, tokens.predicted) * shape.vocab_size
        further = max(0, min(4 * numbers, LOGITS_BLOCK) - 2 * min(numbers, LOGITS_BLOCK))
        chunk = (numbers * min(2, len(_taught_by(config))) + further) * FP32
    of_states, of_matrix = (count * shape.hidden_size * num_bytes for count in (tokens.predicted, shape.vocab_size))
    return beside + chunk, beside + chunk + of_states + of_matrix


def _taught_by(config: Config) -> list[ModelShape]:
    """The sizes of the different teachers. CannotPlanError as given_bytes()."""
    if config.teacher.source == "folder":
        return [shape_of(folder, dotted(keys[0])) for folder, keys in keys_of_teachers(config.teacher).items()]
    if config.model.path is None:
        return [read_shape(config.model.tiny.hf_config())]
    return [shape_of(config.model.path, "model.path")]
