"""Small models of images and texts with random weights, in folders as their libraries write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from classlens.models._torchvision import import_transformers

WORDS = ("a", "photo", "of", "cat", "dog", "red", "square", "on", "grass")
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
LONGEST = 12  # tokens of a text


def tokenizer() -> Any:
    """A tokenizer of whole words, which needs no download: start, words, end, padding."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ("<pad>", "<start>", "<end>", "<unknown>")
    numbers = {word: i for i, word in enumerate((*special, *WORDS))}
    made = Tokenizer(models.WordLevel(numbers, "<unknown>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing("<start> $A <end>", None, [("<start>", 1), ("<end>", 2)])
    return import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<start>", eos_token="<end>", unk_token="<unknown>",
        model_max_length=LONGEST,
    )  # fmt: skip


def hf_model(kind: str) -> nn.Module:
    """CLIP or SigLIP in small."""
    library = import_transformers()
    text: dict[str, Any] = TOWER | {"vocab_size": 4 + len(WORDS), "max_position_embeddings": LONGEST}
    text |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    vision = TOWER | {"image_size": 32, "patch_size": 8}
    options: dict[str, Any] = {"projection_dim": 16} if kind == "CLIP" else {}
    torch.manual_seed(0)
    config = getattr(library, f"{kind}Config")(text_config=text, vision_config=vision, **options)
    made: nn.Module = getattr(library, f"{kind}Model")(config).eval()
    for parameter in made.parameters():  # the small initial weights would make all texts alike
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return made


def hf_folder(folder: Path, kind: str) -> str:
    """A folder with model, processor and tokenizer, as `save_pretrained` writes them."""
    library = import_transformers()
    model: Any = hf_model(kind)
    model.save_pretrained(folder)
    square = {"height": 32, "width": 32}
    options: dict[str, Any] = (
        {"size": square} if kind == "Siglip" else {"size": {"shortest_edge": 32}, "crop_size": square}
    )
    getattr(library, f"{kind}ImageProcessor")(**options).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return f"hf:{folder}"


def open_clip_folder(folder: Path) -> str:
    """A folder that open_clip reads: its configuration and weights; its own tokenizer comes with it."""
    import open_clip
    from safetensors.torch import save_file

    vision = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
    text = {"context_length": 20, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    config = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}
    colours = {"mean": [0.4, 0.4, 0.5], "std": [0.2, 0.3, 0.2]}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": colours}))
    torch.manual_seed(0)
    model = open_clip.CLIP(**config)
    nn.init.normal_(model.token_embedding.weight, std=0.3)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / "open_clip_model.safetensors")
    return f"open_clip:{folder}"
