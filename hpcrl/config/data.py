"""Where prompts come from: the section `data`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from hpcrl.spec.fields import NUMBER, Positive, Section, Share

MAX_ROWS = 1 << 24
"""Maximum rows of a generated source: the order of an epoch is kept in memory."""


class DataSource(Section):
    """One source of prompts: files (jsonl, json, csv, tsv, parquet, arrow), a benchmark (`benchmark:NAME`), or
    generated: `task:NAME` (built in), `reasoning_gym:NAME`, `env:DOMAIN` (starts of episodes) or `expert:NAME`
    (episodes of a built-in environment's expert)."""

    path: str
    """File, pattern, folder, name of a data set in the local Hugging Face cache, benchmark:NAME, task:NAME,
    reasoning_gym:NAME, env:DOMAIN or expert:NAME."""
    domain: str | None = None
    """Domain of all rows of this source; null: each row's own, from the column data.domain_key."""
    size: Annotated[int, Field(ge=1, lt=MAX_ROWS), NUMBER] | None = None
    """Rows per epoch of a generated source."""
    options: dict[str, Any] = {}
    """Arguments of a generated source's task; of a benchmark, file and template."""


def _one_or_many(value: Any) -> str:
    return "<many>" if isinstance(value, list | tuple) else "<one>"


def _path_or_source(value: Any) -> str:
    return "<source>" if isinstance(value, dict | DataSource) else "<path>"


# Tags keep an error in one branch of a union; angle brackets distinguish them from keys.
Source = Annotated[
    Annotated[str, Tag("<path>")] | Annotated[DataSource, Tag("<source>")],
    Discriminator(_path_or_source),
]
Sources = Annotated[
    Annotated[str, Tag("<one>")] | Annotated[list[Source], Field(min_length=1), Tag("<many>")],
    Discriminator(_one_or_many),
]


NOT_VARIABLES = {
    **dict.fromkeys(("messages", "conversation"), "a row has its messages itself"),
    "tools": "a row has them in its column tools",
    "chat_template": "put the template into the model folder (chat_template.jinja)",
    **dict.fromkeys(
        (
            "add_generation_prompt",
            "continue_final_message",
            "tokenize",
            "tokenizer_kwargs",
            "padding",
            "truncation",
            "max_length",
            "return_tensors",
            "return_dict",
            "return_assistant_tokens_mask",
        ),
        "hpcrl sets how a prompt is rendered",
    ),
}
"""Arguments of transformers' apply_chat_template() that are not template variables -> the remedy."""


def _variables(given: dict[str, Any]) -> dict[str, Any]:
    """ValueError names an argument that is not a variable."""
    for name in given:
        if name in NOT_VARIABLES:
            raise ValueError(f"variables of a chat template, and {name} is not one ({NOT_VARIABLES[name]})")
    return given


class DataConfig(Section):
    """Where prompts come from and how a row is read."""

    train: Sources | None = "task:sort_digits"
    """File (jsonl, json, csv, tsv, parquet, arrow), pattern, folder, name of a cached data set of the hub, task:NAME,
    reasoning_gym:NAME, env:DOMAIN, expert:NAME, or a list of these or of {path, domain, size, options}; null, in a run
    that trains nothing (pipeline=evaluate): none."""
    val: Sources | None = None
    """Validation prompts, in the same forms, or benchmark:NAME; null: no evaluation."""
    prompt_key: str | None = None
    """Column of the prompt; null: prompt, messages, conversations, question, problem or instruction, if it exists."""
    answer_key: str | None = None
    """Column of the answer; null: answer, ground_truth, label, solution, reward_model.ground_truth (verl)."""
    domain_key: str = "tag"
    """Column of the domain."""
    chosen_key: str = "chosen"
    """Column of the better answer of a pair."""
    rejected_key: str = "rejected"
    """Column of the worse answer of a pair."""
    label_key: str = "label"
    """Column that says whether the answer of a labelled row is good: true or false, or the integers 1 or 0."""
    system_prompt: str | None = None
    """System message for every prompt without one; null: none. An empty text replaces the chat template's own system
    message by an empty one."""
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_variables)] = {}
    """Variables for every rendering of the policy's chat template, such as enable_thinking=false; a row's column of
    this name overrides it."""
    max_prompt_tokens: Positive = 1024
    """Maximum prompt length, tokens."""
    max_pixels: Positive | None = None
    """Shrink larger images to at most this number of pixels; null: to the maximum in the model's
    preprocessor_config.json."""
    overlong_prompts: Literal["drop", "truncate", "error"] = "drop"
    """What to do with longer prompts."""
    max_sequence_tokens: Positive | None = None
    """Maximum length of a row's prompt and answer together in a pipeline that learns from answers, tokens; null: the
    model's context (max_position_embeddings)."""
    overlong_sequences: Literal["drop", "keep_start", "keep_end", "error"] = "drop"
    """What to do with longer ones. keep_start: cut the end of the answer, as TRL does. keep_end: cut the beginning of
    the prompt, equally in both parts of a pair. A row whose answer would be gone, or cut at its beginning, is dropped,
    and so are, with keep_end, rows with images."""
    unusable_rows: Literal["error", "drop"] = "error"
    """What to do with rows of data.train from which a pipeline that learns from answers cannot learn, such as equal or
    tied pairs and empty answers. drop: they are left out and counted, and the first ones are named."""
    shuffle: bool = True
    """Shuffle every epoch, with the run's seed."""
    domain_interleave_probs: dict[str, Share] = {}
    """Share of each domain in every rollout batch, even if groups are filtered or fail; empty: proportional to the
    sizes of the sources."""
