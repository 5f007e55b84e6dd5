"""Weight files: reads them without running code, and loads them into a matching network."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from classlens.errors import ModelError
from classlens.models._text import reason, some

_WRAPPERS = ("state_dict", "model_state_dict", "model", "network", "teacher")  # where training scripts keep the weights
_PREFIXES = ("module.", "_orig_mod.")  # DataParallel, torch.compile


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a .safetensors file or a torch checkpoint, unwrapped, on the CPU.

    Objects are never unpickled, so an untrusted file cannot run code:

        >>> read_weights("model.safetensors").keys()
    """
    return unwrap(read_file(path), path)


def read_file(path: str | os.PathLike[str]) -> Any:
    """The full content of a weight file, including wrappers and metadata."""
    file = Path(path)
    if not file.is_file():
        raise ModelError(f"there is no weight file {file}: check the path")
    try:
        return load_file(file) if file.suffix == ".safetensors" else _torch_load(file)
    except UnpicklingError as error:
        raise ModelError(
            f"{file} holds pickled objects, which could run code, and is refused: "
            "save only model.state_dict(), preferably as .safetensors"
        ) from error
    except Exception as error:  # the readers raise many kinds of errors for a broken file
        raise ModelError(f"{file} is corrupt or not a weight file ({reason(error)})") from error


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load a file into a network; the network keeps its precision (half-precision files become float32)."""
    fill(model, _without_prefix(read_weights(path), model), path)


def build_with_weights(build: Callable[..., nn.Module], path: str | os.PathLike[str]) -> tuple[nn.Module, int | None]:
    """A network for the weights in a file, and its number of classes if it differs from the default.

    If a fine-tuned checkpoint differs from the library's network only in the size of its head,
    `build(num_classes=...)` builds a matching head.
    """
    model = build()
    state = _without_prefix(read_weights(path), model)
    classes = _other_head_size(model, state)
    if classes is not None:
        model = build(num_classes=classes)
    fill(model, state, path)
    return model, classes


def _torch_load(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


def unwrap(content: Any, path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors in the content of a file."""
    while isinstance(content, Mapping):
        if content and all(isinstance(value, Tensor) for value in content.values()):
            return dict(content)
        inner = (content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping))
        content = next(inner, None)
    raise ModelError(f"{os.fspath(path)} holds no state dict: save model.state_dict(), plain or under 'state_dict'")


def _without_prefix(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    own = model.state_dict()
    for prefix in _PREFIXES:
        foreign = not any(key.startswith(prefix) for key in own)
        if foreign and all(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def _other_shapes(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.Size]]:
    """name -> (shape in the file, shape in the network), where they differ."""
    own = model.state_dict()
    return {
        key: (value.shape, own[key].shape)
        for key, value in state.items()
        if isinstance(own.get(key), Tensor) and value.shape != own[key].shape
    }


def _other_head_size(model: nn.Module, state: Mapping[str, Tensor]) -> int | None:
    """The number of classes of a file that differs from the network only in the head's first dimension."""
    pairs = _other_shapes(model, state).values()
    sizes = {(theirs[:1], ours[:1]) for theirs, ours in pairs}
    if len(sizes) != 1 or any(theirs[1:] != ours[1:] for theirs, ours in pairs):
        return None
    ((theirs, _),) = sizes
    return theirs[0] if theirs else None


def fill(model: nn.Module, state: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Load a state dict that matches the network exactly; otherwise an error names the file and the mismatch."""
    name = f"{os.fspath(path)} does not fit the network"
    wrong = [
        f"{key} is {tuple(theirs)} for {tuple(ours)}" for key, (theirs, ours) in _other_shapes(model, state).items()
    ]
    if wrong:
        raise ModelError(f"{name}: {some(wrong)} of another shape; name the architecture they were saved from")
    missing, unexpected = model.load_state_dict(state, strict=False)
    if missing or unexpected:
        raise ModelError(
            f"{name}: {some(missing)} weights missing, {some(unexpected)} unexpected; "
            "name the architecture they were saved from"
        )
