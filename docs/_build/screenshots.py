"""Take the pictures of the explorer in README and docs/explorer.md: docs/figures/explorer.png, explorer-streams.png.

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
PICTURES = {
    "stack": ("explorer.png", "#v=1&place=pre&S=48&pins=S:48&depth=36", 860),
    "streams": ("explorer-streams.png", "#v=1&view=streams&swiring=hyper_connections&moved=0.4&sdepth=8", 1420),
}
"""The file, the address and the height of each view's picture."""
WIDTH = 1280


def main() -> int:
    """Take the pictures."""
    views = sys.argv[1:] or [*PICTURES]
    command = [sys.executable, "-m", "addnorm", "explore", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, sync_playwright() as playwright:
        try:
            results = re.search(r"http://[\w.:]+", process.stdout.readline() if process.stdout else "")
            if results is None:
                return 1
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            for view in views:
                name, state, height = PICTURES[view]
                page = browser.new_page(
                    viewport={"width": WIDTH, "height": height}, color_scheme="light", reduced_motion="reduce"
                )
                page.goto(f"{results[0]}/{state}")
                page.wait_for_selector(f"#panel-{view}[data-ready]")
                page.wait_for_timeout(500)
                page.screenshot(path=FIGURES / name)
            browser.close()
        finally:
            process.terminate()
    print("Written:", *(FIGURES / PICTURES[view][0] for view in views))
    return 0


if __name__ == "__main__":
    sys.exit(main())
