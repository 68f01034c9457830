"""Evaluation on the first prompts of data.val, greedily and with training's sampling parameters."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config
from hpcrl.controller.best_effort import best_effort
from hpcrl.controller.clients import timed
from hpcrl.controller.episodes import Episode, write_episode
from hpcrl.controller.examples import example_key, keep_examples, read_examples
from hpcrl.controller.generation import evaluation_sampling, replica_capacity
from hpcrl.data import PromptSource
from hpcrl.messaging.dispatcher import Controller
from hpcrl.messaging.messages import ReadLastObservation, ReadTexts
from hpcrl.metrics.stats import Stats, merge, scalar
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
        self._prompts = _validation_prompts(config, tokenizer) if config.data.val else []
        self._domains = [prompt.domain for prompt in self._prompts]

    def scores(self, step: int) -> Stats:
        """val/score (greedy or at eval.temperature) and val/sampled/score (at the training temperature), each with the
        number of responses whose reward could not be computed (score_errors); with several domains also scores per
        domain, such as val/maths/score."""
        if not self._prompts:
            return {}
        start, config = time.perf_counter(), self._config
        collected = self._generate(config.eval.temperature, 2 * step)
        stats = _score_stats("val", collected, self._domains)
        self._keep_episodes(step, collected)
        best_effort("examples", lambda: self._keep_examples(step, collected), None)
        self._loop.forget(collected.groups)
        if config.rollout.temperature != config.eval.temperature:
            sampled = self._generate(config.rollout.temperature, 2 * step + 1)
            stats |= _score_stats("val/sampled", sampled, self._domains)
            self._loop.forget(sampled.groups)
        return merge([stats, timed("time/val_step", start)])

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

    def _generate(self, temperature: float, number: int) -> CollectedRollouts:
        # Every prompt counts once; a reward that could not be computed counts as 0.
        settings = SchedulerConfig(group_size=1, deterministic=self._config.deterministic, accept_errors=True)
        living = {rank: slots for rank, slots in self._slots.items() if rank not in self._controller.lost}
        scheduler = RolloutScheduler(settings, living)
        scheduler.begin_step(0, len(self._prompts))
        waiting = (replace(prompt, uid=validation_uid(number, i)) for i, prompt in enumerate(self._prompts))
        return self._loop.collect(
            scheduler,
            {},
            lambda count: [prompt for prompt, _ in zip(waiting, range(count), strict=False)],
            evaluation_sampling(self._config, temperature),
        )

    def _keep_examples(self, step: int, collected: CollectedRollouts) -> None:
        """Keep the first completions, from prompts without environments."""
        both = zip(self._prompts, collected.groups, strict=True)  # in order of uid
        chosen = (pair for pair in both if self._config.env_of(pair[0].domain) is None)
        examples: list[dict[str, Any]] = []
        media: list[Sequence[Medium]] = []
        for prompt, group in islice(chosen, self._config.eval.num_examples):
            sample = group.samples[0]
            answers = self._controller.call({sample.replica: ReadTexts([sample.id])})
            if not answers:  # its replica was lost
                continue
            examples.append(
                {
                    "domain": prompt.domain,
                    "row": prompt.row,
                    "prompt": self._tokenizer.decode(prompt.token_ids, skip_special_tokens=True),
                    "answer": prompt.answer,
                    "response": answers[sample.replica].texts[0],
                    "score": sample.score,
                }
            )
            media.append(prompt.media)
        keep_examples(self._run_dir, step, examples, media)

    def _keep_episodes(self, step: int, collected: CollectedRollouts) -> None:
        """Write each domain's first, best and worst validation episodes."""
        played: dict[str, list[DoneSample]] = {}
        for prompt, group in zip(self._prompts, collected.groups, strict=True):
            if self._config.env_of(prompt.domain) is not None:
                played.setdefault(prompt.domain, []).append(group.samples[0])
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
            answers = self._controller.call({sample.replica: ReadTexts([sample.id], whole=True)})
            if not answers:  # its replica was lost
                continue
            held = [(done.texts[number], done.media[number]) for done in ends.values() if done.texts[number]]
            shown_last, last_media = held[0] if held else ("[]", ())
            messages = json.loads(answers[sample.replica].texts[0])
            (media,) = answers[sample.replica].media
            told = sample.turn_rewards, sample.reward, sample.score, sample.error
            episode = Episode(messages, *told, media, json.loads(shown_last), last_media)
            write_episode(path.parent, path.name, episode)


def _folder_name(domain: str) -> str:
    """A domain's name, which may come from the data, as a safe folder name."""
    return quote(domain, safe="", errors="replace").replace(".", "%2E")[:MAX_FOLDER_CHARS]


def _worth(sample: DoneSample) -> tuple[float, float]:
    return sample.score, sample.reward


def _validation_prompts(config: Config, tokenizer: Any) -> list[Prompt]:
    """An evaluation's prompts. ValueError if all prompts of data.val are over-long."""
    source = PromptSource(config.data, "val", tokenizer, config.seed, 1)
    found = source.head(config.eval.num_prompts)
    if not found:
        raise ValueError(
            f"data.val: all {len(source)} prompts have more than data.max_prompt_tokens="
            f"{config.data.max_prompt_tokens} tokens; raise it, or set data.overlong_prompts=truncate"
        )
    return found


def _score_stats(prefix: str, collected: CollectedRollouts, domains: Sequence[str]) -> Stats:
    """An evaluation's scores and lengths. `domains` names each prompt's domain; several also get separate scores."""
    samples = [group.samples[0] for group in collected.groups]  # in order of uid
    shown = []
    for sample, domain in zip(samples, domains, strict=True):
        told = {"score": scalar(sample.score), "response_length": scalar(collected.sizes[sample.id].model)}
        shown.append({f"{prefix}/{name}/*": value for name, value in told.items()})
        if len(set(domains)) > 1:
            shown.append({f"{prefix}/{domain}/{name}": value for name, value in told.items()})
    played = {f"{prefix}/{name}": stat for name, stat in collected.stats.items() if name.startswith("env/")}
    return merge(shown) | played | {f"{prefix}/score_errors": scalar(sum(bool(sample.error) for sample in samples))}


def _short(text: str) -> str:
    """A text in one line; a long text is cut to its end, which contains the question or answer."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARS else "..." + line[-SHOWN_CHARS:]
