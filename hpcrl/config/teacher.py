"""The section `teacher`: the model from which the policy is distilled."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from hpcrl.config.scalar_heads import train_engine_name
from hpcrl.config.self_teaching import SelfTeaching
from hpcrl.config.teacher_endpoint import TeacherEndpoint
from hpcrl.spec.divergence import DivergenceForm
from hpcrl.spec.fields import NUMBER, NonEmpty, Positive


class TeacherConfig(SelfTeaching):
    """The model of the role teacher, which judges every token that the policy generates. Its engine reads the
    keys of `trainer` that are not about optimisation, and holds the weights in trainer.param_dtype."""

    path: NonEmpty | None = None
    """Folder in HF layout of a model of any size, with a tokenizer in which every token of the policy has the same id;
    null: no teacher, or another one (paths, endpoint, source)."""
    paths: dict[str, NonEmpty] = {}
    """Domain -> folder, in place of path: the domain's tokens learn from this teacher; the key default is for all other
    domains. Domains with the same folder share its model."""
    endpoint: TeacherEndpoint = TeacherEndpoint()
    """A teacher behind an endpoint."""
    engine: Annotated[str, AfterValidator(train_engine_name)] | None = None
    """Training engine; null: trainer.engine."""
    form: DivergenceForm = "sampled"
    """What the policy is compared with: the teacher's log-probs of the tokens that the policy drew, of its own top_k
    tokens, or of the whole vocabulary."""
    top_k: Positive = 64
    """Tokens of form=top_k."""
    beta: Annotated[float, Field(ge=0, le=1), NUMBER] = 1.0
    """Divergence of form=top_k and form=full, as in GKD (arXiv 2306.13649): 0: forward KL(teacher, policy), 1: reverse
    KL(policy, teacher), between: generalised Jensen-Shannon."""
