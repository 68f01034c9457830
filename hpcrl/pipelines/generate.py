"""Responses of a model to data.train as rows to train on, for distillation off policy or rejection sampling."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.config.generating import ENDINGS, GenerateConfig
from hpcrl.spec.kinds import PipelineSpec
from hpcrl.spec.problems import Problem
from hpcrl.spec.tables import REWARDS

if TYPE_CHECKING:
    from hpcrl.controller.generation_run import GenerationRun

SAMPLES, TEMPERATURE = ("generate", "samples"), ("rollout", "temperature")


def _check(config: Any) -> Iterator[Problem]:
    asked, greedy = config.generate, config.rollout.temperature == 0
    if asked.samples > 1 and greedy:
        text = f"{asked.samples} greedy responses to a prompt are all equal; set rollout.temperature above 0"
        yield Problem(SAMPLES, f"generate.samples: {text}", (TEMPERATURE,))
    if asked.form == "pairs" and asked.samples == 1:
        text = "1, but generate.form=pairs compares the responses to a prompt; use at least 2"
        yield Problem(SAMPLES, f"generate.samples: {text}", (("generate", "form"),))
    if asked.keep is not None and asked.form == "pairs":
        text = f"{asked.keep}, but generate.form=pairs has one row per prompt; use null"
        yield Problem(("generate", "keep"), f"generate.keep: {text}", (("generate", "form"),))
    elif asked.keep is not None and asked.keep > asked.samples:
        text = f"{asked.keep} is above generate.samples, which is {asked.samples}"
        yield Problem(("generate", "keep"), f"generate.keep: {text}", (SAMPLES,))
    if config.data.overlong_prompts == "truncate":
        text = "truncate, but rows have whole prompts, which the responses do not answer; use drop or error"
        yield Problem(("data", "overlong_prompts"), f"data.overlong_prompts: {text}", (("pipeline",),))
    bounded = all(REWARDS[reward.name].scores_in_unit_interval for reward in config.reward.values())
    if asked.min_score is not None and asked.min_score > 1 and bounded and not config.envs:
        text = f"{asked.min_score:g}, and scores are between 0 and 1, so no response would be kept; use at most 1"
        yield Problem(("generate", "min_score"), f"generate.min_score: {text}", (("reward",),))
    if asked.target is not None and Path(asked.target).suffix not in ENDINGS:
        text = f"generate.target: {asked.target} ends in neither {' nor '.join(ENDINGS)}"
        yield Problem(("generate", "target"), text)


def _inspect(config: Any, resumes: bool) -> Iterator[Problem]:
    if config.generate.target is None:
        return
    target, at = Path(config.generate.target).absolute(), ("generate", "target")
    if not target.parent.is_dir():
        yield Problem(at, f"generate.target: {target.parent} is no folder; make it, or name another file")
    elif not os.access(target.parent, os.W_OK | os.X_OK):
        yield Problem(at, f"generate.target: {target.parent} is not writable; name a file in another folder")
    elif target.is_dir():
        yield Problem(at, f"generate.target: {target} is a folder; name a file in it")
    elif not resumes and target.exists():
        text = f"generate.target: {target} exists, and nothing is overwritten; name another file or remove it"
        yield Problem(at, text)


def _work(config: Any) -> str:
    asked, sampling = config.generate, config.rollout
    which = f"up to {asked.num_prompts} prompts" if asked.num_prompts is not None else "all prompts"
    how = "greedy" if sampling.temperature == 0 else f"at temperature {sampling.temperature:g}"
    kept = [f"score at least {asked.min_score:g}"] if asked.min_score is not None else []
    kept += [f"the best {asked.keep} of a prompt"] if asked.keep is not None else []
    kept += ["not truncated"] if asked.truncated == "drop" else []
    rows = "best and worst as a pair" if asked.form == "pairs" else "a row each"
    return (
        f"generate {asked.samples} response(s) to {which}, {how}; {rows}{', if ' if kept else ''}{', '.join(kept)}; "
        f"to {asked.target or 'rows.jsonl in the run folder'}"
    )


SPEC = PipelineSpec(
    about="Responses of a model to data.train, written as rows to train on.",
    make="hpcrl.pipelines.generate:generate",
    section=GenerateConfig,
    check=_check,
    learns_from_rewards=False,
    learns=False,
    trains=False,
    writes_responses=True,
    needs_reward=False,
    inspect=_inspect,
    batch_size=lambda config: int(config.generator.most_requests),
    work=_work,
    resume_keys=("target",),
)


def generate(run: GenerationRun) -> None:
    """Generate, score and store the responses that are not stored yet, part by part, then write the file of rows."""
    while part := run.next_part():
        run.store(run.respond(part))
    run.write()
