"""Makes docs/watch_*.png: the views of `whet watch` on a short quickstart and a comparison, in Chromium.

    python scripts/make_watch_pictures.py                   run both first (two minutes)
    python scripts/make_watch_pictures.py --runs FOLDER     of a folder that has quickstart and compare

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
from urllib.parse import urlencode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from whetstone.report import write_report  # noqa: E402
from whetstone.watch.server import WatchServer  # noqa: E402

WAIT_S = 2.0  # for the data and the charts
FOLD = "document.getElementById('picker').open = false;"
STRIP = "const strip = document.querySelector('.strip'); strip.focus();"
STRIP += "strip.dispatchEvent(new KeyboardEvent('keydown', {key: 'Home'}));"
# Picture -> its address, its size, whether it is dark, and what is done before it is taken.
PICTURES: dict[str, tuple[dict[str, str], tuple[int, int], bool, str]] = {
    "now": ({"view": "now"}, (1100, 620), False, FOLD),
    "curves": ({"view": "curves"}, (1100, 900), False, FOLD),
    "groups": ({"view": "groups", "step": "4", "coloring": "entropy"}, (1100, 900), False, FOLD + STRIP),
    "evaluation": ({"view": "evaluation"}, (1100, 700), False, FOLD),
    "compare": ({"view": "compare"}, (1100, 700), False, FOLD),
    "phone": ({"view": "groups", "step": "4", "coloring": "logprob"}, (390, 844), True, FOLD + STRIP),
    "report": ({}, (1100, 900), False, ""),
}
RUNS = (
    "train quickstart max_steps=12 fixed_eval_steps=4 eval_num_samples=60 log_completions_steps=4",
    "compare quickstart learning_rate=1e-4,4e-4 seed=1,2 max_steps=6 eval_num_samples=60",
)


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--runs", type=Path, help="a folder with runs that have ended")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if chosen.runs is None:
            for line in RUNS:
                command = [sys.executable, "-m", "whetstone", *line.split(), f"output_dir={folder}"]
                subprocess.run(command, cwd=ROOT, check=True)
        take_pictures(Path(folder) if chosen.runs is None else chosen.runs)


def open_browser() -> Any:
    webdriver: Any = importlib.import_module("selenium.webdriver")  # no dependency of the package
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        sys.exit("There is no chromium or no chromedriver here: install both.")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    return webdriver.Chrome(service=webdriver.ChromeService(driver), options=options)


def take_pictures(runs: Path) -> None:
    server = WatchServer(runs)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    report = write_report(runs / "quickstart").resolve().as_uri()
    browser = open_browser()
    for name, (address, (width, height), is_dark, script) in PICTURES.items():
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        browser.get("about:blank")
        parts = urlencode({"runs": "quickstart", **address})
        browser.get(f"{server.address}/#{parts}" if address else report)
        time.sleep(WAIT_S)
        browser.execute_script(script)
        time.sleep(0.5)
        path = ROOT / "docs" / f"watch_{name}.png"
        browser.save_screenshot(str(path))
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")
    browser.quit()
    server.shutdown()


if __name__ == "__main__":
    main()
