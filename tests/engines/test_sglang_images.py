"""Images in SGLang, the real one on a CPU (tests/sglang_cpu): log-probs equal transformers', for mixed requests, later
turns, and new weights of tower and decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.models.families import vision_of
from tests.contracts.gen.sglang import ENVIRONMENT, make_engine
from tests.engines.image_requests import Answer, generated, mixed, model_of, of_transformers, second_turn
from tests.vlm import make_vlm

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def own(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    from hpcrl.engines.gen.sglang.child import Child

    models = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_cpu_vision_models"}
    return Child(arguments, {**ENVIRONMENT, **models, **environment}, start_s=280.0, call_s=60.0)


@pytest.mark.outside
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", FAMILIES)
def test_responses_have_transformers_log_probs(family: str, tmp_path: Path) -> None:
    pytest.importorskip("sglang", reason="SGLang is not installed; make test-outside")
    folder = make_vlm(family, tmp_path / "model")
    vision = vision_of(folder)
    assert vision is not None
    engine = make_engine(folder, start=own, max_length=256, cache_tokens=4096)
    found: list[Answer] = []
    version = 0
    models = {seeds: model_of(folder, seeds) for seeds in ((0, 0), (1, 0), (1, 1))}

    def load(seeds: tuple[int, int]) -> None:
        nonlocal version
        engine.load_weights(((name, p.detach()) for name, p in models[seeds].named_parameters()), version)
        version += 1

    load((0, 0))
    requests = mixed(vision, 0)
    outputs = generated(engine, requests)
    found += [Answer("new", asked, output, (0, 0)) for asked, output in zip(requests, outputs, strict=True)]
    again = second_turn(vision, requests[0], outputs[0])
    found.append(Answer("second turn", again, generated(engine, [again])[0], (0, 0)))
    for seeds in ((1, 0), (1, 1)):
        running = [replace(requests[0], id=10 * version + 8), replace(requests[3], id=10 * version + 9)]
        engine.add(running)
        assert engine.step(4) == []
        waiting = mixed(vision, 10 * version)
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
        print(answer.case, answer.request.id, error)
        assert error < 1e-5, f"{answer.case}, request {answer.request.id}: {error}"
