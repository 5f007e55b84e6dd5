"""Adapters for captum, Quantus and pytorch-grad-cam, for loggers of trainings, for FiftyOne and for COCO.

    >>> from classlens.interop.captum import AGF                   # captum: AGF(model).attribute(images, target=281)
    >>> from classlens.interop.quantus import explain_func         # Quantus: metric(..., explain_func=explain_func)
    >>> from classlens.interop.grad_cam import cam_on_image        # show_cam_on_image(*cam_on_image(e), use_rgb=True)
    >>> from classlens.interop.lightning import MapLogger          # Trainer(callbacks=[MapLogger(images, targets=3)])
    >>> from classlens.interop.tensorboard import log_maps         # log_maps(writer, model, images, ...); wandb, mlflow
    >>> from classlens.interop.fiftyone import add_maps            # add_maps(dataset, m, classlens.top(2))
    >>> from classlens.interop.coco import write_coco              # write_coco("export", explanations)

Targets of pytorch-grad-cam need no adapter: `explain` takes any callable of one image's logits.
"""
