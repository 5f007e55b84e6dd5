"""LeGrad: the gradient at the attention of each block, where the block's own tokens are classified."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from classlens.core.capture import Tape, Value, place_index
from classlens.core.capture.backward import gradients
from classlens.errors import MethodError
from classlens.methods.blocks import Attention, attentions, block_inputs, last_output
from classlens.methods.places import enlarged
from classlens.methods.registry import Case, Result, method
from classlens.methods.tail import Tail


@method(
    "legrad", family="attention", summary="positive gradient at the attention of the last blocks, mean over queries",
    class_specific=True, signed=False, conserves=False, scalars=True, attention=True,
    paper="Bousselham et al.: LeGrad: Explainability of Vision Transformers via Feature Formation, ICCV 2025",
)  # fmt: skip
def legrad(case: Case, last: int = 2) -> Result:
    """Sum over the `last` blocks of E_h,queries[(d s_l / d A_l)+]; s_l is the score of block l's mean token.

    The mean over all tokens of a block's output takes the place of every token after the last block, so the network's
    own norm and head classify it. `last=0`: all blocks.
    """
    found, outputs = _blocks(case.tape)
    if not 0 <= last <= len(found):
        raise MethodError(f"last={last} is not possible; this network has {len(found)} blocks with attention")
    tail = Tail.after(case.tape, outputs[-1], "legrad cannot classify the tokens of a block")
    axis = _axis_of_tokens(case.tape, outputs[-1])
    size = case.images.shape[2:]
    total = torch.zeros((), device=case.images.device)
    for one, output in list(zip(found, outputs, strict=True))[-last:]:
        cotangent = _gradient(tail, axis, case, output)
        at_output = replace(case.tape, output=output).gradients(cotangent, [one.output])[one.output]
        total = total + enlarged(_of_keys(one, one.gradient(at_output)).transpose(0, 1), size)
    return Result(total)


def _blocks(tape: Tape) -> tuple[list[Attention], list[Value]]:
    """The attention of each block, and the block's output."""
    found = attentions(tape, "legrad")
    inputs = block_inputs(tape, found)
    if len(inputs) != len(found) or len({value.shape for value in inputs}) > 1 or len(inputs[0].shape) != 3:
        raise MethodError(
            "legrad classifies the tokens of each block, so all blocks must have the same tokens; this network's "
            "blocks differ; use attnlrp or agf"
        )
    return found, [*inputs[1:], last_output(tape, inputs[-1])]


def _axis_of_tokens(tape: Tape, value: Value) -> int:
    places = place_index(tape).get(value)
    if places is None:
        raise MethodError(
            "legrad classifies the tokens of each block, and these are in no order that can be read; use attnlrp or agf"
        )
    sizes = places.index.shape  # (1,tokens,1), or (tokens,1,1) where tokens come first
    return sizes.index(max(sizes))


def _of_keys(one: Attention, gradient: Tensor) -> Tensor:
    """(K,B,h,w): E over heads and queries of the positive gradient, for each key at its place."""
    if one.keys is None or one.keys.index.numel() != gradient.shape[-1]:
        raise MethodError(
            f"the patches that {one.node.where} reads are in no order that can be read; use attnlrp or agf"
        )
    of_keys = gradient.clamp(min=0).mean((2, 3))
    place = one.keys.index.flatten().long()
    maps = of_keys.new_zeros(*of_keys.shape[:2], math.prod(one.keys.grid))
    maps[..., place[place > 0] - 1] = of_keys[..., place > 0]
    found: Tensor = maps.unflatten(2, one.keys.grid)
    return found


def _gradient(tail: Tail, axis: int, case: Case, output: Value) -> Tensor:
    """(K, *shape): the gradient of the scores of a block's mean token, at the block's output."""
    with torch.inference_mode(False), torch.enable_grad():
        tokens = output.tensor.detach().requires_grad_()
        logits = tail(tokens.mean(axis, keepdim=True).expand_as(tokens))
        starts = case.directions(logits.detach())
        return torch.stack([gradients([logits], [tokens], [s], case.tape.odd, retain_graph=True)[0] for s in starts])
