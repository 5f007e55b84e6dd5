"""Files on disk: images, masks, class names, and the layouts of data sets."""
