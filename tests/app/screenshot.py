"""The picture of the page in the docs (needs chromium).

PYTHONPATH=tests python tests/app/screenshot.py docs/images/page.jpg
"""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from app.browsing import Server, all_of, open_browser, shown, wait

WIDTH, HEIGHT, CAT = 1400, 900, 285


def main(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server, browser = Server(Path(folder), "efficientnet-lite0"), open_browser(folder)
        try:
            window = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", window)
            browser.get(server.address)
            wait(browser, lambda: shown(browser))
            all_of(browser, f'.bar[data-index="{CAT}"]')[0].click()
            wait(browser, lambda: shown(browser)[0][0] == "Egyptian cat" and not all_of(browser, ".pending"))
            png = browser.get_screenshot_as_png()
        finally:
            browser.quit()
            server.stop()
    Image.open(io.BytesIO(png)).convert("RGB").save(path, quality=88, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
