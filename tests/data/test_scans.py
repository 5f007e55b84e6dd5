"""Scans: every format gives the values and the geometry that were written; broken files are refused in one line."""

from __future__ import annotations

import gzip
import os
import sys
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import tifffile
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

from classlens.data import scans
from classlens.data.scans import open_scan, scans_in, write_nifti
from classlens.errors import ImageError, MissingPackage

AFFINE = np.array([[-2.0, 0, 0, 90], [0, 0, 3, -120], [0, 1.5, 0, -60], [0, 0, 0, 1]])


def values(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(-1000, 1000, shape).astype(np.int16)


@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz", "A.NII.GZ"])
def test_nifti(tmp_path: Path, name: str, kind: Any) -> None:
    image = kind(values(4, 5, 6), AFFINE)
    image.header.set_slope_inter(2.0, 10.0)
    content = image.to_bytes()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.lower().endswith("gz") else content)
    scan = open_scan(tmp_path / name, 3)
    assert scan.values.dtype == np.float32
    assert np.array_equal(scan.values, values(4, 5, 6)[None] * 2.0 + 10)
    assert scan.affine is not None
    assert np.allclose(scan.affine, AFFINE)


def test_nifti_with_channels_and_without_geometry(tmp_path: Path) -> None:
    image = nibabel.Nifti1Image(values(4, 5, 6, 1, 2), None)
    image.header["sform_code"] = image.header["qform_code"] = 0
    (tmp_path / "a.nii").write_bytes(image.to_bytes())
    scan = open_scan(tmp_path / "a.nii", 3)
    assert np.array_equal(scan.values[1], values(4, 5, 6, 1, 2)[:, :, :, 0, 1])
    assert scan.affine is None


def test_a_map_is_written_with_its_geometry_and_twice_the_same(tmp_path: Path) -> None:
    evidence = values(3, 4, 5).astype(np.float32) / 7
    first, second = (write_nifti(tmp_path / name, evidence, AFFINE) for name in ("a.nii.gz", "b.nii.gz"))
    assert first.read_bytes() == second.read_bytes()
    read = nibabel.load(first)
    assert np.array_equal(read.get_fdata(dtype=np.float32), evidence)
    assert np.allclose(read.affine, AFFINE)


def dicom(folder: Path, number: int, z: float, pixels: np.ndarray[Any, Any], **tags: Any) -> Path:
    """One slice of a CT series: axial, 0.5 mm between rows, 0.75 mm between columns."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.TransferSyntaxUID = CTImageStorage, ExplicitVRLittleEndian
    meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=[str(number)])
    slice_ = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    slice_.SOPClassUID, slice_.SOPInstanceUID = CTImageStorage, meta.MediaStorageSOPInstanceUID
    slice_.SeriesInstanceUID, slice_.InstanceNumber = "1.2.3", number
    slice_.Rows, slice_.Columns = pixels.shape
    slice_.BitsAllocated = slice_.BitsStored = 16
    slice_.HighBit, slice_.PixelRepresentation, slice_.SamplesPerPixel = 15, 1, 1
    slice_.PhotometricInterpretation = "MONOCHROME2"
    slice_.ImagePositionPatient, slice_.ImageOrientationPatient = [-100.0, -80.0, z], [1, 0, 0, 0, 1, 0]
    slice_.PixelSpacing, slice_.RescaleSlope, slice_.RescaleIntercept = [0.5, 0.75], 2.0, -1024.0
    slice_.PixelData = pixels.astype("<i2").tobytes()
    for tag, value in tags.items():
        setattr(slice_, tag, value)
    path = folder / f"slice-{number:03d}.dcm"
    slice_.save_as(path, enforce_file_format=True)
    return path


def series(folder: Path, heights: list[float], **tags: Any) -> np.ndarray[Any, Any]:
    pixels = values(len(heights), 4, 5)
    for number, z in enumerate(heights):
        dicom(folder, number, z, pixels[number], **tags)
    return pixels


def test_a_dicom_series_in_the_order_of_its_positions(tmp_path: Path) -> None:
    pixels = series(tmp_path, [30.0, 10.0, 20.0])
    (tmp_path / "README").write_text("not a slice")
    scan = open_scan(tmp_path, 3)
    assert np.array_equal(scan.values[0], pixels[[1, 2, 0]] * 2.0 - 1024)
    # Index (1, 2, 3): slice 1 at z = 20, row 2 is 1 mm further back, column 3 is 2.25 mm further left.
    assert scan.affine is not None
    assert np.allclose(scan.affine @ [1, 2, 3, 1], [100 - 2.25, 80 - 1.0, 20, 1])


@pytest.mark.parametrize(
    ("heights", "tags", "message"),
    [
        ([0.0, 5.0, 15.0], {}, "slices are missing"),
        ([0.0, 5.0], {"NumberOfFrames": 4}, "several frames"),
        ([0.0, 5.0], {"PhotometricInterpretation": "MONOCHROME1"}, "inverted"),
    ],
)
def test_series_that_would_be_guessed_are_refused(
    tmp_path: Path, heights: list[float], tags: dict[str, Any], message: str
) -> None:
    series(tmp_path, heights, **tags)
    with pytest.raises(ImageError, match=message):
        open_scan(tmp_path, 3)


def test_two_series_in_a_folder_and_none(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="without DICOM files"):
        open_scan(tmp_path, 3)
    dicom(tmp_path, 0, 0.0, values(4, 5))
    dicom(tmp_path, 1, 5.0, values(4, 5), SeriesInstanceUID="1.2.4")
    with pytest.raises(ImageError, match="2 DICOM series"):
        open_scan(tmp_path, 3)


def test_pages_of_a_tiff_are_slices_or_channels(tmp_path: Path) -> None:
    stack = values(7, 5, 6).astype(np.uint16)
    tifffile.imwrite(tmp_path / "a.tif", stack, photometric="minisblack")
    assert np.array_equal(open_scan(tmp_path / "a.tif", 3).values, stack[None])
    assert np.array_equal(open_scan(tmp_path / "a.tif", 2).values, stack)


def test_bands_of_a_tiff_are_channels(tmp_path: Path) -> None:
    bands = values(5, 6, 13).astype(np.uint16)
    tifffile.imwrite(tmp_path / "a.tif", bands, photometric="minisblack", planarconfig="contig")
    assert np.array_equal(open_scan(tmp_path / "a.tif", 2).values, np.moveaxis(bands, -1, 0))
    with pytest.raises(ImageError, match="needs pages"):
        open_scan(tmp_path / "a.tif", 3)


def test_a_coloured_stack_is_a_video(tmp_path: Path) -> None:
    frames = values(7, 5, 6, 3).astype(np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", frames, photometric="rgb")
    assert np.array_equal(open_scan(tmp_path / "a.tif", 3).values, np.moveaxis(frames, -1, 0))


def test_npy_with_and_without_channels(tmp_path: Path) -> None:
    for name, array in (("one.npy", values(4, 5, 6)), ("two.npy", values(2, 4, 5, 6))):
        np.save(tmp_path / name, array)
    assert open_scan(tmp_path / "one.npy", 3).values.shape == (1, 4, 5, 6)
    assert open_scan(tmp_path / "two.npy", 3).values.shape == (2, 4, 5, 6)
    assert open_scan(tmp_path / "one.npy", 2).values.shape == (4, 5, 6)
    with pytest.raises(ImageError, match="reads 2 axes"):
        open_scan(tmp_path / "two.npy", 2)


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ImageError, match=r"a\.npy cannot be read"):
        open_scan(tmp_path / "a.npy", 2)


def test_grey_images_keep_their_bits(tmp_path: Path) -> None:
    deep = np.arange(30, dtype=np.uint16).reshape(5, 6) * 2000
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert np.array_equal(open_scan(tmp_path / "deep.png", 2).values, deep[None])
    with pytest.raises(ImageError, match="is not a volume"):
        open_scan(tmp_path / "deep.png", 3)


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz", "a.dcm", "a.tif", "a.npy"])
@pytest.mark.parametrize("content", [b"", b"\0\1\2\3" * 200])
def test_broken_files_are_one_line_with_their_name(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ImageError, match=name) as caught:
        open_scan(tmp_path / name, 3)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.nii", "a.dcm", "a.tif", "a.npy"])
def test_pipes_are_refused_without_waiting(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ImageError, match="pipe or a device"):
        open_scan(tmp_path / name, 3)


def test_huge_and_not_finite_values_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "nan.npy", np.full((2, 2, 2), np.nan))
    with pytest.raises(ImageError, match="NaN"):
        open_scan(tmp_path / "nan.npy", 3)
    monkeypatch.setattr(scans, "MAX_VALUES", 100)
    (tmp_path / "a.nii").write_bytes(nibabel.Nifti1Image(values(5, 5, 5), AFFINE).to_bytes())
    tifffile.imwrite(tmp_path / "a.tif", values(5, 5, 5).astype(np.uint16))
    np.save(tmp_path / "a.npy", values(5, 5, 5))
    series_of = tmp_path / "series"
    series_of.mkdir()
    series(series_of, [float(z) for z in range(6)])
    for name in ("a.nii", "a.tif", "a.npy", "series"):
        with pytest.raises(ImageError, match="more than 100"):
            open_scan(tmp_path / name, 3)


def test_a_missing_library_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.nii").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(MissingPackage, match=r"a\.nii needs nibabel: pip install 'classlens\[volumes\]'"):
        open_scan(tmp_path / "a.nii", 3)


def test_scans_in_a_folder(tmp_path: Path) -> None:
    assert scans_in(tmp_path) == [tmp_path]
    for name in ("b.nii.gz", "a.NPY", "notes.txt"):
        (tmp_path / name).touch()
    assert scans_in(tmp_path) == [tmp_path / "a.NPY", tmp_path / "b.nii.gz"]
    assert scans_in(tmp_path / "b.nii.gz") == [tmp_path / "b.nii.gz"]
