"""The page on a phone, in the dark, by keyboard and for a screen reader, in Chromium."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.page import Page
from tests.support.waiting import wait_until
from whetstone.report import write_report

pytestmark = pytest.mark.browser
VIEWS = {
    "now": ".tile",
    "curves": "figure[data-metric] path",
    "groups": ".tokens span",
    "evaluation": ".pairs td",
    "talk": "#send",
}
NAMED = {
    "button",
    "combobox",
    "slider",
    "checkbox",
    "searchbox",
    "textbox",
    "img",
    "image",
    "link",
    "progressbar",
}


@pytest.fixture
def phone(page: Page) -> Iterator[Page]:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    yield page
    page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def leave_out_columns(path: Path, names: set[str]) -> None:
    with np.load(path) as file:
        arrays = dict(file)
    description = json.loads(arrays["description"].tobytes())
    present = [n for n, name in enumerate(description["columns"]) if name not in names]
    description["columns"] = [description["columns"][n] for n in present]
    arrays["numbers"] = arrays["numbers"][present]
    arrays["description"] = np.frombuffer(json.dumps(description).encode(), dtype=np.uint8)
    np.savez(path, **arrays)


def widest(page: Page) -> int:
    return page.script("return document.documentElement.scrollWidth")


def test_every_view_fits_a_phone(phone: Page, serve: Callable, ruled: Path, tmp_path: Path) -> None:
    plain = shutil.copytree(ruled, tmp_path / "plain")
    for path in (plain / "completions").glob("tokens_*.npz"):
        leave_out_columns(path, {"kl", "value"})  # a run without reference and critic
    address = serve(plain)
    for view, selector in VIEWS.items():
        phone.show(address, view=view)
        wait_until(lambda selector=selector: phone.count(selector))
        assert widest(phone) == 390, view
    phone.show(address, view="groups")
    wait_until(lambda: "not part of this run" in phone.text("select[aria-label='color tokens by']"))
    assert phone.count("select[aria-label='color tokens by'] option:disabled") == 2
    phone.show_report(write_report(plain))
    phone.script("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    wait_until(lambda: phone.count(".pairs td"))
    assert widest(phone) == 390


def luminance(color: str) -> float:
    parts = [int(part) / 255 for part in color.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_schemes(page: Page, serve: Callable, ruled: Path, scheme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    page.show(serve(ruled), view="groups")
    wait_until(lambda: page.count(".completion"))

    def color(name: str) -> float:
        script = (
            "const probe = document.body.appendChild(document.createElement('i'));"
            "probe.style.color = `var(${arguments[0]})`; const value = getComputedStyle(probe).color;"
            "probe.remove(); return value"
        )
        return luminance(page.script(script, name))

    assert (color("--page") < 0.1) == (scheme == "dark")
    for ground in ("--page", "--card"):
        for ink in ("--ink", "--muted", "--good", "--bad", "--accent"):
            low, high = sorted((color(ground), color(ink)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (ground, ink)
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_all_controls_have_names_for_a_screen_reader(page: Page, serve: Callable, ruled: Path) -> None:
    address = serve(ruled)
    for view, selector in VIEWS.items():
        page.show(address, view=view)
        wait_until(lambda selector=selector: page.count(selector))
        nodes = page.browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        roles = [
            (node["role"]["value"], node.get("name", {}).get("value", "").strip())
            for node in nodes
            if not node["ignored"] and node.get("role", {}).get("value") in NAMED
        ]
        assert len(roles) > 4 and [role for role, name in roles if not name] == [], view
        assert "main" in {node.get("role", {}).get("value") for node in nodes if not node["ignored"]}


def test_the_keyboard_reaches_tokens_and_keeps_its_position(page: Page, serve: Callable, ruled: Path) -> None:
    keys = pytest.importorskip("selenium.webdriver").Keys
    page.show(serve(ruled), view="groups", coloring="entropy")
    wait_until(lambda: page.count(".tokens span"))
    for _ in range(60):
        active = page.browser.switch_to.active_element
        if active.get_attribute("role") == "slider":
            break
        active.send_keys(keys.TAB)
    assert active.get_attribute("role") == "slider"
    for key in (keys.HOME, keys.ARROW_RIGHT, keys.ARROW_RIGHT, keys.ARROW_LEFT):
        active.send_keys(key)
    assert active.get_attribute("aria-valuenow") == "1"
    assert page.text(".numbers dt") == "token 1"
    # A choice draws the view again; the cursor stays at its token.
    page.choose("color tokens by", "kl")
    wait_until(lambda: "coloring=kl" in page.browser.current_url)
    wait_until(lambda: page.attribute(".strip", "aria-valuenow") == "1")
    assert page.text(".numbers dt") == "token 1"
