"""Evidence maps as pictures and as words."""

from classlens.render.figures import (
    RGB,
    comparison,
    decomposition,
    describe,
    figure,
    heatmap,
    notebook_png,
    overlay,
    png,
    probability_text,
    save,
    scaled,
    segmentation,
    shares,
    summary,
    where,
    write_png,
    write_text,
)

__all__ = [
    "RGB", "comparison", "decomposition", "describe", "figure", "heatmap", "notebook_png", "overlay", "png",
    "probability_text", "save", "scaled", "segmentation", "shares", "summary", "where", "write_png", "write_text",
]  # fmt: skip
