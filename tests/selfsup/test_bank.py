"""The bank: made once, resumed, searched, and refused where it does not belong."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sorting import net, seeded
from torch import Tensor

from classlens.errors import ImageError
from classlens.models import Preprocess
from classlens.selfsup import Bank, BankError, bank, build_bank, explain
from classlens.selfsup.bank import compare, encoder_of, hashes_of
from classlens.selfsup.bank_files import ROW
from classlens.selfsup.split import Encoder, split

NO_HASH = np.zeros((1, 16), np.uint8)


def random_bank(count: int, dimensions: int = 6, folder: Path | None = None) -> Bank:
    latents = np.random.default_rng(0).normal(size=(count, dimensions)).astype(np.float32)
    rows = np.zeros(count, ROW)
    rows["state"] = 1
    rows["hash"] = np.random.default_rng(1).integers(0, 256, (count, 16))
    return Bank(
        latents, rows, tuple(map(str, range(count))), lambda row: torch.zeros(3, 4, 4), seeded(), "head", folder
    )


# ----------------------------------------------------------------------------------------------------------- search


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_the_nearest_is_the_nearest(monkeypatch: pytest.MonkeyPatch, metric: str) -> None:
    monkeypatch.setattr(bank, "_BLOCK", 7)  # the last block is shorter
    made, wanted = random_bank(100), torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    found = made.nearest(wanted, NO_HASH.repeat(5, 0), metric)
    for row, latent in enumerate(wanted.double().numpy()):
        others = made.latents.astype(np.float64)
        distances = np.linalg.norm(others - latent, axis=1)
        if metric == "cosine":
            distances = 1 - others @ latent / (np.linalg.norm(others, axis=1) * np.linalg.norm(latent))
        assert int(found.indices[row]) == distances.argmin()
        assert float(found.distances[row]) == pytest.approx(distances.min())
        assert np.array_equal(found.latents[row].numpy(), made.latents[distances.argmin()])


def test_an_image_is_never_its_own_neighbour() -> None:
    made = random_bank(20)
    itself = torch.from_numpy(made.latents[4:5])
    by_latent = made.nearest(itself, NO_HASH)
    by_hash = made.nearest(itself + 0.01, made.rows["hash"][4:5])
    near = made.nearest(itself + 0.01, NO_HASH)
    assert int(by_latent.indices) == int(by_hash.indices) != 4
    assert int(near.indices) == 4  # a picture that is merely alike is a neighbour


def test_pictures_that_could_not_be_read_are_no_neighbours() -> None:
    made = random_bank(20)
    wanted = torch.from_numpy(made.latents[4:5]) + 0.01
    made.rows["state"][4] = 2
    assert int(made.nearest(wanted, NO_HASH).indices) != 4
    assert len(made) == 19


def test_far_from_the_origin_distances_stay_exact() -> None:
    """|a|^2 + |b|^2 - 2ab would lose everything in float32."""
    a = torch.full((1, 8), 1000.0, dtype=torch.float64)
    distances, same = compare(a, a + 0.5, "euclidean")
    assert float(distances) == pytest.approx(0.5 * 8**0.5, rel=1e-6)
    assert not bool(same)


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_a_large_bank_is_searched_by_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str) -> None:
    pytest.importorskip("faiss")
    made = random_bank(2000, 16, tmp_path)
    chosen = [3, 700, 1999]
    wanted, hashes = torch.from_numpy(made.latents[chosen]), made.rows["hash"][chosen]
    exact = made.nearest(wanted * 1.001, hashes, metric)
    monkeypatch.setattr(bank, "EXACT_UP_TO", 1999)
    monkeypatch.setattr(bank, "_CANDIDATES", 1)  # of which the image itself is the first: then all are compared
    alone = made.nearest(wanted * 1.001, hashes, metric)
    assert torch.equal(alone.indices, exact.indices)
    monkeypatch.setattr(bank, "_CANDIDATES", 200)
    found = made.nearest(wanted * 1.001, NO_HASH.repeat(3, 0), metric)
    assert found.indices.tolist() == chosen
    assert [path.name for path in tmp_path.iterdir()] == [f"index-{metric}.faiss"]
    # The kept index is read, not made again.
    monkeypatch.setattr(sys.modules["faiss"], "index_factory", None)
    assert made.nearest(wanted * 1.001, NO_HASH.repeat(3, 0), metric).indices.tolist() == chosen


def test_a_large_bank_without_faiss_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bank, "EXACT_UP_TO", 5)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(BankError, match=r"pip install 'classlens\[selfsup\]'"):
        random_bank(9).nearest(torch.zeros(1, 6), NO_HASH)


def test_other_dimensions_are_refused() -> None:
    with pytest.raises(BankError, match="have 6 numbers, the model's 5"):
        random_bank(9).nearest(torch.zeros(1, 5), NO_HASH)


# ----------------------------------------------------------------------------------------------------------- making


def test_it_holds_what_the_head_reads(pictures: Path, tmp_path: Path) -> None:
    made = build_bank(net(), pictures, tmp_path / "bank", batch_size=4)
    assert made.names == tuple(f"{i}.png" for i in range(9))
    assert isinstance(made.latents, np.memmap)
    images = torch.stack([net().preprocess(pictures / name) for name in made.names])
    expected = seeded().features(images).detach()
    torch.testing.assert_close(torch.from_numpy(np.array(made.latents)), expected, rtol=1e-4, atol=1e-6)
    assert np.array_equal(made.rows["hash"], hashes_of(images))
    torch.testing.assert_close(made.picture(3), images[3])


def test_stopped_it_goes_on_where_it_was(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_bank(net(), pictures, tmp_path / "bank", batch_size=2, progress=stop)
    with pytest.raises(BankError, match="lacks 5 of 9 images; rerun the same command"):
        Bank.open(tmp_path / "bank", net())
    seen: list[int] = []
    latents = Encoder.latents

    def counted(self: Encoder, images: Tensor) -> Tensor:
        seen.append(len(images))
        return latents(self, images)

    monkeypatch.setattr(Encoder, "latents", counted)
    resumed = build_bank(net(), pictures, tmp_path / "bank", batch_size=2)
    assert sum(seen) == 5
    whole = build_bank(net(), pictures, tmp_path / "whole", batch_size=2)
    np.testing.assert_allclose(resumed.latents, whole.latents, rtol=1e-4, atol=1e-6)


def test_files_without_a_card_are_begun_again(pictures: Path, tmp_path: Path) -> None:
    """What is left if the process dies between the arrays and the card."""
    build_bank(net(), pictures, tmp_path / "bank")
    (tmp_path / "bank" / "bank.json").unlink()
    assert len(build_bank(net(), pictures, tmp_path / "bank")) == 9


def test_broken_pictures_are_left_out(pictures: Path, tmp_path: Path) -> None:
    shutil.copytree(pictures, tmp_path / "some")
    (tmp_path / "some" / "4.png").write_bytes(b"no picture")
    made = build_bank(net(), tmp_path / "some", tmp_path / "bank")
    assert len(made) == 8
    for file in (tmp_path / "some").iterdir():
        file.write_bytes(b"no picture")
    with pytest.raises(BankError, match="none of the 9 images"):
        build_bank(net(), tmp_path / "some", tmp_path / "none")


def test_pictures_that_were_mended_or_changed_are_computed_again(pictures: Path, tmp_path: Path) -> None:
    some, out = tmp_path / "some", tmp_path / "bank"
    shutil.copytree(pictures, some)
    (some / "4.png").write_bytes(b"no picture")
    build_bank(net(), some, out)
    shutil.copy(pictures / "4.png", some / "4.png")
    shutil.copy(pictures / "3.png", some / "2.png")
    again, fresh = build_bank(net(), some, out), build_bank(net(), some, tmp_path / "fresh")
    assert len(again) == 9
    np.testing.assert_allclose(again.latents, fresh.latents, atol=1e-6)
    assert (again.rows == fresh.rows).all()


def test_a_full_disk_is_an_error_and_no_signal(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The space is taken before the arrays are mapped: a write to a map without space would end the process."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        build_bank(net(), pictures, tmp_path / "bank")
    monkeypatch.undo()
    assert len(build_bank(net(), pictures, tmp_path / "bank")) == 9


def test_pictures_of_any_size(pictures: Path, tmp_path: Path) -> None:
    """A network without a size of its own gets every picture alone."""
    from PIL import Image

    shutil.copytree(pictures, tmp_path / "some")
    Image.open(pictures / "0.png").resize((40, 36)).save(tmp_path / "some" / "large.png")
    free = replace(net(), preprocess=Preprocess(resize=None, crop=None))
    assert len(build_bank(free, tmp_path / "some", tmp_path / "bank")) == 10


def test_a_limit_is_a_stable_choice(pictures: Path, tmp_path: Path) -> None:
    few = build_bank(net(), pictures, tmp_path / "few", limit=3)
    more = build_bank(net(), pictures, tmp_path / "more", limit=6)
    assert set(few.names) < set(more.names)


# ---------------------------------------------------------------------------------------------------------- refusing


def test_a_bank_of_another_model_is_refused(pictures: Path, tmp_path: Path) -> None:
    file = pictures / "0.png"
    made = build_bank(net(), pictures, tmp_path / "bank")
    explain(net(), file, tmp_path / "bank")
    with pytest.raises(BankError, match=r"made with another model \(squares, other weights\)"):
        explain(net(seed=1), file, tmp_path / "bank")
    with pytest.raises(BankError, match="made with another model"):  # opened for one, used with the other
        explain(net(seed=1), file, made)
    squashed = replace(net(), preprocess=Preprocess(resize=(32, 32), crop=None, interpolation="nearest"))
    with pytest.raises(BankError, match="made with other preprocessing"):
        explain(squashed, file, tmp_path / "bank")
    with pytest.raises(BankError, match="holds what the head 'head' reads, not 'none'"):
        explain(net(), file, tmp_path / "bank", head="none")
    with pytest.raises(BankError, match="holds a bank with other weights; choose a new folder"):
        build_bank(net(seed=1), pictures, tmp_path / "bank")
    with pytest.raises(BankError, match="holds a bank with other names"):
        build_bank(net(), pictures, tmp_path / "bank", limit=3)


def test_a_changed_weight_is_noticed(pictures: Path, tmp_path: Path) -> None:
    build_bank(net(), pictures, tmp_path / "bank")
    changed = net()
    with torch.no_grad():
        changed.model.get_parameter("body.0.weight")[0, 0, 0, 0] += 1e-3
    with pytest.raises(BankError, match="another model"):
        Bank.open(tmp_path / "bank", changed)


def test_folders_that_are_no_bank(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(BankError, match="holds other files than a bank"):
        build_bank(net(), pictures, tmp_path / "notes")
    with pytest.raises(BankError, match="is not a bank; make one with `classlens selfsup bank"):
        Bank.open(tmp_path / "nothing", net())
    build_bank(net(), pictures, tmp_path / "bank")
    card = json.loads((tmp_path / "bank" / "bank.json").read_text())
    (tmp_path / "bank" / "bank.json").write_text(json.dumps(card | {"names": card["names"][:4]}))
    with pytest.raises(BankError, match="do not match"):
        Bank.open(tmp_path / "bank", net())
    (tmp_path / "bank" / "bank.json").write_text("{}")
    with pytest.raises(BankError, match="not the card of a bank"):
        Bank.open(tmp_path / "bank", net())
    (tmp_path / "bank" / "bank.json").write_text("{")
    with pytest.raises(BankError, match="cannot be read"):
        Bank.open(tmp_path / "bank", net())


def test_a_neighbour_whose_file_is_gone_is_still_a_neighbour(pictures: Path, tmp_path: Path) -> None:
    shutil.copytree(pictures, tmp_path / "some")
    made = build_bank(net(), tmp_path / "some", tmp_path / "bank")
    first = explain(net(), pictures / "0.png", made)
    (tmp_path / "some" / first.neighbours[0]).unlink()
    again = explain(net(), pictures / "0.png", Bank.open(tmp_path / "bank", net()))
    assert again.neighbours == first.neighbours
    assert again.neighbour_pictures == (None,)
    assert len(again.figure().axes) == 5
    with pytest.raises(ImageError, match="no longer exists"):
        Bank.open(tmp_path / "bank", net()).picture(int(again.indices[0]))


def test_a_bank_from_an_encoder_and_its_head() -> None:
    assert encoder_of(net()).head.name == "head"
    assert split(seeded(), torch.zeros(1, 3, 32, 32)).head.weight.shape == (5, 12)
