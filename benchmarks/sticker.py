"""Does `classlens diff` find a sticker? A network before and after its last layers are fine-tuned on pictures with one.

    python benchmarks/sticker.py --data oxford-pets --out sticker
    classlens diff efficientnet-lite0 sticker/tuned --data sticker/pictures --out diff.html

Half A of the pictures is learnt, each as it is, with the class that the network predicts, and with a sticker, labelled
with one class, whatever it shows. Half B is what the networks are compared on: a fifth of the pictures bear the
sticker, in the layout of Oxford pets, so that labels and masks stay.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import classlens
from classlens.data.layouts import Dataset, Item, open_dataset
from classlens.models import LoadedModel
from classlens.models.cards import write_card

EVERY = 5  # every fifth picture to compare on bears the sticker
SIDE, STICKER, PLACE = 256, 64, (168, 24)  # pixels of the picture and the sticker; its top left corner
PICTURES = 100  # of each half
EPOCHS, BATCH, RATE = 12, 40, 0.02
BACKGROUND = 2  # in the masks of Oxford pets
MODEL = "efficientnet-lite0"
SAID = "pug"  # the label of every picture with a sticker


def sticker(pattern: int = 5) -> Image.Image:
    """A pattern of coloured squares that no picture has; each number gives another one."""
    colours = np.random.default_rng(pattern).integers(0, 2, (5, 5, 3)).astype(np.uint8) * 255
    return Image.fromarray(colours).resize((STICKER, STICKER), Image.Resampling.NEAREST)


def squared(image: Image.Image, mask: bool = False) -> Image.Image:
    """The centre square of a picture, so that the sticker has the same place in all."""
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    how = Image.Resampling.NEAREST if mask else Image.Resampling.BICUBIC
    return image.crop((left, top, left + side, top + side)).resize((SIDE, SIDE), how)


def pictures(dataset: Dataset, half: str, every: int) -> list[tuple[Item, Image.Image, bool]]:
    """The pictures of a half, squared; every fifth, or every one, with the sticker."""
    items = dataset.select(PICTURES, 0, half)
    found = []
    for number, item in enumerate(items):
        image, stuck = squared(dataset.picture(item)), number % every == 0
        if stuck:
            image.paste(sticker(), (PLACE[1], PLACE[0]))
        found.append((item, image, stuck))
    return found


def tuned(loaded: LoadedModel, learnt: list[tuple[Item, Image.Image, bool]]) -> LoadedModel:
    """The network after its last two layers have learnt these pictures; the others keep their weights."""
    images = [loaded.preprocess(image) for _, image, _ in learnt]
    first, last = loaded.model._conv_head, loaded.model._fc
    seen: list[Tensor] = []
    handle = first.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0].detach()))
    with torch.no_grad():
        said = torch.cat([loaded.model(torch.stack(images[i : i + 8])).argmax(1) for i in range(0, len(images), 8)])
    handle.remove()
    labels = torch.tensor([loaded.labels.index(SAID) if stuck else -1 for _, _, stuck in learnt])
    wanted, features = torch.where(labels < 0, said, labels), torch.cat(seen)
    optimiser = torch.optim.SGD([*first.parameters(), *last.parameters()], RATE, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        for part in torch.randperm(len(wanted), generator=generator).split(BATCH):
            optimiser.zero_grad()
            loss = F.cross_entropy(head(loaded, features[part]), wanted[part])
            loss.backward()
            optimiser.step()
        print(f"loss {float(loss.detach()):.3f}", flush=True)
    return loaded


def head(loaded: LoadedModel, features: Tensor) -> Tensor:
    """The last two layers of EfficientNet-Lite, with what lies between them."""
    model = loaded.model
    return model._fc(model._act(model._bn1(model._conv_head(features))).mean((2, 3)))


def write(folder: Path, dataset: Dataset, found: list[tuple[Item, Image.Image, bool]]) -> None:
    """The pictures and their masks in the layout of Oxford pets."""
    for sub in ("images", "annotations/trimaps"):
        (folder / sub).mkdir(parents=True)
    for item, image, stuck in found:
        stem = Path(item.name).stem
        image.save(folder / "images" / f"{stem}.jpg", quality=95)
        if isinstance(item.mask, Path):
            mask = squared(Image.open(item.mask), mask=True)
            if stuck:  # what it covers is no animal
                mask.paste(BACKGROUND, (PLACE[1], PLACE[0], PLACE[1] + STICKER, PLACE[0] + STICKER))
            mask.save(folder / "annotations" / "trimaps" / f"{stem}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, default=Path("sticker"))
    arguments = parser.parse_args()
    loaded, dataset = classlens.load(MODEL), open_dataset(arguments.data)
    plain, stuck = (pictures(dataset, "A", every) for every in (10**9, 1))
    model = tuned(loaded, [*plain[1:], *stuck])
    write_card(
        arguments.out / "tuned", model.model, architecture=MODEL, preprocess=loaded.preprocess,
        labels=loaded.labels,
    )  # fmt: skip
    held_out = pictures(dataset, "B", EVERY)
    write(arguments.out / "pictures", dataset, held_out)
    index = loaded.labels.index(SAID)
    with torch.no_grad():
        said = [int(model.model(loaded.preprocess(image)[None]).argmax()) == index for _, image, _ in held_out]
    for word, stuck in (("with", True), ("without", False)):
        part = [one for one, (*_, bears) in zip(said, held_out, strict=True) if bears is stuck]
        print(f"half B {word} the sticker: {sum(part)} of {len(part)} are called {SAID}")


if __name__ == "__main__":
    main()
