"""Checks of the ratios between trainer and generator: in the off-policy correction, and in the loss with
algorithm.ratio_to=generator."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.rollout import RolloutConfig
from hpcrl.config.schema import Config
from hpcrl.spec.policy_loss import SURROGATE_KEYS
from hpcrl.spec.problems import Problem

KEEPS_ALL = {"top_p": 1, "top_k": 0, "min_p": 0}
"""Sampling settings that keep every token."""


def check_off_policy(config: Config) -> Iterator[Problem]:
    """Report corrections and ratios that would drop, or weight at random, tokens to train on."""
    if config.learns_from_rewards and config.learns:
        yield from _correction(config)
        yield from _ratio_to_generator(config)
        yield from _whole_responses(config)


def _correction(config: Config) -> Iterator[Problem]:
    """Report bounds that correct responses from the weights being trained: their ratio is 1 up to rounding, so a mask
    or a rejection with bound 1 would drop them at random."""
    algorithm = config.algorithm
    if algorithm.correction == "none":
        return
    masks = algorithm.correction in ("mask", "reject")
    yield from _ratio_bounds("correction", algorithm.correction_low, algorithm.correction_high, masks, "correction")
    if "rejection_level" in algorithm.correction_levels:
        low, high = algorithm.rejection_low, algorithm.rejection_high
        yield from _ratio_bounds("rejection", low, high, True, "rejection_level")


def _ratio_bounds(name: str, low: float, high: float, masks: bool, cause: str) -> Iterator[Problem]:
    """With `masks`, ratios outside the bounds are dropped instead of clipped."""
    fresh, section = "responses of the weights that are trained, whose ratio is 1", "algorithm"
    if masks and low >= high:
        text = f"algorithm.{name}_low: {low:g} must be below algorithm.{name}_high, which is {high:g}"
        yield Problem((section, f"{name}_low"), text, ((section, f"{name}_high"),))
    elif masks and low >= 1:
        text = f"algorithm.{name}_low: {low:g} drops {fresh}; use less than 1"
        yield Problem((section, f"{name}_low"), text, ((section, cause),))
    elif high < 1 or (masks and high == 1):
        what, remedy = ("drops", "more than") if masks else ("cuts", "at least")
        text = f"algorithm.{name}_high: {high:g} {what} {fresh}; use {remedy} 1"
        yield Problem((section, f"{name}_high"), text, ((section, cause),))


def _ratio_to_generator(config: Config) -> Iterator[Problem]:
    algorithm = config.algorithm
    if not algorithm.compares_with_generator:
        return
    cause = ("algorithm", "ratio_to")
    if algorithm.correction != "none":
        text = (
            f"algorithm.correction: {algorithm.correction} weights the loss by the ratio to the generator, which "
            "algorithm.ratio_to=generator contains already; use correction=none"
        )
        yield Problem(("algorithm", "correction"), text, (cause,))
    if config.generates and (text := starts_clipped(config, config.rollout)):
        yield Problem(("rollout", "top_p"), f"rollout.top_p: {text}", (cause, ("algorithm", "pg_clip_low")))
    if config.trainer.max_mismatch is not None and algorithm.optimizer_steps > 1 and not algorithm.kl_reward_coef:
        text = (
            f"trainer.max_mismatch: with {algorithm.optimizer_steps} optimizer steps a step, "
            "algorithm.ratio_to=generator computes no log-probs from before the step to compare with; use "
            "ratio_to=trainer"
        )
        yield Problem(("trainer", "max_mismatch"), text, (cause,))


def starts_clipped(config: Config, rollout: RolloutConfig) -> str:
    """Why this section's top-p moves ratios to the generator's log-probs out of the clip range even at staleness 0;
    empty if it does not."""
    algorithm, top_p = config.algorithm, rollout.top_p
    lowest = 1 - algorithm.pg_clip_low
    clips = algorithm.compares_with_generator and "pg_clip_low" in SURROGATE_KEYS[algorithm.surrogate]
    if not (clips and config.learns_from_rewards and config.learns and top_p < lowest):
        return ""
    return (
        f"{top_p:g} lets ratios to the generator's log-probs, which are normalised over the tokens that sampling "
        f"keeps, begin at {top_p:g}, below the clip's 1 - algorithm.pg_clip_low = {lowest:g}; use "
        "algorithm.ratio_to=trainer"
    )


def weighed_shares(config: Config, rollout: RolloutConfig) -> tuple[str, str]:
    """(key, settings as text) that make a ratio of whole responses contain the probability that sampling keeps; empty
    texts if there are none.

    Args:
        rollout: the section of the run that generates the responses.

    The generator's log-probs are normalised over the tokens that sampling keeps, the trainer's over all tokens. So a
    token's ratio is the kept share of probability, and a product of hundreds of such ratios is nearly 0.
    """
    levels = config.algorithm.behaviour_levels if config.learns_from_rewards and config.learns else {}
    whole = next((key for key, level in levels.items() if level == "sequence"), "")
    given = ", ".join(f"rollout.{key}={getattr(rollout, key):g}" for key in KEEPS_ALL if _cuts(rollout, key))
    return (whole, given) if whole and given else ("", "")


def _whole_responses(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    key, given = weighed_shares(config, rollout)
    if config.generates and key:
        cut = [name for name in KEEPS_ALL if _cuts(rollout, name)]
        text = (
            f"algorithm.{key}: sequence multiplies the shares of probability that {given} keeps at each "
            "token, so long responses get almost no weight even at staleness 0; use token, turn or geometric, or "
            + " ".join(f"rollout.{name}={KEEPS_ALL[name]}" for name in cut)
        )
        involved = (("algorithm", "correction"), *(("rollout", name) for name in cut))
        yield Problem(("algorithm", key), text, involved)


def _cuts(rollout: RolloutConfig, key: str) -> bool:
    return bool(getattr(rollout, key) != KEEPS_ALL[key])
