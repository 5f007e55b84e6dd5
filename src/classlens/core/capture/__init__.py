"""Record what one forward pass of an unmodified network does: `record(model, images) -> Tape`."""

from classlens.core.capture.fold import fold_paddings, folded
from classlens.core.capture.forward import (
    Picker,
    footprint,
    home,
    pick_output,
    placed,
    plain_logits,
    record,
    record_logits,
    run_model,
    unwrap,
)
from classlens.core.capture.modes import GradientsStayOn
from classlens.core.capture.origin import Axis, Places, image_index, place_index
from classlens.core.capture.precision import autocast_off, in_float32
from classlens.core.capture.tape import Node, Tape, Value

__all__ = [
    "Axis", "GradientsStayOn", "Node", "Picker", "Places", "Tape", "Value", "autocast_off", "fold_paddings", "folded",
    "footprint", "home", "image_index", "in_float32", "pick_output", "place_index", "placed", "plain_logits", "record",
    "record_logits", "run_model", "unwrap",
]  # fmt: skip
