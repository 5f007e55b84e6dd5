"""Explanation methods: `METHODS` maps each name to a function and its properties."""

from classlens.methods import agf, cam, fullgrad, relevance
from classlens.methods.registry import METHODS, Case, LayerTrace, Method, Result, check_options, resolve

__all__ = ["METHODS", "Case", "LayerTrace", "Method", "Result", "agf", "fullgrad", "cam", "relevance", "check_options", "resolve"]
