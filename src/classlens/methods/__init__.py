"""Explanation methods: `METHODS` maps each name to a function and its properties."""

from classlens.methods import agf, cam, controls, deeplift, fullgrad, gradient, perturbation, relevance
from classlens.methods.registry import (
    METHODS,
    Case,
    LayerTrace,
    Method,
    Result,
    check_options,
    method_names,
    resolve,
    split_names,
)

__all__ = [
    "METHODS", "Case", "LayerTrace", "Method", "Result", "agf", "cam", "check_options", "controls", "deeplift",
    "fullgrad", "gradient", "method_names", "perturbation", "relevance", "resolve", "split_names",
]  # fmt: skip
