"""A Lightning callback that logs maps of fixed images while a network trains.

>>> trainer = Trainer(callbacks=[MapLogger(images, targets=3, every=5)])

It logs to the trainer's loggers: TensorBoard, Weights & Biases, MLflow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from classlens.errors import ClasslensError
from classlens.interop import mlflow, tensorboard, wandb

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError:
            raise ClasslensError("Lightning is not installed: pip install lightning") from None


class MapLogger(Callback):  # type: ignore[misc, unused-ignore]
    """Logs maps of `images` after every `every` epochs; `how` is passed to `classlens.explain`, with `scale`.

    The network is the LightningModule itself, or its attribute `network`, as in `MapLogger(images, network="net")`.
    """

    def __init__(
        self, images: torch.Tensor, targets: Any = None, *, every: int = 1, name: str = "classlens",
        network: str = "", **how: Any,
    ) -> None:  # fmt: skip
        if every < 1:
            raise ClasslensError(f"every={every}: maps are logged after every 1, 2, ... epochs")
        self.images, self.targets, self.every, self.name, self.network, self.how = (
            images, targets, every, name, network, how,
        )  # fmt: skip

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse before the training begins what could not be logged after it."""
        kinds = [type(logger).__name__ for logger in trainer.loggers]
        if not any(kind in LOGGERS for kind in kinds):
            found = ", ".join(kinds) or "no logger"
            raise ClasslensError(f"MapLogger logs to {', '.join(LOGGERS)}; the trainer has {found}")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the maps of this epoch."""
        if not trainer.is_global_zero or (trainer.current_epoch + 1) % self.every:
            return
        network = pl_module.get_submodule(self.network)
        images = self.images.to(pl_module.device)
        for logger in trainer.loggers:
            log = LOGGERS.get(type(logger).__name__)
            if log is not None:
                how = {"step": trainer.global_step, "name": self.name, **self.how}
                log(logger, network, images, self.targets, **how)


def _to_tensorboard(logger: Any, *what: Any, **how: Any) -> None:
    tensorboard.log_maps(logger.experiment, *what, **how)


def _to_wandb(logger: Any, *what: Any, step: int, **how: Any) -> None:
    # Lightning's logger writes the step into a column of its own, since wandb's own step may only grow.
    logger.experiment.define_metric(how["name"], step_metric="trainer/global_step")
    wandb.log_maps(logger.experiment, *what, **how)


def _to_mlflow(logger: Any, *what: Any, **how: Any) -> None:
    mlflow.log_maps(logger.run_id, *what, client=logger.experiment, **how)


LOGGERS = {"TensorBoardLogger": _to_tensorboard, "WandbLogger": _to_wandb, "MLFlowLogger": _to_mlflow}
