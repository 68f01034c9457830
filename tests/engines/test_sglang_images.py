"""Images in SGLang, the real one on a CPU (tests/sglang_cpu): log-probs equal transformers', for mixed requests, later
turns, and new weights of tower and decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hpcrl.engines.gen.generation_engine import PromptRefused
from hpcrl.engines.gen.sglang.processor_output import image_hash
from hpcrl.engines.gen.sglang.server import Made
from hpcrl.engines.hf_folder import read_safetensors
from tests.contracts.gen.sglang import ENVIRONMENT, make_engine
from tests.engines.image_requests import Answer, Prompts, ask, generated, known_vision, model_of, of_transformers
from tests.vlm import make_vlm, noise

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
"""The test also passes with the two others in SGLANG_SEEING; each starts a server, which takes half a minute."""


def own(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    from hpcrl.engines.gen.sglang.child import Child

    models = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_cpu_vision_models"}
    return Child(arguments, {**ENVIRONMENT, **models, **environment}, start_s=280.0, call_s=60.0)


class Recording:
    """A Server that makes the token 7 and records calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def call(self, name: str, *arguments: Any) -> Any:
        self.asked.append((name, *arguments))
        if name != "decode_chunk":
            return None
        jobs, num_tokens, _ = arguments
        counts = [(job.id, min(job.left, num_tokens)) for job in jobs]
        return [Made(i, 0, [7] * count, [-1.0] * count, [], False) for i, count in counts]

    def close(self) -> None:
        """Nothing runs."""

    def images(self) -> list[tuple[int, int]]:
        """The numbers of images with pixels and of places of images, by call."""
        return [(len(call[1]), len(call[2])) for call in self.asked if call[0] == "add_images"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vlm("qwen2_5_vl", tmp_path_factory.mktemp("sglang") / "model")


def recorded(folder: Path) -> tuple[Any, Recording]:
    server = Recording()
    return make_engine(folder, start=lambda arguments, environment: server, load=True, max_length=256), server


def test_each_image_is_sent_once_and_dropped_after_its_last_request(folder: Path) -> None:
    engine, server = recorded(folder)
    vision = known_vision(folder)
    a, b = (noise(28, 56, vision, seed) for seed in (1, 2))
    engine.add([ask(0, [a], "x"), ask(1, [a, b], "x"), ask(2, [], "x")])
    engine.step(4)
    assert server.images() == [(2, 3)], "two images at three places"
    engine.step(4)
    engine.add([ask(3, [b], "y", new_tokens=40)])
    engine.step(4)
    assert server.images() == [(2, 3)] and sorted(engine.progress()) == [3]
    engine.step(4)
    assert server.images()[1:] == [(0, 1)], "only the last request's image is still needed"
    jobs = server.asked[-1][1]
    assert [(span.start, span.length, span.digest) for span in jobs[0].images] == [(11, 2, b.digest)]
    engine.abort([3])
    engine.add([ask(4, [a], "z")])
    engine.step(1)
    assert server.images()[2:] == [(1, 1)] and list(server.asked[-2][1]) == [a.digest]


def test_weights_have_the_names_of_files(folder: Path) -> None:
    engine, server = recorded(folder)
    engine.load_weights(((name, p.detach()) for name, p in model_of(folder, (0, 0)).named_parameters()), 1)
    sent = {name for call in server.asked if call[0] == "update" for name, _ in call[1]}
    assert sent == {name for name, _ in read_safetensors(folder)}


def test_requests_with_images_elsewhere_are_refused(folder: Path) -> None:
    engine, _ = recorded(folder)
    vision = known_vision(folder)
    asked = ask(0, [noise(28, 56, vision, 1)], "x")
    moved = replace(asked, media=(msgspec.structs.replace(asked.media[0], start=0),))
    with pytest.raises(PromptRefused, match="request 0: image 0 of 28 x 56 pixels: tokens 0 to 1 are not 2 placeh"):
        engine.add([moved])


def test_an_image_has_other_hashes_under_other_weights() -> None:
    a, b = bytes(32), bytes([1]) * 32
    hashes = [image_hash(digest, salt) for digest in (a, b) for salt in ("0", "1")]
    assert len(set(hashes)) == 4 and max(hashes) < 1 << 64 and image_hash(a, "0") == hashes[0]


@pytest.mark.outside
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_responses_have_transformers_log_probs(family: str, tmp_path: Path) -> None:
    pytest.importorskip("sglang", reason="SGLang is not installed; make test-outside")
    folder = make_vlm(family, tmp_path / "model", vision_config={"in_chans": 3})
    prompts = Prompts(folder)
    engine = make_engine(folder, start=own, max_length=256, cache_tokens=4096)
    found: list[Answer] = []
    version = 0
    models = {seeds: model_of(folder, seeds) for seeds in ((0, 0), (1, 0), (1, 1))}

    def load(seeds: tuple[int, int]) -> None:
        nonlocal version
        engine.load_weights(((name, p.detach()) for name, p in models[seeds].named_parameters()), version)
        version += 1

    load((0, 0))
    requests = prompts.mixed(0)
    outputs = generated(engine, requests)
    found += [Answer("new", asked, output, (0, 0)) for asked, output in zip(requests, outputs, strict=True)]
    again = prompts.second_turn(requests[0], outputs[0])
    found.append(Answer("second turn", again, generated(engine, [again])[0], (0, 0)))
    for seeds in ((1, 0), (1, 1)):
        running = [replace(requests[0], id=10 * version + 8), replace(requests[3], id=10 * version + 9)]
        engine.add(running)
        assert engine.step(4) == []
        waiting = prompts.mixed(10 * version)
        engine.add(waiting)
        load(seeds)
        engine.recompute()
        done = {output.id: output for output in engine.step(100)}
        found += [Answer(f"recomputed {seeds}", asked, done[asked.id], seeds, first=4) for asked in running]
        found += [Answer(f"waited {seeds}", asked, done[asked.id], seeds) for asked in waiting]
    engine.close()
    for answer in found:
        wanted = of_transformers(folder, models[answer.weights], answer)
        error = np.abs(answer.output.gen_logprobs - wanted)[answer.first :].max()
        assert error < 1e-5, f"{answer.case}, request {answer.request.id}: {error}"
