"""Scans and images with many channels -> arrays: NIfTI, DICOM series, TIFF, NumPy files, grey images.

Values keep their own units, such as Hounsfield units or 16-bit reflectances; nothing is scaled here.

    >>> scan = open_scan("scan.nii.gz", axes=3)
    >>> scan.values.shape               # (channels, depth, height, width)
    (1, 181, 217, 181)

Like `data.images`, every problem is an `ImageError` of one line that names the file.
"""

from __future__ import annotations

import gzip
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from classlens.data.images import open_regular, open_stored
from classlens.errors import ImageError, MissingPackage

Values: TypeAlias = NDArray[np.float32]
Affine: TypeAlias = NDArray[np.float64]

MAX_VALUES = 128_000_000  # voxels times channels: half a gigabyte as float32
MAX_SLICES = 4096  # files of a DICOM series
_EXTRA = "pip install 'classlens[volumes]'"


@dataclass(frozen=True, eq=False)
class Scan:
    """The values of a file and, if it says so, where they lie."""

    values: Values  # (C,*size)
    affine: Affine | None = None  # (4,4): from indices along the axes of a volume to millimetres (right, anterior, up)


def open_scan(source: str | os.PathLike[str], axes: int) -> Scan:
    """Read a file, or a folder with the slices of one DICOM series; `axes` is 3 for volumes and 2 for images.

    The pages of a TIFF file are the slices of a volume, or the channels of an image.
    """
    path, name = Path(source), os.fspath(source)
    scan = _reader(path)(path, name, axes)
    if len(scan.values.shape) != 1 + axes or 0 in scan.values.shape:
        raise ImageError(f"{name} holds values of shape {scan.values.shape[1:]}, but the network reads {axes} axes")
    if not np.isfinite(scan.values).all():
        raise ImageError(f"{name} holds NaN or infinite values: replace them first")
    return scan


def scans_in(path: Path) -> list[Path]:
    """The scans in a folder, sorted by name; a file is itself, and so is the folder of a DICOM series.

    >>> scans_in(Path("study"))
    [PosixPath('study/first.nii.gz'), PosixPath('study/second.nii.gz')]
    """
    whole = [ending for ending in _READERS if ending != ".dcm"]
    inside = sorted(p for p in path.iterdir() if p.name.lower().endswith(tuple(whole))) if path.is_dir() else []
    return inside or [path]


Reader: TypeAlias = Callable[[Path, str, int], Scan]


def _reader(path: Path) -> Reader:
    if path.is_dir():
        return _read_series
    ending = "".join(path.suffixes[-2:]).lower() if path.suffix.lower() == ".gz" else path.suffix.lower()
    return _READERS.get(ending, _read_picture)


def library(name: str, file: str) -> Any:
    """A library of the extra `volumes`: `library("nibabel", "scan.nii.gz")`."""
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingPackage(f"{file} needs {name.partition('.')[0]}: {_EXTRA}") from error


def _checked(name: str, shape: Sequence[int]) -> None:
    """Refuse what would not fit, before its values are read."""
    if math.prod(shape) > MAX_VALUES:
        size = " x ".join(map(str, shape))
        raise ImageError(f"{name} holds {size} values, more than {MAX_VALUES}: crop it or scale it down first")


def _broken(name: str, error: Exception) -> ImageError:
    if isinstance(error, ImageError):
        return error
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return ImageError(f"{name} cannot be read: {lines[0]}; give an intact file")


# ------------------------------------------------------------------------------------------------------------ NIfTI


def _read_nifti(path: Path, name: str, axes: int) -> Scan:
    nibabel = library("nibabel", name)
    with open_regular(path, name) as file:
        stream = cast(BinaryIO, gzip.GzipFile(fileobj=file)) if path.suffix.lower() == ".gz" else file
        try:
            second = 540 in (int.from_bytes(head := stream.read(4), "little"), int.from_bytes(head, "big"))
            stream.seek(0)
            image = (nibabel.Nifti2Image if second else nibabel.Nifti1Image).from_stream(stream)
            _checked(name, image.shape)
            values = np.asarray(image.dataobj, dtype=np.float32)
        except Exception as error:  # nibabel, gzip and numpy raise their own errors
            raise _broken(name, error) from error
    # (X,Y,Z), then time, then channels: whatever follows the three axes of space is a channel.
    values = values.reshape(*values.shape[:3], *[1] * (3 - values.ndim), -1)
    known = int(image.header["qform_code"]) > 0 or int(image.header["sform_code"]) > 0
    return Scan(np.moveaxis(values, -1, 0), np.asarray(image.affine, dtype=np.float64) if known else None)


def write_nifti(path: Path, values: Values, affine: Affine) -> Path:
    """Write a volume (D,H,W) as .nii.gz, whole or not at all; the same volume gives the same bytes."""
    from classlens.files import write_bytes

    nibabel = library("nibabel", str(path))
    content = nibabel.Nifti1Image(np.asarray(values, dtype=np.float32), affine).to_bytes()
    return write_bytes(path, gzip.compress(content, mtime=0))


# ------------------------------------------------------------------------------------------------------------ DICOM


def _read_series(path: Path, name: str, axes: int) -> Scan:
    """The slices of one series, in the order of their positions."""
    pydicom = library("pydicom", name)
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    if len(files) > MAX_SLICES:
        raise ImageError(f"{name} holds {len(files)} files, more than {MAX_SLICES}: give a folder with one series")
    heads = [(file, head) for file in files if (head := _header(pydicom, file, path.is_dir())) is not None]
    if not heads:
        raise ImageError(f"{name} is a folder without DICOM files; give a scan, or a folder with one series")
    _check_series(name, [head for _, head in heads])
    try:
        heads.sort(key=lambda pair: _height(pair[1]))
        affine = _affine(name, [head for _, head in heads])
        first = heads[0][1]
        _checked(name, (len(heads), int(first.Rows), int(first.Columns)))
        values = np.stack([_slice(pydicom, file) for file, _ in heads])
    except Exception as error:  # a missing tag, a compression that pydicom cannot read
        raise _broken(name, error) from error
    return Scan(values[None], affine)


def _header(pydicom: Any, file: Path, optional: bool) -> Any:
    """The tags of a file without its pixels; None for other files in a folder."""
    with open_regular(file, str(file)) as stream:
        try:
            head = pydicom.dcmread(stream, stop_before_pixels=True)
        except Exception as error:
            if optional and isinstance(error, pydicom.errors.InvalidDicomError):
                return None
            raise _broken(str(file), error) from error
    return head if "Rows" in head else None  # a DICOMDIR has no pixels


def _check_series(name: str, heads: Sequence[Any]) -> None:
    series = {str(head.get("SeriesInstanceUID", "")) for head in heads}
    if len(series) > 1:
        raise ImageError(f"{name} holds {len(series)} DICOM series: give a folder with one")
    for head in heads:
        if int(head.get("NumberOfFrames", 1) or 1) > 1 or int(head.get("SamplesPerPixel", 1)) > 1:
            raise ImageError(f"{name} holds several frames or colours in a file: convert it to NIfTI first")
        if "ModalityLUTSequence" in head or head.get("PhotometricInterpretation", "MONOCHROME2") != "MONOCHROME2":
            raise ImageError(f"{name} stores its values in a table or inverted: convert it to NIfTI first")


def _height(head: Any) -> float:
    """The position of a slice along the normal of its plane."""
    return float(np.dot(np.array(head.ImagePositionPatient, float), _normal(head)))


def _normal(head: Any) -> Affine:
    across, down = np.array(head.ImageOrientationPatient, float).reshape(2, 3)
    return np.cross(across, down)


def _affine(name: str, heads: Sequence[Any]) -> Affine:
    """From (slice, row, column) to millimetres; DICOM counts to the left and to the back, NIfTI does not."""
    first, last = heads[0], heads[-1]
    if any(head.ImageOrientationPatient != first.ImageOrientationPatient for head in heads):
        raise ImageError(f"the slices of {name} lie in different planes: give a folder with one series")
    gaps = np.diff([_height(head) for head in heads])
    if len(gaps) and gaps.max() - gaps.min() > 0.01 * gaps.mean() + 1e-3:
        raise ImageError(f"the slices of {name} are {gaps.min():.3g} to {gaps.max():.3g} mm apart: slices are missing")
    begin = np.array(first.ImagePositionPatient, float)
    step = (np.array(last.ImagePositionPatient, float) - begin) / max(len(gaps), 1)
    if not len(gaps):
        step = _normal(first) * float(first.get("SliceThickness", 1.0) or 1.0)
    across, down = np.array(first.ImageOrientationPatient, float).reshape(2, 3)
    between_rows, between_columns = (float(v) for v in first.PixelSpacing)
    affine = np.eye(4)
    affine[:3, :] = np.stack([step, down * between_rows, across * between_columns, begin], 1)
    affine[:2] *= -1
    return affine


def _slice(pydicom: Any, file: Path) -> Values:
    with open_regular(file, str(file)) as stream:
        found = pydicom.dcmread(stream)
    slope, offset = float(found.get("RescaleSlope", 1.0)), float(found.get("RescaleIntercept", 0.0))
    values: Values = (found.pixel_array.astype(np.float64) * slope + offset).astype(np.float32)
    return values


# ------------------------------------------------------------------------------------------------- TIFF and the rest


def _read_tiff(path: Path, name: str, axes: int) -> Scan:
    tifffile = library("tifffile", name)
    with open_regular(path, name) as stream:
        try:
            with tifffile.TiffFile(stream, name=path.name) as tiff:
                if len(tiff.series) != 1:
                    raise ImageError(f"{name} holds {len(tiff.series)} images of different sizes: give a file with one")
                letters, shape = tiff.series[0].axes, tiff.series[0].shape
                _checked(name, shape)
                values = tiff.series[0].asarray()
        except Exception as error:  # a broken tag, a compression that tifffile cannot read
            raise _broken(name, error) from error
    return Scan(_by_letters(values, letters, name, axes))


def _by_letters(values: NDArray[Any], letters: str, name: str, axes: int) -> Values:
    """(C,*size) from tifffile's letters: Y and X, S for samples and C for channels, others for pages."""
    pages = [letter for letter, size in zip(letters, values.shape, strict=True) if letter not in "YXSC" and size > 1]
    if axes == 3 and len(pages) != 1:
        raise ImageError(f"{name} has the axes {letters}: a volume needs pages along one axis, besides its channels")
    order = [letter for letter in letters if letter not in (*(pages if axes == 3 else ()), "Y", "X")]
    order += [*(pages if axes == 3 else ()), "Y", "X"]
    turned = values.transpose([letters.index(letter) for letter in order])
    return turned.reshape(-1, *turned.shape[-axes:]).astype(np.float32)


def _read_npy(path: Path, name: str, axes: int) -> Scan:
    """(C,*size), or (*size) with one channel."""
    with open_regular(path, name) as stream:
        try:
            version = np.lib.format.read_magic(stream)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            _checked(name, header(stream)[0])
            stream.seek(0)
            values = np.load(stream, allow_pickle=False).astype(np.float32)
        except Exception as error:
            raise _broken(name, error) from error
    return Scan(values[None] if values.ndim == axes else values)


def _read_picture(path: Path, name: str, axes: int) -> Scan:
    """The stored values of an image file, 8 or 16 bits; its bands are channels."""
    if axes != 2:
        known = ", ".join(_READERS)
        raise ImageError(f"{name} is not a volume: give a file ({known}), or a folder with one DICOM series")
    image = open_stored(path, name)
    values = np.asarray(image.convert("RGB") if image.mode == "P" else image).astype(np.float32)
    return Scan(values[None] if values.ndim == 2 else np.moveaxis(values, -1, 0))


_READERS: dict[str, Reader] = {
    ".nii": _read_nifti, ".nii.gz": _read_nifti, ".dcm": _read_series, ".tif": _read_tiff, ".tiff": _read_tiff,
    ".npy": _read_npy,
}  # fmt: skip
