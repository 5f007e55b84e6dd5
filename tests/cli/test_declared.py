import subprocess
import sys

from classlens.cli.declared import declared
from classlens.methods import METHODS


def test_what_is_read_is_what_is_registered() -> None:
    found = declared()
    assert sorted(entry["name"] for entry in found) == sorted(METHODS)
    for entry in found:
        registered = METHODS[entry["name"]]
        assert {key: getattr(registered, key) for key in entry} == entry
        assert {"family", "summary", "class_specific", "signed", "conserves", "paper"} <= entry.keys()


def test_listing_methods_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from classlens.cli import app; app(['methods'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
