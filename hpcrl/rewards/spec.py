"""The specifications of the built-in rewards, with their options."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from hpcrl.spec.fields import (
    NUMBER,
    Count,
    Float,
    NonNegative,
    Positive,
    PositiveFloat,
    SandboxLevel,
    Seconds,
    Section,
    Share,
)
from hpcrl.spec.kinds import RewardSpec
from hpcrl.spec.options import read_options
from hpcrl.spec.table import SpecError
from hpcrl.spec.tables import REWARDS


def _compiled(pattern: str | None) -> str | None:
    """The pattern. ValueError if it is not a regular expression."""
    import regex

    try:
        regex.compile(pattern or "")
    except regex.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    return pattern


class ExactMatchOptions(Section):
    """Options of the reward exact_match."""

    pattern: str | None = None
    """Regular expression; the answer is its last match (the first group, if any). null: all text after the thinking."""
    ignore_case: bool = True
    """Compare without regard to case."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        return _compiled(pattern)


class MathOptions(Section):
    """Options of the reward math."""

    require_boxed: bool = False
    """Accept only a box as the answer."""
    unevaluated: bool = False
    """Accept an answer that still has to be computed, such as 20 + 35 for 55."""
    max_answer_chars: Annotated[int, Field(ge=1, le=4000), NUMBER] = 300
    """Maximum answer length, characters; a longer answer is wrong, a longer gold answer an error."""


class ChoiceOptions(Section):
    """Options of the reward choice."""

    soft: bool = False
    """Boxed letter: 1 if right, -0.5 if wrong; letter outside a box: 0.5 or -1. false: 1 or 0."""


class F1Options(Section):
    """Options of the reward f1."""

    threshold: Share = 1.0
    """The score is 1 if the F1 is at least this; the reward is the F1."""


class NumericOptions(Section):
    """Options of the reward numeric."""

    relative: Share = 0.0
    """Allowed difference, as a share of the larger number."""
    absolute: NonNegative = 1e-6
    """Allowed difference."""
    words: bool = False
    """An answer without digits may have an English number word from zero to ninety-nine, as in counting questions."""


class GroundingOptions(Section):
    """Options of the reward grounding."""

    measure: Literal["iou", "giou", "point"] = "iou"
    """giou: generalised IoU, as (GIoU + 1) / 2. point: 1 if the response's point or its box's centre is in the box."""
    threshold: Annotated[float, Field(gt=0, le=1), NUMBER] | None = None
    """The reward is the F1 of boxes whose IoU or GIoU is at least this; null: the IoU, or (GIoU + 1) / 2, itself."""
    response_coordinates: Literal["same", "relative_1000"] = "same"
    """same: as the answer's. relative_1000: from 0 to 1000 over width and height of the picture, as Qwen3-VL answers;
    the answer is in pixels, and the row has image_size, [width, height], or width and height."""

    @model_validator(mode="after")
    def _reads_threshold(self) -> Self:
        if self.measure == "point" and self.threshold is not None:
            raise ValueError(f"threshold={self.threshold:g}: not read with measure=point")
        return self


class RegexOptions(Section):
    """Options of the reward regex."""

    pattern: str | None = None
    """Regular expression; null: the row's answer is one."""
    whole: bool = False
    """The whole response must match; false: a match anywhere is enough."""
    with_thinking: bool = False
    """Whether to search the thinking too."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        return _compiled(pattern)


class JsonSchemaOptions(Section):
    """Options of the reward json_schema."""

    json_schema: dict[str, Any] | None = None
    """JSON schema; null: the row's answer is one."""


class LengthOptions(Section):
    """Options of the reward length."""

    max_tokens: Positive
    """Length in tokens from which the reward is -1; usually rollout.max_new_tokens."""
    buffer_tokens: Positive
    """The reward falls from 0 to -1 over this many tokens before max_tokens."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(f"buffer_tokens={self.buffer_tokens} is above max_tokens={self.max_tokens}")
        return self


class RepetitionOptions(Section):
    """Options of the reward repetition."""

    ngram: Positive = 3
    """Number of words per n-gram."""


class TagsOptions(Section):
    """Options of the reward tags."""

    tags: Annotated[list[str], Field(min_length=1)] = ["think"]
    """Names of the tags, in order."""
    answer_after: bool = True
    """Whether text must follow the last tag; false: no text may."""


class LanguageOptions(Section):
    """Options of the reward language."""

    language: str | None = None
    """Code of ISO 639-1, such as en; null: the language of the prompt."""
    with_thinking: bool = False
    """Whether the thinking counts too."""


class PartOptions(Section):
    """A part of the reward composed."""

    name: str
    """Built-in reward."""
    options: dict[str, Any] = {}
    """The reward's options."""
    weight: Float = 1.0
    """Factor of the part's reward."""
    gate: bool = False
    """Whether the part's score must be 1; only with rule=gate."""


class ComposedOptions(Section):
    """Options of the reward composed."""

    parts: Annotated[dict[str, PartOptions], Field(min_length=1)]
    """Name -> name, options, weight and gate of each part. The first part gives the score."""
    rule: Literal["sum", "product", "gate"] = "sum"
    """sum: weighted; product: without weights; gate: the weighted sum where every gate has score 1, else `closed`."""
    closed: Float = 0.0
    """The reward if a gate's score is not 1."""


class IFEvalOptions(Section):
    """Options of the reward ifeval."""

    reading: Literal["strict", "loose"] = "strict"
    """loose: an instruction also counts if the response follows it without its first or last line, or its asterisks."""
    partial: bool = False
    """The reward is the share of instructions that are followed; false: 1 if all are followed, else 0."""


class CodeOptions(Section):
    """Options of the reward code."""

    language: Literal["python", "cpp", "bash"] = "python"
    """Language of the code; cpp and bash with cases of standard input and output only."""
    partial: bool = False
    """The reward is the share of cases that pass; false: 1 if all pass, else 0."""
    case_timeout_s: Seconds = 4.0
    """Timeout of a case, seconds; all cases of a response together have 0.8 x reward.*.timeout_s."""
    min_level: SandboxLevel = "L1"
    """Minimum isolation level for running code (docs/security.md); L0 is unsafe."""
    memory_mib: Annotated[int, Field(ge=64), NUMBER] = 1024
    """Memory of all processes of a case, and address space of each, MiB."""
    max_processes: Count = 16
    """Processes and threads of a case; 1: threads only, 16 of them at most."""
    max_file_mib: Positive = 16
    """Maximum size of a file, MiB; of all files of a case four times this."""
    max_output_kib: Positive = 1024
    """Maximum output of a case, KiB."""


class ReasoningGymOptions(Section):
    """Options of the reward reasoning_gym."""

    threshold: Share | None = None
    """The reward is 1 if the score is at least this, else 0; null: the reward is the score, with partial credit."""


class SortDigitsOptions(Section):
    """Options of the reward sort_digits."""

    partial: Share = 0.0
    """Maximum reward of a wrong answer, scaled by the share of digits in the right place."""


def is_shown_images(role: Any, images: Any, judge_sees: bool) -> bool:
    """Whether a judge with these values of JudgeSection gets images. judge_sees: judge.path takes images."""
    return images is True if role is None else judge_sees and images is not False


class JudgeSection(Section):
    """A judge of the reward judge."""

    role: Literal["judge"] | None = None
    """judge: the ranks of the run that serve the model of the section `judge`; null: url."""
    url: Annotated[str, Field(pattern=r"^https?://[^\s]+$")] | None = None
    """Address of an OpenAI-compatible endpoint, including /v1."""
    model: str | None = None
    """Name of the model at the endpoint; only with url."""
    api_key_env: str | None = None
    """Environment variable with the endpoint's key; null: no key."""
    temperature: NonNegative = 0.0
    """Sampling temperature."""
    max_tokens: Positive = 512
    """Maximum tokens of an answer; only with url. For role it is judge.max_new_tokens."""
    max_requests_per_s: PositiveFloat | None = None
    """Maximum requests per second of one worker process; null: no limit."""
    extra_body: dict[str, Any] = {}
    """Additional fields of the request."""
    images: bool | None = None
    """Whether the judge sees the images of prompts; null: with role, if judge.path takes images; with url, it does not.
    """

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.role is None) == (self.url is None):
            raise ValueError("give either url and model, or role: judge for the ranks of the run")
        if self.url is not None and self.model is None:
            raise ValueError("model: missing; the endpoint of url serves models by name")
        if self.role is not None and (unread := [k for k in ("model", "api_key_env") if getattr(self, k) is not None]):
            raise ValueError(f"{unread[0]}: not read with role, only with url")
        if self.role is not None and "max_tokens" in self.model_fields_set:
            raise ValueError(f"max_tokens={self.max_tokens}: not read with role; use judge.max_new_tokens")
        return self


class JudgeOptions(Section):
    """Options of the reward judge."""

    judges: Annotated[dict[str, JudgeSection], Field(min_length=1)]
    """Judges by name: role, or url, model and api_key_env; temperature, max_tokens, max_requests_per_s, extra_body,
    images."""
    vote: Literal["mean", "median", "majority"] = "mean"
    """How verdicts are combined; majority: 1 if more than half of them reach the threshold, else 0."""
    min_votes: Positive = 1
    """Minimum number of verdicts; with fewer, the response has an error."""
    threshold: Share = 0.5
    """The score is 1 if the vote is at least this; vote=majority compares each verdict, scaled to 0..1, with it."""
    verdict: Literal["number", "yes_no"] = "number"
    """Kind of verdict that judges are asked for."""
    scale: tuple[Float, Float] = (0.0, 10.0)
    """Lowest and highest number."""
    rubric_file: str | None = None
    """File with the rubric; null: a built-in rubric (correct, complete and helpful)."""
    template_file: str | None = None
    """File with the question's template: {rubric}, {prompt}, {answer} and {response}; null: a built-in template."""
    with_thinking: bool = False
    """Whether judges see the response's thinking."""
    max_chars: Annotated[int, Field(ge=100, le=1_000_000), NUMBER] = 20_000
    """Maximum length of each text that a judge sees, characters; of longer texts the middle is omitted."""
    request_timeout_s: Seconds = 60.0
    """Time for one request, seconds; requests are repeated until 90 % of the reward's timeout_s have passed."""
    backoff_s: Seconds = 1.0
    """Pause before the first repetition, seconds; it doubles with each, to 30 at most."""
    cache: str | None = None
    """Folder in which verdicts are cached for equal questions; null: no cache."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        low, high = self.scale
        if low >= high:
            raise ValueError(f"scale: the lowest number, {low:g}, must be below the highest, {high:g}")
        if self.min_votes > len(self.judges):
            raise ValueError(f"min_votes={self.min_votes} is above the number of judges, {len(self.judges)}")
        return self


class RewardModelOptions(Section):
    """Options of the reward reward_model."""

    shift: Float = 0.0
    """Subtracted from the model's score."""
    scale: Float = 1.0
    """Factor of the shifted score."""
    sigmoid: bool = False
    """The reward is the sigmoid of the scaled score."""
    threshold: Float = 0.0
    """The score, for accuracy metrics and filters, is 1 if the reward is at least this."""
    request_timeout_s: Seconds = 60.0
    """Time for one request, seconds; requests are repeated until 90 % of the reward's timeout_s have passed."""
    backoff_s: Seconds = 1.0
    """Pause before the first repetition, seconds; it doubles with each, to 30 at most."""


class FakeOptions(Section):
    """Options of the reward fake."""

    pass_rate: Share = 0.5
    """Share of responses with reward 1."""
    latency_s: NonNegative = 0.0
    """Seconds to score one response."""


EXACT_MATCH = RewardSpec(
    about="Compares the answer with the ground truth, up to white space, a final full stop and, by default, case.",
    make="hpcrl.rewards.builtin.exact_match:ExactMatchReward",
    section=ExactMatchOptions,
    compares_answer=True,
)

MATH = RewardSpec(
    about="Compares the final answer with the gold answer mathematically.",
    make="hpcrl.rewards.builtin.math:MathReward",
    section=MathOptions,
    compares_answer=True,
)

CHOICE = RewardSpec(
    about="The option letter of multiple choice.",
    make="hpcrl.rewards.builtin.choice:ChoiceReward",
    section=ChoiceOptions,
    compares_answer=True,
)

NUMERIC = RewardSpec(
    about="A number within a tolerance.",
    make="hpcrl.rewards.builtin.numeric:NumericReward",
    section=NumericOptions,
    compares_answer=True,
)

GROUNDING = RewardSpec(
    about="Boxes or points in a picture, by IoU, generalised IoU or point in box.",
    make="hpcrl.rewards.builtin.grounding:GroundingReward",
    section=GroundingOptions,
    compares_answer=True,
)

F1 = RewardSpec(
    about="F1 of the words of the answer, as in SQuAD.",
    make="hpcrl.rewards.builtin.f1:F1Reward",
    section=F1Options,
    compares_answer=True,
)

REGEX = RewardSpec(
    about="Whether a regular expression, of the options or the row, is found.",
    make="hpcrl.rewards.builtin.pattern:RegexReward",
    section=RegexOptions,
)

JSON_SCHEMA = RewardSpec(
    about="Whether the response is JSON of a schema, of the options or the row.",
    make="hpcrl.rewards.builtin.pattern:JsonSchemaReward",
    section=JsonSchemaOptions,
)

IFEVAL = RewardSpec(
    about="The 25 verifiable instructions of IFEval.",
    make="hpcrl.rewards.builtin.ifeval:IFEvalReward",
    section=IFEvalOptions,
)

CODE = RewardSpec(
    about="Runs the response's code in a sandbox on the row's test cases.",
    make="hpcrl.rewards.builtin.code:CodeReward",
    section=CodeOptions,
)

LENGTH = RewardSpec(
    about="A negative reward for responses near the token limit.",
    make="hpcrl.rewards.builtin.shaping:LengthReward",
    section=LengthOptions,
)

REPETITION = RewardSpec(
    about="Minus the share of repeated n-grams.",
    make="hpcrl.rewards.builtin.shaping:RepetitionReward",
    section=RepetitionOptions,
)

TAGS = RewardSpec(
    about="Whether the response has the tags, such as <think>, in order.",
    make="hpcrl.rewards.builtin.shaping:TagsReward",
    section=TagsOptions,
)

LANGUAGE = RewardSpec(
    about="Whether the response is in the configured language, else in the prompt's language.",
    make="hpcrl.rewards.builtin.shaping:LanguageReward",
    section=LanguageOptions,
)


def _roles_of_parts(options: Mapping[str, Any]) -> Iterator[str]:
    parts = options.get("parts")
    for part in parts.values() if isinstance(parts, Mapping) else ():
        if isinstance(part, Mapping) and isinstance(name := part.get("name"), str):
            with contextlib.suppress(SpecError):
                given = part.get("options")
                yield from REWARDS[name].asks(given if isinstance(given, Mapping) else {})


def _part_weights(options: Mapping[str, Any]) -> dict[str, float]:
    composed = read_options(ComposedOptions, options)
    if composed.rule != "sum":
        raise ValueError(f"options.rule: {composed.rule} has no parts that can be normalised separately; use sum")
    return {name: part.weight for name, part in composed.parts.items()}


def _parts_shown_images(options: Mapping[str, Any], judge_sees: bool) -> bool:
    parts = options.get("parts")
    for part in parts.values() if isinstance(parts, Mapping) else ():
        if isinstance(part, Mapping) and isinstance(name := part.get("name"), str) and name in REWARDS:
            given = part.get("options")
            if REWARDS[name].shown_images(given if isinstance(given, Mapping) else {}, judge_sees):
                return True
    return False


COMPOSED = RewardSpec(
    about="The sum, the product or a gated sum of other rewards.",
    make="hpcrl.rewards.builtin.composed:ComposedReward",
    asks=_roles_of_parts,
    shown_images=_parts_shown_images,
    section=ComposedOptions,
    part_weights=_part_weights,
)

REASONING_GYM = RewardSpec(
    about="reasoning-gym's own verifiers.",
    make="hpcrl.rewards.builtin.reasoning_gym:ReasoningGymReward",
    section=ReasoningGymOptions,
    compares_answer=True,
)

SORT_DIGITS = RewardSpec(
    about="The reward of the built-in task sort_digits.",
    make="hpcrl.rewards.builtin.sort_digits:SortDigitsReward",
    section=SortDigitsOptions,
    compares_answer=True,
)


def _roles_of_judges(options: Mapping[str, Any]) -> Iterator[str]:
    judges = options.get("judges")
    for judge in judges.values() if isinstance(judges, Mapping) else ():
        if isinstance(judge, Mapping) and judge.get("role") == "judge":
            yield "judge"


def _judges_shown_images(options: Mapping[str, Any], judge_sees: bool) -> bool:
    judges = options.get("judges")
    return any(
        is_shown_images(judge.get("role"), judge.get("images"), judge_sees)
        for judge in (judges.values() if isinstance(judges, Mapping) else ())
        if isinstance(judge, Mapping)
    )


JUDGE = RewardSpec(
    about="The vote of language models, on ranks of the run or behind OpenAI-compatible endpoints, by a rubric.",
    make="hpcrl.rewards.builtin.judge:JudgeReward",
    asks=_roles_of_judges,
    shown_images=_judges_shown_images,
    section=JudgeOptions,
)

REWARD_MODEL = RewardSpec(
    about="The score of a reward model with a scalar head, on ranks of the run.",
    make="hpcrl.rewards.builtin.reward_model:RewardModelReward",
    asks=lambda options: ("reward_model",),
    section=RewardModelOptions,
)

NONE = RewardSpec(
    about="No task: 0 for every response, without an answer; for pipelines that need no reward (distill, generate).",
    make="hpcrl.rewards.builtin.none:NoReward",
)

FAKE = RewardSpec(
    about="A random reward, for tests without a task.",
    make="hpcrl.rewards.builtin.fake:FakeReward",
    section=FakeOptions,
)

UNSCORED = "none"
"""Its name."""

FUNCTION = RewardSpec(
    about="A user-defined function, called with the signature of verl, TRL, OpenRLHF, NeMo-RL or hpcrl, or a rubric.",
    make="hpcrl.rewards.function:FunctionReward",
    imports_code="function",
    scores_in_unit_interval=False,
)
