"""The generator role with its real engine: a refused prompt costs its sample, environments get dropped samples."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from hpcrl.engines.gen.generation_engine import Output
from hpcrl.engines.hf_folder import read_safetensors
from hpcrl.messaging import messages as m
from hpcrl.rewards.serving.protocol import LENGTH as HEAD
from hpcrl.rewards.serving.protocol import pack_chunk, read_chunk, to_message
from hpcrl.rollout.batch import pack
from hpcrl.rollout.pending import read_pending, write_pending
from hpcrl.rollout.types import make_sample_id
from hpcrl.spec.media import IMAGE_MARK, Medium
from hpcrl.spec.trajectory import FIELDS, TEXT, Field, Level, Origin
from hpcrl.workers.expert_tokens import ExpertTokens
from hpcrl.workers.generator import GeneratorRole
from hpcrl.workers.reward import item_of
from tests.workers.conftest import Stage

ENVS = {
    "default": {"max_turns": 2},
    "short": {"max_turns": 2, "max_tokens": 6},
    "steps": {"max_turns": 2, "episode": "steps"},
    "plain": None,
}
SETTINGS = {"data": {"max_prompt_tokens": 8}, "rollout": {"max_new_tokens": 4}, "env": ENVS}
LENGTH = 2 * (8 + 4)
SAMPLING = m.Sampling(4, 1.0, 1.0, 0, 0.0, [])
PROMPTS = {1: [5, 6, 7], 2: [5, 10**6], 3: [5] * LENGTH}
QUESTION = [{"role": "user", "content": "?"}]
META = json.dumps({"prompt": "?", "answer": "4", "extra": {"level": 2}, "messages": QUESTION, "tools": None}).encode()
SAMPLES = [make_sample_id(uid, 0, member) for uid in PROMPTS for member in range(2)]


@pytest.fixture
def role(stage: Stage, model_folder: Path) -> GeneratorRole:
    role = GeneratorRole(stage.worker(2, SETTINGS))
    role.engine.load_weights(read_safetensors(model_folder), version=0)
    stage.empty(1)
    admit(role, {uid: ("d", ids) for uid, ids in PROMPTS.items()}, SAMPLES)
    begun = carry_out(role, m.DecodeChunk(8, [2], [1]))
    assert [(e.sample, e.model_tokens) for e in begun.turns] == [(sample, 0) for sample in SAMPLES]
    assert [(turn.sample, turn.starts_episode) for turn in stage.mail(1, m.Turn)] == [
        (sample, True) for sample in SAMPLES
    ]
    stage.send(1, 2, [m.EnvObservation(sample, b"") for sample in SAMPLES])  # each begins with the prompt of its row
    carry_out(role, m.Admit([], [(sample, 3) for sample in SAMPLES], SAMPLING))
    return role


def admit(role: GeneratorRole, prompts: dict[int, tuple[str, list[int]]], samples: list[int]) -> None:
    payloads = [
        m.PromptPayload(uid, domain, np.array(ids, dtype=np.int32).tobytes(), META)
        for uid, (domain, ids) in prompts.items()
    ]
    carry_out(role, m.Admit(payloads, [(sample, 3) for sample in samples], SAMPLING))


def carry_out(role: GeneratorRole, command: m.Command) -> m.DecodeChunkDone:
    return role.handlers()[type(command)](command, 1)


def test_a_refused_prompt_ends_only_its_samples(stage: Stage, role: GeneratorRole) -> None:
    scored = [result for event in stage.heard() for result in event.samples]
    assert [result.sample for result in scored] == SAMPLES[2:]
    assert all("outside the vocabulary" in result.error for result in scored[:2])
    assert all("exceed the engine's max_length" in result.error for result in scored[2:])
    done = carry_out(role, m.DecodeChunk(8, [2], [1]))
    assert sorted(e.sample for e in done.turns) == SAMPLES
    tokens = {e.sample: e.model_tokens for e in done.turns}
    assert all(tokens[sample] > 0 for sample in SAMPLES[:2]) and not any(tokens[sample] for sample in SAMPLES[2:])
    assert not carry_out(role, m.DecodeChunk(8, [2], [1])).turns


def test_only_responses_that_an_environment_continues_are_kept(stage: Stage, role: GeneratorRole) -> None:
    carry_out(role, m.DecodeChunk(8, [2], [1]))
    kept = role.engine._blocks.match(role.samples[SAMPLES[0]].held.token_ids[:-1])
    assert kept.tail_tokens == len(role.samples[SAMPLES[0]].held.token_ids) - 1
    admit(role, {9: ("plain", [6, 7, 8])}, [make_sample_id(9, 0, 0)])
    carry_out(role, m.DecodeChunk(8, [], [1]))
    plain = role.samples[make_sample_id(9, 0, 0)].held.token_ids
    assert len(plain) > 3 and role.engine._blocks.match(plain[:-1]).tail_tokens == 2


def test_a_refused_sample_that_is_dropped_first_is_reported_as_aborted(stage: Stage, role: GeneratorRole) -> None:
    stage.heard()
    aborted = carry_out(role, m.AbortSamples(SAMPLES[1:3]))
    assert [(e.sample, e.reason) for e in aborted.finished] == [(sample, "abort") for sample in SAMPLES[1:3]]
    assert sorted(e.sample for e in carry_out(role, m.DecodeChunk(8, [2], [1])).turns) == [SAMPLES[0], *SAMPLES[3:]]


def test_a_refused_next_turn_keeps_earlier_turns(stage: Stage, role: GeneratorRole) -> None:
    stage.heard()
    before = {e.sample: e for e in carry_out(role, m.DecodeChunk(8, [2], [1])).turns}
    good, bad = SAMPLES[:2]
    for sample, ids in ((good, [9, 9]), (bad, [9, 10**6])):
        said = b'[{"role": "user", "content": "again"}]'
        stage.send(1, 2, [m.EnvObservation(sample, np.array(ids, dtype=np.int32).tobytes(), said)])
    carry_out(role, m.Admit([], [(good, 3), (bad, 3)], SAMPLING))
    [scored] = stage.heard()
    assert scored.samples[0].sample == bad and "outside the vocabulary" in scored.samples[0].error
    after = {e.sample: e for e in carry_out(role, m.DecodeChunk(8, [2], [1])).turns}
    assert after[bad].total_tokens == before[bad].total_tokens == len(role.samples[bad].held.token_ids)
    assert after[bad].model_tokens == before[bad].model_tokens
    assert after[good].total_tokens > before[good].total_tokens + 2
    for sample in (good, bad):
        columns = role.pick([sample])
        tokens = {len(column[0]) for name, column in columns.items() if name not in ("status", TEXT)}
        assert tokens == {after[sample].total_tokens} and len(columns[TEXT][0]) == after[sample].text_bytes
        assert json.loads(columns[TEXT][0].tobytes())[-1]["role"] == "assistant"
        assert columns["loss_mask"][0][-1]


def test_a_dropped_turn_is_counted_with_earlier_turns(stage: Stage, role: GeneratorRole) -> None:
    stage.heard()
    before = {e.sample: e.model_tokens for e in carry_out(role, m.DecodeChunk(8, [2], [1])).turns}
    stage.send(1, 2, [m.EnvObservation(SAMPLES[0], np.array([9], dtype=np.int32).tobytes())])
    carry_out(role, m.Admit([], [(SAMPLES[0], 3)], SAMPLING))
    carry_out(role, m.DecodeChunk(1, [2], [1]))
    aborted = carry_out(role, m.AbortSamples(SAMPLES[:2]))
    assert [(e.sample, e.model_tokens) for e in aborted.finished] == [(SAMPLES[0], before[SAMPLES[0]] + 1)]


def test_environments_get_the_remaining_length_and_dropped_samples(stage: Stage, role: GeneratorRole) -> None:
    stage.heard()
    done = carry_out(role, m.DecodeChunk(8, [2], [1]))
    total = {e.sample: e.total_tokens for e in done.turns}
    turns = stage.mail(1, m.Turn)
    assert sorted(turn.sample for turn in turns) == SAMPLES[:2]
    for turn in turns:
        assert turn.max_observation_tokens == LENGTH - total[turn.sample] - SAMPLING.max_new_tokens
        assert turn.last_token == role.samples[turn.sample].held.token_ids[-1]
    carry_out(role, m.AbortSamples(SAMPLES))
    assert [(turn.sample, turn.reason) for turn in stage.mail(1, m.Turn)] == [(s, "abort") for s in SAMPLES]
    assert not role.samples and not role._prompts and not role._refused


@pytest.mark.parametrize(
    ("ids", "marked"),
    [([1, 40, 2], "<|im_start|>F"), ([40, 1, 40], "F<|im_start|>F"), ([40, 2], ""), ([40, 40], ""), ([2], "")],
)
def test_environments_get_special_tokens_except_the_last(
    stage: Stage, role: GeneratorRole, ids: list[int], marked: str
) -> None:
    decode_chunk = role.engine.step
    new = {"token_ids": np.array(ids, dtype=np.int32), "gen_logprobs": np.zeros(len(ids), dtype=np.float32)}
    new["versions"] = np.zeros(len(ids), dtype=np.int32)
    role.engine.step = lambda count: [replace(o, **new) for o in decode_chunk(count)]  # type: ignore[method-assign]
    carry_out(role, m.DecodeChunk(8, [2], [1]))
    turns = stage.mail(1, m.Turn)
    assert {(turn.text_with_special_tokens, turn.text) for turn in turns} == {(marked, "F" * ids.count(40))}


def test_a_turns_text_includes_reasoning_begun_in_the_prompt(stage: Stage, role: GeneratorRole) -> None:
    sample, prompt = make_sample_id(9, 0, 0), role._worker.tokenizer.encode("<think>\n", add_special_tokens=False)
    for uid, ids in ((9, prompt), (10, prompt[:-2])):
        admit(role, {uid: ("plain", ids)}, [make_sample_id(uid, 0, 0)])
    carry_out(role, m.DecodeChunk(8, [], [1]))
    [text, other] = role.handlers()[m.ReadTexts](m.ReadTexts([sample, make_sample_id(10, 0, 0)]), 1).texts
    turn = role.samples[sample].held
    written = role._worker.tokenizer.decode(turn.token_ids[turn.loss_mask], skip_special_tokens=True)
    assert text == f"<think>\n{written}" == turn.messages[-1]["content"] and not other.startswith("<think>")


def test_an_episode_is_read_as_prompt_and_response(stage: Stage, role: GeneratorRole) -> None:
    """An example in the prompt is no turn of the model; a refused prompt has no response."""
    carry_out(role, m.DecodeChunk(8, [2], [1]))
    good, refused = SAMPLES[0], SAMPLES[-1]
    said = [{"role": "user", "content": "again"}]
    observation = m.EnvObservation(good, np.array([9, 9], dtype=np.int32).tobytes(), json.dumps(said).encode())
    stage.send(1, 2, [observation])
    carry_out(role, m.Admit([], [(good, 3)], SAMPLING))
    carry_out(role, m.DecodeChunk(8, [2], [1]))
    example = [{"role": "user", "content": "a" + IMAGE_MARK}, {"role": "assistant", "content": "b"}]
    held = role.samples[good].held
    held.messages[:0] = example
    role.samples[good].shown = [Medium("image", bytes([n] * 3), 1, 1) for n in range(2)]
    texts = role.handlers()[m.ReadEpisodes](m.ReadEpisodes([good, refused]), 1).texts
    read, none = map(json.loads, texts)
    assert read["prompt"] == [{"role": "user", "content": "a<image>"}, example[1], *QUESTION]
    assert [message["role"] for message in read["response"]] == ["assistant", "user", "assistant"]
    assert read["response"][1] == said[0] and read["images"] == [role.samples[good].shown[0].digest.hex()]
    assert none == {"prompt": QUESTION, "response": [], "images": []}
    admit(role, {9: ("plain", [5, 10**6])}, [lost := make_sample_id(9, 0, 0)])
    assert role.handlers()[m.ReadTexts](m.ReadTexts([lost]), 1).texts == [""]


def test_a_field_of_the_engine_is_kept_and_read_back(
    stage: Stage, role: GeneratorRole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Declared once and given in Output.columns: held, padded at observations, and in a checkpoint."""
    field = Field("entropies", "float64", Level.TOKEN, Origin.GENERATOR, "of a token", wire="float16", fill=-2)
    monkeypatch.setitem(FIELDS, "entropies", field)
    decode_chunk, sample = role.engine.step, make_sample_id(9, 0, 0)

    def step(num_tokens: int) -> list[Output]:
        outputs = decode_chunk(num_tokens)
        return [replace(o, columns={"entropies": np.full(len(o.token_ids), 0.5)}) for o in outputs]

    role.engine.step = step  # type: ignore[method-assign]
    carry_out(role, m.AbortSamples(SAMPLES))
    admit(role, {9: ("d", [5, 6])}, [sample])
    for observation in ([], [9, 9]):
        carry_out(role, m.DecodeChunk(8, [2], [1]))
        stage.send(1, 2, [m.EnvObservation(sample, np.array(observation, dtype=np.int32).tobytes())])
        carry_out(role, m.Admit([], [(sample, 3)], SAMPLING))
    carry_out(role, m.DecodeChunk(8, [2], [1]))
    held = role.samples[sample].held
    assert held.entropies.dtype == np.float16
    assert held.entropies.tolist() == [0.5 if written else -2.0 for written in held.loss_mask]
    again = read_pending(tmp_path, [write_pending(tmp_path, 2, [held])], {sample})[sample]
    assert again.entropies.tolist() == held.entropies.tolist() and again.entropies.dtype == np.float16
    columns = {name: column[0] for name, column in role.pick([sample]).items() if name != TEXT}
    batch = pack([sample], [len(held.token_ids)], columns)
    assert batch.entropies.dtype == torch.float64 and batch.entropies.tolist() == held.entropies.tolist()
    stage.mail(1, m.Turn)


def test_domains_with_and_without_environments_share_a_decode_chunk(stage: Stage, role: GeneratorRole) -> None:
    stage.heard()
    single = [make_sample_id(9, 0, member) for member in range(2)]
    admit(role, {9: ("plain", [5, 6])}, single)
    done = carry_out(role, m.DecodeChunk(8, [2], [1]))
    assert sorted(e.sample for e in done.turns) == SAMPLES and sorted(e.sample for e in done.finished) == single
    assert {turn.sample for turn in stage.mail(1, m.Turn)} == set(SAMPLES[:2])
    responses = stage.mail(2, m.Response)
    assert {response.sample for response in responses} == set(single)
    assert all(response.meta == META for response in responses)
    for response in responses:
        assert role.samples[response.sample].held.messages == [
            *QUESTION,
            {"role": "assistant", "content": response.text},
        ]
    # After its episode a sample is scored with all its turns.
    carry_out(role, m.Rescore(SAMPLES[:1], [2]))
    [response] = stage.mail(2, m.Response)
    assert json.loads(response.meta)["extra"] == {"level": 2, "messages": role.samples[SAMPLES[0]].held.messages}


def test_a_reward_gets_images_only_if_it_looks_at_them(stage: Stage, role: GeneratorRole) -> None:
    """And the marks of images in an episode's messages as `<image>`."""
    stage.heard()
    stage.mail(2, m.Response)
    sample = role.samples[SAMPLES[0]]
    picture = Medium("image", b"\0\0\0", 1, 1, 3, 1)
    carry_out(role, m.DecodeChunk(8, [2], [1]))
    sample.prompt.media = (picture,)
    sample.held.messages[0] = {"role": "user", "content": f"é{IMAGE_MARK}?"}
    for shows in (False, True):
        role._shows_images = lambda domain: domain == "d" and shows  # noqa: B023
        carry_out(role, m.Rescore([sample.id], [2]))
        [response] = stage.mail(2, m.Response)
        assert response.media == ((picture,) if shows else ())
        item = item_of(response)
        assert item.extra["messages"][0]["content"] == "é<image>?"
        assert list(item.images) == list(response.media)
    (again,) = read_chunk(pack_chunk([item], [to_message(item)])[HEAD.size :])
    assert list(again.images) == [picture]


@pytest.mark.slow
def test_a_reward_gets_all_turns_of_an_episode(stage: Stage, role: GeneratorRole) -> None:
    stage.heard()
    stage.mail(2, m.Response)
    sample = SAMPLES[0]
    carry_out(role, m.DecodeChunk(8, [2], [1]))
    said = b'[{"role": "assistant", "content": "ha"}]'
    stage.send(1, 2, [m.EnvObservation(sample, np.array([9, 9], dtype=np.int32).tobytes(), said)])
    carry_out(role, m.Admit([], [(sample, 3)], SAMPLING))
    carry_out(role, m.DecodeChunk(8, [2], [1]))
    carry_out(role, m.Rescore([sample], [2]))
    [response] = stage.mail(2, m.Response)
    held = role.samples[sample].held
    ids = np.frombuffer(b"".join([*(ids for _, ids in response.earlier), response.token_ids]), dtype=np.int32)
    assert ids.tolist() == held.token_ids[held.loss_mask].tolist() and len(response.earlier) == 1
    assert [response.earlier[0][0], response.text] == [held.messages[n]["content"] for n in (-3, -1)]
    assert held.messages[-2]["content"] == "ha", "what an environment says is not a turn of the model"


def test_the_first_observation_replaces_the_prompt(stage: Stage, role: GeneratorRole) -> None:
    stage.heard()
    sample, said = make_sample_id(9, 0, 0), [{"role": "user", "content": "a board"}]
    admit(role, {9: ("d", [5, 6])}, [sample])
    carry_out(role, m.DecodeChunk(8, [2], [1]))
    stage.send(
        1, 2, [m.EnvObservation(sample, np.array([7, 8, 9], dtype=np.int32).tobytes(), json.dumps(said).encode())]
    )
    carry_out(role, m.Admit([], [(sample, 3)], SAMPLING))
    [end] = carry_out(role, m.DecodeChunk(8, [2], [1])).turns
    held = role.samples[sample].held
    assert held.token_ids[:3].tolist() == [7, 8, 9] and len(held.token_ids) == end.total_tokens > 3
    assert held.turn_ids.tolist() == [-1] * 3 + [0] * end.model_tokens
    assert [message["role"] for message in held.messages] == ["user", "assistant"] and held.messages[0] == said[0]
    # A sample dropped before its environment got it is reported as aborted and forgotten.
    other = make_sample_id(10, 0, 0)
    admit(role, {10: ("d", [5, 6])}, [other])
    aborted = carry_out(role, m.AbortSamples([other]))
    assert [(e.sample, e.model_tokens, e.reason) for e in aborted.finished] == [(other, 0, "abort")]
    assert not carry_out(role, m.DecodeChunk(8, [2], [1])).turns and other not in role.samples
    stage.mail(1, m.Turn)


def test_all_turns_of_an_episode_share_its_token_limit(stage: Stage, role: GeneratorRole) -> None:
    """A turn may have 4, the episode 6."""
    carry_out(role, m.AbortSamples(SAMPLES))
    sample, written = make_sample_id(9, 0, 0), [0]
    admit(role, {9: ("short", [5, 6])}, [sample])
    while written[-1] < 6:
        stage.empty(1)
        carry_out(role, m.DecodeChunk(8, [2], [1]))
        [turn] = stage.mail(1, m.Turn)
        written.append(turn.num_written_tokens)
        assert turn.starts_episode or 0 < turn.num_written_tokens - written[-2] <= min(4, 6 - written[-2])
        stage.send(1, 2, [m.EnvObservation(sample, np.array([7], np.int32).tobytes(), json.dumps(QUESTION).encode())])
        carry_out(role, m.Admit([], [(sample, 3)], SAMPLING)) if written[-1] < 6 else None
    assert role.samples[sample].num_model_tokens == 6


def test_an_expert_plays_a_turn_between_turns_of_the_policy(stage: Stage, role: GeneratorRole) -> None:
    """Its tokens are the text's and the end of a turn, are trained on, and belong to no weights; the turn goes to the
    environment like the policy's, which continues after it."""
    stage.heard()
    carry_out(role, m.AbortSamples(SAMPLES))
    sample, other = make_sample_id(9, 0, 0), make_sample_id(9, 0, 1)
    admit(role, {9: ("d", [5, 6])}, [sample, other])
    carry_out(role, m.DecodeChunk(8, [2], [1]))
    written = role._expert_tokens.of("Up", [])
    assert len(written) == 3 and written[-1] in role._end_ids and role._worker.tokenizer.decode(written[:-1]) == "Up"
    said = json.dumps(QUESTION).encode()
    # The text of the other sample has more tokens than a turn may have.
    for observation in (
        [m.EnvObservation(sample, b""), m.EnvObservation(other, b"", expert="Upwards")],
        [m.EnvObservation(sample, np.array([7], np.int32).tobytes(), said, expert="Up")],
        [m.EnvObservation(sample, np.array([8], np.int32).tobytes(), said)],
    ):
        stage.send(1, 2, observation)
        stage.empty(1)
        carry_out(role, m.Admit([], [(each.sample, 3) for each in observation], SAMPLING))
        done = carry_out(role, m.DecodeChunk(8, [2], [1]))
        turns = stage.mail(1, m.Turn)
        if observation[0].expert:
            assert [(e.sample, e.reason) for e in done.turns] == [(sample, "stop")] and done.tokens == 0
            assert [(turn.text, turn.starts_episode, turn.last_token) for turn in turns] == [("Up", False, written[-1])]
    held, policy = role.samples[sample].held, role.samples[other].held
    assert (policy.versions[policy.loss_mask] == 0).all(), "the policy has played the turn"
    counts = [int((held.loss_mask & (held.turn_ids == turn)).sum()) for turn in range(3)]
    assert counts[0] and counts[1] == 3 and counts[2] and turns[0].num_written_tokens == sum(counts)
    start = 2 + counts[0] + 1
    assert held.token_ids[start : start + 3].tolist() == written.tolist()
    assert held.versions[held.loss_mask].tolist() == [0] * counts[0] + [-1] * 3 + [0] * counts[2]
    assert not held.gen_logprobs[held.versions < 0].any() and held.gen_logprobs[held.versions >= 0].all()
    assert [message["role"] for message in held.messages] == ["user", "assistant"] * 3
    assert held.messages[3]["content"] == "Up" and (role.engine.progress(), role._by_expert) == ({}, [])
    # A sample dropped before its environment gets the turn is reported as aborted.
    stage.send(1, 2, [m.EnvObservation(sample, np.array([8], np.int32).tobytes(), said, expert="Up")])
    carry_out(role, m.Admit([], [(sample, 3)], SAMPLING))
    aborted = carry_out(role, m.AbortSamples([sample]))
    assert [(e.sample, e.model_tokens, e.reason) for e in aborted.finished] == [(sample, sum(counts) + 3, "abort")]
    assert not carry_out(role, m.DecodeChunk(8, [2], [1])).turns
    stage.mail(1, m.Turn)


@pytest.mark.parametrize(
    ("prompt", "turn"),
    [("", "Up"), ("<think>\n", "\n</think>\n\nUp")],
)
def test_an_experts_turn_ends_the_reasoning_that_its_prompt_has_begun(
    model_folder: Path, prompt: str, turn: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:<think>\n{% endif %}{# </think> #}"
    )
    before = tokenizer.encode("a question" + prompt, add_special_tokens=False)
    ids = ExpertTokens(tokenizer).of("Up", before)
    assert tokenizer.decode(ids) == turn + "<|im_end|>" and ExpertTokens(tokenizer).of("", before).size == 0
    quoted = ExpertTokens(tokenizer).of("a<|im_end|>b", [])
    assert (quoted == ids[-1]).sum() == 1, "a special token in the text is text"


def test_a_turn_by_steps_follows_its_own_prompt(
    stage: Stage, role: GeneratorRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row holds every prompt and turn; the engine gets only the turn's prompt, which may have any allowed length."""
    stage.heard()
    carry_out(role, m.AbortSamples(SAMPLES))
    sample, (wall, lake) = make_sample_id(9, 0, 0), ([{"role": "user", "content": said}] for said in ("wall", "lake"))
    admit(role, {9: ("steps", [5, 6])}, [sample])
    asked: list[tuple[list[int], bool]] = []
    add = role.engine.add
    monkeypatch.setattr(role.engine, "add", lambda rs: (asked.extend((r.prompt_ids, r.continues) for r in rs), add(rs)))
    for prompt, said in (([7, 8, 9], QUESTION + wall), ([7, 9, 9, 4], lake), ([7, 3], wall)):
        stage.empty(1)
        carry_out(role, m.DecodeChunk(8, [2], [1]))
        [turn] = stage.mail(1, m.Turn)
        assert turn.max_observation_tokens == SETTINGS["data"]["max_prompt_tokens"], "however long the row is"
        stage.send(1, 2, [m.EnvObservation(sample, np.array(prompt, np.int32).tobytes(), json.dumps(said).encode())])
        carry_out(role, m.Admit([], [(sample, 3)], SAMPLING))
    assert asked == [([7, 8, 9], False), ([7, 9, 9, 4], False), ([7, 3], False)]
    carry_out(role, m.DecodeChunk(8, [2], [1]))
    held = role.samples[sample].held
    assert [message["content"] for message in held.messages[:2]] == ["?", "wall"] and len(held.messages) == 7
    counts = [int((held.turn_ids == turn).sum()) for turn in range(3)]
    assert all(counts) and (held.turn_ids == -1).sum() == 3 + 4 + 2
    begins = held.states.nonzero()[0].tolist()
    assert begins == [0, 3 + counts[0], 3 + counts[0] + 4 + counts[1]]
    assert held.states[begins[0]] == held.states[begins[2]] != held.states[begins[1]], "of the last message alone"
    batch = pack([sample], [len(held.token_ids)], {n: c[0] for n, c in role.pick([sample]).items() if n != TEXT})
    assert batch.segment_lengths.tolist() == [n + count for n, count in zip((3, 4, 2), counts, strict=True)]
    assert batch.prefix_lengths().tolist() == [3, 4, 2] and batch.check() is batch
    batch.loss_mask[begins[1]] = True
    with pytest.raises(ValueError, match="first token of a sequence"):
        batch.check()
    stage.mail(1, m.Turn)


def test_a_refused_prompt_of_a_later_step_leaves_no_trace(stage: Stage, role: GeneratorRole) -> None:
    carry_out(role, m.AbortSamples(SAMPLES))
    sample = make_sample_id(9, 0, 0)
    admit(role, {9: ("steps", [5, 6])}, [sample])
    for prompt in ([], [10**6, 4]):
        stage.empty(1)
        carry_out(role, m.DecodeChunk(8, [2], [1]))
        stage.send(
            1, 2, [m.EnvObservation(sample, np.array(prompt, np.int32).tobytes(), json.dumps(QUESTION).encode())]
        )
        carry_out(role, m.Admit([], [(sample, 3)], SAMPLING))
    [end] = carry_out(role, m.DecodeChunk(8, [2], [1])).turns
    held = role.samples[sample].held
    assert end.total_tokens == len(held.token_ids) == len(held.states) == 2 + end.model_tokens
    assert held.states.nonzero()[0].tolist() == [0] and held.messages[-1]["role"] == "assistant"
    stage.heard()


def test_responses_end_at_tokens_of_tokenizer_and_template(stage: Stage, model_folder: Path, tmp_path: Path) -> None:
    """Also where the model's generation config names another token, under which no response would end."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    worker = stage.worker(2, SETTINGS | {"env": {}, "rollout": {"max_new_tokens": 8}})
    worker.model_path = folder
    worker.tokenizer.eos_token = "<|endoftext|>"
    role = GeneratorRole(worker)
    weights = dict(read_safetensors(folder))
    weights["model.norm.weight"] = torch.zeros_like(weights["model.norm.weight"])  # every token is <|endoftext|>
    role.engine.load_weights(weights.items(), version=0)
    sampling = m.Sampling(8, 0.0, 1.0, 0, 0.0, [])
    payload = m.PromptPayload(9, "plain", np.array([5, 6], dtype=np.int32).tobytes(), META)
    carry_out(role, m.Admit([payload], [(make_sample_id(9, 0, 0), 3)], sampling))
    (ended,) = carry_out(role, m.DecodeChunk(8, [2], [])).finished
    assert (ended.model_tokens, ended.reason) == (1, "stop")


def test_media_that_the_engine_does_not_take_fail_their_prompt(stage: Stage, role: GeneratorRole) -> None:
    stage.heard()
    ids, media = np.array([5, 6], dtype=np.int32).tobytes(), (Medium("image", b"x"),)
    payloads = [m.PromptPayload(8, "plain", ids, META), m.PromptPayload(9, "plain", ids, META, media)]
    samples = [make_sample_id(uid, 0, member) for uid in (8, 9) for member in range(2)]
    carry_out(role, m.Admit(payloads, [(sample, 3) for sample in samples], SAMPLING))
    refused = [result for event in stage.heard() for result in event.samples]
    assert [result.sample for result in refused] == samples[2:]
    assert all("a medium of kind image, which the engine does not take" in result.error for result in refused)
    assert sorted(end.sample for end in carry_out(role, m.DecodeChunk(8, [2], [1])).finished) == samples
