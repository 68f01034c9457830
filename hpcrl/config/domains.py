"""The sections `reward` and `env`, one for each domain."""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from hpcrl.config.part_names import listed
from hpcrl.spec.fields import NUMBER, Count, ImportPath, Natural, Positive, Seconds, Section
from hpcrl.spec.tables import ENVS, REWARDS


class RewardConfig(Section):
    """The reward of one domain's rows: built-in, or `function`, an import path or file."""

    name: Annotated[str, AfterValidator(functools.partial(listed, REWARDS))] = "exact_match"
    """Built-in reward, function, or module:SPEC."""
    function: str | None = None
    """package.module:callable or file.py:callable, used with name=function."""
    signature: Literal["auto", "verl", "verl_batched", "trl", "openrlhf", "nemo_rl", "hpcrl"] = "auto"
    """How the function is called; auto: determined by its parameter names."""
    timeout_s: Seconds = 10.0
    """Timeout for one response, or one group if the reward scores groups, seconds; then its samples have an error."""
    num_processes: Count = 1
    """Worker processes per reward rank."""
    concurrency: Count = 64
    """Concurrent calls per worker process of an asynchronous reward."""
    options: dict[str, Any] = {}
    """Arguments of the reward."""


RunsIn = Literal["thread", "task", "process"]


class EnvConfig(Section):
    """The environment of one domain's prompts: built-in, or `class_path`, an import path or a file. The key `default`
    is for all domains without their own key; null: no environment, a single response."""

    name: Annotated[str, AfterValidator(functools.partial(listed, ENVS))] = "scripted"
    """Built-in environment, class, or module:SPEC."""
    class_path: ImportPath | None = None
    """package.module:Class or file.py:Class, used with name=class."""
    max_turns: Positive = 2
    """Maximum model turns per episode."""
    max_tokens: Positive | None = None
    """Maximum tokens that the model writes in an episode, over all turns; the turn that reaches it is the last."""
    max_sequence_tokens: Positive | None = None
    """Maximum tokens of an episode in one sequence: prompt, turns and observations (ROLL's sequence_length, verl's
    max_model_len). An observation that leaves no room for a full response (rollout.max_new_tokens) ends the episode as
    truncated. null: max_turns x (data.max_prompt_tokens + rollout.max_new_tokens)."""
    max_seconds: Seconds | None = None
    """Maximum seconds of an episode, including generation; the turn that exceeds it is the last."""
    long_observation: Literal["end", "shorten"] = "end"
    """Treatment of an observation that leaves no room for another turn. end: the episode ends with the reward so far,
    and with an error if max_sequence_tokens is null. shorten: the middle of its longest message is cut to make it
    fit."""
    episode: Literal["trajectory", "steps"] = "trajectory"
    """trajectory: an episode is one sequence, which grows with every turn. steps: every turn is a separate sequence,
    after a prompt that shows only the latest turns; it is trained with its episode's advantage."""
    history: Natural = 2
    """With episode=steps, number of earlier turns (observation and action) in a turn's prompt, which always includes
    the first prompt."""
    thinking: Literal["keep", "cut"] = "keep"
    """With episode=steps, how later prompts show the thinking of earlier turns. keep: as the chat template renders it;
    cut: they do not show it."""
    examples: Natural = 0
    """Example episodes before the first prompt, as messages of user and assistant; identical for all prompts."""
    examples_path: str | None = None
    """Dialogues (jsonl or parquet, as for data.train with pipeline=sft), of which the first ones are the examples;
    null: episodes of the environment's expert."""
    add_reward: bool = False
    """Also score each episode with the domain's reward and add this to the environment's rewards."""
    runs_in: RunsIn | None = None
    """thread: each turn is played in a thread of the env rank. task: reset() and step() are coroutines, and all turns
    are tasks of one event loop. process: each episode has its own process; if a turn exceeds timeout_s, this process
    and its children are killed. null: the environment class's `runs_in`, else thread."""
    num_threads: Count | None = None
    """Turns that an env rank plays concurrently; no limit with runs_in=task. null: 1 with deterministic=true; else at
    most 32, of which at most 1 (with processes, one per core) computes while the others wait for a network or a
    process. In threads, an environment's code must be thread-safe: use 1 if it is not."""
    memory_mib: Annotated[int, Field(ge=64), NUMBER] | None = None
    """With runs_in=process: maximum private memory of each process of an episode, MiB, including imported modules;
    null: no limit."""
    timeout_s: Seconds | None = None
    """Timeout for one turn, seconds; null: half of timeouts.command_s. An episode whose turn exceeds it has failed; the
    turn's thread is abandoned, its task cancelled or its process killed."""
    options: dict[str, Any] = {}
    """Arguments of the environment."""

    @property
    def by_steps(self) -> bool:
        """Whether every turn is a separate sequence."""
        return self.episode == "steps"
