import pytest
import torch
import torch.nn.functional as F
from torch import nn

import classlens
import goldens
from classlens.core.capture import Axis, Value
from classlens.errors import UnsupportedOp
from classlens.methods.fullgrad import _images_first, spread
from networks import RELU_LIKE, build, pictures


@pytest.mark.parametrize("name", ["vgg_id", "resnet_basic", "resnet_bottleneck", "vgg11_smallhead"])
def test_release_variant_agrees(name: str) -> None:
    model, x, arrays = goldens.load(name)
    e = classlens.explain(model, x, goldens.targets(arrays)[:, :1], "fullgrad", variant="release")
    theirs = torch.as_tensor(arrays["baseline/fullgrad"]).double()
    assert goldens.distance(goldens.stored(e.maps[: len(theirs)], arrays), theirs) < goldens.tolerance(arrays)


@pytest.mark.parametrize("name", RELU_LIKE)
def test_complete_on_relu_networks(name: str) -> None:
    """x . dy/dx and all biases' shares add up to the logit."""
    e = classlens.explain(build(name).double(), pictures().double(), classlens.top(3), "fullgrad")
    assert e.report.conservation.max() < 1e-10
    assert torch.allclose(e.report.started, e.logits.gather(1, e.targets))


def test_incompleteness_is_reported() -> None:
    assert classlens.explain(build("modern"), pictures(), method="fullgrad").report.conservation.max() > 0.01


def test_map_by_hand() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 225, 5)).double().eval()
    x = pictures(1).double().requires_grad_()
    hidden = model[0](x)
    logit = model[1:](hidden)[0, 2]
    g_x, g_h = torch.autograd.grad(logit, [x, hidden])

    def psi(t: torch.Tensor) -> torch.Tensor:
        t = t.abs() - t.abs().min()
        return t / t.max()

    conv_bias = psi(g_h * model[0].bias[:, None, None]).sum(1, keepdim=True)
    head = torch.zeros(5).double()
    head[2] = model[3].bias[2]
    expected = psi(x * g_x).sum(1) + F.interpolate(conv_bias, size=(32, 32), mode="bilinear")[:, 0] + psi(head).sum()
    ours = classlens.explain(model, x.detach(), 2, "fullgrad").maps[0]
    assert torch.allclose(ours, expected.detach())


def test_spreading_is_per_image() -> None:
    t = torch.tensor([[[1.0, -3.0], [10.0, 20.0]]])
    assert torch.equal(spread(t), torch.tensor([[[0.0, 1.0], [0.0, 1.0]]]))


def test_maps_are_as_large_as_the_picture_and_norms_of_a_batch_have_no_bias() -> None:
    """BatchNorm with statistics of its own batch has none that is known; its input's gradient says the rest."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(4, 5),
    ).eval()  # fmt: skip
    found = classlens.explain(model, pictures(2, (16, 24)), 1, "fullgrad").maps
    assert found.shape == (2, 1, 16, 24)
    assert torch.isfinite(found).all()


def test_a_norm_that_stands_alone_counts_as_a_bias() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.fc = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.norm(x + self.conv(x).relu()).relu().mean((2, 3)))

    torch.manual_seed(0)
    model = Alone().double().eval()
    nn.init.normal_(model.norm.running_mean)
    nn.init.normal_(model.norm.bias)
    assert classlens.explain(model, pictures(2, (16, 24)).double(), 1, "fullgrad").report.conservation.max() < 1e-10


class Windowed(nn.Module):
    """Windows of patches stacked along the batch axis, then tokens before images."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.mix = nn.Conv2d(3, 4, 4, 4), nn.Linear(4, 4)
        self.up, self.head = nn.Linear(4, 6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = self.patch(x).unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 2, 4, 3, 5, 1).reshape(-1, 4, 4)
        tokens = self.mix(windows).relu().reshape(len(x), -1, 4).transpose(0, 1)
        return self.head(self.up(tokens).relu().mean(0))


@pytest.mark.parametrize("images", [1, 2, 16])
def test_windows_and_tokens_belong_to_their_image(images: int) -> None:
    torch.manual_seed(0)
    model, x = Windowed().double().eval(), pictures(images, (16, 24)).double()
    e = classlens.explain(model, x, 1, "fullgrad")
    assert e.maps.shape == (images, 1, 16, 24)
    assert e.report.conservation.max() < 1e-10
    single = torch.cat([classlens.explain(model, x[i : i + 1], 1, "fullgrad").maps for i in range(images)])
    assert torch.allclose(single, e.maps)


def test_the_windows_of_an_image_are_no_positions_of_it() -> None:
    """(classes, images, all entries of an image): a share without positions, which is spread evenly."""
    value = Value(torch.zeros(8, 3, 4), None, torch.Size([8, 3, 4]))
    share = torch.arange(192.0).reshape(2, 8, 3, 4)
    windows = Axis(0, torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]))
    assert torch.equal(_images_first({value: windows}, value, share, 2), share.reshape(2, 2, 48))


def test_images_that_cannot_be_told_apart_are_refused() -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.head = nn.Linear(12, 4), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = x.flatten(1)
            return self.head(self.mix(rows.mT @ rows)[: len(x)])

    with pytest.raises(UnsupportedOp, match="fullgrad cannot tell the 2 images apart at a layer; explain one image at"):
        classlens.explain(Mixes().eval(), torch.rand(2, 3, 2, 2), 1, "fullgrad")
