"""Take the picture of the explorer in README and docs/explorer.md: docs/figures/explorer.png.

python docs/_build/screenshots.py    start `addnorm explore`, and take the picture in the system's Chromium
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

FIGURES = Path(__file__).parent.parent / "figures"
STATE = "#v=1&place=pre&S=48&pins=S:48&depth=36"
WIDTH, HEIGHT = 1280, 860


def main() -> int:
    """Take the picture."""
    command = [sys.executable, "-m", "addnorm", "explore", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, sync_playwright() as playwright:
        try:
            results = re.search(r"http://[\w.:]+", process.stdout.readline() if process.stdout else "")
            if results is None:
                return 1
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(
                viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light", reduced_motion="reduce"
            )
            page.goto(f"{results[0]}/{STATE}")
            page.wait_for_selector("#panel-stack[data-ready]")
            page.wait_for_timeout(500)
            page.screenshot(path=FIGURES / "explorer.png")
            browser.close()
        finally:
            process.terminate()
    print(f"Written: {FIGURES / 'explorer.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
