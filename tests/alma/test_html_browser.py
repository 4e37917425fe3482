"""The report page in Chromium: figures are drawn, and their hover texts and menu tell the numbers."""

import shutil

import pytest

from alma.report.html.page import write_page
from alma.report.results import find_runs

from .synthetic import drifting, image_run, lm_run

webdriver = pytest.importorskip("selenium.webdriver")
WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
BINARIES = [shutil.which(name) for name in ("chromium", "chromedriver")]
pytestmark = pytest.mark.skipif(None in BINARIES, reason="needs Debian's chromium and chromium-driver")
EVIL = "</script><b onload=alert(1)>&amp;%{x}"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """The page about image runs and text that drifts, in a window that has all figures."""
    place = tmp_path_factory.mktemp("runs")
    image_run(place / "ens", [0.4, 0.3, 0.3, 0.25], size=16, learner="ens", members=5)
    image_run(place / "gmoe", [0.4, 0.4, 0.4, 0.15], w=2, learner="gmoe")
    image_run(place / "evil", [0.6, 0.6, 0.6, 0.6], learner=EVIL)
    run = lm_run(place / "text", [30, 20], learner="gmoe", experts=[2, 3], stream="text")
    drifting(run, lambda t, j: 10 * t + j if t else 5e4)
    path = place / "report.html"
    write_page(find_runs([place]), path, [f"no rows yet: {EVIL}"])
    options = webdriver.ChromeOptions()
    options.binary_location, driver = BINARIES
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,6000"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chromium = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        chromium.get(path.as_uri())
        missing = "return document.querySelectorAll('.plot:not(.js-plotly-plot)').length"
        WebDriverWait(chromium, 60).until(lambda _: chromium.execute_script(missing) == 0)
        yield chromium
    finally:
        chromium.quit()


def test_no_errors_no_markup_from_records_and_pictures_of_drift(browser):
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"] == []
    assert browser.execute_script("return document.querySelectorAll('[onload], main b, .plot a').length") == 0
    assert len(browser.execute_script("return [...document.images].map(e => e.naturalWidth)")) == 4


def test_hover_and_menu_tell_the_numbers(browser):
    hover = """const plot = document.querySelector('.plot');
        const number = plot._fullData.findIndex(e => e.name.startsWith('gmoe'));
        Plotly.Fx.hover(plot, [{curveNumber: number, pointNumber: 0}]);"""
    browser.execute_script(hover)
    lines = "return [...document.querySelectorAll('.hoverlayer tspan')].map(e => e.textContent).join(' ')"
    shown = WebDriverWait(browser, 5).until(lambda _: browser.execute_script(lines))
    # Untrained (90%) at t = 1, then 40 at t = 2 and 3, then 15.
    assert "average error (%): 46.25" in shown
    choose = """const plot = document.querySelector('.plot'), { buttons } = plot.layout.updatemenus[0];
        return Plotly.update(plot, ...buttons.find(e => e.label.startsWith('CER / memory')).args) && null;"""
    browser.execute_script(choose)  # as a click on the entry does
    points = "return document.querySelector('.plot')._fullData.map(e => [e.name, e.x[0], e.y[0]])"
    (point,) = ((x, y) for name, x, y in browser.execute_script(points) if name.startswith("ens"))
    assert point == pytest.approx((160 * 5, 1.25))
