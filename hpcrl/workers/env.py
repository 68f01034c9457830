"""The env role: plays one environment per sample, turn by turn."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import msgspec
from PIL import Image

from hpcrl.config import EnvConfig
from hpcrl.data.env_sources import given_start
from hpcrl.data.image_tokens import bound_vision
from hpcrl.data.messages import Messages
from hpcrl.data.template_forms import chat_template
from hpcrl.envs.environment import (
    UNREAD_KEYS,
    Env,
    begin,
    checked_reset,
    checked_step,
    cut,
    expert_response,
    image_bytes,
    num_chars,
)
from hpcrl.envs.examples import example_messages
from hpcrl.envs.processes import EnvProcess, EnvProcessError
from hpcrl.messaging.messages import (
    Done,
    EndEpisodes,
    EnvObservation,
    Observed,
    ReadLastObservation,
    ScoredSample,
    Turn,
)
from hpcrl.messaging.queues import ReaderLost
from hpcrl.rewards.grading.extract import after_thinking
from hpcrl.rewards.serving.guarded import RAISED, describe, sendable
from hpcrl.rollout.expert_turns import expert_seed
from hpcrl.rollout.pictures import MAX_SHOWN, thumbnail
from hpcrl.rollout.types import FinishReason, episode_seed, is_validation, split_sample_id
from hpcrl.spec.media import IMAGE_MARK, MAX_PIXEL_BYTES, WRITTEN_MARK, Medium, by_picture
from hpcrl.spec.trajectory import MAX_REWARD
from hpcrl.system.clock import AwakeClock
from hpcrl.workers.dialogue import (
    Encoded,
    as_messages,
    encode_prompt,
    first_prompt,
    fitting,
    images_of,
    window,
    with_images,
    with_tools,
    without_images,
)
from hpcrl.workers.env_hosts import Hosts, StartedTurn
from hpcrl.workers.observations import check_continues, encode_observation
from hpcrl.workers.role import Rank

logger = logging.getLogger(__name__)

ERROR_CHARS = 2000
LAST_CHARS = 100_000
"""Maximum characters of a validation episode's last observation, which is only shown on its page."""
LAST_PIXEL_BYTES = 32 << 20
"""Maximum pixels of all last observations that are sent in one message; further pictures are not shown."""
NOTHING_PLAYED = {"success": 0.0, "return": 0.0, "turns": 0.0, "failed": 0.0}
"""Metrics of an episode without a turn. Failed episodes get them too; otherwise, mean metrics would be too high."""


@dataclass(eq=False)
class _Episode:
    """A sample's episode."""

    generator: int  # the rank that generates its turns
    began: float  # start time by the role's clock
    env: Env | None = None  # None until it is created for the first turn
    row: dict[str, Any] = field(default_factory=dict)  # with the tools that the environment adds
    adds_tools: bool = False
    rewards: list[float] = field(default_factory=list)  # one per turn
    shown: list[Messages] = field(default_factory=list)  # first prompt and observations, for the chat template
    said: list[str] = field(default_factory=list)  # the model's turns between them
    at_work: bool = False  # whether one of its turns waits or is played
    dropped: bool = False  # whether the sample is no longer needed: the episode ends after its current turn


@dataclass
class _Played:
    """A turn's result: the environment's observation, the sample's result so far, whether the episode ended, and the
    text of the next turn if the environment's expert plays it."""

    observation: Any
    result: ScoredSample
    ended: bool
    expert: str = ""


class _TooLate(Exception):
    """A turn took longer than env.<domain>.timeout_s."""


class _NoRoom(Exception):
    """An observation leaves no room for another turn."""


class _Playing:
    """A turn that an environment plays."""

    def __init__(self, turn: Turn, episode: _Episode, section: str, timeout_s: float):
        self.turn, self.episode, self.section = turn, episode, section
        self._timeout_s, self._clock = timeout_s, AwakeClock(timeout_s)
        self.began = time.monotonic()
        self.played: Future[_Played] = Future()
        self.started: StartedTurn

    def is_over(self) -> bool:
        """Whether the turn has ended. Ends it with _TooLate after its timeout. Called in every poll, for AwakeClock."""
        if not self.played.done() and self._clock.now() > self._timeout_s:
            call = "reset()" if self.turn.starts_episode else "step()"
            text = f"{call} did not return within {self._timeout_s:g} s (env.{self.section}.timeout_s)"
            self.end(_TooLate(text))
        return self.played.done()

    def end(self, result: _Played | BaseException) -> bool:
        """Set the result unless the turn has ended; return whether it was set."""
        try:
            if isinstance(result, BaseException):
                self.played.set_exception(result)
            else:
                self.played.set_result(result)
        except InvalidStateError:
            return False
        return True


class EnvRole:
    """Receives turns in its mailbox, and sends observations to the sample's generator rank. An episode's first turn has
    no text and is answered with the first prompt.

    Each environment section plays several turns at once (hpcrl.workers.env_hosts), so a waiting environment does not
    delay others. Group members get the same seed. If an environment raises, or returns an invalid number or text, the
    episode ends with reward 0. If an observation leaves no room for another turn, it ends with the reward so far. Both
    are errors of the sample. Generator ranks report dropped samples; the controller reports lost generator ranks.
    """

    def __init__(self, worker: Rank):
        """ValueError if a section names no valid environment, if its examples leave no room for a prompt, or if the
        chat template cannot continue a dialogue."""
        if worker.config.envs:
            check_continues(worker.tokenizer)
        self._examples = {name: _examples(worker, name, env) for name, env in worker.config.envs.items()}
        self._config, self._hosts = worker.config, Hosts(worker.config, chat_template(worker.tokenizer))
        self._worker = worker
        self._token_chars = max(map(len, worker.tokenizer.get_vocab()))  # maximum characters per token
        limits = [env.max_seconds for env in worker.config.envs.values() if env.max_seconds is not None]
        self._clock, self._now = AwakeClock(min(limits, default=math.inf)), 0.0
        self._episodes: dict[int, _Episode] = {}  # by sample, without timed-out episodes that still run
        self._ends: dict[int, _End] = {}  # last observations of the newest evaluation's episodes, by sample
        self._unread: dict[str, frozenset[str]] = defaultdict(frozenset)  # info keys already warned about, by section
        self._waiting: deque[Turn] = deque()  # not started yet, in order
        self._playing: list[_Playing] = []
        self._lost: set[int] = set()  # generator ranks

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        return {EndEpisodes: self._end_episodes, ReadLastObservation: self._peek_end}

    @property
    def busy(self) -> bool:
        return bool(self._playing)

    def poll(self) -> bool:
        arrived, self._now = self._worker.world.mailbox.receive(Turn), self._clock.now()
        for turn in arrived:
            if turn.reason == FinishReason.ABORT:
                self._drop(turn.sample)
            elif turn.reply_to not in self._lost:
                self._waiting.append(turn)
                self._episodes.setdefault(turn.sample, _Episode(turn.reply_to, self._now)).at_work = True
        self._hosts.interrupt_busy()
        over = [playing for playing in self._playing if playing.is_over()]
        for playing in over:
            self._playing.remove(playing)
            self._answer(playing)
        self._begin_waiting()
        self._worker.world.trace.set_thread_activity(next(map(self._in_thread, self._playing), ""))
        return bool(arrived or over)

    def close(self) -> None:
        for sample in list(self._episodes):
            self._end(sample)
        self._hosts.close()

    def _env(self, turn: Turn) -> EnvConfig:
        config = self._config.env_of(turn.domain)
        assert config is not None, "generators send turns of samples with an environment"
        return config

    def _section(self, turn: Turn) -> str:
        return turn.domain if turn.domain in self._config.env else "default"

    def _begin_waiting(self) -> None:
        """Start waiting turns, in order, where their section may play another turn."""
        started: dict[str, list[StartedTurn]] = defaultdict(list)
        for playing in self._playing:
            started[playing.section].append(playing.started)
        later: deque[Turn] = deque()
        for turn in self._waiting:
            config = self._env(turn)
            section = self._section(turn)
            if not self._hosts.has_room(section, config, started[section]):
                later.append(turn)
                continue
            playing = _Playing(turn, self._episodes[turn.sample], section, self._config.turn_timeout_s(config))
            self._playing.append(playing)
            playing.played.add_done_callback(lambda _: self._worker.world.mailbox_server.wakeup.set())
            ended = functools.partial(self._ended, playing)
            self._worker.world.trace.set_thread_activity(self._in_thread(playing))
            work, env = self._play(turn, playing.episode), playing.episode.env
            playing.started = self._hosts.start(section, work, ended, env)
            started[section].append(playing.started)
        self._waiting = later

    def _in_thread(self, playing: _Playing) -> str:
        """A name for the turn's section if its code runs in this process, else an empty string."""
        return f"env.{playing.section}" if self._hosts.plays_here(playing.section) else ""

    def _ended(self, playing: _Playing, result: _Played | BaseException) -> None:
        """Set what the turn has returned or raised; called in the turn's thread or event loop."""
        if not playing.end(result):  # it had already timed out
            self._close(playing.episode)

    def _answer(self, playing: _Playing) -> None:
        """Report a turn's result: the observation to the generator rank, the sample's state to the controller."""
        worker, turn, episode = self._worker, playing.turn, playing.episode
        config, reply, failed = self._env(turn), EnvObservation(turn.sample, b""), False
        try:
            played = playing.played.result()
            result, ended = played.result, played.ended
            if ended and is_validation(turn.sample):
                with contextlib.suppress(TypeError, ValueError):  # training does not need it
                    shown = cut(as_messages(played.observation, bound_vision(worker.tokenizer)), LAST_CHARS)
                    if num_chars(shown) < 2 * LAST_CHARS:
                        self._ends[turn.sample] = _End.of(as_messages(shown))
            elif not ended:
                reply = self._reply(turn, episode, played.observation, played.expert)
        except _NoRoom as problem:
            ended, error = True, _text(config.name, str(problem))
            if config.max_sequence_tokens is not None and not turn.starts_episode:  # the episode's limit, not an error
                full = {**result.metrics, "truncated": 1.0, "sequence_full": 1.0}
                result, error = msgspec.structs.replace(result, metrics=full), ""
            result = msgspec.structs.replace(result, error=error)
        except RAISED as failure:  # one bad environment is data, not a crash
            told = isinstance(failure, (EnvProcessError, _TooLate))  # exceptions with a message by hpcrl
            error = _text(config.name, str(failure) if told else describe(failure))
            metrics = NOTHING_PLAYED | {"turns": float(len(episode.rewards)), "failed": 1.0}
            result, ended, failed = ScoredSample(turn.sample, 0.0, 0.0, error, metrics), True, True
        episode.at_work = False
        if isinstance(playing.played.exception(), _TooLate):
            del self._episodes[turn.sample]  # if the call ever returns, _ended() closes the environment
            playing.started.stop()
            if isinstance(episode.env, EnvProcess):
                self._close(episode)
        elif ended or episode.dropped:
            self._end(turn.sample)
        else:
            # If the generator is gone, its agent reports that to the controller, which restarts the sample.
            with contextlib.suppress(ReaderLost):
                worker.world.mailbox.send(turn.reply_to, [reply])
        result = msgspec.structs.replace(result, started=playing.began, ended=time.monotonic())
        worker.emit(Observed(turn.sample, ended, result, config.add_reward and not result.error, failed))

    def _reply(self, turn: Turn, episode: _Episode, observation: Any, expert: str) -> EnvObservation:
        """An observation as messages and as tokens: the tokens after the turn or, if turns are separate sequences, the
        next turn's prompt. _NoRoom if there are too many tokens; TypeError if it is neither text nor messages."""
        config, tokens = self._env(turn), functools.partial(self._tokens, turn, episode)
        shortens, most_chars = (
            config.long_observation == "shorten",
            max(0, turn.max_observation_tokens) * self._token_chars,
        )
        if not isinstance(observation, str):
            observation = as_messages(observation, bound_vision(self._worker.tokenizer))
        if shortens:
            observation = cut(observation, most_chars)
        # Text that cannot fit is not tokenised, which would delay the rank's other episodes. The factor 2 leaves room
        # for the note about the cut and for the shorter messages.
        if (count := num_chars(observation)) > 2 * most_chars:
            raise _NoRoom(
                f"an observation of {count} characters is too long, "
                f"there is room for {turn.max_observation_tokens} tokens"
            )
        encoded = tokens(observation)
        if len(encoded.token_ids) > turn.max_observation_tokens and shortens:
            encoded = fitting(observation, turn.max_observation_tokens, tokens)
        if (count := len(encoded.token_ids)) > turn.max_observation_tokens:
            what = "a prompt" if config.by_steps else "an observation"
            if config.examples and (turn.starts_episode or config.by_steps):
                what = f"a prompt with {config.examples} examples (env.{self._section(turn)}.examples)"
            raise _NoRoom(f"{what} of {count} tokens is too long, there is room for {turn.max_observation_tokens}")
        if (size := sum(len(medium.content) for medium in encoded.media)) > MAX_PIXEL_BYTES:
            limit = MAX_PIXEL_BYTES >> 20
            raise _NoRoom(f"the images before a turn have {size / 2**20:.1f} MiB of pixels, at most {limit} are sent")
        episode.shown.append(encoded.messages)
        if not turn.starts_episode:
            episode.said.append(self._remembered(turn))
        said = json.dumps(without_images(encoded.messages)).encode()
        return EnvObservation(turn.sample, encoded.token_ids.tobytes(), said, encoded.media, expert)

    def _tokens(self, turn: Turn, episode: _Episode, observation: Any) -> Encoded:
        tokenizer, tools, config = self._worker.tokenizer, episode.row["tools"], self._env(turn)
        if turn.starts_episode:
            examples = self._examples[self._section(turn)]
            return first_prompt(tokenizer, episode.row, observation, episode.adds_tools, examples)
        messages = as_messages(observation)
        if not config.by_steps:
            return encode_observation(tokenizer, messages, turn.last_token, tools)
        shown, said = [*episode.shown, messages], [*episode.said, self._remembered(turn)]
        return encode_prompt(tokenizer, window(shown, said, config.history), tools)._replace(messages=messages)

    def _remembered(self, turn: Turn) -> str:
        """The part of the turn that later prompts of the episode may show."""
        text = turn.text.replace(IMAGE_MARK, "")
        return after_thinking(text).lstrip() if self._env(turn).thinking == "cut" else text

    async def _play(self, turn: Turn, episode: _Episode) -> _Played:
        """Play a turn. Awaits only the environment's coroutines, and raises whatever the environment raises."""
        config, section = self._env(turn), self._section(turn)
        if turn.starts_episode:
            episode.row = _row(turn)
            episode.env = self._hosts.make(section, config, _told(episode.row))
            began = await self._hosts.returned(section, begin(episode.env, self._seed(turn, episode.row)))
            observation, info = checked_reset(began)
            self._mention(section, info)
            if tools := info.get("tools"):
                episode.row["tools"], episode.adds_tools = with_tools(episode.row["tools"], tools), True
            ended, metrics = bool(info.get("terminated") or info.get("truncated")), dict(NOTHING_PLAYED)
            if ended:
                metrics |= {"truncated": float(not info.get("terminated")), **_metrics(info, "reset()")}
            score = metrics["success"]
            expert = "" if ended else await self._expert_turn(turn, episode)
            return _Played(observation, ScoredSample(turn.sample, 0.0, score, "", metrics), ended, expert)
        assert episode.env is not None, "an episode begins with its first turn"
        action = (
            turn.text_with_special_tokens
            if turn.text_with_special_tokens and getattr(episode.env, "special_tokens", False)
            else turn.text
        )
        played = await self._hosts.returned(section, episode.env.step(action))
        observation, gained, terminated, truncated, info = checked_step(played)
        self._mention(section, info)
        reward, metrics = float(gained), _metrics(info, "step()")
        total = sum(episode.rewards) + reward
        _check_numbers({"reward": reward, "return": total}, "step()")
        episode.rewards.append(reward)
        score = metrics.get("success", total)
        metrics = {"return": total, "turns": float(len(episode.rewards))} | metrics | {"failed": 0.0}
        over = bool(terminated or truncated) or turn.reason == FinishReason.LENGTH or self._is_spent(turn, episode)
        if over:
            full = {} if config.max_sequence_tokens is None else {"sequence_full": 0.0}
            metrics = {"truncated": float(not terminated)} | full | metrics
        result = ScoredSample(turn.sample, total, score, "", metrics, list(episode.rewards))
        return _Played(observation, result, over, "" if over else await self._expert_turn(turn, episode))

    async def _expert_turn(self, turn: Turn, episode: _Episode) -> str:
        """The text of the next turn if the environment's expert plays it, else empty. Raises whatever the expert
        raises."""
        if not self._config.expert_plays:
            return ""
        seed = expert_seed(self._config.imitation, self._config.seed, turn.sample, len(episode.rewards))
        if seed is None:
            return ""
        env = episode.env
        said = env.expert_response(seed) if isinstance(env, EnvProcess) else expert_response(env, seed)
        text = await self._hosts.returned(self._section(turn), said)
        if not isinstance(text, str) or not text.strip():
            raise TypeError(f"expert() must return a text, but returned {text!r}")
        return text

    def _mention(self, section: str, info: dict[str, Any]) -> None:
        """Warn once about keys of info that nothing reads."""
        if (unread := frozenset(info.get(UNREAD_KEYS, ()))) - self._unread[section]:
            self._unread[section] |= unread
            names = ", ".join(sorted(unread))
            names = " ".join(names.split())
            text = "env.%s: nobody sees %s of info; what the model needs belongs to the observation"
            logger.warning(text, section, names)

    def _is_spent(self, turn: Turn, episode: _Episode) -> bool:
        """Whether the episode has no turns, tokens or seconds left."""
        config = self._env(turn)
        return (
            len(episode.rewards) >= config.max_turns
            or (config.max_tokens is not None and turn.num_written_tokens >= config.max_tokens)
            or (config.max_seconds is not None and self._now - episode.began > config.max_seconds)
        )

    def _seed(self, turn: Turn, row: dict[str, Any]) -> int:
        """The row's seed, else a seed derived from the prompt. ValueError if the row's seed is invalid."""
        given = given_start(row["extra"])
        return episode_seed(self._config.seed, split_sample_id(turn.sample)[0]) if given is None else given

    def _peek_end(self, command: ReadLastObservation, seq: int) -> Done:
        found = [self._ends.get(sample, _End("")) for sample in command.samples]
        self._ends = {}  # the next evaluation has other episodes
        media: list[tuple[Medium, ...]] = []
        room = LAST_PIXEL_BYTES
        for end in found:
            shown = tuple(end.media())
            room -= sum(len(picture.content) for picture in shown)
            media.append(shown if room >= 0 else ())
        return Done(seq, texts=[end.text for end in found], media=media)

    def _drop(self, sample: int) -> None:
        """End the sample's episode, if it has one, after its current turn."""
        episode = self._episodes.get(sample)
        if episode is not None and episode.at_work:
            episode.dropped = True
        elif episode is not None:
            self._end(sample)

    def _end_episodes(self, command: EndEpisodes, seq: int) -> None:
        self._lost.add(command.generator)
        for sample in [i for i, episode in self._episodes.items() if episode.generator == command.generator]:
            self._drop(sample)

    def _end(self, sample: int) -> None:
        """Drop an episode and close its environment."""
        self._close(self._episodes.pop(sample))

    def _close(self, episode: _Episode) -> None:
        if episode.env is not None:
            self._hosts.end(episode.env)


def _row(turn: Turn) -> dict[str, Any]:
    """The prompt's row, with the images in its messages, and in its column `images` as paths, or as PNG files if the
    row has no paths."""
    row: dict[str, Any] = json.loads(turn.meta)
    if turn.media:
        row["messages"] = with_images(row["messages"], turn.media)
        files = [image_bytes(Image.fromarray(picture[-1].pixels)) for picture in by_picture(turn.media)]
        row["extra"].setdefault("images", files)
    return row


@dataclass(frozen=True)
class _End:
    """The last observation of an episode as JSON messages. A picture for pages is kept compressed until it is asked
    for, because an evaluation may have thousands of episodes."""

    text: str
    pictures: tuple[Medium, ...] = ()

    @staticmethod
    def of(messages: Messages) -> _End:
        shown = [picture[-1] for picture in by_picture(images_of(messages))][:MAX_SHOWN]
        return _End(_stored(messages), tuple(_packed(thumbnail(picture)) for picture in shown))

    def media(self) -> Iterator[Medium]:
        for picture in self.pictures:
            yield msgspec.structs.replace(picture, content=zlib.decompress(picture.content))


def _packed(picture: Medium) -> Medium:
    return Medium(picture.kind, zlib.compress(picture.content, 1), picture.width, picture.height)


def _stored(messages: Messages) -> str:
    """Messages as JSON, with written marks of images."""
    return json.dumps(without_images(messages), ensure_ascii=False).replace(IMAGE_MARK, WRITTEN_MARK)


def _told(row: dict[str, Any]) -> dict[str, Any]:
    """The row for the environment's constructor, with written marks of images in its messages."""
    told = [
        {**message, "content": (message["content"] or "").replace(IMAGE_MARK, WRITTEN_MARK)}
        if images_of([message])
        else message
        for message in row["messages"]
    ]
    return {**row, "messages": without_images(told)}


def _examples(worker: Rank, section: str, config: EnvConfig) -> Messages:
    told, most = example_messages(config, section, worker.config.seed), worker.config.data.max_prompt_tokens
    vision = bound_vision(worker.tokenizer)
    messages = [as_messages([message], vision)[0] if message.get("images") else message for message in told]
    if messages and (count := len(encode_prompt(worker.tokenizer, messages, None).token_ids)) >= most:
        raise ValueError(
            f"env.{section}.examples: {config.examples} examples take {count} tokens, and leave none of "
            f"data.max_prompt_tokens={most} for the prompt; show fewer or allow more"
        )
    return messages


def _metrics(info: dict[str, Any], call: str) -> dict[str, float]:
    """The metrics in info, converted to str and float because msgpack cannot encode numpy and torch numbers. ValueError
    as in _check_numbers()."""
    metrics = {sendable(str(name)): float(value) for name, value in info.get("metrics", {}).items()}
    _check_numbers(metrics, call)
    return metrics


def _check_numbers(numbers: dict[str, float], call: str) -> None:
    """ValueError if a number that this call returned is not finite or too large."""
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise ValueError(f"{call} returned {name}={value}, which is not a number")
        if abs(value) > MAX_REWARD:
            raise ValueError(f"after {call} {name}={value:g}; at most {MAX_REWARD:g} is possible")


def _text(name: str, problem: str) -> str:
    """An error message of limited size and valid UTF-8, whatever text user code has raised."""
    text = problem[:ERROR_CHARS].encode(errors="replace").decode()
    return f"environment {name}: {text}"
