"""Loads torchvision first: a torchvision built for CUDA beside a torch for CPUs would stop every library's import."""

from classlens.models._torchvision import import_torchvision

import_torchvision()
