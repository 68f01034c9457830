"""Supervised fine-tuning on the answers of the training data."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from hpcrl.data import epoch_order
from hpcrl.metrics.stats import scalar
from hpcrl.rollout.loop import Sizes
from hpcrl.runtime.context import Run


def sft(run: Run) -> None:
    """Train to the last step, or until the sampled held-out score reaches sft.stop_score."""
    config, rows = run.config, run.rows
    order = functools.lru_cache(2)(lambda epoch: epoch_order(config.seed, "sft", epoch, len(rows)))
    for step in run.steps():
        if config.sft.stop_score is not None and _score(run.last_logged) >= config.sft.stop_score:
            run.end_at(step - 1)
            return
        draws = range((step - 1) * config.sft.batch_size, step * config.sft.batch_size)
        chosen = sorted({int(order(draw // len(rows))[draw % len(rows)]) for draw in draws})
        encoded = [rows.row(row) for row in chosen]
        sizes = [Sizes(len(token_ids), sum(mask)) for token_ids, mask in encoded]
        batch = run.trainer.load_rows(step, chosen, sizes)
        stats = run.trainer.update(batch, loss="sft")
        run.trainer.drop(batch)
        scores = {}
        if run.evaluation is not None and config.eval_every and step % config.eval_every == 0:
            run.publish(step)
            scores = run.evaluate(step)
        counted = {"_tokens": scalar(sum(size.total for size in sizes)), "_samples": scalar(len(sizes))}
        run.log(step, counted, stats, scores)
        run.checkpoint.maybe_save(step)


def _score(logged: Mapping[str, float | None]) -> float:
    """The sampled held-out score that was logged last, as a resumed run finds it too; -1 without one."""
    score = logged.get("val/sampled/score/mean", logged.get("val/score/mean"))
    return -1.0 if score is None else score
