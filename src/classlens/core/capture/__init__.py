"""Record what one forward pass of an unmodified network does: `record(model, images) -> Tape`."""

from classlens.core.capture.fold import fold_paddings, folded
from classlens.core.capture.forward import (
    Picker,
    described,
    footprint,
    home,
    logits_of,
    outputs_at,
    pick_output,
    pick_part,
    placed,
    plain_logits,
    record,
    record_logits,
    run_model,
    unwrap,
)
from classlens.core.capture.modes import GradientsStayOn
from classlens.core.capture.origin import Axis, Grid, Places, image_index, place_index
from classlens.core.capture.precision import autocast_off, in_float32
from classlens.core.capture.probabilities import WatchesEnding, of_labels
from classlens.core.capture.reading import Pick, Reading, last_linear
from classlens.core.capture.recorder import Recorder
from classlens.core.capture.tape import Node, Point, Tape, Value, has_own_gradient

__all__ = [
    "Axis", "GradientsStayOn", "Grid", "Node", "Pick", "Picker", "Places", "Point", "Reading", "Recorder", "Tape",
    "Value", "WatchesEnding", "autocast_off", "described", "fold_paddings", "folded", "footprint", "has_own_gradient",
    "home", "image_index", "in_float32", "last_linear", "logits_of", "of_labels", "outputs_at", "pick_output",
    "pick_part", "place_index", "placed", "plain_logits", "record", "record_logits", "run_model", "unwrap",
]  # fmt: skip
