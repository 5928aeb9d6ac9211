"""Chromium, driven by Selenium, and servers for it."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.page import Page
from tests.support.runs import run
from whetstone.config import load
from whetstone.train import train
from whetstone.watch.server import WatchServer

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    if not (CHROMIUM and DRIVER):
        pytest.skip("needs chromium and chromedriver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,1400"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(service=webdriver.ChromeService(DRIVER), options=options)
    yield driver
    driver.quit()


@pytest.fixture
def page(chromium: Any) -> Page:
    """With empty logs: what another test did is not this one's."""
    chromium.get("about:blank")
    for kind in ("browser", "performance"):
        chromium.get_log(kind)
    return Page(chromium)


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    servers = []

    def start(folder: Path) -> str:
        server = WatchServer(folder)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return server.address

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="session")
def ruled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose updates apply every rule for tokens, on rows that come again at later steps."""
    parent = tmp_path_factory.mktemp("ruled")
    rows = [
        f'{{"question": "State the final answer: {n} + {n} =", "answer": "{2 * n}"}}' for n in range(2, 14)
    ]
    (parent / "sums.jsonl").write_text("\n".join(rows) + "\n")
    run(
        parent,
        datasets="{chain_sum: {config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2}}, "
        f"rows: {{config: {{path: {parent / 'sums.jsonl'}, eval_fraction: 0.4}}}}}}",
        max_steps=6, prompts_per_step=6, log_completions_steps=2, log_tokens_groups=4, fixed_eval_steps=2,
        num_iterations=2, epsilon=1e-4, top_entropy_quantile=0.6, mask_truncated_completions=True, beta=0.01,
        advantage="gae", max_completion_length=12, importance_correction="token_truncate",
        importance_correction_max=1.0, off_policy_mask_threshold=1e-5, save_strategy="no",
    )  # fmt: skip
    return parent / "run"


@pytest.fixture(scope="session")
def game(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with a game of two turns, shorter, with checkpoints."""
    parent = tmp_path_factory.mktemp("game")
    settings = {
        "output_dir": parent, "max_steps": 4, "save_strategy": "steps", "save_steps": 2,
        "fixed_eval_steps": 4, "eval_num_samples": 12, "log_completions_steps": 2, "preflight": "off",
    }  # fmt: skip
    train(load("guess", [f"{key}={value}" for key, value in settings.items()]))
    return parent / "guess"
