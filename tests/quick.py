"""Fewer samples where a method draws many: tests over all methods stay quick, and do not depend on how many."""

from __future__ import annotations

from typing import Any

from classlens.methods import METHODS

QUICK: dict[str, dict[str, Any]] = {
    "rise": {"n_masks": 6}, "meaningful-perturbation": {"steps": 3}, "smoothgrad": {"samples": 3},
    "integrated-gradients": {"steps": 4}, "gradient-shap": {"samples": 3}, "deeplift-shap": {"baselines": "zero+noise"},
}  # fmt: skip

ANYWHERE = [name for name, method in METHODS.items() if not method.attention]  # also on networks without attention


def suited(name: str, method: str) -> str:
    """A network of that name, or one with attention if the method needs it."""
    return "tokens" if METHODS[method].attention else name
