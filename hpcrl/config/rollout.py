"""The sections `rollout` and `eval`: how many responses are generated, how they are sampled and which are kept."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from hpcrl.spec.fields import NUMBER, Float, Natural, NonNegative, Positive, Section, Share

MAX_MEMBERS = (1 << 14) - 1
MAX_VALIDATION_PROMPTS = 1 << 20
"""Limits of a sample id (hpcrl.rollout.types)."""


class DomainRolloutConfig(Section):
    """Keys of rollout with different values for one domain's prompts; null: the value of rollout."""

    max_new_tokens: Positive | None = None
    """Maximum response length, tokens, also of validation prompts; at most rollout.max_new_tokens."""
    filter_mean_low: Float | None = None
    """Keep only groups with a mean score above this value."""
    filter_mean_high: Float | None = None
    """Keep only groups with a mean score below this value."""
    filter_std: bool | None = None
    """Drop groups whose rewards are all equal."""


class RolloutConfig(Section):
    """A rollout batch: num_prompts groups of group_size responses."""

    num_prompts: Positive = 64
    """Prompts (groups) per step."""
    group_size: Annotated[int, Field(ge=1, le=MAX_MEMBERS), NUMBER] = 8
    """Responses per prompt."""
    max_new_tokens: Positive = 256
    """Maximum response length, tokens."""
    temperature: NonNegative = 1.0
    """Sampling temperature; must be above 0, since greedy responses to a prompt are all equal."""
    top_p: Annotated[float, Field(ge=1e-3, le=1), NUMBER] = 1.0
    """Nucleus sampling; 1: off."""
    top_k: Natural = 0
    """Most likely tokens kept; 0: off."""
    min_p: Share = 0.0
    """Minimum probability of a kept token, relative to the most likely token; 0: off."""
    stop: list[str] = []
    """Strings that end a response."""
    max_staleness: NonNegative = 0
    """Maximum staleness of a token, the number of steps from its weights to the weights being trained. 0: synchronous;
    0.5: staleness 1 for at most half of a batch."""
    on_stale: Literal["wait", "cancel"] = "wait"
    """What to do with groups that would become too old for max_staleness. wait: the batch waits for them; cancel: they
    restart, which is faster and favours short responses."""
    on_new_weights: Literal["continue", "recompute", "restart"] = "continue"
    """What to do with responses in progress when weights arrive: continue with the old weights' KV cache (log-probs of
    no single policy, token/mixed_weights_ratio), recompute the cache, or restart (at most max_attempts times)."""
    extra_prompts: Natural = 0
    """Redundant groups, generated in addition to num_prompts and aborted once there are enough valid groups."""
    extra_members: Natural = 0
    """Redundant responses per prompt, in addition to group_size; the first group_size responses count, which favours
    short responses (scheduler/kept_length, scheduler/aborted_length)."""
    group_affinity: bool = True
    """Send all responses to a prompt to one replica while it has room; false: each to the least loaded replica."""
    prompt_affinity: bool = False
    """Send a restarted prompt to the replica that has cached its prefix, if there is room."""
    routing: Literal["count", "expected_length"] = "count"
    """Unit of a replica's load: responses, or tokens expected from recent lengths in each response's domain."""
    speed_aware_routing: bool = True
    """Assign fewer responses to a replica that decodes more slowly than others under equal load
    (scheduler/replica_speed)."""
    min_replicas: Positive = 1
    """Generator replicas that must remain for the run to continue after losses."""
    max_attempts: Annotated[int, Field(ge=1, le=200), NUMBER] = 3
    """Attempts after which a prompt counts as failed."""
    restart_failed_episodes: bool = False
    """Restart an episode whose environment raised or exceeded its timeout, up to max_attempts times; false: the episode
    is not trained on (scheduler/score_errors), as after the last attempt."""
    filter_mean_low: Float | None = None
    """Keep only groups with a mean score above this value."""
    filter_mean_high: Float | None = None
    """Keep only groups with a mean score below this value."""
    filter_std: bool = False
    """Drop groups whose rewards are all equal."""
    domains: dict[str, DomainRolloutConfig] = {}
    """Domain -> max_new_tokens, filter_mean_low, filter_mean_high and filter_std of its prompts, if different."""
    max_generated_groups: Positive | None = None
    """Maximum groups generated for a step, after which the run ends; null: 20 x num_prompts."""
    save_rollouts: bool = True
    """Write every step's rollouts to rollouts/step_NNNNNN (HDF5)."""

    def of_domain(self, domain: str) -> RolloutConfig:
        """The section with the values for a domain's prompts."""
        own = self.domains.get(domain, DomainRolloutConfig()).model_dump(exclude_none=True)
        return self.model_copy(update=own) if own else self

    @property
    def most_generated_groups(self) -> int:
        """max_generated_groups, or its default."""
        return self.max_generated_groups or 20 * self.num_prompts


Responses = Annotated[int, Field(ge=1, le=MAX_MEMBERS), NUMBER]
Prompts = Annotated[int, Field(ge=1, le=MAX_VALIDATION_PROMPTS), NUMBER]


class EvalSet(Section):
    """Keys of eval with different values for one domain of data.val; null: the value of eval."""

    num_prompts: Prompts | None = None
    """Validation prompts of this domain; null: its part of eval.num_prompts."""
    samples: Responses | None = None
    """Responses per prompt."""
    temperature: NonNegative | None = None
    """Sampling temperature; 0: greedy."""
    max_new_tokens: Positive | None = None
    """Maximum response length, tokens; at most rollout.domains.NAME.max_new_tokens."""


class EvalSampling(NamedTuple):
    """How validation prompts are answered; the fields are as in EvalConfig."""

    samples: int
    temperature: float
    max_new_tokens: int | None


class EvalConfig(Section):
    """Evaluation on the validation prompts (data.val)."""

    num_prompts: Prompts = 256
    """Validation prompts per evaluation, from the domains in turn."""
    samples: Responses = 1
    """Responses per prompt. With several, val/score is their mean (avg@n), and there are also pass@k and maj@n."""
    temperature: NonNegative = 0.0
    """Sampling temperature; 0: greedy."""
    max_new_tokens: Positive | None = None
    """Maximum response length, tokens; null: rollout.max_new_tokens."""
    num_examples: Natural = 5
    """Validation completions that every evaluation keeps; at the end, the first and last ones are shown."""
    sets: dict[str, EvalSet] = {}
    """Domain of data.val -> num_prompts, samples, temperature and max_new_tokens of its prompts, if different. A domain
    that is listed is not also evaluated at the training temperature."""

    def of_domain(self, domain: str) -> EvalSampling:
        """How a domain's prompts are answered."""
        shared, own = (
            EvalSampling(self.samples, self.temperature, self.max_new_tokens),
            self.sets.get(domain, EvalSet()),
        )
        given = own.model_dump(include=set(EvalSampling._fields), exclude_none=True)
        return shared._replace(**given)

    @property
    def most_prompts(self) -> int:
        """Maximum prompts of an evaluation."""
        return self.num_prompts + sum(own.num_prompts or 0 for own in self.sets.values())

    @property
    def most_responses(self) -> int:
        """Maximum responses of an evaluation at the same time."""
        return self.most_prompts * max([self.samples, *(self.of_domain(name).samples for name in self.sets)])

    @property
    def longest_response(self) -> int | None:
        """The largest max_new_tokens of a set; None without one."""
        own = [self.max_new_tokens, *(each.max_new_tokens for each in self.sets.values())]
        return max((limit for limit in own if limit is not None), default=None)
