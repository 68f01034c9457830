"""A causal language model from an HF folder, with a trainer's two forward passes: a packed one and the model's own."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hpcrl.engines.hf_folder import add_mtp, copy_beside_weights, save_model, write_config
from hpcrl.engines.train.fsdp2.exchange import assemble
from hpcrl.engines.train.fsdp2.images import ImageInputs, visible_keys
from hpcrl.engines.train.fsdp2.logits import Head, token_hits, token_logprobs
from hpcrl.engines.train.fsdp2.lora import Adapters
from hpcrl.engines.train.fsdp2.model_kind import CAUSAL, Kind, body_of, decoder_of, quiet
from hpcrl.engines.train.fsdp2.mtp_layer import MTPInputs, MTPLayers
from hpcrl.engines.train.fsdp2.packed_attention import (
    PACKED_ATTENTION,
    AttentionLayout,
    PackedLayout,
    PositionsAsCache,
    sequences_are_known,
)
from hpcrl.engines.train.fsdp2.row_attention import use_own_attention
from hpcrl.engines.train.fsdp2.row_mixers import RowMixers, mixers_of
from hpcrl.engines.train.fsdp2.spec import unpackable
from hpcrl.engines.train.fsdp2.taught import Taught
from hpcrl.engines.train.fsdp2.teacher_top_k import teacher_top_k
from hpcrl.engines.train.fsdp2.tensor_parallel import TensorParallel
from hpcrl.engines.train.fsdp2.token_divergence import token_divergence
from hpcrl.models.families import family_of
from hpcrl.models.mtp import MTP
from hpcrl.models.rope import rope_types
from hpcrl.models.row_modules import is_row_attention
from hpcrl.models.vision import BothWays
from hpcrl.system.files import new_folder

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


class Inputs(NamedTuple):
    """The first arguments of PackedCausalLM.forward."""

    token_ids: Tensor
    positions: Tensor
    layout: PackedLayout | None
    before: Tensor
    images: ImageInputs | None


class PackedCausalLM(nn.Module):
    """Wraps a transformers model. Parameters are used only inside forward methods, for which FSDP gathers them."""

    # methods besides forward() that use parameters
    other_forwards: tuple[str, ...] = ("own_logprobs", "with_mtp", "top_k", "final_states")

    def __init__(self, hf: PreTrainedModel, chunk_tokens: int, tensor_parallel_plan: TensorParallel | None = None):
        """tensor_parallel_plan: of `hf`."""
        super().__init__()
        self.hf, self.tensor_parallel_plan = hf, tensor_parallel_plan
        self.mtp: MTPLayers | None = None
        text = hf.config.get_text_config()
        self.head = Head.from_config(text)
        self.chunk_tokens = chunk_tokens
        self.family = family_of(text.model_type)
        self.row_mixers = RowMixers(mixers_of(hf), self.family)
        self.attention_layout = AttentionLayout()
        for module in decoder_of(hf).modules():
            if hasattr(module, "layer_idx"):
                setattr(module, AttentionLayout.name, self.attention_layout)
        dynamic = "dynamic" in rope_types(hf.config.to_dict())
        self._dynamic_rotary = [m for m in hf.modules() if dynamic and hasattr(m, "max_seq_len_cached")]
        # SDPA has no soft-capping, and transformers' SDPA attention would silently omit it.
        self.own_attention = (
            "eager" if getattr(text, "attn_logit_softcapping", None) else hf.config._attn_implementation
        )
        for module in self.row_mixers.modules.values():
            if is_row_attention(module, self.family):
                use_own_attention(module, self.own_attention)

    def in_float32(self) -> Iterator[nn.Module]:
        """Yield the modules that always compute in float32."""
        return iter(())

    def set_packing(self, packing: bool) -> None:
        """Use attention over packed sequences (True), or the model's own attention over one sequence (False)."""
        own, text = self.own_attention, PACKED_ATTENTION if packing else self.own_attention
        parts: dict[str, Any] = {} if self.hf.config.get_text_config() is self.hf.config else self.hf.config.sub_configs
        self.hf.set_attn_implementation({**dict.fromkeys(parts, own), "text_config": text} if parts else text)
        if self.family.row_attention:  # transformers sets it only for models with its attention interface
            self.hf.config._attn_implementation = text
        if self.tensor_parallel_plan is not None:
            self.tensor_parallel_plan.tokens_split = packing

    def set_head_dtype(self, dtype: str | None) -> None:
        """Compute the vocabulary projection in this dtype (trainer.head_dtype). None, the default, is the model's."""
        self.head = dataclasses.replace(self.head, float32=dtype == "float32")

    def packing_obstacle(self) -> str:
        """Why the model's code or config rules out packing; empty if the probe must decide."""
        if why := unpackable(self.hf.config.to_dict()):
            return why
        parameters = inspect.signature(body_of(self.hf).forward).parameters
        takes_layout = "position_ids" in parameters and any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if not takes_layout and not self.row_mixers.modules:
            return "its forward takes no position_ids or no layout of the sequences"
        return ""

    def checkpoint_activations(self, engine: str) -> None:
        """Keep only the layers' inputs and recompute activations in the backward pass. ValueError for a model without
        layers that transformers can checkpoint.

        transformers supports this only in training mode, in which some layers (OPT) apply dropout. Here, layers are
        wrapped and stay in evaluation mode, so recomputation is deterministic.
        """
        layers = [module for module in self.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise ValueError(
                f"trainer.{engine}.activation_checkpointing=true: {self.hf.config.model_type} has no layers that can "
                "be computed again; set it to false"
            )
        for layer in layers:
            layer.forward = functools.partial(  # type: ignore[method-assign]
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        layout: PackedLayout | None,
        before: Tensor,
        images: ImageInputs | None,
        targets: Tensor,
        temperature: float,
        entropy: bool,
        taught: Taught | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(log-probs, entropies or None, divergences or None), float32 [N], of targets[n] as the token that follows
        token_ids[before[n]]; divergences from what the teacher has told about these N tokens.

        token_ids int64 [T] and positions int64 [T] or [T, axes] are concatenated sequences, or one sequence if there is
        no layout. `images` are those of the micro-batch; None if the model takes none. Collective over the layout's
        ranks: each rank computes its share and gets all results.
        """
        states, mine = self._states(token_ids, positions, layout, before, images)
        return self._scores(states, mine, layout, targets, temperature, entropy, taught)

    def top_k(
        self,
        token_ids: Tensor,
        positions: Tensor,
        layout: PackedLayout | None,
        before: Tensor,
        images: ImageInputs | None,
        k: int,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """The k most probable tokens after the tokens `before`, int32 [N, k], descending, and their log-probs, float32
        [N, k]; other arguments and ranks as in forward()."""
        states, mine = self._states(token_ids, positions, layout, before, images)
        given: dict[str, Any] = {"head": self.head, "temperature": temperature, "chunk_tokens": self.chunk_tokens}
        found = teacher_top_k(states, *self.projection(), k, **given)
        if layout is None or mine is None:
            return found
        ids, logprobs = (assemble(own, mine, len(before), layout.ranks.all) for own in found)
        return ids, logprobs

    def final_states(
        self,
        token_ids: Tensor,
        positions: Tensor,
        layout: PackedLayout | None,
        before: Tensor,
        images: ImageInputs | None,
    ) -> Tensor:
        """[N, h]: the states after the tokens `before`, to which the head is applied; arguments and ranks as in
        forward()."""
        states, mine = self._states(token_ids, positions, layout, before, images)
        return states if layout is None or mine is None else assemble(states, mine, len(before), layout.ranks.all)

    def with_mtp(
        self,
        token_ids: Tensor,
        positions: Tensor,
        layout: PackedLayout | None,
        before: Tensor,
        images: ImageInputs | None,
        targets: Tensor,
        temperature: float,
        entropy: bool,
        taught: Taught | None,
        further: Sequence[MTPInputs],
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
        """As forward(), and of the targets of all MTP layers, one layer after another: log-probs float32 [M], whose
        gradients reach only these layers, and whether each is its layer's most probable token, bool [M]."""
        assert self.mtp is not None and images is None
        hidden, before, mine = self._hidden(token_ids, positions, layout, before, images)
        scores = self._scores(hidden.index_select(0, before), mine, layout, targets, temperature, entropy, taught)
        states, found = hidden.detach(), []
        for number, inputs in enumerate(further):
            with torch.no_grad():
                embedded = self.hf.get_input_embeddings()(inputs.token_ids)
                rotation = decoder_of(self.hf).rotary_emb(embedded[None], inputs.positions[None])
            states = self.mtp(number, states.index_select(0, inputs.states), embedded, rotation, inputs.layout)
            found.append(states.index_select(0, inputs.before))
        states, targets_of_all = torch.cat(found), torch.cat([inputs.targets for inputs in further])
        del embedded, found
        weight, bias = self.projection()
        given = (states, weight.detach(), None if bias is None else bias.detach(), targets_of_all)
        return *scores, *token_hits(*given, head=self.head, chunk_tokens=self.chunk_tokens)

    def _scores(
        self,
        states: Tensor,
        mine: Tensor | None,
        layout: PackedLayout | None,
        targets: Tensor,
        temperature: float,
        entropy: bool,
        taught: Taught | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        num_targets = len(targets)
        weight, bias = self.projection()
        logprobs, entropies = token_logprobs(
            states,
            weight,
            bias,
            targets if mine is None else targets[mine],
            head=self.head,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            entropy=entropy,
        )
        divergences = None
        if taught is not None:
            taught = taught if mine is None else taught.of(mine)
            divergences = token_divergence(states, weight, bias, taught, head=self.head, chunk_tokens=self.chunk_tokens)
        if layout is None or mine is None:
            return logprobs, entropies, divergences
        whole = functools.partial(assemble, places=mine, count=num_targets, axis=layout.ranks.all)
        entropies = None if entropies is None else whole(entropies)
        return whole(logprobs), entropies, None if divergences is None else whole(divergences)

    def projection(self) -> tuple[Tensor, Tensor | None]:
        """Matrix [V, h] and bias [V] of the vocabulary projection."""
        projection = self.hf.get_output_embeddings()
        return projection.weight, projection.bias

    def _states(
        self,
        token_ids: Tensor,
        positions: Tensor,
        layout: PackedLayout | None,
        before: Tensor,
        images: ImageInputs | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [n, h] after this rank's share of the tokens `before`, and the share's indices in `before`, or
        None if the share is all of them."""
        hidden, before, mine = self._hidden(token_ids, positions, layout, before, images)
        return hidden.index_select(0, before), mine

    def _hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        layout: PackedLayout | None,
        before: Tensor,
        images: ImageInputs | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states [k, h] of this rank's tokens, the indices in them of its share of `before`, and the share as
        from _states()."""
        packed: dict[str, Any] = {}
        mine = None
        self._begin(layout)
        if layout is not None:
            token_ids = token_ids[layout.kept]
            mine, before = layout.own(before)
            packed = {"packed_layout": layout}
            positions = positions[layout.rotated]
            if self.family.reads_positions_from_cache:
                packed["past_key_values"] = PositionsAsCache(positions)
        if layout is not None or positions.dim() > 1:
            packed["position_ids"] = positions[None] if positions.dim() == 1 else positions.t()[:, None]
        decoder: Any = body_of(self.hf)
        if images is None:
            packed["input_ids"] = token_ids[None]
        else:
            decoder = decoder.get_decoder()
            packed |= self._seen(token_ids, images)
            if layout is None and images.numbers is not None:
                packed["attention_mask"] = self._masks(images.numbers, images.both_ways, packed["inputs_embeds"].dtype)
        with contextlib.nullcontext() if layout is None else sequences_are_known():
            hidden = decoder(use_cache=False, **packed).last_hidden_state[0]
        return hidden, before, mine

    def _masks(self, numbers: Tensor, both_ways: BothWays, dtype: torch.dtype) -> dict[str, Tensor]:
        """What to add to a sequence's scores [1, 1, T, T] in each kind of layer, so an image's tokens attend to each
        other in both directions. numbers int64 [T]: as in ImageInputs."""
        window = getattr(self.hf.config.get_text_config(), "sliding_window", None)
        seen = {
            "full_attention": visible_keys(numbers if both_ways == "all" else torch.full_like(numbers, -1), None),
            "sliding_attention": visible_keys(numbers, window),
        }
        return {
            kind: torch.zeros_like(keys, dtype=dtype).masked_fill(~keys, torch.finfo(dtype).min)[None, None]
            for kind, keys in seen.items()
        }

    def _seen(self, token_ids: Tensor, images: ImageInputs) -> dict[str, Any]:
        """The decoder's input for tokens of which some are of images."""
        base: Any = self.hf.base_model
        output = base.get_image_features(**images.tower)
        embedded = base.get_input_embeddings()(token_ids)
        features = torch.cat(tuple(output.pooler_output)).to(embedded.dtype)
        deep = [torch.cat(parts) for parts in getattr(output, "deepstack_features", None) or ()]
        # Every parameter is in the graph, also without an image, so all ranks reduce the same gradients.
        anchor = 0.0 * sum(some.sum() for some in (features, *deep))
        embedded = embedded.index_copy(0, images.places, features.index_select(0, images.sources)) + anchor
        given: dict[str, Any] = {"inputs_embeds": embedded[None]}
        decoder: Any = base.get_decoder()
        if getattr(decoder, "hidden_size_per_layer_input", None):  # which images lack (Gemma 4)
            padded = token_ids.index_fill(0, images.places, self.hf.config.get_text_config().pad_token_id)
            given["per_layer_inputs"] = decoder.get_per_layer_inputs(padded[None], None)
        if deep:
            shown = torch.zeros(len(token_ids), dtype=torch.bool, device=token_ids.device)
            given["visual_pos_masks"] = shown.index_fill(0, images.places, True)[None]
            order = images.places.argsort()
            given["deepstack_visual_embeds"] = [some.index_select(0, images.sources[order]) for some in deep]
        return given

    def _begin(self, layout: PackedLayout | None) -> None:
        """Prepare a forward pass. Dynamic NTK's state is reset, because transformers uses the maximum length of all
        earlier forward passes."""
        self.row_mixers.set_layout(layout)
        self.attention_layout.current = layout
        for module in self._dynamic_rotary:
            for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
                setattr(module, name, module.original_max_seq_len)
            for name, original in list(module.named_buffers(recurse=False)):
                if name.endswith("original_inv_freq"):  # one per kind of layer, which is the name's prefix
                    setattr(module, f"{name.removesuffix('original_inv_freq')}inv_freq", original)

    def own_logprobs(self, token_ids: Tensor) -> Tensor:
        """float32 [T - 1]: log-probs of all but the first token of a sequence, int64 [T], from the model's own forward
        pass and head."""
        self._begin(None)
        logits = self.hf(input_ids=token_ids[None], use_cache=False).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, token_ids[1:, None])[:, 0]


def empty_model(path: Path, dtype: torch.dtype, kind: Kind = CAUSAL) -> PreTrainedModel:
    """The model of a folder's config.json, on the meta device. ValueError if the folder has no model of this kind."""
    if not (path / "config.json").is_file():
        raise ValueError(f"model.path {path}: no config.json; give a folder in Hugging Face layout")
    if not any((path / name).is_file() for name in WEIGHT_FILES):
        raise ValueError(f"model.path {path}: no weights; one of {', '.join(WEIGHT_FILES)} must be there")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, **kind.options)
        with torch.device("meta"), quiet():
            return kind.auto.from_config(config, dtype=dtype)
    except Exception as error:  # from the config's or the model's own code, such as a missing package
        raise ValueError(f"model.path {path}: config.json makes no {kind.what}: {_line(error)}") from error


def read_model(path: Path, dtype: torch.dtype, kind: Kind = CAUSAL) -> PreTrainedModel:
    """The model with its weights, on the CPU. ValueError names the first missing or mismatched tensor."""
    try:
        with quiet():
            loaded: Any = kind.auto.from_pretrained(
                path,
                dtype=dtype,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **kind.options,
            )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ValueError(f"model.path {path}: weights cannot be read: {_line(error)}") from error
    model, info = loaded
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise ValueError(
            f"model.path {path}: {name} has shape {list(found)}, config.json asks for {list(expected)}"
            f"{_more(len(mismatched) - 1)}"
        )
    for name in info["missing_keys"] & kind.may_lack:
        model.get_parameter(name).data.zero_()
    if missing := sorted(info["missing_keys"] - kind.may_lack):
        raise ValueError(f"model.path {path}: the weights lack {missing[0]}{_more(len(missing) - 1)}")
    return model


def write_model(
    hf: PreTrainedModel,
    weights: dict[str, Tensor],
    origin: Path,
    folder: Path,
    mtp: MTP | Mapping[str, Tensor],
    lora: Adapters | None = None,
) -> None:
    """Write weights (by name), config and index, and copy tokenizer and generation config from `origin`. `mtp` are the
    tensors of its multi-token prediction layers in files, or whether they are copied, too. Adapters are merged, and
    also written to the subfolder `adapter` for peft. The folder is written completely or left unchanged; OSError gives
    the cause."""
    with new_folder(folder) as partial:
        try:
            if lora is not None:
                lora.write(weights, hf, origin, partial / "adapter")
                weights = lora.merged(weights, hf)
            dtype = next(iter(weights.values())).dtype  # may differ from the dtype of `hf`
            with quiet():
                save_model(hf, partial, state_dict=weights, max_shard_size="5GB")
            write_config(partial, partial, dtype)
            add_mtp(origin, partial, mtp)
        except SafetensorError as error:  # raised on a full disk
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]) if number else errno.EIO, _line(error), str(folder)) from error
        copy_beside_weights(origin, partial)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _more(count: int) -> str:
    return f" (and {count} more tensors)" if count else ""
