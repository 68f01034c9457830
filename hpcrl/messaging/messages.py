"""All messages of the control plane, typed; a rank refuses anything else.

Commands go from the controller to one rank's inbox and are executed in order; events go to the controller's inbox. A
command with an answer gets exactly one `Done` or `Failed`. Messages never carry tokens, log-probs or weights.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from hpcrl.metrics.stats import Stat
from hpcrl.spec.media import Medium


class Message(msgspec.Struct, forbid_unknown_fields=True, tag=True, array_like=True):
    """Base of all messages: tagged by class name, no unknown fields."""


# -- commands: world ---------------------------------------------------------------------------------------------


class BuildRole(Message):
    """Build a role's engine or pool. `ranks` share the engine's default group of epoch `epoch`. `services` maps every
    role that serves requests, and is already built, to the addresses of its ranks."""

    role: str
    ranks: list[int]
    epoch: int = 0
    services: dict[str, list[str]] = {}


class BuildGroup(Message):
    """All of `ranks` join the explicit group `name`. `replica` is the number of the replica to which the group sends
    weights, if it does; it sends from GPU to GPU if every rank has its own GPU."""

    name: str
    ranks: list[int]
    epoch: int = 0
    replica: int | None = None


class Ask(Message):
    """A pipeline's question to a role (hpcrl.workers.role.Answers)."""

    role: str
    question: str
    values: dict[str, Any] = {}


class Profile(Message):
    """Begin the profile of a step, or end and write it. The answer's texts say what is missing in it."""

    step: int
    begins: bool


class Shutdown(Message):
    """End the rank's loop; its last command."""


# -- commands: rollout -------------------------------------------------------------------------------------------


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """Sampling parameters of an Admit command."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: list[str]

    @property
    def truncates(self) -> bool:
        """Whether there are gen_logprobs_behaviour; the same rule as in the engines' SamplingParams."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


class PromptPayload(msgspec.Struct, frozen=True, array_like=True):
    """Token ids as int32; `meta` is the JSON that rewards and environments read; `media` are for the engine."""

    uid: int
    domain: str
    token_ids: bytes
    meta: bytes
    media: tuple[Medium, ...] = ()


class Admit(Message):
    """Start samples (id, seed) of these prompts. A held sample continues with its next turn; a new sample with an
    environment first gets its prompt from the environment."""

    prompts: list[PromptPayload]
    samples: list[tuple[int, int]]
    sampling: Sampling


class DecodeChunk(Message):
    """Decode `num_tokens` iterations. The first rank of a replica answers with DecodeChunkDone, its other ranks with
    Done. `receivers` and `envs` are the living reward and env ranks, of which hpcrl.rollout.types.receiver_of() chooses
    the rank that gets a finished sample or turn."""

    num_tokens: int
    receivers: list[int]
    envs: list[int] = []


class AbortSamples(Message):
    """Stop these samples and drop their state; answered like DecodeChunk."""

    samples: list[int]


class Rescore(Message):
    """Send held, finished samples to a scorer, when their first scorer is lost or their episode has ended."""

    samples: list[int]
    receivers: list[int]


class ScoreGroup(Message):
    """Score these samples, which the reward rank has reported in AwaitGroup, as one group."""

    samples: list[int]


class DropAwaiting(Message):
    """Drop samples that wait for other group members on this reward rank."""

    samples: list[int]


class EndEpisodes(Message):
    """End the episodes whose samples this lost generator rank held."""

    generator: int


class DropSamples(Message):
    """Drop held samples."""

    samples: list[int]


class SavePending(Message):
    """Write held samples into a checkpoint's folder; answer with the file."""

    folder: str
    samples: list[int]


class LoadPending(Message):
    """Load these samples from a checkpoint, as held samples. `files` are all of its files with held samples."""

    folder: str
    files: list[str]
    samples: list[int]


class ReadTexts(Message):
    """Answer with the text of held samples; if `whole`, with all messages from the prompt on, as JSON, and images."""

    samples: list[int]
    whole: bool = False


class ReadEpisodes(Message):
    """Answer with a JSON object for each of these held samples: `prompt`, the messages before the model's first turn,
    `response`, all later ones, and `images`, the digests of the prompt's images in hex."""

    samples: list[int]


class ReadLastObservation(Message):
    """Answer with the environment's observation after the last turn of validation samples, as JSON messages, and its
    first pictures in a size for pages; an empty text for each sample that another rank holds."""

    samples: list[int]


# -- commands: training ------------------------------------------------------------------------------------------


class Move(msgspec.Struct, frozen=True, array_like=True):
    """Samples sent from rank `source` to rank `dest`, in this order; lengths are in tokens. `text_bytes` has the sizes
    of their messages; it is empty if the messages are not sent."""

    source: int
    dest: int
    samples: list[int]
    lengths: list[int]
    text_bytes: list[int] = []


class TransferRollouts(Message):
    """Carry out the moves from or to this rank, with the generator's `fields` listed here (hpcrl.spec.trajectory).
    `scored` has the bytes of the scorer's fields for the samples that this rank receives, in order; fields of turns and
    tokens have counts (hpcrl.comm.transfer). After a transfer's last command, which has `forms`, every destination
    forms batch `batch`, even if it received nothing."""

    batch: int
    group: str
    moves: list[Move]
    fields: list[str]
    scored: dict[str, bytes]
    forms: bool


class LoadRows(Message):
    """Form batch `batch` from the rows of data.train or data.val: sequence n belongs to row n // per_row
    (hpcrl.data.answers). With `answers`, each sequence ends with the answer of the sequence given there, cut so that it
    has at most `max_tokens`."""

    batch: int
    sequences: list[int]
    split: Literal["train", "val"] = "train"
    answers: list[int] = []
    max_tokens: int = 0


class MixRows(Message):
    """Add these rows of imitation.data to batch `batch`."""

    batch: int
    sequences: list[int]


class TakePairs(Message):
    """Form batch `batch` from these rows of batch `source`: pairs, of which the better one is first."""

    batch: int
    source: int
    rows: list[int]


class LoadRollouts(Message):
    """Form batch `batch` from these stored samples of a step."""

    batch: int
    run_dir: str
    step: int
    samples: list[int]


class Logprobs(Message):
    """Fill the batch's field `into` with log-probs (old_logprobs, ref_logprobs) or entropies (old_entropies) of
    `role`'s policy."""

    batch: int
    role: str
    into: str
    micro_batches: list[list[int]]


class Teach(Message):
    """Fill fields of the batch with what a teacher gives for the tokens of these rows (teacher.form): [T], or
    [T, width] for a field with a width above 0. Other rows keep the values of earlier commands. `prompts` are those
    that the teacher reads (teacher.context) for this rank's rows, by the uid of the policy's prompt, token ids as
    int32; empty: it reads the policy's."""

    batch: int
    widths: dict[str, int]
    micro_batches: list[list[int]]
    teacher: int = 0
    prompts: dict[int, bytes] = {}


class StoreLogprobs(Message):
    """Write the trained tokens' values of the batch's field as a part of this folder (hpcrl.data.stored_logprobs)."""

    batch: int
    field: str
    folder: str


class ReadLogprobs(Message):
    """Fill the batch's field from this folder (hpcrl.data.stored_logprobs)."""

    batch: int
    into: str
    folder: str


class Values(Message):
    """Fill the batch's field `values` with the critic's values."""

    batch: int
    micro_batches: list[list[int]]


class SendTokens(Message):
    """Send one token field of a batch to the ranks of the role `dest`, by the moves from or to this rank. A field that
    training fills (hpcrl.spec.trajectory.Origin) is sent only for tokens in loss_mask, outside of which it is 0.
    `width`: numbers per token of a field of any width; 0: as declared."""

    batch: int
    group: str
    field: str
    moves: list[Move]
    dest: str = "trainer"
    width: int = 0


class SetSampleWeights(Message):
    """Set weights in the loss for a batch on a critic's own rank; samples not listed get 1."""

    batch: int
    weights: list[tuple[int, float]]


class Advantages(Message):
    """Fill the batch's advantages and returns, if the run has an algorithm; the trainers exchange all rewards. The
    answer has all weights that are not 1. `coefficients` are the algorithm's adaptive coefficients for this step;
    `domains` maps names to prompts."""

    batch: int
    coefficients: dict[str, float] = {}
    domains: dict[str, list[int]] = {}


class TrainStep(Message):
    """One optimizer step on these rows of the batch. `tokens` and `sequences` are the loss's global normalizers;
    `coefficients` are the algorithm's adaptive coefficients for this step."""

    batch: int
    micro_batches: list[list[int]]
    tokens: float
    sequences: float
    coefficients: dict[str, float] = {}


class LossStats(Message):
    """Statistics of the loss of these rows of the batch, without a step. The fields are as in TrainStep."""

    batch: int
    micro_batches: list[list[int]]
    tokens: float
    sequences: float
    coefficients: dict[str, float] = {}


class TrainCritic(Message):
    """TrainStep of the critic, which is trained on the batch's returns."""

    batch: int
    micro_batches: list[list[int]]
    tokens: float
    sequences: float


class BroadcastBatch(Message):
    """Broadcast the batch, or only its token field `field`, from a data-parallel rank's leader to its other ranks."""

    batch: int
    role: str
    field: str = ""


class DropBatch(Message):
    """Drop the batch."""

    batch: int


class WriteRollouts(Message):
    """Write this rank's part of the batch into the rollout store."""

    batch: int
    folder: str
    facts: dict[str, str | int | float]


# -- commands: weights and checkpoints ---------------------------------------------------------------------------


class UpdateWeights(Message):
    """Load the trainers' weights as this version into these replicas (indices into RoleLayout.replicas). Collective
    over the trainer ranks and the replicas."""

    version: int
    replicas: list[int]


class SaveState(Message):
    """Start to write this rank's part of the checkpoint: a copy, while later commands run, or the state itself, which
    no command may change before FinishSave returns the files."""

    folder: str
    copy: bool = True


class FinishSave(Message):
    """Answer with SaveState's files and time/save_write once these are on disk, or after wait_s with the progress."""

    wait_s: float


class AbandonSave(Message):
    """Stop writing SaveState's files, which are then never asked for; nothing if they are written."""


class CheckFiles(Message):
    """Start to verify a checkpoint's files, given as in Done.files; stops an earlier check."""

    folder: str
    files: list[tuple[str, int, str]]


class FinishCheck(Message):
    """Answer with the first defect found by CheckFiles (empty if none), or after wait_s with the progress."""

    wait_s: float


class LoadState(Message):
    """Restore this rank's part of the checkpoint."""

    folder: str


class LoadReference(Message):
    """Make the model in this folder the reference."""

    folder: str


class LoadTeacher(Message):
    """Make the model in this folder the teacher; to teacher ranks."""

    folder: str


class LoadTeacherHead(Message):
    """Read the teacher's output head from this folder; to trainer ranks with teacher.form=full."""

    folder: str


class ReleaseReference(Message):
    """Free the reference's engine, which gets no further command."""


class Export(Message):
    """Write the policy in HF layout."""

    folder: str


class ExportCritic(Message):
    """Write the critic in HF layout."""

    folder: str


Command = (
    BuildRole
    | BuildGroup
    | Ask
    | Profile
    | Shutdown
    | Admit
    | DecodeChunk
    | AbortSamples
    | Rescore
    | ScoreGroup
    | DropAwaiting
    | EndEpisodes
    | DropSamples
    | SavePending
    | LoadPending
    | ReadTexts
    | ReadEpisodes
    | ReadLastObservation
    | TransferRollouts
    | LoadRows
    | MixRows
    | TakePairs
    | LoadRollouts
    | Logprobs
    | Teach
    | StoreLogprobs
    | ReadLogprobs
    | Values
    | SendTokens
    | SetSampleWeights
    | Advantages
    | BroadcastBatch
    | TrainStep
    | LossStats
    | TrainCritic
    | DropBatch
    | WriteRollouts
    | UpdateWeights
    | SaveState
    | FinishSave
    | AbandonSave
    | CheckFiles
    | FinishCheck
    | LoadState
    | LoadReference
    | LoadTeacher
    | LoadTeacherHead
    | ReleaseReference
    | Export
    | ExportCritic
)


ONE_WAY = (Admit, Rescore, ScoreGroup, DropAwaiting, EndEpisodes, DropSamples, DropBatch)
"""Commands without an answer; a failure in one is still reported."""


# -- events ------------------------------------------------------------------------------------------------------

Span = tuple[int, float, float]
"""A command that a rank executed: its number, its start on the host's monotonic clock, and its duration, seconds. A
rank reports each command once, in its next event with `spans`."""


class Joined(Message):
    """A rank has joined the world and reads its inbox."""

    host: str
    pid: int


class Done(Message):
    """The command `seq` was executed.

    Args:
        stats: Name -> (sum, count, min, max).
        files: (path, bytes, hash) of each file.
        progress: The current file and the total bytes done, if the work is unfinished.
        unwritten: Error number and text, if a full or failing file system did not take the files of a checkpoint.
        unreached: Ranks that did not send or receive their part, and without which the run may continue.
        weights: (sample, weight in the loss), if not 1.
        address: Where the newly built role serves requests.
        media: Per text, its images.
    """

    seq: int
    stats: dict[str, Stat] = {}
    files: list[tuple[str, int, str]] = []
    texts: list[str] = []
    progress: tuple[str, int] | None = None
    unwritten: tuple[int, str] | None = None
    unreached: list[int] = []
    weights: list[tuple[int, float]] = []
    address: str = ""
    media: list[tuple[Medium, ...]] = []
    spans: list[Span] = []


class Failed(Message):
    """The command `seq` raised; seq 0: a role raised in work outside a command. `kind` is "input" for ValueError and
    OSError, "storage" for a full or failing file system, "numbers" for non-finite values of the model, "peer" for a
    broken connection to another rank (a consequence, not a cause), "control" for messages to this rank that were lost,
    reordered or read by another process; else empty."""

    seq: int
    command: str
    error: str
    kind: Literal["", "input", "storage", "numbers", "peer", "control"] = ""


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """A finished response: tokens including the prompt, the model's tokens, finish reason, bytes of its messages."""

    sample: int
    total_tokens: int
    model_tokens: int
    reason: str
    text_bytes: int = 0


class DecodeChunkDone(Message):
    """A decode chunk ended: finished samples, samples whose turn ended, tokens decoded, seconds.

    Args:
        decoded_at: When the last token was decoded, on the host's monotonic clock.
        running, queued: Requests that the engine decoded and that waited for a slot, at the start.
    """

    seq: int
    finished: list[Ended]
    turns: list[Ended]
    tokens: int
    seconds: float
    decoded_at: float = 0.0
    running: int = 0
    queued: int = 0
    spans: list[Span] = []


class ScoredSample(msgspec.Struct, frozen=True, array_like=True):
    """A sample's reward and score.

    Args:
        error: Why there is no reward.
        turn_rewards: A reward per turn; their sum is `reward`. If empty, the last turn gets the whole reward.
        token_rewards: Parts of the turn rewards that belong to tokens (bytes of hpcrl.rollout.types.TOKEN_REWARD).
        extracted: The answer that the reward found in a validation response, or its hash if it is long.
        started, ended: When the scoring or the turn began and ended, on the host's monotonic clock; 0 for neither.
    """

    sample: int
    reward: float
    score: float
    error: str = ""
    metrics: dict[str, float] = {}
    turn_rewards: list[float] = []
    token_rewards: bytes = b""
    extracted: str | None = None
    started: float = 0.0
    ended: float = 0.0


class Scored(Message):
    """Samples that a reward rank scored."""

    samples: list[ScoredSample]
    spans: list[Span] = []


class AwaitGroup(Message):
    """Samples that reached a reward rank with a group reward."""

    samples: list[int]


class Observed(Message):
    """An environment answered a sample's turn; the tokens went to its generator rank. If `ended`, the episode is over,
    with reward and score in `result`, and with `add_reward` a reward rank scores it too. If `failed`, the environment
    raised or did not answer."""

    sample: int
    ended: bool
    result: ScoredSample
    add_reward: bool = False
    failed: bool = False
    spans: list[Span] = []


class Lost(Message):
    """A rank's process ended, or its node agent ended it because it was `silent`."""

    rank: int
    cause: str
    silent: bool = False


WithSpans = Done | DecodeChunkDone | Scored | Observed
Event = Joined | Done | Failed | DecodeChunkDone | Scored | AwaitGroup | Observed | Lost


# -- mailbox items: finished text and turns, from rank to rank ----------------------------------------------------


class Response(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """A finished response, sent to a reward rank. `meta` is the prompt's JSON, `token_ids` (int32) is the last turn,
    `earlier` has text and token ids of the model's earlier turns, and `media` the prompt's media if the reward gets
    them."""

    sample: int
    domain: str
    text: str
    meta: bytes
    reason: str
    token_ids: bytes = b""
    earlier: list[tuple[str, bytes]] = []
    media: tuple[Medium, ...] = ()


class Turn(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """A request to a sample's environment to answer the model's turn or, with `starts_episode`, to start the episode.

    Args:
        meta: The prompt's JSON.
        reason: Why the turn ended; "abort": the sample was dropped, no answer is needed.
        reply_to: The generator rank.
        max_observation_tokens: Maximum tokens of the observation, which leaves space for another turn.
        num_written_tokens: Tokens of all turns until now.
        text_with_special_tokens: The text with its special tokens, if it has any before the last token.
        media: At the start of an episode, the media of the row's prompt.
    """

    sample: int
    domain: str
    text: str
    meta: bytes
    reason: str
    reply_to: int
    last_token: int = -1
    max_observation_tokens: int = 0
    starts_episode: bool = False
    num_written_tokens: int = 0
    text_with_special_tokens: str = ""
    media: tuple[Medium, ...] = ()


class EnvObservation(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """An observation, sent to all ranks of the replica that holds the sample: int32 token ids, chat messages as JSON,
    and media with their places among the tokens. The first one is the whole prompt; if it has no tokens, the row's own
    prompt is used. `expert` is the text of the next turn if the environment's expert plays it, else empty."""

    sample: int
    token_ids: bytes
    messages: bytes = b"[]"
    media: tuple[Medium, ...] = ()
    expert: str = ""


class Post(Message):
    """A batch of mailbox items."""

    items: list[Response | Turn | EnvObservation]
