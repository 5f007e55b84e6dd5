"""Maps in the tools that people already run, with the real libraries in their offline modes."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from classlens.errors import ClasslensError

IMAGES = torch.rand(2, 3, 24, 32, generator=torch.Generator().manual_seed(1))


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def test_wandb_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from classlens.interop.wandb import log_maps

    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(project="maps", mode="offline", dir=str(tmp_path)) as run:
        for step in (0, 1):
            log_maps(run, network(), IMAGES, 1 + step, step=step)
    pictures = sorted(Path(tmp_path).rglob("classlens_*.png"))
    assert len(pictures) == 2


def test_mlflow_in_a_folder(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    from classlens.interop.mlflow import log_maps

    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    mlflow.create_experiment("maps", artifact_location=str(tmp_path / "files"))
    mlflow.set_experiment("maps")
    with mlflow.start_run() as run:
        log_maps(run.info.run_id, network(), IMAGES, 1, step=3)
    pictures = list((tmp_path / "files").rglob("*.png"))
    assert len(pictures) == 1
    assert re.search(r"step\W3\W", pictures[0].name)


def train(tmp_path, callbacks, logger, epochs=4):
    lightning = pytest.importorskip("lightning.pytorch")

    class Training(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, _):
            x, y = batch
            return nn.functional.cross_entropy(self(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    lightning.seed_everything(3)
    data = torch.utils.data.TensorDataset(torch.rand(16, 3, 24, 32), torch.arange(16) % 4)
    module = Training()
    trainer = lightning.Trainer(
        max_epochs=epochs, callbacks=callbacks, logger=logger, default_root_dir=str(tmp_path), accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data, 8, shuffle=True))
    return module.state_dict()


def test_the_callback_logs_every_other_epoch_and_changes_nothing(tmp_path):
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from classlens.interop.lightning import MapLogger

    plain = train(tmp_path / "a", [], False)
    logger = loggers.TensorBoardLogger(str(tmp_path / "b"))
    watched = train(tmp_path / "b", [MapLogger(IMAGES, [[1, 2]] * 2, every=2, network="net")], logger)
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    events = EventAccumulator(logger.log_dir).Reload()
    assert [event.step for event in events.Images("classlens")] == [4, 8]


def test_the_callback_logs_to_wandb_and_mlflow(tmp_path, monkeypatch):
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    from classlens.interop.lightning import MapLogger

    monkeypatch.setenv("WANDB_SILENT", "true")
    run = pytest.importorskip("wandb").init(project="maps", mode="offline", dir=str(tmp_path))
    wandb = loggers.WandbLogger(experiment=run)
    mlflow = loggers.MLFlowLogger(
        tracking_uri=f"sqlite:///{tmp_path}/runs.db", artifact_location=str(tmp_path / "files")
    )
    train(tmp_path, [MapLogger(IMAGES, 1)], [wandb, mlflow], epochs=2)
    run.finish()
    assert len(list(Path(tmp_path).rglob("classlens_*.png"))) == 2
    assert len(list((tmp_path / "files").rglob("*.png"))) == 2


def test_a_trainer_without_a_logger_is_refused_before_it_trains(tmp_path):
    pytest.importorskip("lightning")
    from classlens.interop.lightning import MapLogger

    with pytest.raises(ClasslensError, match="the trainer has no logger"):
        train(tmp_path, [MapLogger(IMAGES)], False)
    with pytest.raises(ClasslensError, match="every=0"):
        MapLogger(IMAGES, every=0)


def test_pycocotools_reads_the_same_masks(tmp_path):
    coco = pytest.importorskip("pycocotools.coco")
    import classlens
    from classlens.interop.coco import strongest_part, write_coco

    e = classlens.explain(network().eval(), IMAGES, [[1, 2], [0, 2]])
    read = coco.COCO(str(write_coco(tmp_path, [e])))
    assert len(read.getImgIds()) == 2
    names = {category["id"]: category["name"] for category in read.loadCats(read.getCatIds())}
    found = read.loadAnns(read.getAnnIds())
    assert len(found) >= 3
    for about in found:
        row = about["image_id"] - 1
        k = [e.name(row, k) for k in range(2)].index(names[about["category_id"]])
        assert (read.annToMask(about) == strongest_part(e.maps[row, k])).all()
