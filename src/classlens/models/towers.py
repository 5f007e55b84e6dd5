"""Models of images and texts, such as CLIP and SigLIP: their two towers, found by how libraries name them.

>>> tower = ImageTower(clip)                      # a network: images -> embeddings (B,D)
>>> text_embedder(clip, tokenizer)(["a cat"])     # (1,D), in the same space
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from classlens.errors import ModelError, TargetError
from classlens.models._text import reason

EmbedText = Callable[[Sequence[str]], Tensor]  # n texts -> (n,D)

_ENCODERS = {"get_image_features": "get_text_features", "encode_image": "encode_text"}  # transformers, open_clip


def has_towers(model: Any) -> bool:
    """Whether a model embeds images and texts in one space."""
    return isinstance(model, nn.Module) and _encoders(model) is not None


def _encoders(model: nn.Module) -> tuple[str, str] | None:
    pairs = ((image, text) for image, text in _ENCODERS.items() if hasattr(model, image) and hasattr(model, text))
    return next(pairs, None)


class ImageTower(nn.Module):
    """The image side of a model of images and texts, as a network. It holds the whole model, so that both move."""

    def __init__(self, both: nn.Module) -> None:
        super().__init__()
        found = _encoders(both)
        if found is None:
            raise ModelError(f"{type(both).__name__} is no model of images and texts: it has no pair of encoders")
        self.both, (self.encoder, self.text_encoder) = both, found
        self.train(both.training)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(B,C,H,W) -> (B,D), not normalised."""
        return _vectors(getattr(self.both, self.encoder)(pixel_values))


def _vectors(found: Any) -> Tensor:
    """The embeddings in what an encoder returns: a tensor, or an output of transformers."""
    vectors: Tensor = found if isinstance(found, Tensor) else found["pooler_output"]
    return vectors


def text_embedder(tower: ImageTower, tokenizer: Callable[[], Any]) -> EmbedText:
    """The text side as a function; the tokenizer is opened when the first text is embedded."""

    def embed(texts: Sequence[str]) -> Tensor:
        device = next(tower.parameters()).device
        with torch.no_grad():
            encode = getattr(tower.both, tower.text_encoder)
            if tower.text_encoder == "encode_text":
                return _vectors(encode(_open_clip_tokens(_opened(tokenizer), texts).to(device)))
            tokens = _transformers_tokens(_opened(tokenizer), texts, tower.both)
            return _vectors(encode(**{name: ids.to(device) for name, ids in tokens.items()}))

    return embed


def _opened(tokenizer: Callable[[], Any]) -> Any:
    try:
        return tokenizer()
    except ModelError:
        raise
    except Exception as error:  # the hub and every tokenizer raise their own errors
        raise ModelError(f"the tokenizer of the text tower cannot be opened ({reason(error)})") from error


def _open_clip_tokens(tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """A tokenizer of open_clip cuts long texts without a word, so their tokens are counted before."""
    inner = getattr(tokenizer, "tokenizer", None)
    for text in texts:
        count = len(inner(text)["input_ids"]) if callable(inner) else len(tokenizer.encode(text)) + 2  # start and end
        _refuse_long(text, count, tokenizer.context_length)
    tokens: Tensor = tokenizer(list(texts))
    return tokens


def _transformers_tokens(tokenizer: Any, texts: Sequence[str], model: Any) -> dict[str, Tensor]:
    """Padded to the full length, as SigLIP was trained; CLIP's answer does not depend on it."""
    longest = model.config.text_config.max_position_embeddings
    for text in texts:
        _refuse_long(text, len(tokenizer(text)["input_ids"]), longest)
    made = tokenizer(list(texts), padding="max_length", max_length=longest, return_tensors="pt")
    return {name: made[name] for name in tokenizer.model_input_names if name in made}


def _refuse_long(text: str, count: int, longest: int) -> None:
    if count > longest:
        short = text if len(text) <= 40 else f"{text[:37]}..."
        raise TargetError(
            f"the text {short!r} has {count} tokens, but the text tower reads at most {longest}; shorten it"
        )


def own_tokenizer(model: nn.Module, preprocess: Any) -> Callable[[], Any]:
    """The tokenizer of a model that the user built: its processor's or, for CLIP's own vocabulary, open_clip's."""

    def found() -> Any:
        of_processor = getattr(preprocess, "tokenizer", None)
        if of_processor is not None:
            return of_processor
        if getattr(model, "vocab_size", None) == 49408 and hasattr(model, "encode_text"):
            from classlens.models._torchvision import import_open_clip

            return import_open_clip().SimpleTokenizer(context_length=getattr(model, "context_length", 77))
        raise ModelError(
            f"{type(model).__name__} comes without a tokenizer, so it cannot read texts; give its processor as "
            "preprocess=, or load it with classlens.load (hf:FOLDER, open_clip:NAME)"
        )

    return found
