"""Take the pictures of the explorer in README and docs/explorer.md: docs/figures/explorer*.png.

python docs/_build/screenshots.py            start `addnorm explore`, and take the pictures in the system's Chromium
python docs/_build/screenshots.py streams    take only that view's
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

FIGURES = Path(__file__).parent.parent / "figures"
ADDRESSES = {
    "stack": "#v=1&place=pre&S=48&pins=S:48&depth=36",
    "streams": "#v=1&view=streams&swiring=hyper_connections&moved=0.4&sdepth=8",
}
# The file, the view, the width and height in CSS pixels, and the pixels for each. README shows a narrow one on a phone.
PICTURES = [
    ("explorer{}.png", "stack", 1280, 860, 1),
    ("explorer-narrow{}.png", "stack", 390, 664, 2),
    ("explorer-streams.png", "streams", 1280, 1420, 1),
]


def main() -> int:
    """Take the pictures."""
    pictures = [one for one in PICTURES if one[1] in (sys.argv[1:] or ADDRESSES)]
    command = [sys.executable, "-m", "addnorm", "explore", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, sync_playwright() as playwright:
        try:
            results = re.search(r"http://[\w.:]+", process.stdout.readline() if process.stdout else "")
            if results is None:
                return 1
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            for name, view, width, height, pixels in pictures:
                for scheme in ("light", "dark") if "{}" in name else ("light",):
                    page = browser.new_page(
                        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce",
                        device_scale_factor=pixels,
                    )  # fmt: skip
                    page.goto(f"{results[0]}/{ADDRESSES[view]}")
                    page.wait_for_selector(f"#panel-{view}[data-ready]")
                    page.wait_for_timeout(500)
                    page.screenshot(path=FIGURES / name.format("-dark" * (scheme == "dark")))
            browser.close()
        finally:
            process.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
