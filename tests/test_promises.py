"""What every method promises on every network. Generated from the registry: a new method is tested by being there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import classlens
from classlens.core.capture import pick_output
from classlens.errors import MethodError, ModelError
from classlens.methods import METHODS
from networks import NETWORKS, RELU_LIKE, VOLUMES, build, inputs, pictures, volumes
from quick import ANYWHERE, QUICK, suited

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")

# The release divides by its own small sums; in float32 rounding decides (up to 0.4 relative on ResNet-18).
UNSTABLE = {"agf-release", "agf-paper"}
PAIRS = [(n, m) for n in (*NETWORKS, *VOLUMES) for m in ANYWHERE] + [
    ("tokens", m) for m in METHODS if METHODS[m].family == "attention"
]
every = pytest.mark.parametrize(("name", "method"), PAIRS, ids=lambda value: str(value))
each_method = pytest.mark.parametrize("method", METHODS)


def run(model: nn.Module, x: Tensor, targets: Any, method: str) -> classlens.Explanation:
    return classlens.explain(model, x, targets, method, **QUICK.get(method, {}))


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    """Relative L2 distance of maps, image by image and class by class."""
    scale = b.flatten(2).norm(dim=2)
    return bool(((a - b).flatten(2).norm(dim=2) <= tolerance * scale + 1e-30).all())


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """All that a user could find changed on a model."""
    state: dict[str, Any] = {}
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        state[name] = (p.data_ptr(), p.detach().clone(), p.requires_grad, p.grad, p._version)
    for name, m in model.named_modules():
        hooks = [dict(v) for k, v in vars(m).items() if k.endswith("_hooks")]
        state[f"module {name}"] = (m.training, sorted(vars(m)), hooks, vars(m).get("forward"))
    state["rng"] = torch.random.get_rng_state()
    return state


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@every
def test_result_is_finite_and_full_resolution_on_odd_sizes_and_the_model_is_untouched(name: str, method: str) -> None:
    model, x = build(name), volumes(2, (5, 36, 44)) if name in VOLUMES else pictures(2, (36, 44))
    before, pixels = fingerprint(model), x.clone()
    e = run(model, x, classlens.top(2), method)
    assert same(before, fingerprint(model))
    assert torch.equal(x, pixels)
    assert e.maps.shape == (2, 2, *x.shape[2:])
    assert torch.isfinite(e.maps).all()
    assert torch.equal(e.targets, e.logits.topk(2).indices)
    if not METHODS[method].signed:  # one sign in a map: that of the logit, for methods that start with it
        low, high = e.maps.flatten(2).aminmax(dim=2)
        assert (torch.minimum(-low, high) <= 1e-6 * torch.maximum(-low, high)).all()


@every
def test_images_and_classes_together_are_each_of_them_alone(name: str, method: str) -> None:
    model, x = build(name).double(), inputs(name, 2).double()
    targets = [[1, 5], [2, 1]]
    together = run(model, x, targets, method).maps
    for b, classes in enumerate(targets):
        for k, target in enumerate(classes):
            alone = run(model, x[b : b + 1], target, method).maps
            assert close(alone, together[b : b + 1, k : k + 1]), f"image {b}, class {target}"


@each_method
def test_batch_and_classes_in_single_precision(method: str) -> None:
    model, x = build(suited("residual", method)), pictures(3)
    together = run(model, x, [[1, 5], [4, 2], [2, 0]], method).maps
    apart = torch.cat([run(model, x[i : i + 1], t, method).maps for i, t in enumerate(([1, 5], [4, 2], [2, 0]))])
    assert close(apart, together, 1e-2 if method in UNSTABLE else 1e-5)


@each_method
def test_same_call_same_bits(method: str) -> None:
    model, x = build(suited("gated", method)), pictures(2)
    torch.manual_seed(1)
    first = run(model, x, 3, method).maps
    torch.manual_seed(2)
    assert torch.equal(first, run(model, x, 3, method).maps)


class Breaks(nn.Module):
    """Works a number of times, then raises: wherever a method is by then, it must leave the model as it was."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.body, self.left = build("residual"), [calls]

    def forward(self, x: Tensor) -> Tensor:
        self.left[0] -= 1
        if self.left[0] < 0:
            raise RuntimeError("out of order")
        return self.body(x)


@pytest.mark.parametrize("calls", [0, 1, 2, 3])
@each_method
def test_model_is_untouched_after_an_exception(method: str, calls: int) -> None:
    model = Breaks(calls).eval()
    before = fingerprint(model)
    with contextlib.suppress(ModelError, MethodError, RuntimeError):
        run(model, pictures(2), classlens.top(2), method)
    assert same(before, fingerprint(model))


@each_method
def test_two_threads_on_one_model(method: str) -> None:
    model = build(suited("residual", method))
    inputs = [pictures(1, seed=s) for s in (1, 2)]
    expected = [run(model, x, 1, method).maps for x in inputs]
    before = fingerprint(model)
    found: dict[int, Tensor] = {}

    def work(i: int) -> None:
        found[i] = run(model, inputs[i % 2], 1, method).maps

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 4
    assert all(torch.equal(found[i], expected[i % 2]) for i in range(4))
    assert same(before, fingerprint(model))


@pytest.mark.parametrize("method", [m for m in METHODS if METHODS[m].conserves])
@pytest.mark.parametrize("name", [*RELU_LIKE, *VOLUMES])
def test_conservation_holds_where_it_is_promised(name: str, method: str) -> None:
    e = run(build(name), inputs(name, 2), classlens.top(2), method)
    assert e.report.conservation.max() <= 1e-3
    assert torch.allclose(e.report.started - e.report.absorbed, e.report.arrived, atol=1e-3 * float(e.maps.abs().sum()))


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "frozen"])
@each_method
def test_gradients_switched_off_make_no_difference(method: str, how: str) -> None:
    model, x = build(suited("residual", method)), pictures(1)
    expected = run(model, x, 1, method).maps
    if how == "frozen":
        model.requires_grad_(False)
    guard: Callable[[], Any] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(
        how, torch.enable_grad
    )
    with guard():
        assert torch.equal(run(model, x, 1, method).maps, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@each_method
def test_precisions(method: str, dtype: torch.dtype) -> None:
    """The model's precision decides; the input may come in any."""
    x = pictures(1)
    exact = run(build(suited("plain", method)).double(), x, None, method)
    e = run(build(suited("plain", method)).to(dtype), x.to(torch.float64), exact.targets, method)
    assert torch.isfinite(e.maps).all()
    assert e.maps.dtype == dtype or e.maps.dtype == torch.float32
    likeness = torch.nn.functional.cosine_similarity(e.maps.double().flatten(), exact.maps.flatten(), dim=0)
    assert likeness > 0.999


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_method
def test_half_precision_is_explained_in_float32(method: str, dtype: torch.dtype) -> None:
    model, x = build(suited("residual", method)).to(dtype), pictures(1)
    e = run(model, x, 1, method)
    assert e.maps.dtype == torch.float32
    assert next(model.parameters()).dtype == dtype
    assert close(e.maps, run(model.float(), x, 1, method).maps)


@pytest.mark.parametrize("method", [m for m in METHODS if METHODS[m].class_specific])
def test_class_specific_methods_tell_classes_apart(method: str) -> None:
    e = run(build(suited("residual", method)), pictures(2), classlens.top(2), method)
    assert not close(e.maps[:, :1], e.maps[:, 1:], 1e-2)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", [m for m in METHODS if METHODS[m].attention])
def test_methods_that_need_attention_refuse_networks_without(method: str, name: str) -> None:
    with pytest.raises(MethodError, match=f"^{method} needs attention, and this network has none; use agf or lrp$"):
        run(build(name), pictures(1), 1, method)


def test_dict_outputs_can_be_picked_for_every_method() -> None:
    model, x = build("dictionary"), pictures(1)
    logits = pick_output(model(x), "logits")
    e = classlens.explain(model, x, output=lambda r: r["logits"] * 2)
    assert torch.allclose(e.logits, 2 * logits)
