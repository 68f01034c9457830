"""Evaluation on the first prompts of data.val, as eval and eval.sets say, and with training's sampling parameters."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, EvalSampling
from hpcrl.controller.best_effort import best_effort
from hpcrl.controller.clients import timed
from hpcrl.controller.episodes import Episode, write_episode
from hpcrl.controller.examples import example_key, keep_examples, read_examples
from hpcrl.controller.generation import evaluation_sampling, replica_capacity
from hpcrl.controller.responses import PromptAnswer, scored_rows, set_headers, whole_rows
from hpcrl.data import PromptSource
from hpcrl.data.source import RowOrigin
from hpcrl.messaging.dispatcher import Controller
from hpcrl.messaging.messages import ReadLastObservation, ReadTexts
from hpcrl.metrics.responses import header, response_stats, responses_file, write_responses
from hpcrl.metrics.stats import Stats, merge
from hpcrl.rollout.loop import CollectedRollouts, RolloutLoop
from hpcrl.rollout.scheduling.events import DoneSample
from hpcrl.rollout.scheduling.policies import SchedulerConfig
from hpcrl.rollout.scheduling.scheduler import RolloutScheduler
from hpcrl.rollout.types import Prompt, validation_uid
from hpcrl.spec.media import Medium
from hpcrl.system.files import step_name

SHOWN_CHARS = 100
MAX_FOLDER_CHARS = 200


class Evaluation:
    """Validation scores, and the model's answers to the first prompts before and after training."""

    def __init__(
        self,
        loop: RolloutLoop,
        controller: Controller,
        layout: RoleLayout,
        config: Config,
        tokenizer: Any,
        run_dir: Path,
    ):
        self._loop, self._controller, self._config, self._tokenizer = loop, controller, config, tokenizer
        self._slots, self._env_ranks = replica_capacity(config, layout), layout.ranks["env"]
        self._run_dir, self._episodes = run_dir, run_dir / "episodes"
        self._prompts, self._origins = _validation_prompts(config, tokenizer) if config.data.val else ([], [])

    def scores(self, step: int) -> Stats:
        """val/score (as eval and eval.sets say) and val/sampled/score (at the training temperature, without the domains
        of eval.sets), with the metrics of response_stats(); with several domains also per domain, such as
        val/maths/score."""
        if not self._prompts:
            return {}
        start, config = time.perf_counter(), self._config
        answers = self._answers(2 * step, [config.eval.of_domain(prompt.domain) for prompt in self._prompts])
        stats = response_stats("val", scored_rows(config, answers))
        self._keep_episodes(step, answers)
        best_effort("examples", lambda: self._keep_examples(step, answers), None)
        best_effort("the file of validation responses", lambda: self._keep_responses(step, answers), None)
        self._loop.forget([answer.group for answer in answers])
        if config.rollout.temperature != config.eval.temperature:
            asked = EvalSampling(1, config.rollout.temperature, config.eval.max_new_tokens)
            shared = [None if prompt.domain in config.eval.sets else asked for prompt in self._prompts]
            sampled = self._answers(2 * step + 1, shared)
            stats |= response_stats("val/sampled", scored_rows(config, sampled))
            self._loop.forget([answer.group for answer in sampled])
        return merge([stats, timed("time/val_step", start)])

    @property
    def prompts(self) -> list[tuple[Prompt, RowOrigin]]:
        """All validation prompts."""
        return list(zip(self._prompts, self._origins, strict=True))

    @property
    def num_slots(self) -> int:
        """Responses that all living replicas generate at the same time."""
        return sum(slots for rank, slots in self._slots.items() if rank not in self._controller.lost)

    def rows_of(self, places: Collection[int]) -> list[dict[str, Any]]:
        """Rows of new responses to the prompts at these places, without those of a replica that is lost meanwhile. Each
        prompt has the same seeds in every call."""
        config = self._config
        asked = [
            config.eval.of_domain(prompt.domain) if place in places else None
            for place, prompt in enumerate(self._prompts)
        ]
        answers = self._answers(0, asked)
        rows = whole_rows(self._controller, config, answers)
        self._loop.forget([answer.group for answer in answers])
        return rows

    def before_and_after(self, last: int) -> str:
        """The kept examples as text, a few short lines each."""
        kept, lines = read_examples(self._run_dir), []
        afterwards = {example_key(example): example for example in kept.get(last, [])}
        for before in kept.get(0, []):
            after = afterwards.get(example_key(before))
            if after is None:  # its replica was lost
                continue
            lines.append(f"  {_short(before['prompt'])}  ->  {_short(str(before['answer']))}")
            for name, example in (("before", before), ("after", after)):
                verdict = "right" if example["score"] > 0 else "wrong"
                lines.append(f"    {name:>6}  {verdict}  {_short(example['response'])}")
        return "\n".join(["validation completions before and after:", *lines]) if lines else ""

    def header(self, step: int) -> dict[str, Any]:
        """The first object of this step's file of responses."""
        return header(self._config.model.path or "tiny", step, set_headers(self._config, self.prompts))

    def _answers(self, number: int, asked: Sequence[EvalSampling | None]) -> list[PromptAnswer]:
        """The responses to all prompts in the n-th evaluation, as `asked` for each prompt; None leaves a prompt out.
        Prompts with equal sampling are answered together."""
        found: dict[int, PromptAnswer] = {}
        for sampling in dict.fromkeys(each for each in asked if each is not None):
            chosen = [place for place, each in enumerate(asked) if each == sampling]
            collected = self._generate(sampling, number, chosen)
            for place, group in zip(chosen, collected.groups, strict=True):  # in order of uid
                sizes = [collected.sizes[sample.id] for sample in group.samples]
                found[place] = PromptAnswer(self._prompts[place], group, sizes, self._origins[place])
        return [found[place] for place in sorted(found)]

    def _generate(self, asked: EvalSampling, number: int, chosen: Sequence[int]) -> CollectedRollouts:
        # Every prompt counts once; a reward that could not be computed counts as 0.
        deterministic = self._config.deterministic
        settings = SchedulerConfig(group_size=asked.samples, deterministic=deterministic, accept_errors=True)
        living = {rank: slots for rank, slots in self._slots.items() if rank not in self._controller.lost}
        scheduler = RolloutScheduler(settings, living)
        scheduler.begin_step(0, len(chosen))
        waiting = (replace(self._prompts[place], uid=validation_uid(number, place)) for place in chosen)
        return self._loop.collect(
            scheduler,
            {},
            lambda count: [prompt for prompt, _ in zip(waiting, range(count), strict=False)],
            evaluation_sampling(self._config, asked),
        )

    def _keep_responses(self, step: int, answers: Sequence[PromptAnswer]) -> None:
        """Write all responses."""
        rows = whole_rows(self._controller, self._config, answers)
        write_responses(responses_file(self._run_dir, step), self.header(step), rows)

    def _keep_examples(self, step: int, answers: Sequence[PromptAnswer]) -> None:
        """Keep the first completions, from prompts without environments."""
        chosen = (answer for answer in answers if self._config.env_of(answer.prompt.domain) is None)
        examples: list[dict[str, Any]] = []
        media: list[Sequence[Medium]] = []
        for prompt, group, *_ in islice(chosen, self._config.eval.num_examples):
            sample = group.samples[0]
            texts = self._controller.call({sample.replica: ReadTexts([sample.id])})
            if not texts:  # its replica was lost
                continue
            examples.append(
                {
                    "domain": prompt.domain,
                    "row": prompt.row,
                    "prompt": self._tokenizer.decode(prompt.token_ids, skip_special_tokens=True),
                    "answer": prompt.answer,
                    "response": texts[sample.replica].texts[0],
                    "score": sample.score,
                }
            )
            media.append(prompt.media)
        keep_examples(self._run_dir, step, examples, media)

    def _keep_episodes(self, step: int, answers: Sequence[PromptAnswer]) -> None:
        """Write each domain's first, best and worst validation episodes."""
        played: dict[str, list[DoneSample]] = {}
        for prompt, group, *_ in answers:
            if self._config.env_of(prompt.domain) is not None:
                played.setdefault(prompt.domain, []).extend(group.samples)
        chosen: dict[Path, DoneSample] = {}
        for domain, samples in played.items():
            folder = self._episodes / step_name(step) / _folder_name(domain)
            shown = {"first": samples[0], "best": max(samples, key=_worth), "worst": min(samples, key=_worth)}
            chosen |= {folder / name: sample for name, sample in shown.items()}
        if not chosen:
            return
        ids = [sample.id for sample in chosen.values()]
        ends = self._controller.call({rank: ReadLastObservation(ids) for rank in self._env_ranks})
        for number, (path, sample) in enumerate(chosen.items()):
            texts = self._controller.call({sample.replica: ReadTexts([sample.id], whole=True)})
            if not texts:  # its replica was lost
                continue
            held = [(done.texts[number], done.media[number]) for done in ends.values() if done.texts[number]]
            shown_last, last_media = held[0] if held else ("[]", ())
            messages = json.loads(texts[sample.replica].texts[0])
            (media,) = texts[sample.replica].media
            told = sample.turn_rewards, sample.reward, sample.score, sample.error
            episode = Episode(messages, *told, media, json.loads(shown_last), last_media)
            write_episode(path.parent, path.name, episode)


def _folder_name(domain: str) -> str:
    """A domain's name, which may come from the data, as a safe folder name."""
    return quote(domain, safe="", errors="replace").replace(".", "%2E")[:MAX_FOLDER_CHARS]


def _worth(sample: DoneSample) -> tuple[float, float]:
    return sample.score, sample.reward


def _validation_prompts(config: Config, tokenizer: Any) -> tuple[list[Prompt], list[RowOrigin]]:
    """An evaluation's prompts, and where they are from. ValueError if all prompts of data.val are over-long."""
    source = PromptSource(config.data, "val", tokenizer, config.seed, 1)
    own = {domain: each.num_prompts for domain, each in config.eval.sets.items() if each.num_prompts is not None}
    found = source.head(config.eval.num_prompts, own)
    if not found:
        raise ValueError(
            f"data.val: all {len(source)} prompts have more than data.max_prompt_tokens="
            f"{config.data.max_prompt_tokens} tokens; raise it, or set data.overlong_prompts=truncate"
        )
    return found, source.origins(found)


def _short(text: str) -> str:
    """A text in one line; a long text is cut to its end, which contains the question or answer."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARS else "..." + line[-SHOWN_CHARS:]
