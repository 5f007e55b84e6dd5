"""Evidence maps as figures, as text and as files."""

from classlens.files import write_text
from classlens.render.colours import RGB, Scale, heatmap, overlay, pixels_of, scaled, shared_scale
from classlens.render.figures import comparison, decomposition, figure, segmentation
from classlens.render.outlines import OUTLINE, strokes
from classlens.render.save import notebook_png, png, save, stem, write_png
from classlens.render.words import (
    arrival_text,
    describe,
    probability_text,
    question_text,
    rival_text,
    shares,
    summary,
    where,
)

__all__ = [
    "OUTLINE", "RGB", "Scale", "arrival_text", "comparison", "decomposition", "describe", "figure", "heatmap",
    "notebook_png", "overlay", "pixels_of", "png", "probability_text", "question_text", "rival_text", "save", "scaled",
    "segmentation", "shared_scale", "shares", "stem", "strokes", "summary", "where", "write_png", "write_text",
]  # fmt: skip
