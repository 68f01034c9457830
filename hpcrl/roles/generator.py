"""The generator role: one replica's engine, the responses it holds, their way to rewards and environments."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from hpcrl.checkpoint.commit import seal_files
from hpcrl.control.clock import AwakeClock
from hpcrl.control.messages import (
    AbortSamples,
    Admit,
    Burst,
    BurstDone,
    Done,
    Ended,
    Forget,
    LoadHeld,
    Peek,
    PromptPayload,
    Rescore,
    Response,
    SaveHeld,
    Scored,
    ScoredSample,
    Turn,
    TurnDelta,
)
from hpcrl.control.queues import StoreLost
from hpcrl.engines.gen.base import GenEngine, Output, PromptRefused, Request, SamplingParams
from hpcrl.roles.base import Rank
from hpcrl.rollout.held import read_held, write_held
from hpcrl.rollout.types import FinishReason, Sample, receiver_of, split_sample_id
from hpcrl.spec.tables import GEN_ENGINES
from hpcrl.trajectory import TEXT, Field, Level, Origin, fields_of


class GeneratorRole:
    """`held` keeps every response from its first finished turn, or the beginning of its episode, until it is forgotten
    or handed over."""

    busy = False

    def __init__(self, worker: Rank):
        self._worker = worker
        make = GEN_ENGINES[worker.config.gen_engine].load()
        self.engine: GenEngine = make(worker.config, worker.model_path, worker.tokenizer)
        self.held: dict[int, Sample] = {}
        self._prompts: dict[int, PromptPayload] = {}
        self._messages: dict[int, list[dict[str, Any]]] = {}  # of these prompts
        self._admitted: dict[int, int] = {}  # sample -> most tokens of one of its turns
        self._beginning: list[int] = []  # held samples whose environment is to be told in the next burst
        self._env_of: dict[int, int] = {}  # sample -> rank of its environment
        self._observed: set[int] = set()  # held samples with an observation that no turn has followed yet
        self._refused: dict[int, Ended] = {}  # samples that end in the next burst without another token
        worker.world.mailbox.open()

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        return {
            Admit: self._admit,
            Burst: self._burst,
            AbortSamples: self._abort,
            Rescore: self._rescore,
            Forget: self._forget,
            SaveHeld: self._save_held,
            LoadHeld: self._load_held,
            Peek: self._peek,
        }

    def look_after(self) -> bool:
        return bool(self._env_of) and self._take_observations(0.0)

    def close(self) -> None:
        self.engine.close()

    def pick(self, samples: Sequence[int]) -> dict[str, list[np.ndarray]]:
        """Fields of held samples, one array per sample, and their messages as bytes under the name TEXT
        (hpcrl.comm.transfer.Fabric.exchange)."""
        held = [self.held[sample] for sample in samples]
        picked = {name: [sample.columns[name] for sample in held] for name in (held[0].columns if held else ())}
        return picked | {TEXT: [np.frombuffer(sample.text(), np.uint8) for sample in held]}

    def _admit(self, command: Admit, seq: int) -> None:
        self._prompts |= {prompt.uid: prompt for prompt in command.prompts}
        self._messages |= {prompt.uid: json.loads(prompt.meta)["messages"] for prompt in command.prompts}
        s = command.sampling
        params = SamplingParams(s.max_new_tokens, s.temperature, s.top_p, s.top_k, s.min_p, tuple(s.stop))
        going_on = {sample for sample, _ in command.samples if sample in self.held}
        if going_on:
            self._extend(going_on)
        shared: dict[int, list[int]] = {}  # siblings get the same list: the engine prefills it once
        requests = []
        for sample, seed in command.samples:
            if sample not in going_on and self._has_env(sample):
                self._hold(sample, s.truncates)
                self._admitted[sample] = s.max_new_tokens
                self._beginning.append(sample)
                continue
            if sample in going_on:
                ids, turn = self.held[sample].token_ids.tolist(), int(self.held[sample].turn_ids[-1]) + 1
            else:
                uid, turn = split_sample_id(sample)[0], 0
                ids = shared.setdefault(uid, np.frombuffer(self._prompts[uid].token_ids, dtype=np.int32).tolist())
            requests.append(Request(sample, ids, params, seed + turn))
        self._admitted |= dict.fromkeys((request.id for request in requests), s.max_new_tokens)
        try:
            self.engine.add(requests)
        except PromptRefused:  # then none was taken
            for request in requests:
                try:
                    self.engine.add([request])
                except PromptRefused as error:
                    self._refuse(request, str(error))

    def _refuse(self, request: Request, error: str) -> None:
        """End a sample that the engine does not take, with an error and without the observation it came with."""
        held = self.held.get(request.id)
        if held is None:
            ended = Ended(request.id, len(request.prompt_ids), 0, str(FinishReason.STOP))
        else:
            written = held.loss_mask.nonzero()[0]
            total = int(written[-1]) + 1 if len(written) else len(held.token_ids)
            for field in _token_fields(held):
                held.columns[field.name] = held.columns[field.name][:total]
            while len(written) and held.messages[-1]["role"] != "assistant":
                held.messages.pop()
            held.finish_reason = FinishReason.STOP
            ended = self._ended(held)
        self._refused[request.id] = ended
        self._worker.emit(Scored([ScoredSample(request.id, 0.0, 0.0, error)]))

    def _extend(self, samples: set[int]) -> None:
        """Wait for the observations of these samples; the controller continues only what was answered."""
        deadline = self._worker.world.timeout_s
        clock = AwakeClock(deadline)
        while missing := samples - self._observed:
            if clock.now() > deadline:
                raise TimeoutError(f"no observation for samples {sorted(missing)[:4]} within the deadline")
            self._take_observations(1.0)
        self._observed -= samples

    def _take_observations(self, timeout_s: float) -> bool:
        """Append the observations that have come, waiting up to timeout_s for the first; whether any has."""
        arrived = self._worker.world.mailbox.receive(TurnDelta, timeout_s)
        for item in arrived:
            held = self.held.get(item.sample)
            if held is None:  # it was dropped meanwhile
                continue
            token_ids, messages = np.frombuffer(item.token_ids, dtype=np.int32), json.loads(item.messages)
            if held.turn_ids[-1] >= 0:
                self._append(held, token_ids, None)
                held.messages += messages
            elif len(token_ids):  # the first prompt, in place of the row's
                self._hold(item.sample, "gen_logprobs_behaviour" in held.columns, token_ids, messages)
            self._observed.add(item.sample)
        return bool(arrived)

    def _append(self, sample: Sample, token_ids: np.ndarray, output: Output | None) -> None:
        """Add a model turn (output) or an observation (None) to a held sample."""
        known: dict[str, Any] = {
            "token_ids": token_ids,
            "loss_mask": output is not None,
            "turn_ids": int(sample.turn_ids[-1]) + (output is not None),
        }
        for field in _token_fields(sample):
            value = known.get(field.name, field.fill)
            if field.name not in known and output is not None:
                value = output.columns[field.name] if field.name in output.columns else getattr(output, field.name)
            column = np.broadcast_to(np.asarray(value, dtype=field.travels_as), len(token_ids))
            sample.columns[field.name] = np.concatenate([sample.columns[field.name], column])

    def _burst(self, command: Burst, seq: int) -> BurstDone:
        started = time.perf_counter()
        beginning, self._beginning = self._beginning, []
        self._env_of |= {sample: self._receiver("env", sample, command.envs) for sample in beginning}
        self._play(beginning)
        before = sum(self.engine.progress().values())
        with torch.no_grad():
            outputs = self.engine.step(command.num_tokens)
        progress = self.engine.progress()
        decoded = sum(progress.values()) + sum(len(o.token_ids) for o in outputs) - before
        decode = self._worker.tokenizer.batch_decode  # makes one text of no sequences
        texts = decode([o.token_ids for o in outputs], skip_special_tokens=True) if outputs else []
        ended = [self._take_in(output, text) for output, text in zip(outputs, texts, strict=True)]
        turns = [end for end in ended if end.sample in self._env_of]
        finished = [end for end in ended if end.sample not in self._env_of]
        self._play([end.sample for end in turns])
        self._post([end.sample for end in finished], command.receivers)
        begun = [self._ended(self.held[sample]) for sample in beginning]
        for end in self._refused.values():
            (turns if end.sample in self._env_of else finished).append(end)
        self._refused = {}
        return BurstDone(
            seq, finished=finished, turns=begun + turns, tokens=decoded, seconds=time.perf_counter() - started
        )

    def _take_in(self, output: Output, text: str) -> Ended:
        sample = self.held.get(output.id) or self._hold(output.id, output.gen_logprobs_behaviour is not None)
        self._append(sample, output.token_ids, output)
        sample.messages.append({"role": "assistant", "content": text})
        sample.finish_reason = output.finish_reason
        return self._ended(sample)

    def _ended(self, held: Sample) -> Ended:
        text_bytes = len(held.text()) if self._worker.config.rollout.save_rollouts else 0
        model = int(held.loss_mask.sum())
        return Ended(held.id, len(held.token_ids), model, str(held.finish_reason), text_bytes)

    def _hold(
        self,
        sample: int,
        truncated: bool,
        token_ids: np.ndarray | None = None,
        messages: list[dict[str, Any]] | None = None,
    ) -> Sample:
        """Hold a prompt alone, the row's own where no other is given. truncated: with the optional fields."""
        if token_ids is None or messages is None:
            uid = split_sample_id(sample)[0]
            token_ids = np.frombuffer(self._prompts[uid].token_ids, dtype=np.int32)
            messages = self._messages[uid]
        columns = {
            field.name: np.full(len(token_ids), field.fill, dtype=field.travels_as)
            for field in fields_of(Origin.GENERATOR, Level.TOKEN)
            if truncated or not field.optional
        }
        held = self.held[sample] = Sample(sample, messages=messages, **(columns | {"token_ids": token_ids}))
        return held

    def _has_env(self, sample: int) -> bool:
        prompt = self._prompts[split_sample_id(sample)[0]]
        return self._worker.config.env_of(prompt.domain) is not None

    def _play(self, samples: Sequence[int]) -> None:
        """Send the last turn of each sample to its environment; of one without a turn, that the episode begins."""
        posts: dict[int, list[Turn]] = defaultdict(list)
        for sample in samples:
            prompt, held = self._prompts[split_sample_id(sample)[0]], self.held[sample]
            begins = bool(held.turn_ids[-1] < 0)
            filled = 0 if begins else len(held.token_ids)
            posts[self._env_of[sample]].append(
                Turn(
                    sample,
                    prompt.domain,
                    "" if begins else held.messages[-1]["content"],
                    prompt.meta if begins else b"",
                    str(held.finish_reason),
                    self._worker.world.rank,
                    int(held.token_ids[-1]),
                    self._worker.config.max_sequence_tokens - filled - self._admitted[sample],
                    begins,
                )
            )
        self._mail(posts)

    def _post(self, samples: Sequence[int], receivers: Sequence[int]) -> None:
        """Send each sample's last turn to the rank that scores it; after an episode with its messages."""
        posts: dict[int, list[Response]] = defaultdict(list)
        for sample in samples if receivers else ():
            prompt, held = self._prompts[split_sample_id(sample)[0]], self.held[sample]
            meta = prompt.meta
            if sample in self._env_of:
                row = json.loads(meta)
                meta = json.dumps(row | {"extra": row["extra"] | {"messages": held.messages}}).encode()
            text = held.messages[-1]["content"]
            turn = held.token_ids[held.loss_mask & (held.turn_ids == held.turn_ids[-1])]
            ids = np.asarray(turn, dtype=np.int32).tobytes()
            earlier = self._earlier_turns(held)
            response = Response(sample, prompt.domain, text, meta, str(held.finish_reason), ids, earlier)
            posts[self._receiver("reward", sample, receivers)].append(response)
        self._mail(posts)

    def _earlier_turns(self, held: Sample) -> list[tuple[str, bytes]]:
        """Text and int32 token ids of the model's turns before the last."""
        turns = [held.token_ids[held.loss_mask & (held.turn_ids == turn)] for turn in range(held.turn_ids[-1])]
        texts = self._worker.tokenizer.batch_decode(turns, skip_special_tokens=True) if turns else []
        return [(text, np.asarray(ids, dtype=np.int32).tobytes()) for text, ids in zip(texts, turns, strict=True)]

    def _receiver(self, role: Literal["env", "reward"], sample: int, alive: Sequence[int]) -> int:
        return receiver_of(sample, self._worker.layout.ranks[role], alive)

    def _mail(self, posts: Mapping[int, Sequence[Response | Turn]]) -> None:
        for rank, items in posts.items():
            try:
                self._worker.world.mailbox.send(rank, items)
            except StoreLost as error:  # the controller learns of the loss from the agent and has them sent elsewhere
                print(f"hpcrl: {len(items)} responses did not reach rank {rank}: {error}", file=sys.stderr, flush=True)

    def _rescore(self, command: Rescore, seq: int) -> None:
        self._post(command.samples, command.receivers)

    def _abort(self, command: AbortSamples, seq: int) -> BurstDone:
        outputs = self.engine.abort(command.samples)
        turns = {i: int(self.held[i].loss_mask.sum()) if i in self.held else 0 for i in command.samples}
        counts = {o.id: turns[o.id] + len(o.token_ids) for o in outputs}  # earlier turns with it
        counts |= {i: turns[i] for i in command.samples if i in self._refused or i in self._beginning}
        ended = [Ended(sample, 0, count, str(FinishReason.ABORT)) for sample, count in counts.items()]
        posts: dict[int, list[Turn]] = defaultdict(list)
        for sample in command.samples:
            if sample in self._env_of:  # it keeps an environment for this one
                abort = Turn(sample, "", "", b"", str(FinishReason.ABORT), self._worker.world.rank)
                posts[self._env_of[sample]].append(abort)
        self._mail(posts)
        self._drop(command.samples)
        return BurstDone(seq, finished=ended, turns=[], tokens=0, seconds=0.0)

    def _forget(self, command: Forget, seq: int) -> None:
        self._drop(command.samples)

    def _save_held(self, command: SaveHeld, seq: int) -> Done:
        folder = Path(command.folder)
        name = write_held(folder, self._worker.world.rank, [self.held[sample] for sample in command.samples])
        return Done(seq, files=[(entry.path, entry.size, entry.sha256) for entry in seal_files(folder, [name])])

    def _load_held(self, command: LoadHeld, seq: int) -> Done:
        self.held |= read_held(Path(command.folder), command.files, set(command.samples))
        return Done(seq)

    def _drop(self, samples: Sequence[int]) -> None:
        known: tuple[dict[int, Any], ...] = (self.held, self._admitted, self._env_of, self._refused)
        for sample in samples:
            for table in known:
                table.pop(sample, None)
        self._observed.difference_update(samples)
        self._beginning = [sample for sample in self._beginning if sample in self.held]
        live = {split_sample_id(sample)[0] for sample in self._admitted}
        self._prompts = {uid: prompt for uid, prompt in self._prompts.items() if uid in live}
        self._messages = {uid: self._messages[uid] for uid in self._prompts}

    def _peek(self, command: Peek, seq: int) -> Done:
        held = [self.held[sample] for sample in command.samples]
        texts = self._worker.tokenizer.batch_decode(
            [h.token_ids[h.turn_ids >= 0] for h in held], skip_special_tokens=True
        )
        return Done(seq, texts=texts)


def _token_fields(sample: Sample) -> list[Field]:
    """The fields of tokens that a sample has."""
    return [field for field in fields_of(Origin.GENERATOR, Level.TOKEN) if field.name in sample.columns]
