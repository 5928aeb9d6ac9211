"""Makes docs/watch_*.png: the views of `whet watch` on a short quickstart, in Chromium.

    python scripts/make_watch_pictures.py                 run the quickstart first (a minute)
    python scripts/make_watch_pictures.py --run FOLDER    of a run that has ended

Needs selenium (make test-browser installs it), chromium and chromedriver.
"""

import argparse
import importlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from whetstone.watch.server import WatchServer  # noqa: E402

SIZES = {"now": (1100, 620), "curves": (1100, 900), "groups": (1100, 900), "evaluation": (1100, 700)}
WAIT_S = 3.0  # for the data and the charts
# The groups view: what the rewards were, with the tokens of one group by entropy.
COLOR = "const box = document.querySelector('select[aria-label=\"color tokens by\"]');"
COLOR += "box.value = 'entropy'; box.onchange()"


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--run", type=Path, help="the folder of a run that has ended")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if chosen.run is None:
            settings = [
                f"output_dir={folder}",
                "max_steps=12",
                "eval_num_samples=60",
                "log_completions_steps=4",
            ]
            command = [sys.executable, "-m", "whetstone", "train", "quickstart", *settings]
            subprocess.run(command, cwd=ROOT, check=True)
        take_pictures(Path(folder) / "quickstart" if chosen.run is None else chosen.run)


def take_pictures(run: Path) -> None:
    webdriver: Any = importlib.import_module("selenium.webdriver")  # no dependency of the package

    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        sys.exit("There is no chromium or no chromedriver here: install both.")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    server = WatchServer(run)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    chromium = webdriver.Chrome(service=webdriver.ChromeService(driver), options=options)
    for view, size in SIZES.items():
        chromium.set_window_size(*size)
        chromium.get("about:blank")
        chromium.get(f"{server.address}/#view={view}")
        time.sleep(WAIT_S)
        if view == "groups":
            chromium.execute_script(COLOR)
            time.sleep(1)
        path = ROOT / "docs" / f"watch_{view}.png"
        chromium.save_screenshot(str(path))
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")
    chromium.quit()
    server.shutdown()


if __name__ == "__main__":
    main()
