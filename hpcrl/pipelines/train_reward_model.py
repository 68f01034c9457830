"""Training of reward models on pairs of answers, answers with scores, or steps with labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hpcrl.config.head_training import HeadTrainingConfig
from hpcrl.spec.kinds import PipelineSpec
from hpcrl.spec.problems import Path, Problem
from hpcrl.spec.tables import TRAIN_ENGINES

if TYPE_CHECKING:
    from hpcrl.controller.context import Run


def _check(config: Any) -> Iterator[Problem]:
    cause, trainer = (("pipeline",),), config.trainer
    spec = TRAIN_ENGINES[config.train_engine]
    if not spec.make_critic:
        able = " or ".join(name for name, other in TRAIN_ENGINES.items() if other.selectable and other.make_critic)
        text = f"trainer.engine: {config.train_engine} has no value head, which a reward model needs; use {able}"
        yield Problem(("trainer", "engine"), text, cause)
    sees = config.model.path is None and config.model.tiny.takes_images
    refused = (
        (
            sees,
            ("model", "tiny", "architecture"),
            "transformers has no model of this family for sequence classification; use qwen2",
        ),
        (
            trainer.lora.rank > 0 and not spec.adapts_critic,
            ("trainer", "lora", "rank"),
            f"the {config.train_engine} trainer has no adapters below a value head; use 0, or trainer.engine=fsdp2",
        ),
        (bool(trainer.freeze), ("trainer", "freeze"), "a value head is trained with all weights; use []"),
        (trainer.head_dtype is not None, ("trainer", "head_dtype"), "a value head is always in float32; use null"),
        (config.model.mtp == "train", ("model", "mtp"), "a reward model has no prediction layers; use keep or drop"),
        (
            bool(config.data.chat_template_kwargs),
            ("data", "chat_template_kwargs"),
            "the role reward_model renders dialogues without variables; write them into the chat template",
        ),
    )
    if config.rm.heads != 1 and config.rm.rows != "scores":
        text = f"{len(config.rm.labels)} heads learn from a row's scores; use rm.rows=scores, or leave it out"
        yield Problem(("rm", "heads"), f"rm.heads: {text}", (*cause, ("rm", "rows")))
    for wrong, key, text in refused:
        if wrong:
            yield Problem(key, f"{'.'.join(key)}: {text}", cause)


def _unread(config: Any) -> Iterator[tuple[Path, Path, str]]:
    """Keys of generation, and of prompts."""
    cause = ("pipeline",)
    other = [("eval", key) for key in type(config.eval).model_fields if key != "num_prompts"]
    for path in (("algorithm",), ("env",), ("reward",), ("rollout",), ("generator",), *other):
        yield path, cause, "the reward_model pipeline generates nothing"
    for key in ("max_prompt_tokens", "overlong_prompts", "max_sequence_tokens", "overlong_sequences"):
        yield ("data", key), cause, "the length of dialogues is rm.max_tokens"
    if config.rm.rows != "pairs":
        yield ("rm", "center_coef"), ("rm", "rows"), f"rm.rows is {config.rm.rows}"
    if config.rm.rows != "steps":
        yield ("rm", "step_separator"), ("rm", "rows"), f"rm.rows is {config.rm.rows}"


SPEC = PipelineSpec(
    about="Training of a reward model on pairs, scores or labels of steps.",
    make="hpcrl.pipelines.train_reward_model:reward_model",
    section=HeadTrainingConfig,
    section_key="rm",
    check=_check,
    learns_from_rewards=False,
    objective="hpcrl.algorithms.scalar_objective:make",
    rows=lambda config: "pairs" if config.rm.rows == "pairs" else "answers",
    batch_size=lambda config: config.rm.batch_size,
    validates_rows=lambda config: True,
    unread=_unread,
    methods=lambda config: (f"on {config.rm.rows}",),
    trains_head=True,
)


def reward_model(run: Run) -> None:
    """Train the model of `run` to its last step; validate on the rows of data.val.

    In the background: roles on rank 0 work during every wait (Worker.run_pending).
    """
    if run.first_step == 0:
        run.log(0, run.evaluate(0))
    for step in run.steps():
        batch = run.rows.next(step)
        stats = run.trainer.update(batch)
        run.trainer.drop(batch)
        run.log(step, run.rows.stats, stats, run.evaluate(step))
        run.checkpoint.maybe_save(step)
