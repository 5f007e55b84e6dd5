"""Files on disk: pictures, masks, class names, and the layouts of data sets."""
