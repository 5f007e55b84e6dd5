import copy
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from classlens.core.capture import pick_output, record, record_logits, unwrap
from classlens.errors import CaptureError, ModelError
from networks import NETWORKS, build, pictures

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")


@pytest.mark.parametrize("size", [(32, 32), (36, 44)])
@pytest.mark.parametrize("name", NETWORKS)
def test_output_is_the_plain_forward_bit_for_bit(name: str, size: tuple[int, int]) -> None:
    model, x = build(name), pictures(2, size)
    assert torch.equal(record(model, x).logits, pick_output(model(x), None))


@pytest.mark.parametrize("name", NETWORKS)
def test_replaying_the_nodes_gives_the_recorded_values(name: str) -> None:
    """Each node, called on its recorded inputs, gives its recorded output: nothing was overwritten unnoticed."""
    tape = record(build(name), pictures())
    for node in tape.nodes:
        with torch.no_grad():
            again = node.call(*(v.tensor for v in node.inputs))
        assert torch.equal(again[0], node.outputs[0].tensor), node.where
    assert tape.producer[tape.output] is tape.nodes[-1]


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_equal_finite_differences(name: str) -> None:
    model, x = build(name).double(), pictures(1).double()
    tape = record(model, x)
    cotangent = torch.randn(1, *tape.logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradient = tape.gradients(cotangent, [tape.image])[tape.image][0]
    direction = pictures(1, seed=5).double()
    step = 1e-6

    def score(at: Tensor) -> Tensor:
        return (pick_output(model(at), None) * cotangent[0]).sum()

    slope = (score(x + step * direction) - score(x - step * direction)) / (2 * step)
    assert torch.allclose((gradient * direction).sum(), slope, rtol=1e-5)


def test_gradient_at_a_value_with_two_uses_is_their_sum() -> None:
    model, x = build("residual").double(), pictures(1).double()
    tape = record(model, x)
    value = next(v for v, users in tape.consumers.items() if len(users) == 2)
    hot = torch.zeros(1, *tape.logits.shape).double()
    hot[..., 3] = 1
    found = tape.gradients(hot, [value])[value][0]

    # The same by autograd on the module, with the value replaced by a leaf.
    inner: dict[str, Tensor] = {}

    def swap(module: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
        if "leaf" not in inner and torch.equal(out, value.tensor):
            inner["leaf"] = out.detach().clone().requires_grad_()
            return inner["leaf"] * 1
        return out

    handle = model.relu.register_forward_hook(swap)
    logits = model(x)
    expected = torch.autograd.grad(logits[0, 3], inner["leaf"])[0]
    handle.remove()
    assert torch.allclose(found, expected)


def test_names_of_modules_and_ops() -> None:
    tape = record(build("plain"), pictures())
    assert [(n.op, n.module) for n in tape.nodes] == [
        ("conv2d", "features.0"), ("batch_norm", "features.1"), ("relu", "features.2"), ("max_pool2d", "features.3"),
        ("conv2d", "features.4"), ("batch_norm", "features.5"), ("relu", "features.6"),
        ("adaptive_avg_pool2d", "head.0"), ("flatten", "head.1"), ("linear", "head.3"),
    ]  # fmt: skip


def test_unused_branches_are_pruned() -> None:
    class Wasteful(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.cat([x, x.relu()])
            return x.flatten(1).tanh()

    assert [n.op for n in record(Wasteful().eval(), pictures()).nodes] == ["flatten", "tanh"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("wrap", ["no_grad", "inference_mode", "frozen", "compiled", "data-parallel"])
def test_any_way_of_holding_a_model(wrap: str) -> None:
    model, x = build("residual"), pictures()
    plain = model(x).detach()
    if wrap == "frozen":
        model.requires_grad_(False)
    held = {"compiled": torch.compile, "data-parallel": nn.DataParallel}.get(wrap, lambda m: m)(model)
    with {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(wrap, torch.enable_grad)():
        tape = record(held, x)
        gradient = tape.gradients(torch.ones(1, *plain.shape), [tape.image])[tape.image]
    assert torch.equal(tape.logits, plain)
    assert gradient.abs().sum() > 0
    assert unwrap(held) is model


def test_two_threads_record_one_model() -> None:
    model = build("residual")
    inputs = [pictures(2, seed=s) for s in range(6)]
    expected = [model(x).detach() for x in inputs]
    results: list[Tensor | None] = [None] * len(inputs)

    def work(i: int) -> None:
        results[i] = record(model, inputs[i]).logits

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(r is not None and torch.equal(r, e) for r, e in zip(results, expected, strict=True))


def test_input_is_not_written_to_though_the_model_does() -> None:
    class Writer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            return x.flatten(1)

    x = pictures()
    before = x.clone()
    tape = record(Writer().eval(), x)
    assert torch.equal(x, before)
    assert torch.equal(tape.image.tensor, before)
    assert torch.equal(tape.logits, 2 * before.flatten(1))


class Tricky(nn.Module):
    def __init__(self, do: object) -> None:
        super().__init__()
        self.do = do
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.do(self.conv(x)).flatten(1)  # type: ignore[operator]


def _base_and_views(x: Tensor) -> Tensor:
    view = x[:, 1:3]
    x.relu_()  # changes the view too
    return view * 1.0


def _sibling_views(x: Tensor) -> Tensor:
    a, b = x[:, :2], x[:, 1:]
    a.mul_(3)  # overlaps b
    return torch.cat([a, b], 1)


def _copy_into_buffer(x: Tensor) -> Tensor:
    buffer = x.new_zeros(x.shape[0], 8, *x.shape[2:])
    buffer[:, 2:6].copy_(x)
    buffer[:, 0] += x[:, 0]
    return buffer


@pytest.mark.parametrize("do", [_base_and_views, _sibling_views, _copy_into_buffer])
def test_overwritten_memory(do: object) -> None:
    torch.manual_seed(0)
    model, x = Tricky(do).eval(), pictures()
    tape = record(model, x)
    assert torch.equal(tape.logits, model(x))
    for node in tape.nodes:
        assert torch.equal(node.call(*(v.tensor for v in node.inputs))[0], node.outputs[0].tensor), node.where
    # The chain of nodes leads from the image to the output: relevance of ones, followed back, is a full Jacobian row.
    gradient = tape.gradients(torch.ones(1, *tape.logits.shape), [tape.image])[tape.image][0]
    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(model(leaf * 1).sum(), leaf)[0]
    assert torch.allclose(gradient, expected)


# ---------------------------------------------------------------------------------------------------- what fails


def test_training_mode_is_refused() -> None:
    model = build("plain")
    model.features[1].train()
    with pytest.raises(ModelError, match=r"features\.1.*call model\.eval\(\)"):
        record(model, pictures())


def test_random_models_are_refused() -> None:
    model = Tricky(lambda x: F.dropout(x, 0.5, training=True)).eval()
    state = torch.random.get_rng_state()
    with pytest.raises(CaptureError, match="two forward passes of the model differ"):
        record(model, pictures())
    assert torch.equal(state, torch.random.get_rng_state())


class Rounding(nn.Module):
    """Adds `error` to its output where a gradient is needed, as another kernel would."""

    def __init__(self, error: float) -> None:
        super().__init__()
        self.layer, self.error = nn.Linear(3, 2), error

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.mean((2, 3)))
        return y + self.error if x.requires_grad else y


def test_a_kernel_that_rounds_differently_is_not_random() -> None:
    images = torch.rand(1, 3, 4, 4)
    record(Rounding(1e-7), images)
    with pytest.raises(CaptureError, match=r"two forward passes of the model differ by 1\.0e-03"):
        record(Rounding(1e-3), images)


def test_a_model_whose_noise_is_small_is_random() -> None:
    class Noisy(Rounding):
        def forward(self, x: Tensor) -> Tensor:
            self.error += 2e-7
            return super().forward(x) + self.error

    with pytest.raises(CaptureError, match="it is random or keeps state"):
        record(Noisy(0.0), torch.rand(1, 3, 4, 4))


def test_a_model_that_remembers_its_last_input_is_refused_each_time() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(3, 2), torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            blended, self.last = x + 0.5 * self.last, x.detach()
            return self.layer((blended * torch.arange(4.0)).mean((2, 3)))

    model, images = Remembers(), torch.rand(2, 1, 3, 4, 4)
    for image in (images[0], images[0], images[1]):  # asked twice about one image, it would seem to keep nothing
        with pytest.raises(CaptureError, match="it is random or keeps state"):
            record(model, image)


def test_leaving_torch_is_refused() -> None:
    model = Tricky(lambda x: torch.from_numpy(x.detach().numpy()) + x.mean()).eval()
    with pytest.raises(CaptureError, match=r"takes a tensor out of torch \(numpy\)"):
        record(model, pictures())


def test_scripted_parts_are_refused() -> None:
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        model = torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4))).eval()
    with pytest.raises(CaptureError, match="scripted model hides"):
        record(model, pictures())


def test_what_another_thread_computes_is_noticed() -> None:
    def elsewhere(x: Tensor) -> Tensor:
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(x * 2))
        thread.start()
        thread.join()
        return found[0]

    with pytest.raises(CaptureError, match="from the image unrecorded"):
        record(Tricky(elsewhere).eval(), pictures())


def test_custom_autograd_functions_are_followed() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, g: Tensor) -> Tensor:  # type: ignore[override]
            return g * 2

    tape = record(Tricky(Doubled.apply).eval(), pictures())
    assert [n.op for n in tape.nodes] == ["conv2d", "mul", "flatten"]
    doubled = tape.nodes[1].outputs[0]
    gradient = tape.gradients(torch.ones(1, *tape.logits.shape), [doubled, tape.nodes[0].outputs[0]])
    assert torch.equal(gradient[doubled], torch.ones_like(gradient[doubled]))
    assert torch.equal(gradient[tape.nodes[0].outputs[0]], 2 * gradient[doubled])


def test_constant_output_is_refused() -> None:
    model = Tricky(lambda x: torch.zeros_like(x)).eval()
    with pytest.raises(CaptureError, match="does not depend on the image"):
        record(model, pictures())


def test_wrong_channel_count_is_one_line() -> None:
    with pytest.raises(ModelError, match=r"cannot run on input of shape \(1, 5, 32, 32\)") as caught:
        record(build("plain"), torch.zeros(1, 5, 32, 32))
    assert "\n" not in str(caught.value)


def test_a_model_that_destroys_its_own_gradient() -> None:
    def destroy(x: Tensor) -> Tensor:
        y = torch.sigmoid(x)
        z = y * 1
        y.zero_()  # sigmoid's backward needs y
        return z

    tape = record(Tricky(destroy).eval(), pictures())
    with pytest.raises(CaptureError, match="overwrites a value that its own gradient needs"):
        tape.gradients(torch.ones(1, *tape.logits.shape), [tape.image])


# ------------------------------------------------------------------------------------------------ picking logits


def test_picking_the_logits() -> None:
    a, b = torch.zeros(2, 3), torch.ones(2, 4)
    assert pick_output((a,), None) is a
    assert pick_output({"logits": a, "aux": b}, None) is a
    assert pick_output([a, b], 1) is b
    assert pick_output({"x": a, "y": b}, "y") is b
    assert pick_output({"x": a}, lambda r: r["x"]) is a
    with pytest.raises(ModelError, match=r"tuple of 0: tensor \(2, 3\), 1: tensor \(2, 4\); select the logits"):
        pick_output((a, b), None)
    with pytest.raises(ModelError, match="the model returns no output='z'"):
        pick_output({"x": a}, "z")
    with pytest.raises(ModelError, match="gives a str, not a tensor"):
        pick_output({"x": "hello"}, "x")


def test_recording_leaves_no_trace() -> None:
    model = build("residual")
    before = copy.deepcopy(model.state_dict())
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    record(model, pictures())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert attributes == {name: set(vars(m)) for name, m in model.named_modules()}
    assert all(p.grad is None for p in model.parameters())


def test_distributed_models_are_unwrapped() -> None:
    if not torch.distributed.is_available():
        pytest.skip("torch was built without distributed")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model, x = build("residual"), pictures()
        wrapped = nn.parallel.DistributedDataParallel(model)
        assert torch.equal(record(wrapped, x).logits, model(x))
    finally:
        torch.distributed.destroy_process_group()


def test_a_recomputed_value_is_what_was_overwritten() -> None:
    """Batch normalisation whose output an in-place ReLU overwrites; the value does not outlive its tape."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4).eval()
    norm.running_mean.normal_()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4 * 36, 2)).eval()
    images = torch.randn(1, 3, 8, 8)
    tape = record(model, images)
    value = next(node.outputs[0] for node in tape.nodes if node.op == "batch_norm")
    assert not isinstance(value.kept, Tensor)
    with torch.no_grad():
        assert torch.equal(value.tensor, model[1](model[0](images)))
    gone = weakref.ref(tape.image.tensor)
    gc.disable()
    try:
        del tape, value
        assert gone() is None
    finally:
        gc.enable()


def test_a_sum_is_made_again_too() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.conv(x)).relu_().mean((2, 3))

    model, images = Skip().eval(), torch.randn(1, 3, 4, 4)
    value = next(node.outputs[0] for node in record(model, images).nodes if node.op == "add")
    assert not isinstance(value.kept, Tensor)
    with torch.no_grad():
        assert torch.equal(value.tensor, images + model.conv(images))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_glance_is_the_record_without_its_nodes(name: str) -> None:
    model, x = build(name), pictures()
    first = record_logits(model, x)  # the first pass is recorded: it has to be checked
    assert first.nodes
    second = record_logits(model, x)
    assert not second.nodes
    assert second.ops() == first.ops()
    assert torch.equal(second.logits, first.logits)
    towards = torch.eye(first.logits.shape[1])[None, [1, 2]]
    assert torch.equal(second.gradients(towards, [second.image])[second.image],
                       first.gradients(towards, [first.image])[first.image])  # fmt: skip
    assert record_logits(model, pictures(1)).nodes  # another kind of input


def test_a_glance_sees_gradients_that_the_model_switches_off() -> None:
    class Off(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.drop = nn.Conv2d(3, 4, 3), nn.Linear(4, 5), nn.Dropout()

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.a(x).relu().mean((2, 3))
            return self.b(self.drop(x))

    model, x = Off().eval(), pictures()
    tapes = [record_logits(model, x) for _ in range(2)]
    maps = [tape.gradients(torch.ones(1, 2, 5), [tape.image])[tape.image] for tape in tapes]
    assert maps[0].any()
    assert torch.equal(*maps)
    model.train()
    with pytest.raises(ModelError, match="training mode"):
        record_logits(model, x)
