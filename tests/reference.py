"""Slow second derivations: the same formulas by explicit matrices and plain loops, one image and class at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


def matrix(layer: Callable[[Tensor], Tensor], x: Tensor) -> np.ndarray:
    """(outputs, inputs) matrix of a linear function at one image x, column by column; a bias drops out."""
    zero = layer(torch.zeros_like(x))
    columns = []
    for j in range(x.numel()):
        unit = torch.zeros_like(x).flatten()
        unit[j] = 1
        columns.append((layer(unit.reshape(x.shape)) - zero).flatten().detach().numpy())
    return np.stack(columns, axis=1)


def generic_rule(x: np.ndarray, w: np.ndarray, r: np.ndarray) -> np.ndarray:
    """Def. 1 with X = x and Theta = w, written as the double sum."""
    share = np.zeros_like(x)
    for i in range(len(r)):
        total = sum(w[i, j] * x[j] for j in range(len(x)))
        if total != 0:
            for j in range(len(x)):
                share[j] += x[j] * w[i, j] * r[i] / total
    return share


def alpha_beta(x: np.ndarray, w: np.ndarray, r: np.ndarray, alpha: float) -> np.ndarray:
    """LRP alpha-beta by its definition over contributions z_ij = w_ij x_j."""
    share = np.zeros_like(x)
    for i in range(len(r)):
        z = w[i] * x
        pos, neg = np.maximum(z, 0), np.minimum(z, 0)
        if pos.sum() > 0:
            share += alpha * pos / pos.sum() * r[i]
        if alpha != 1 and neg.sum() < 0:
            share -= (alpha - 1) * neg / neg.sum() * r[i]
    return share


def gamma(x: np.ndarray, w: np.ndarray, r: np.ndarray, weight: float) -> np.ndarray:
    """LRP-gamma: contributions that agree with the output's sign count 1 + gamma times."""
    share = np.zeros_like(x)
    for i in range(len(r)):
        z = w[i] * x
        boosted = z + weight * (np.maximum(z, 0) if z.sum() >= 0 else np.minimum(z, 0))
        if boosted.sum() != 0:
            share += boosted / boosted.sum() * r[i]
    return share


def epsilon(x: np.ndarray, w: np.ndarray, r: np.ndarray, eps: float) -> np.ndarray:
    z = w @ x
    return sum(w[i] * x * r[i] / (z[i] + (eps if z[i] >= 0 else -eps)) for i in range(len(r)))


def relative(x: np.ndarray, w: np.ndarray, r: np.ndarray) -> np.ndarray:
    """RAP over contributions: through agreeing ones, by share through opposing ones, negative R through the latter."""
    share = np.zeros_like(x)
    for i in range(len(r)):
        z = w[i] * x
        pos, neg = np.maximum(z, 0), np.maximum(-z, 0)
        p, q = pos.sum(), neg.sum()
        if p > 0:
            share += pos / p * max(r[i], 0)
        if q > 0:
            share += neg / q * (r[i] * q / (p + q) + min(r[i], 0))
    on = share != 0
    return share - on * (share.sum() - r.sum()) / max(on.sum(), 1)


def zbox(x: np.ndarray, w: np.ndarray, r: np.ndarray) -> np.ndarray:
    """z^B with the image's own bounds, over contributions w (x - l or h)."""
    low, high = x.min(), x.max()
    share = np.zeros_like(x)
    for i in range(len(r)):
        z = w[i] * x - np.maximum(w[i], 0) * low - np.minimum(w[i], 0) * high
        if z.sum() != 0:
            share += z / z.sum() * r[i]
    return share


def highlighted(y: np.ndarray, t: int) -> float:
    """Eq. 7, entry t."""
    sigma = max(abs(v - y[t]) for v in y)
    u = np.array([y[t] * np.exp(-0.5 * ((v - y[t]) / sigma) ** 2) for v in y])
    e = np.exp(u - u.max())
    return float(e[t] / e.sum())


def factorised(
    y: np.ndarray, phi: np.ndarray, sharpness: float, ridge: float, zero_is_background: bool, normalise: bool
) -> np.ndarray:
    """Eq. 10 for y (C,H,W) and phi (H,W), with numpy's least squares."""
    h = 1 / (1 + np.exp(-sharpness * y / y.max())).reshape(len(y), -1) if y.max() != 0 else np.full(
        (len(y), phi.size), 0.5
    )  # fmt: skip
    flat = phi.flatten()
    back = flat <= 0 if zero_is_background else flat < 0
    r_b, r_f = (h[:, s].mean(1) if s.any() else np.zeros(len(h)) for s in (back, flat > 0))
    r = np.stack([r_b, r_f], 1)
    if ridge:  # the ridge as extra rows of an ordinary least-squares problem
        r_extended = np.concatenate([r, np.sqrt(ridge) * np.eye(2)])
        h_extended = np.concatenate([h, np.zeros((2, h.shape[1]))])
        weights = np.linalg.lstsq(r_extended, h_extended, rcond=None)[0]
    else:
        weights = np.linalg.pinv(r) @ h
    weights = np.maximum(weights, 0)
    factor = np.maximum(weights[1] - weights[0], 0).reshape(phi.shape)
    return factor / factor.max() if normalise and factor.max() > 0 else factor
