"""The generator role: a replica's engine, its responses, and their transfer to rewards and environments."""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from hpcrl.checkpoint.commit import seal_files
from hpcrl.data.chat import end_ids
from hpcrl.data.reasoning import TAIL_TOKENS, TurnTexts
from hpcrl.engines.gen.generation_engine import GenEngine, PromptRefused, ReplicaRanks, Request, SamplingParams
from hpcrl.engines.hf_folder import read_safetensors
from hpcrl.messaging.messages import (
    AbortSamples,
    Admit,
    DecodeChunk,
    DecodeChunkDone,
    Done,
    DropSamples,
    Ended,
    EnvObservation,
    LoadPending,
    PromptPayload,
    ReadEpisodes,
    ReadTexts,
    Rescore,
    Response,
    SavePending,
    Scored,
    ScoredSample,
    Turn,
)
from hpcrl.messaging.queues import ReaderLost
from hpcrl.rewards.seeing import rewards_with_images
from hpcrl.rollout.pending import read_pending, write_pending
from hpcrl.rollout.pictures import MAX_SHOWN, thumbnail
from hpcrl.rollout.types import FinishReason, Sample, receiver_of, split_sample_id
from hpcrl.spec.media import Medium
from hpcrl.spec.tables import GEN_ENGINES
from hpcrl.spec.trajectory import TEXT
from hpcrl.system.clock import AwakeClock
from hpcrl.workers.checkpointing import or_unwritten
from hpcrl.workers.expert_tokens import ExpertTokens
from hpcrl.workers.held_samples import PromptState, SampleState
from hpcrl.workers.one_process import OneProcess
from hpcrl.workers.role import Rank

logger = logging.getLogger(__name__)


class GeneratorRole:
    """A rank of a generator replica. `samples` has all admitted samples that were neither dropped nor transferred.

    All ranks of a replica execute the same commands in the same order, so they make the same engine calls and have the
    same samples. The first rank answers DecodeChunk, sends messages to mailboxes and transfers samples. It receives
    observations in its mailbox, and sends them to the replica's other ranks when the next turns are admitted.
    """

    busy = False

    def __init__(self, worker: Rank):
        self._worker = worker
        replica = worker.layout.replica_of(worker.world.rank)
        self._texts = TurnTexts(worker.tokenizer)
        added = worker.tokenizer.added_tokens_decoder.items()
        self._special = frozenset(token_id for token_id, token in added if token.special)
        self._speaks, self._others = replica[0] == worker.world.rank, replica[1:]
        group = worker.world.group(f"replica/{replica[0]}", replica, 0, of_engine=True) if self._others else None
        ranks = ReplicaRanks(replica, replica.index(worker.world.rank), group)
        make = GEN_ENGINES[worker.config.gen_engine].load()
        self.engine: GenEngine = make(worker.config, worker.model_path, worker.tokenizer, ranks)
        if not worker.config.pipeline_spec.trains:  # no trainer sends weights
            self.engine.load_weights(read_safetensors(worker.model_path), version=0)
        self._end_ids = end_ids(worker.tokenizer)
        self._shows_images = rewards_with_images(worker.config)  # by domain, to its reward
        self.trainer = OneProcess.of(worker, self.engine)
        self.samples: dict[int, SampleState] = {}
        self._prompts: WeakValueDictionary[int, PromptState] = WeakValueDictionary()  # kept alive by their samples
        self._beginning: list[SampleState] = []  # samples whose environments start in the next decode chunk
        self._refused: list[Ended] = []  # samples that end in the next decode chunk without a new token
        self._expert_tokens = ExpertTokens(worker.tokenizer)
        self._by_expert: list[SampleState] = []  # samples whose turn, an expert's, ends in the next decode chunk
        self._observations: dict[int, EnvObservation] = {}  # by sample, until the next turn is admitted

    def handlers(self) -> dict[type, Callable[[Any, int], Any]]:
        return {
            Admit: self._admit,
            DecodeChunk: self._decode_chunk,
            AbortSamples: self._abort,
            Rescore: self._rescore,
            DropSamples: self._forget,
            SavePending: lambda command, seq: or_unwritten(seq, lambda: self._save_held(command, seq)),
            LoadPending: self._load_held,
            ReadTexts: self._peek,
            ReadEpisodes: self._read_episodes,
        }

    def poll(self) -> bool:
        return False

    def close(self) -> None:
        self.engine.close()

    def pick(self, samples: Sequence[int]) -> dict[str, list[np.ndarray]]:
        """The fields of these samples, one array per sample, and their messages as bytes in TEXT (see
        TransferGroup.exchange)."""
        held = [self.samples[sample].held for sample in samples]
        picked = {name: [sample.columns[name] for sample in held] for name in (held[0].columns if held else ())}
        return picked | {TEXT: [np.frombuffer(sample.text(), np.uint8) for sample in held]}

    def pictures(self, samples: Sequence[int]) -> dict[bytes, bytes]:
        """The pixels of these samples' images, by digest."""
        return {digest: pixels for sample in samples for digest, pixels in self.samples[sample].held.pictures.items()}

    def _admit(self, command: Admit, seq: int) -> None:
        prompts = {payload.uid: self._prompt(payload) for payload in command.prompts}
        s = command.sampling
        limits = s.top_p, s.top_k, s.min_p, tuple(s.stop)
        params = SamplingParams(s.max_new_tokens, s.temperature, *limits, stop_token_ids=self._end_ids)
        rollout = self._worker.config.rollout
        known = [self.samples[sample] for sample, _ in command.samples if sample in self.samples]
        if going_on := [sample for sample in known if sample.rollout is not None]:
            self._extend(going_on)
        shared: dict[int, list[int]] = {}  # group members get the same list, which the engine prefills once
        requests = []
        for sample_id, seed in command.samples:
            uid = split_sample_id(sample_id)[0]
            if sample_id not in self.samples:
                self.samples[sample_id] = SampleState(sample_id, prompts[uid])
            sample = self.samples[sample_id]
            own = rollout.domains.get(sample.prompt.domain)
            limit = min(s.max_new_tokens, (own.max_new_tokens if own is not None else None) or s.max_new_tokens)
            if (budget := sample.prompt.max_tokens) is not None:
                limit = min(limit, budget - sample.num_model_tokens)
            sample.max_new_tokens, turn = limit, 0
            if sample.rollout is not None:
                ids, turn = sample.context.tolist(), sample.next_turn
                written = self._expert_tokens.of(sample.expert, ids)
                if 0 < len(written) <= limit:  # a longer turn is the policy's
                    sample.take_turn(written)
                    self._by_expert.append(sample)
                    continue
            elif sample.prompt.played:
                sample.begin(s.truncates)
                self._beginning.append(sample)
                continue
            else:
                ids = shared.setdefault(uid, sample.prompt.token_ids.tolist())
            continues = sample.env is not None and not sample.prompt.by_steps
            own_params = replace(params, max_new_tokens=limit) if limit < params.max_new_tokens else params
            requests.append(Request(sample_id, ids, own_params, seed + turn, continues, sample.context_media))
        try:
            self.engine.add(requests)
        except PromptRefused:  # the engine accepted none of the requests
            for request in requests:
                try:
                    self.engine.add([request])
                except PromptRefused as error:
                    self._refuse(request, str(error))

    def _prompt(self, payload: PromptPayload) -> PromptState:
        prompt = self._prompts.get(payload.uid)
        if prompt is None:
            prompt = self._prompts[payload.uid] = PromptState(payload, self._worker.config)
        return prompt

    def _refuse(self, request: Request, error: str) -> None:
        """End a sample that the engine has refused: report an error, and remove its last observation."""
        sample = self.samples[request.id]
        if sample.rollout is None:
            ended = Ended(request.id, len(request.prompt_ids), 0, str(FinishReason.STOP))
        else:
            sample.take_back()
            ended = self._ended(sample)
        self._refused.append(ended)
        if self._speaks:
            self._worker.emit(Scored([ScoredSample(request.id, 0.0, 0.0, error)]))

    def _extend(self, samples: Sequence[SampleState]) -> None:
        """Add observations to samples that continue, and send them to the replica's other ranks. All of them have been
        sent to the first rank, because the controller only continues samples whose environment has answered."""
        deadline = self._worker.world.timeout_s
        clock = AwakeClock(deadline)
        while missing := [sample.id for sample in samples if sample.id not in self._observations]:
            if clock.now() > deadline:
                raise TimeoutError(f"no observation for samples {sorted(missing)[:4]} within the deadline")
            for item in self._worker.world.mailbox.receive(EnvObservation, 1.0):
                # On the first rank, an unknown sample has been dropped. Other ranks may receive observations before
                # they admit the sample.
                if item.sample in self.samples or not self._speaks:
                    self._observations[item.sample] = item
        observations = [self._observations.pop(sample.id) for sample in samples]
        self._mail(dict.fromkeys(self._others, observations))
        for sample, observation in zip(samples, observations, strict=True):
            sample.observe(observation)

    def _decode_chunk(self, command: DecodeChunk, seq: int) -> DecodeChunkDone | Done:
        started = time.perf_counter()
        beginning, self._beginning = self._beginning, []
        for sample in beginning:
            sample.env = receiver_of(sample.id, self._worker.layout.ranks["env"], command.envs)
        self._play(beginning)
        if self.trainer is not None:
            self.trainer.check()
        at_start = self.engine.progress()
        before, running = sum(at_start.values()), min(len(at_start), self._worker.config.generator.max_num_seqs)
        with torch.no_grad():
            outputs = self.engine.step(command.num_tokens)
        decoded_at = time.monotonic()
        progress = self.engine.progress()
        decoded = sum(progress.values()) + sum(len(o.token_ids) for o in outputs) - before
        samples = [self.samples[output.id] for output in outputs]
        written = [output.token_ids.tolist() for output in outputs]
        texts = self._texts.of(written, [sample.context[-TAIL_TOKENS:].tolist() for sample in samples])
        for sample, output, text in zip(samples, outputs, texts, strict=True):
            sample.end_turn(output, text)
        by_expert, self._by_expert = self._by_expert, []
        turns = [*by_expert, *(sample for sample in samples if sample.env is not None)]
        finished = [sample for sample in samples if sample.env is None]
        self._play(turns)
        self._post(finished, command.receivers)
        refused, self._refused = self._refused, []
        if not self._speaks:
            return Done(seq)
        played = [end for end in refused if self.samples[end.sample].env is not None]
        return DecodeChunkDone(
            seq,
            finished=[*map(self._ended, finished), *(end for end in refused if end not in played)],
            turns=[*map(self._ended, beginning + turns), *played],
            tokens=decoded,
            seconds=time.perf_counter() - started,
            decoded_at=decoded_at,
            running=running,
            queued=len(at_start) - running,
        )

    def _ended(self, sample: SampleState) -> Ended:
        return sample.ended(with_text=self._worker.config.rollout.save_rollouts)

    def _play(self, samples: Sequence[SampleState]) -> None:
        """Send each sample's last turn, or the start of its episode, to its environment."""
        posts: dict[int, list[Turn]] = defaultdict(list)
        for sample in samples:
            prompt, held = sample.prompt, sample.held
            begins = bool(held.turn_ids[-1] < 0)
            if prompt.by_steps:
                room = self._worker.config.data.max_prompt_tokens
            else:
                filled = 0 if begins else len(held.token_ids)
                room = prompt.max_sequence_tokens - filled - sample.max_new_tokens
            assert sample.env is not None, "environments are told of their own samples"
            posts[sample.env].append(
                Turn(
                    sample.id,
                    prompt.domain,
                    "" if begins else held.messages[-1]["content"],
                    prompt.meta if begins else b"",
                    str(held.finish_reason),
                    self._worker.world.rank,
                    int(held.token_ids[-1]),
                    room,
                    begins,
                    sample.num_model_tokens,
                    "" if begins else self._marked(held),
                    prompt.media if begins else (),
                )
            )
        self._mail(posts)

    def _marked(self, held: Sample) -> str:
        """The last turn's text with special tokens but without a final one; empty if there are no other ones."""
        turn = held.token_ids[held.loss_mask & (held.turn_ids == held.turn_ids[-1])].tolist()
        inner = turn[:-1] if turn[-1] in self._special else turn
        return self._worker.tokenizer.decode(inner, skip_special_tokens=False) if self._special & {*inner} else ""

    def _post(self, samples: Sequence[SampleState], receivers: Sequence[int]) -> None:
        """Send each sample's last turn, and an episode's messages, to the rank that scores it."""
        posts: dict[int, list[Response]] = defaultdict(list)
        for sample in samples if receivers else ():
            prompt, held = sample.prompt, sample.held
            meta = prompt.meta
            if sample.env is not None:
                row = json.loads(meta)
                row["extra"]["messages"] = held.messages
                meta = json.dumps(row, ensure_ascii=False).encode(errors="replace")
            text = held.messages[-1]["content"]
            turn = held.token_ids[held.loss_mask & (held.turn_ids == held.turn_ids[-1])]
            ids = np.asarray(turn, dtype=np.int32).tobytes()
            earlier = self._earlier_turns(held)
            media = prompt.media if self._shows_images(prompt.domain) else ()
            response = Response(sample.id, prompt.domain, text, meta, str(held.finish_reason), ids, earlier, media)
            scorers = self._worker.layout.scorers_of(prompt.domain)
            posts[receiver_of(sample.id, scorers, receivers)].append(response)
        self._mail(posts)

    def _earlier_turns(self, held: Sample) -> list[tuple[str, bytes]]:
        """Text and int32 token ids of the model's turns except the last."""
        written = [held.loss_mask & (held.turn_ids == turn) for turn in range(held.turn_ids[-1])]
        turns, starts = [held.token_ids[places] for places in written], [int(places.argmax()) for places in written]
        prompts = [held.token_ids[max(0, start - TAIL_TOKENS) : start].tolist() for start in starts]
        texts = self._texts.of([turn.tolist() for turn in turns], prompts)
        return [(text, np.asarray(ids, dtype=np.int32).tobytes()) for text, ids in zip(texts, turns, strict=True)]

    def _mail(self, posts: Mapping[int, Sequence[Response | Turn | EnvObservation]]) -> None:
        for rank, items in posts.items() if self._speaks else ():
            try:
                self._worker.world.mailbox.send(rank, items)
            except ReaderLost as error:  # the agent reports it to the controller, which commands to resend the items
                logger.warning("%d items did not reach rank %d: %s", len(items), rank, error)

    def _rescore(self, command: Rescore, seq: int) -> None:
        self._post([self.samples[sample] for sample in command.samples], command.receivers)

    def _abort(self, command: AbortSamples, seq: int) -> DecodeChunkDone | Done:
        outputs = self.engine.abort(command.samples)
        samples = {i: self.samples[i] for i in command.samples if i in self.samples}
        unstarted = (*self._beginning, *self._by_expert)
        outside = {*(sample.id for sample in unstarted), *(end.sample for end in self._refused)}
        counts = {o.id: samples[o.id].num_model_tokens + len(o.token_ids) for o in outputs}  # includes earlier turns
        counts |= {i: sample.num_model_tokens for i, sample in samples.items() if i in outside}
        posts: dict[int, list[Turn]] = defaultdict(list)
        for sample in samples.values():
            if sample.env is not None:  # that rank has this sample's environment
                abort = Turn(sample.id, "", "", b"", str(FinishReason.ABORT), self._worker.world.rank)
                posts[sample.env].append(abort)
        self._mail(posts)
        self._drop(command.samples)
        if not self._speaks:
            return Done(seq)
        ended = [Ended(sample, 0, count, str(FinishReason.ABORT)) for sample, count in counts.items()]
        return DecodeChunkDone(seq, finished=ended, turns=[], tokens=0, seconds=0.0)

    def _forget(self, command: DropSamples, seq: int) -> None:
        self._drop(command.samples)

    def _save_held(self, command: SavePending, seq: int) -> Done:
        folder = Path(command.folder)
        name = write_pending(folder, self._worker.world.rank, [self.samples[i].held for i in command.samples])
        return Done(seq, files=[(entry.path, entry.size, entry.sha256) for entry in seal_files(folder, [name])])

    def _load_held(self, command: LoadPending, seq: int) -> Done:
        held = read_pending(Path(command.folder), command.files, set(command.samples))
        self.samples |= {i: SampleState(i, None, rollout=sample) for i, sample in held.items()}
        return Done(seq)

    def _drop(self, samples: Sequence[int]) -> None:
        for sample in samples:
            self.samples.pop(sample, None)
            self._observations.pop(sample, None)
        self._beginning = [sample for sample in self._beginning if sample.id in self.samples]
        self._by_expert = [sample for sample in self._by_expert if sample.id in self.samples]
        self._refused = [end for end in self._refused if end.sample in self.samples]

    def _peek(self, command: ReadTexts, seq: int) -> Done:
        states = [self.samples[sample] for sample in command.samples]
        if command.whole:
            texts = [state.held.text().decode() for state in states]
            return Done(seq, texts=texts, media=[_for_pages(state.shown) for state in states])
        refused = [state.rollout is None for state in states]  # a prompt that the engine refused has no response
        texts = [
            "" if none else state.held.messages[-1]["content"] for none, state in zip(refused, states, strict=True)
        ]
        return Done(seq, texts=texts)

    def _read_episodes(self, command: ReadEpisodes, seq: int) -> Done:
        return Done(seq, texts=[self.samples[sample].as_episode() for sample in command.samples])


def _for_pages(pictures: Sequence[Medium]) -> tuple[Medium, ...]:
    """An episode's first pictures in a size that one message can hold."""
    return tuple(thumbnail(picture) for picture in pictures[:MAX_SHOWN])
