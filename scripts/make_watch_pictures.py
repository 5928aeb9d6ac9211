"""Makes docs/watch_*.png: `whet watch` in Chromium, on a short quickstart, a game and a comparison.

    python scripts/make_watch_pictures.py                   run these first (three minutes)
    python scripts/make_watch_pictures.py --runs FOLDER     of a folder that has quickstart, guess and compare
    python scripts/make_watch_pictures.py turns talk        these pictures only

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from whetstone.report import write_report  # noqa: E402
from whetstone.watch.server import WatchServer  # noqa: E402

WAIT_S, LIMIT_S = 2.0, 180.0  # for the data and the charts; for a model that is loaded
FOLD = "document.getElementById('picker').open = false;"
STRIP = "const strip = document.querySelector('.strip'); strip.focus();"
STRIP += "strip.dispatchEvent(new KeyboardEvent('keydown', {key: 'Home'}));"
ASK = "document.querySelector('[aria-label=message]').value = '{}'; document.getElementById('send').click();"
ANSWERED = "return document.querySelectorAll('.talk .strip').length === {}"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """`actions`: scripts that are run before it is taken, each with what is waited for after it."""

    address: dict[str, str]
    size: tuple[int, int] = (1100, 900)
    is_dark: bool = False
    actions: tuple[tuple[str, str], ...] = ((FOLD, "return true"),)


MARKED = ((FOLD + STRIP, "return true"),)
PICTURES = {
    "now": Picture(address={"view": "now"}, size=(1100, 620)),
    "curves": Picture(address={"view": "curves"}),
    "groups": Picture(address={"view": "groups", "step": "4", "coloring": "entropy"}, actions=MARKED),
    "turns": Picture(
        address={
            "runs": "guess",
            "view": "groups",
            "step": "4",
            "problem": "guess_number/train/005474",  # right and wrong samples
            "coloring": "entropy",
        },
        actions=(*MARKED, ("document.querySelector('.groups').scrollIntoView()", "return true")),
    ),
    "talk": Picture(
        address={"runs": "guess", "view": "talk"},
        size=(1100, 760),
        actions=(
            (FOLD + ASK.format("Guess my number from 1 to 3."), ANSWERED.format(1)),
            (ASK.format("Lower."), ANSWERED.format(2)),
            (STRIP, "return true"),
        ),
    ),
    "evaluation": Picture(address={"view": "evaluation"}, size=(1100, 700)),
    "compare": Picture(address={"view": "compare"}, size=(1100, 700)),
    "phone": Picture(
        address={"view": "groups", "step": "4", "coloring": "logprob"},
        size=(390, 844),
        is_dark=True,
        actions=MARKED,
    ),
    "report": Picture(address={}, actions=()),
}
RUNS = (
    "train guess max_steps=4 fixed_eval_steps=4 eval_num_samples=60 log_completions_steps=4",
    "train quickstart max_steps=12 fixed_eval_steps=4 eval_num_samples=60 log_completions_steps=4",
    "compare quickstart learning_rate=1e-4,4e-4 seed=1,2 max_steps=6 eval_num_samples=60",
)


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--runs", type=Path, help="a folder with runs that have ended")
    parser.add_argument("names", nargs="*", metavar="PICTURE", help=f"(default: all) {', '.join(PICTURES)}")
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - set(PICTURES):
        parser.error(f"there is no picture {', '.join(unknown)}")
    with tempfile.TemporaryDirectory() as folder:
        if chosen.runs is None:
            for line in RUNS:
                command = [sys.executable, "-m", "whetstone", *line.split(), f"output_dir={folder}"]
                subprocess.run(command, cwd=ROOT, check=True)
        take_pictures(Path(folder) if chosen.runs is None else chosen.runs, chosen.names or list(PICTURES))


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


def wait_for(browser: Any, condition: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not browser.execute_script(condition):
        if time.monotonic() > deadline:
            sys.exit(f"This did not happen in {LIMIT_S:g} s: {condition}")
        time.sleep(0.1)


def take_pictures(runs: Path, names: list[str]) -> None:
    server = WatchServer(runs)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    report = write_report(runs / "quickstart").resolve().as_uri() if "report" in names else ""
    browser = open_browser()
    for name in names:
        picture = PICTURES[name]
        width, height = picture.size
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if picture.is_dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        browser.get("about:blank")
        parts = urlencode({"runs": "quickstart", **picture.address})
        browser.get(f"{server.address}/#{parts}" if picture.address else report)
        time.sleep(WAIT_S)
        for script, condition in picture.actions:
            browser.execute_script(script)
            wait_for(browser, condition)
        time.sleep(0.5)
        path = ROOT / "docs" / f"watch_{name}.png"
        browser.save_screenshot(str(path))
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")
    browser.quit()
    server.shutdown()
    server.server_close()


if __name__ == "__main__":
    main()
