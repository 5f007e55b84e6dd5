"""The web page: `classlens serve`."""
