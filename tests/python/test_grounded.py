"""examples/grounded: what the page shows is what the engine counts."""

import copy
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import launch
import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/grounded"
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield importlib.import_module("run")
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in ("run", "slices"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The command, as a newcomer types it."""
    path = tmp_path_factory.mktemp("grounded") / "page.html"
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "run.py"), str(path)],
        env=launch.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the engine's own counts are the same in all 48 cases" in done.stdout
    return path


def shown(page):
    return json.loads(page.read_text().split('id="data">')[1].split("</script>")[0])


def test_the_page_has_all_models_ranks_and_stages(page):
    found = shown(page)
    assert {each["model"] for each in found} == {"MLP", "AlexNet", "ResNet", "Transformer"}
    assert {each["ranks"] for each in found} == {1, 2, 4}
    for each in found:
        for stage, layers in enumerate(each["held"]):
            for layer, ranks in zip(each["layers"], layers, strict=True):
                for rank, (weights, gradients, states) in enumerate(ranks):
                    mine = [
                        rank * layer["numbers"] // each["ranks"],
                        (rank + 1) * layer["numbers"] // each["ranks"],
                    ]
                    whole = [0, layer["numbers"]]
                    assert states == (mine if stage >= 1 else whole)
                    assert gradients == (mine if stage >= 2 else whole)
                    assert weights == (mine if stage >= 3 else whole)


def test_a_count_that_differs_is_told(example):
    parameters = {"layer": [("weight", [64, 64])]}
    (its,) = example.layers_of({"layers": parameters}, 2)
    found = {"layers": parameters, "ranks": []}
    for rank in range(2):
        weights, gradients, states = example.slices.held(its, 3, rank, 2).bytes()
        found["ranks"].append(
            {"weights": {"layer": weights}, "states": {"layer": states}, "gradients": gradients}
        )
    example.check("MLP", 3, 2, found)
    for change in (
        lambda counted: counted["weights"].update(layer=1),
        lambda counted: counted["states"].update(layer=1),
        lambda counted: counted.update(gradients=1),
    ):
        wrong = copy.deepcopy(found)
        change(wrong["ranks"][1])
        with pytest.raises(example.Differs, match="rank 1 of 2"):
            example.check("MLP", 3, 2, wrong)


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no browser: apt-get install chromium chromium-driver")
def test_the_page_in_a_browser(page, tmp_path):
    webdriver = pytest.importorskip("selenium.webdriver", reason="pip install selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'p'}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        browser.get(f"file://{page}")
        for its in shown(page):
            for stage in range(4):
                for name, value in (("model", its["model"]), ("ranks", its["ranks"]), ("stage", stage)):
                    browser.execute_script(
                        "const e = document.getElementById(arguments[0]); e.value = arguments[1]; e.onchange()",
                        name,
                        str(value),
                    )
                cells = browser.execute_script(
                    "return [...document.querySelectorAll('#rows td')].map((e) => Number(e.dataset.bytes))"
                )
                expected = [
                    (w[1] - w[0]) * 4 + (s[1] - s[0]) * 8 for ranks in its["held"][stage] for w, _, s in ranks
                ]
                assert cells == expected
        # Through the step: what is held in backward of the last layer has its gradient too, and at the end none has.
        said = set()
        for _ in range(int(browser.find_element("id", "moment").get_attribute("max"))):
            browser.find_element("id", "next").click()
            said.add(browser.find_element("css selector", "#now b").text.split(": ")[1])
        assert {"Forward", "Backward", "The update", "After the step"} <= said
        assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    finally:
        browser.quit()
