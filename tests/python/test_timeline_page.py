"""The timeline's page in a real browser: Debian's chromium, driven by selenium."""

import shutil

import pytest
import torch

import overspill
from overspill import timeline
from overspill.timeline.spans import Timeline, Unit

webdriver = pytest.importorskip("selenium.webdriver", reason="pip install selenium")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if not (CHROMIUM and DRIVER):
    pytest.skip("no browser: apt-get install chromium chromium-driver", allow_module_level=True)

from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

LAYERS, MS = 400, 10**6


@pytest.fixture(scope="module", params=["light", "dark"])
def browser(request, tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    arguments = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,900"]
    arguments.append(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    if request.param == "dark":
        arguments.append("--blink-settings=preferredColorScheme=0")
    for argument in arguments:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.scheme = request.param
    yield driver
    driver.quit()


class Page:
    def __init__(self, browser, path):
        self.browser = browser
        browser.get(f"file://{path}")

    def __call__(self, name):
        return self.browser.find_element("id", name)

    def said(self):
        return self("said").text

    def keys(self, *keys):
        ActionChains(self.browser).send_keys(*keys).perform()

    def at(self, lane, part, row=0.5):
        """The pointer at a part of a lane's width and height."""
        canvas = self(f"lane-{lane}")
        self.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
        size = canvas.size
        x, y = (part - 0.5) * size["width"], (row - 0.5) * size["height"]
        return ActionChains(self.browser).move_to_element_with_offset(canvas, int(x), int(y))

    def eval(self, text):
        return self.browser.execute_script(f"return {text}")

    def errors(self):
        return [entry for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]


def of_many_layers(path):
    """A step in which each layer is read, computed, computed backward and updated."""
    units = [
        Unit(
            f"layers.{i}",
            [f"model.layers.{i}.{part}.weight" for part in ("attention", "up", "down")],
            36,
            36,
            72,
            1,
        )
        for i in range(LAYERS)
    ]
    entries, now = [(0, "forward", -1, -1, -1)], 0
    for i in [*range(LAYERS), *reversed(range(LAYERS))]:
        if i == LAYERS - 1 and len(entries) > 4 * LAYERS:
            entries.append((now, "backward", -1, -1, -1))
        entries += [
            (now, "gathering", i, -1, -1),
            (now + 300 * MS, "gathered", i, -1, -1),
            (now + 310 * MS, "acquired", i, -1, -1),
        ]
        now += 1000 * MS
        entries.append((now - MS, "freed", i, -1, -1))
    entries.append((now, "stepped", -1, -1, -1))
    for i in range(LAYERS):
        entries.append((now, "scheduled", i, i, -1))
    for i in range(LAYERS):
        slot = i % 4
        for what in ("reading", "staged", "updating", "updated", "writing", "written"):
            entries.append((now, what, i, i, slot))
            now += 100 * MS
    timeline.write(Timeline.of(entries, [], units, 0, now + 500), path)


def test_four_hundred_layers(browser, tmp_path):
    of_many_layers(tmp_path / "many.html")
    page = Page(browser, tmp_path / "many.html")
    assert "1 step in" in page("title").text
    assert page.eval("lanes.length") >= 6
    assert page.eval("dark.matches") == (browser.scheme == "dark")
    assert page.eval("Number(document.body.dataset.drawn)") > 1000
    assert page.eval("Number(document.body.dataset.milliseconds)") > 0
    assert len(browser.find_elements("css selector", "#tree button")) > 5 * LAYERS
    cells = browser.find_elements("css selector", "#totals td")
    shares = [float(cell.text.split(",")[0].removesuffix(" s")) for cell in cells]
    assert sum(shares) == pytest.approx(page.eval("data.duration") / 1e9, abs=2e-3) and sum(shares) > 1000
    assert not page.errors()


def test_pointing_choosing_and_keys(browser, tmp_path):
    of_many_layers(tmp_path / "many.html")
    page = Page(browser, tmp_path / "many.html")
    page.at("caller", 0.001).perform()
    assert "layers." in page.said() and "forward" in page.said()
    page.keys(Keys.HOME)
    # A click on a buffer shows those of its layer alone, Escape all again.
    page.at("weights", 0.3, 0.4).click().perform()
    assert page.eval("chosen.size") == 1 and "weights are in memory" in page.said()
    pressed = browser.find_elements("css selector", "#tree button[aria-pressed=true]")
    assert [b.get_attribute("data-path").split(".")[:2] for b in pressed[:1]] == [["model", "layers"]]
    page.keys(Keys.ESCAPE)
    assert page.eval("chosen") is None
    # By the tree: a module, and one inside it.
    model = browser.find_element("css selector", "#tree button[data-path=model]")
    model.click()
    assert page.eval("chosen.size") == LAYERS and model.get_attribute("aria-pressed") == "true"
    page("find").send_keys("layers.37")
    assert page.eval("[...chosen]") == [37] and "layers.37: 1 unit, weights of 36 B" in page.said()
    page("find").clear()
    page("find").send_keys("nothing like it")
    assert 'no parameter\'s name contains "nothing like it"' in page.said()
    # Zoom and move.
    browser.execute_script("document.activeElement.blur()")
    whole = page.eval("until - from")
    page.keys("+", "+")
    assert page.eval("until - from") == pytest.approx(whole * 0.36)
    left = page.eval("from")
    page.keys(Keys.ARROW_RIGHT)
    assert page.eval("from") > left
    page.keys("-", Keys.HOME)
    assert page.eval("[from, until]") == [0, whole]
    # From bar to bar by the keyboard.
    browser.execute_script("document.getElementById('lane-coming').focus()")
    ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT).key_up(
        Keys.SHIFT
    ).perform()
    assert page.said().startswith("layers.1: weights are on their way, 36 B, for 300.00 ms")
    # By Ctrl and the wheel, around the pointer.
    browser.execute_script(
        "document.getElementById('lane-coming').dispatchEvent(new WheelEvent('wheel', {deltaY: -400, clientX: 500, "
        "ctrlKey: true, bubbles: true, cancelable: true}))"
    )
    assert page.eval("until - from") < whole
    assert not page.errors()


def test_a_step_of_smollm2(browser, smollm2, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16)
    engine, *_ = overspill.initialize(
        model,
        {
            "budget": {"host": "600MiB", "nvme": [str(tmp_path)]},
            "optimizer": {"type": "AdamW", "lr": 1e-5},
        },
    )
    ids = torch.randint(0, 40_000, (1, 64))

    def step():
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    step()
    step()
    with engine.timeline(tmp_path / "step.html"):
        step()
    engine.close()
    page = Page(browser, tmp_path / "step.html")
    spans = page.eval("data.lanes.find((lane) => lane.key === 'caller').spans")
    whole = page.eval("data.duration")
    assert sum(end - begin for begin, end, *_ in spans) == pytest.approx(whole, rel=0.02)
    names = {page.eval(f"data.units[{unit}].name") for _, _, _, unit, *_ in spans if unit >= 0}
    assert len([name for name in names if name.startswith("model.layers.")]) >= 25
    assert page.eval("Number(document.body.dataset.drawn)") > 100
    browser.find_element("css selector", "#tree button[data-path='model']").click()
    assert page.eval("chosen.size") > 25
    assert not page.errors()
    assert page.eval("data.totals.compute") > 0
