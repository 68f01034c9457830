"""The reward from language models that grade a response by a rubric (LLM as a judge, arXiv 2306.05685)."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpcrl.config import RewardConfig
from hpcrl.rewards.builtin.exact_match import as_text
from hpcrl.rewards.builtin.judge_prompt import RUBRIC, TEMPLATE, Scale, harmless, messages, with_images
from hpcrl.rewards.grading.extract import after_thinking
from hpcrl.rewards.reward import Reward, RewardItem, Score
from hpcrl.rewards.services import NOBODY, Services
from hpcrl.rewards.serving.endpoint import Cache, Endpoint, EndpointError, content_of
from hpcrl.rewards.spec import JudgeOptions, JudgeSection, is_shown_images
from hpcrl.spec.media import Medium
from hpcrl.spec.options import read_options

SHARE = 0.9
"""Share of reward.*.timeout_s after which the votes received so far are counted."""


class JudgeReward(Reward):
    """The vote of the judges, 0 to 1; the score is 1 if the vote is at least `threshold`.

    A worker process has up to reward.*.concurrency responses judged at once, each in one thread per judge. A judge that
    fails, is late or gives an unreadable verdict has no vote; a response with fewer than min_votes votes has an error.
    Metrics: each judge's vote, and the response's counts unparsable, failed, cached, requests and retries.
    """

    pool = "async"

    def __init__(self, config: RewardConfig):
        """ValueError if a file cannot be read or the template lacks {response}."""
        options = self.options = read_options(JudgeOptions, config.options)
        self._timeout_s = SHARE * config.timeout_s
        self._scale = Scale(*options.scale, yes_no=options.verdict == "yes_no")
        self._template = _file(options.template_file, TEMPLATE, "template_file")
        if "{response}" not in self._template:
            raise ValueError(f"template_file: {options.template_file} lacks {{response}}")
        self._rubric = _file(options.rubric_file, RUBRIC, "rubric_file")
        self._cache = Cache(Path(options.cache)) if options.cache else None
        self._services = NOBODY
        self._endpoints = {
            name: self._endpoint(judge, [judge.url.rstrip("/")])
            for name, judge in options.judges.items()
            if judge.url is not None
        }
        self._threads = ThreadPoolExecutor(config.concurrency * len(options.judges), "judge")

    def connect(self, services: Services) -> None:
        """See Reward."""
        self._services = services

    def start(self) -> None:
        """See Reward."""
        for name, judge in self.options.judges.items():
            if judge.role is not None:
                urls = [f"{url}/v1" for url in self._services.of(judge.role)]
                self._endpoints[name] = self._endpoint(judge, urls)

    def _endpoint(self, judge: JudgeSection, urls: Sequence[str]) -> Endpoint:
        options = self.options
        return Endpoint(
            [f"{url}/chat/completions" for url in urls],
            timeout_s=options.request_timeout_s,
            backoff_s=options.backoff_s,
            key_env=judge.api_key_env,
            token=self._services.token if judge.role is not None else "",
            max_requests_per_s=judge.max_requests_per_s,
        )

    async def score(self, items: Sequence[RewardItem]) -> list[Score]:
        return list(await asyncio.gather(*map(self._judged, items)))

    async def _judged(self, item: RewardItem) -> Score:
        deadline, loop = time.monotonic() + self._timeout_s, asyncio.get_running_loop()
        counts = {name: Counter[str]() for name in self.options.judges}
        asked = {
            name: loop.run_in_executor(self._threads, self._ask, name, item, deadline, own)
            for name, own in counts.items()
        }
        await asyncio.wait(asked.values(), timeout=self._timeout_s)
        votes: dict[str, float] = {}
        problems: list[str] = []
        for name, answer in asked.items():
            try:
                vote = answer.result() if answer.done() else None
            except EndpointError as error:
                kind, problem = "failed", str(error)
            else:
                kind = "unparsable" if answer.done() else "failed"
                problem = "no verdict in its answer" if answer.done() else f"no verdict in {self._timeout_s:g} s"
                if vote is not None:
                    votes[name] = vote
                    continue
            counts[name][kind] += 1
            problems.append(f"{name}: {problem}")
        total = sum(counts.values(), Counter[str]())
        metrics = {name: float(total[name]) for name in ("unparsable", "failed", "cached", "requests", "retries")}
        metrics |= {f"vote_{name}": vote for name, vote in votes.items()}
        if len(votes) < self.options.min_votes:
            return Score(0.0, 0.0, "; ".join(problems), metrics)
        reward = VOTES[self.options.vote](list(votes.values()), self.options.threshold)
        return Score(reward, float(reward >= self.options.threshold), metrics=metrics)

    def _ask(self, name: str, item: RewardItem, deadline: float, counts: Counter[str]) -> float | None:
        """A judge's verdict; None if its answer has none. Runs in its own thread."""
        options, judge = self.options, self.options.judges[name]
        response = item.response if options.with_thinking else after_thinking(item.response)
        material = {
            "rubric": self._rubric,
            "prompt": item.prompt,
            "answer": "" if item.answer is None else as_text(item.answer),
            "response": response,
        }
        judge_sees = judge.role in self._services.seeing
        images = item.images if is_shown_images(judge.role, judge.images, judge_sees) else ()
        path = self._cache.path(self._identity(judge, material, images)) if self._cache is not None else None
        if self._cache is not None and path is not None and (kept := self._cache.read(path)) is not None:
            counts["cached"] += 1
            return kept
        asked, nonce = messages(self._template, material, self._scale, options.max_chars, self._services.seed)
        body = {
            "model": judge.model or judge.role,
            "messages": with_images(asked, images),
            "temperature": judge.temperature,
        }
        if judge.role is None:
            body["max_tokens"] = judge.max_tokens
        body |= judge.extra_body
        try:
            verdict = self._scale.read(content_of(self._endpoints[name].ask(body, deadline, counts)), nonce)
        except ValueError:  # an answer that is not a chat completion
            return None
        if self._cache is not None and path is not None and verdict is not None:
            self._cache.write(path, verdict)
        return verdict

    def _identity(
        self, judge: JudgeSection, material: Mapping[str, str], images: Sequence[Medium]
    ) -> dict[str, object]:
        """Everything that determines a verdict."""
        texts = {name: harmless(text, self.options.max_chars) for name, text in material.items()}
        model = {
            **judge.model_dump(exclude={"api_key_env", "max_requests_per_s", "images"}),
            "scale": vars(self._scale),
        }
        if judge.role is not None:
            model |= {"model": self._services.models[judge.role]}
        seen = {"images": [image.digest.hex() for image in images]} if images else {}
        return {"judge": model, "template": self._template, **texts, **seen}


def _majority(votes: list[float], threshold: float) -> float:
    """1 if more than half of the votes reach the threshold."""
    return float(2 * sum(vote >= threshold for vote in votes) > len(votes))


VOTES: dict[str, Callable[[list[float], float], float]] = {
    "mean": lambda votes, _: statistics.fmean(votes),
    "median": lambda votes, _: float(statistics.median(votes)),
    "majority": _majority,
}


def _file(path: str | None, default: str, key: str) -> str:
    """The text of a file, or the default. ValueError names the key."""
    if path is None:
        return default
    try:
        return Path(path).read_text()
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}: {path} cannot be read: {error}") from error
