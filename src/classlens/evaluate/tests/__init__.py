"""The evaluations, one module each. Every module in this package that calls `register(Test(...))` is found."""

import pkgutil
from importlib import import_module

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
