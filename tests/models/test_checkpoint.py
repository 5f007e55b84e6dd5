"""Weight files: what is in them is never run, and what does not fit is said."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from classlens.errors import ModelError
from classlens.models.checkpoint import build_with_weights, load_weights, read_weights


def small(num_classes: int = 5) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, num_classes))


def trained(num_classes: int = 5) -> nn.Module:
    torch.manual_seed(1)
    model = small(num_classes)
    for buffer in model.buffers():
        buffer += 3
    return model


class Touch:
    """Unpickled by a careless reader, this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for (name, ours), theirs in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": state, "optimizer": {"lr": 0.1}},
        lambda state: {"state_dict": {"model": state}},
        lambda state: {"model_state_dict": {f"module.{key}": value for key, value in state.items()}},
        lambda state: {f"_orig_mod.{key}": value for key, value in state.items()},
        lambda state: {f"module._orig_mod.{key}": value for key, value in state.items()},
    ],
    ids=["plain", "state_dict", "model", "nested", "data-parallel", "compiled", "compiled-data-parallel"],
)
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".pth.tar"])
def test_wrappers_come_off(tmp_path: Path, wrap: Any, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    torch.save(wrap(trained().state_dict()), path)
    model = small()
    load_weights(model, path)
    assert_same(model, trained())


def test_a_module_called_module_keeps_its_name(tmp_path: Path) -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    torch.save({key: torch.full_like(value, 7) for key, value in model.state_dict().items()}, tmp_path / "w.pt")
    load_weights(model, tmp_path / "w.pt")
    assert set(model.module.weight.flatten().tolist()) == {7.0}


def test_half_precision_without_batch_counts_loads_as_float32(tmp_path: Path) -> None:
    state = {key: value.half() for key, value in trained().state_dict().items() if "num_batches" not in key}
    save_file(state, tmp_path / "half.safetensors")
    model = small()
    load_weights(model, tmp_path / "half.safetensors")
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, state[name].float())
    assert torch.equal(model[1].running_var, state["1.running_var"].float())


def test_a_fine_tuned_head_is_rebuilt(tmp_path: Path) -> None:
    save_file(trained(3).state_dict(), tmp_path / "three.safetensors")
    model, classes = build_with_weights(small, tmp_path / "three.safetensors")
    assert classes == 3
    assert_same(model, trained(3))
    save_file(trained().state_dict(), tmp_path / "five.safetensors")
    model, classes = build_with_weights(small, tmp_path / "five.safetensors")
    assert classes is None
    assert_same(model, trained())


# Bad files.


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("how", ["zip", "legacy", "pickle", "inside"])
def test_code_is_refused_and_not_run(tmp_path: Path, how: str) -> None:
    evil, path = tmp_path / "evil", tmp_path / "weights.pt"
    if how == "pickle":
        path.write_bytes(pickle.dumps(Touch(evil)))
    else:
        content = {"0.weight": torch.zeros(1), "x": Touch(evil)} if how == "inside" else Touch(evil)
        torch.save(content, path, _use_new_zipfile_serialization=how != "legacy")
    with pytest.raises(ModelError, match=r"weights\.pt holds pickled objects.*refused") as error:
        read_weights(path)
    assert not evil.exists()
    assert "\n" not in str(error.value)
    with path.open("rb") as file:  # the trap works: a careless reader would have fallen into it
        (torch.load(file, weights_only=False) if how != "pickle" else pickle.load(file))
    assert evil.exists()


def test_a_whole_pickled_model_is_refused(tmp_path: Path) -> None:
    torch.save(small(), tmp_path / "model.pt")
    with pytest.raises(ModelError, match=r"save only model\.state_dict\(\)"):
        read_weights(tmp_path / "model.pt")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b"some text", lambda b: b[: len(b) // 2]])
def test_a_corrupt_file_is_named(tmp_path: Path, suffix: str, damage: Any) -> None:
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pt":
        torch.save(trained().state_dict(), path)
    else:
        save_file(trained().state_dict(), path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match=re.escape(path.name) + " is corrupt or not a weight file") as error:
        read_weights(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [[torch.zeros(2)], {}, {"epoch": 3}, {"state_dict": {}}, torch.zeros(2)])
def test_a_file_without_a_state_dict_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(ModelError, match="holds no state dict"):
        read_weights(tmp_path / "weights.pt")


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no weight file .*nowhere\.pt"):
        read_weights(tmp_path / "nowhere.pt")
    with pytest.raises(ModelError, match="no weight file"):
        read_weights(tmp_path)


def test_keys_that_do_not_fit_are_counted_and_listed(tmp_path: Path) -> None:
    state: dict[str, Tensor] = dict(trained().state_dict())
    del state["0.weight"], state["0.bias"]
    state |= {f"extra.{i}": torch.zeros(1) for i in range(6)}
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(ModelError) as error:
        load_weights(small(), tmp_path / "w.safetensors")
    assert "2 (0.weight, 0.bias) weights missing" in str(error.value)
    assert "6 (extra.0, extra.1, extra.2, extra.3, ...) unexpected" in str(error.value)
    assert "w.safetensors" in str(error.value)
    assert "\n" not in str(error.value)


def test_shapes_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    state = dict(trained().state_dict()) | {"0.weight": torch.zeros(4, 1, 3, 3)}
    save_file(state, tmp_path / "w.safetensors")
    for load in (lambda path: load_weights(small(), path), lambda path: build_with_weights(small, path)):
        with pytest.raises(ModelError, match=r"1 \(0\.weight is \(4, 1, 3, 3\) for \(4, 3, 3, 3\)\) of another shape"):
            load(tmp_path / "w.safetensors")
