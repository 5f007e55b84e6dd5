"""Adapters for captum, Quantus and pytorch-grad-cam.

    >>> from classlens.interop.captum import AGF                   # captum: AGF(model).attribute(images, target=281)
    >>> from classlens.interop.quantus import explain_func         # Quantus: metric(..., explain_func=explain_func)
    >>> from classlens.interop.grad_cam import cam_on_image        # show_cam_on_image(*cam_on_image(e), use_rgb=True)

Targets of pytorch-grad-cam need no adapter: `explain` takes any callable of one image's logits.
"""
