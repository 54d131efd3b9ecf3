"""The pages in a real browser: drawn, without an error, without network, and with the figures of the JSON."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support_faulty_replay import watched_replay
from support_programs import needs

from kvtier.cli import main
from kvtier.tools.whatif.page import Series, chart_of, page
from kvtier.tools.whatif.run_page import PHASE_NAMES

OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage")
DRAWN = """
const plots = [...document.querySelectorAll('.js-plotly-plot')];
const shapes = {bar: '.bars .point path', lines: '.scatterlayer .js-line', markers: '.scatterlayer .point'};
return plots.map(plot => plot._fullData.map(series => ({
    name: series.name, x: [...series.x], y: [...series.y], points: series.customdata && [...series.customdata],
    row: plot.layout.annotations[(series.yaxis.slice(1) || 1) - 1].text,
    drawn: plot.querySelectorAll(shapes[series.type === 'bar' ? 'bar' : series.mode]).length,
})));
"""
TEXT = "getComputedStyle(document.querySelector('.xtick text')).fill"
BACK = "getComputedStyle(document.body).backgroundColor"
FETCH = "const got = new XMLHttpRequest(); got.open('GET', 'http://127.0.0.1:9/', false); got.send();"
LOADED = (
    "return performance.getEntriesByType('resource').map(entry => entry.name).filter(name => /^https?:/.test(name));"
)


@pytest.fixture(scope="module")
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    needs(request, "browser", "chromium", "chromedriver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    started.set_page_load_timeout(240)
    try:
        yield started
    finally:
        started.quit()


@pytest.fixture
def browser(driver: Any) -> Any:
    """The browser on an empty page, with an empty log."""
    driver.get("about:blank")
    driver.get_log("browser")
    return driver


def drawn(browser: Any, path: Path) -> list[list[dict[str, Any]]]:
    """The plots of a page as the browser drew them. The page must hold all it needs and log nothing."""
    browser.get(path.as_uri())
    plots: list[list[dict[str, Any]]] = browser.execute_script(DRAWN)
    assert browser.get_log("browser") == []
    assert browser.execute_script(LOADED) == []
    assert all(series["drawn"] for plot in plots for series in plot), "a series was not drawn"
    return plots


def held(browser: Any) -> dict[str, Any]:
    """The figures in the page."""
    found: dict[str, Any] = json.loads(browser.execute_script("return document.getElementById('figures').textContent"))
    return found


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = []
    for session in [number % 23 for number in range(120)]:
        turn = session % 5
        ids = [session % 9, *range(100 * session, 100 * session + 3 + turn)]
        lines.append({"input_length": 64 + 16 * turn, "output_length": 1, "hash_ids": ids})
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def run(*arguments: object) -> dict[str, Any]:
    """The figures that a command wrote to the file before its last argument."""
    done = CliRunner().invoke(main, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    figures: dict[str, Any] = json.loads(Path(str(arguments[arguments.index("--json") + 1])).read_text())
    return figures


@pytest.mark.browser
def test_the_page_of_advise_shows_the_figures_of_its_json(browser: Any, trace: Path, tmp_path: Path) -> None:
    prices = ("--price-cpu", 4, "--price-disk", 0.1, "--policy", "arc")
    found = run("advise", "--trace", trace, *prices, "--json", tmp_path / "a.json", "--html", tmp_path / "a.html")
    rates, saved = drawn(browser, tmp_path / "a.html")
    points = found["lru"]
    assert [series["name"] for series in rates] == ["lru", "arc"]
    assert rates[0]["y"] == [point["hit_rate"] for point in points]
    assert rates[0]["x"] == [point["bytes"] / (1 << 30) for point in points]
    assert rates[1]["y"] == [point["hit_rate"] for point in found["shadows"]["arc"]]
    assert [series["y"] for series in saved] == [
        [point[f"{name}_seconds_saved"] for point in points] for name in ("cpu", "disk")
    ]
    assert held(browser) == found
    assert "The next 1,000 go to" in browser.find_element("tag name", "body").text


@pytest.mark.browser
def test_the_page_of_simulate_shows_the_figures_of_its_json(browser: Any, trace: Path, tmp_path: Path) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text("tiers: [{type: gpu}, {type: cpu, cpu_bytes_to_use: 64KiB}]\n")
    files = ("--json", tmp_path / "s.json", "--html", tmp_path / "s.html")
    found = run("simulate", stack, "--trace", trace, "--block-bytes", "4KiB", "--set", "cpu.blocks=8,64", *files)
    hits, saved, *runs = drawn(browser, tmp_path / "s.html")
    titles = ["cpu.blocks=8", "cpu.blocks=64"]
    assert {series["name"]: (series["x"], series["y"]) for series in hits} == {
        name: (titles, [variant["hit_tokens"][name] for variant in found["variants"]]) for name in ("gpu", "cpu")
    }
    assert saved[0]["y"] == [variant["time_to_first_token"]["saved_seconds"] for variant in found["variants"]]
    assert held(browser) == found
    for run_drawn, variant in zip(runs, found["variants"], strict=True):
        assert_drawn(run_drawn, variant["run"], variant["hit_tokens"], variant["tiers"])


def assert_drawn(
    series: list[dict[str, Any]], run: dict[str, Any], hits: dict[str, int], tiers: dict[str, Any]
) -> None:
    """A run's chart shows the figures of its JSON, and these add up to those of the whole run."""

    def row(start: str) -> dict[str, list[Any]]:
        return {each["name"]: each["y"] for each in series if each["row"].startswith(start)}

    tokens = row("Prompt tokens")
    assert tokens == run["tokens"]
    assert {name: sum(steps) for name, steps in tokens.items() if name != "computed"} == {
        name: count for name, count in hits.items() if count
    }
    moved = {each["name"]: each["points"] for each in series if each["row"].startswith("Bytes moved")}
    for name, tier in tiers.items():
        for what in ("load", "store"):
            assert sum(moved.get(f"{name} {what}s", [])) == tier[f"{what}_bytes"]
        evicted = row("Blocks evicted").get(f"{name} evicted", [0])
        assert sum(evicted) == tier["evictions"]
        (held_bytes,) = [
            each["y"] for each in series if each["name"] == name and each["row"].startswith(f"{name}: holds")
        ]
        used = run["tiers"][name]["used_bytes"]
        assert [round(value * used[-1] / held_bytes[-1]) for value in held_bytes] == used
        assert used[-1] == tier["used_bytes"]
    lost = {f"{name} {what}": steps for name, tier in run["tiers"].items() for what, steps in tier["lost"].items()}
    assert row("Blocks evicted") == lost
    assert row("Blocks on their way") == ({"on their way": run["backlog"]} if any(run["backlog"]) else {})
    assert_phases(row("Where the time"), run)
    assert_events([each for each in series if each["row"].startswith("Breakers")], run)
    marks = [each for each in series if each["row"].startswith("Requests")]
    shown = {
        point: milliseconds for each in marks for point, milliseconds in zip(each["points"], each["y"], strict=True)
    }
    assert [shown[index] for index in range(len(run["requests"]))] == pytest.approx(
        [1e3 * request["first_token_seconds"] for request in run["requests"]]
    )


def assert_phases(shown: dict[str, list[float]], run: dict[str, Any]) -> None:
    """Means over the requests that ended in each interval, in one unit."""
    ended = run["requests_ended"]
    means = {
        PHASE_NAMES.get(name, name): [time / count if count else 0.0 for time, count in zip(times, ended, strict=True)]
        for name, times in run["phases"].items()
    }
    scale = 1.0 if max(map(max, means.values())) >= 10 else 1e3
    assert shown.keys() == means.keys()
    for name, values in means.items():
        assert shown[name] == pytest.approx([scale * value for value in values])


def assert_events(series: list[dict[str, Any]], run: dict[str, Any]) -> None:
    """Each span of a breaker or a stall from its beginning to its end, and each interval in which blocks failed."""
    spans: dict[str, list[float]] = {}
    for span in run["spans"]:
        spans.setdefault(f"{span['tier']}: {span['what']}", []).extend((span["begin"], span["end"]))
    faults = {
        f"{name}: blocks {what}": [count for count in steps if count]
        for name, tier in run["tiers"].items()
        for what, steps in tier["faults"].items()
    }
    assert {each["name"]: each["points"] for each in series if each["points"]} == faults
    drawn_spans = {each["name"]: [at for at in each["x"] if at is not None] for each in series if not each["points"]}
    assert drawn_spans.keys() == spans.keys()
    for name, ends in spans.items():
        assert drawn_spans[name] == pytest.approx(ends)


CLICK = """
const [index] = arguments, plot = document.querySelector('.js-plotly-plot');
plot.emit('plotly_click', {points: [{customdata: index}]});
return document.querySelector('.request').innerText;
"""


@pytest.mark.browser
def test_the_page_of_replay_shows_the_figures_of_its_json(browser: Any, trace: Path, tmp_path: Path) -> None:
    files = ("--json", tmp_path / "r.json", "--html", tmp_path / "r.html")
    sizes = ("--cpu-blocks", 16, "--fs-blocks", 40, "--gpu-blocks", 24, "--block-bytes", "4KiB")
    found = run("replay", "--trace", trace, *sizes, *files)
    (series,) = drawn(browser, tmp_path / "r.html")
    tiers = {name: tier for name, tier in found["tiers"].items() if name != "gpu"}
    assert_drawn(series, found["run"], found["hit_tokens"], tiers)
    assert sum(sum(tier["lost"].get("evicted", [])) for tier in found["run"]["tiers"].values()) > 0
    assert held(browser) == found


@pytest.mark.browser
def test_a_click_on_a_request_opens_its_path(browser: Any, trace: Path, tmp_path: Path) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text("tiers: [{type: gpu}, {type: cpu, cpu_bytes_to_use: 1MiB}]\n")
    files = ("--json", tmp_path / "s.json", "--html", tmp_path / "s.html")
    found = run("simulate", stack, "--trace", trace, "--block-bytes", "4KiB", "--gpu-blocks", 12, *files)
    drawn(browser, tmp_path / "s.html")
    requests = found["variants"][0]["run"]["requests"]
    slowest = max(requests, key=lambda request: request["first_token_seconds"])
    assert f"Request {slowest['number']}," in browser.find_element("class name", "request").text
    index = next(index for index, request in enumerate(requests) if any(part[0] == "cpu" for part in request["parts"]))
    shown = browser.execute_script(CLICK, index)
    assert f"Request {requests[index]['number']}," in shown
    for source, tokens in requests[index]["parts"]:
        assert f"{source}: {tokens} tokens" in shown
    assert "cpu → gpu" in shown
    assert browser.get_log("browser") == []


LONELIEST_MARK = """
const plot = document.querySelector('.js-plotly-plot'), layout = plot._fullLayout, marks = [];
for (const series of plot._fullData) {
  const axis = name => layout[name[0] + 'axis' + name.slice(1)];
  const [x, y] = [axis(series.xaxis), axis(series.yaxis)];
  if (!layout.annotations[(series.yaxis.slice(1) || 1) - 1].text.startsWith('Requests')) continue;
  series.customdata.forEach((index, at) => marks.push(
      {index, x: x._offset + x.d2p(series.x[at]), y: y._offset + y.d2p(series.y[at])}));
}
const apart = mark => Math.min(...marks.filter(other => other !== mark).map(
    other => Math.hypot(other.x - mark.x, other.y - mark.y)));
const shown = document.querySelector('.request').innerText;
const others = marks.filter(mark => !shown.includes(`Request ${arguments[0][mark.index]},`));
const mark = others.reduce((one, other) => apart(other) > apart(one) ? other : one);
plot.scrollIntoView({block: 'end'});
const at = plot.getBoundingClientRect();
return {index: mark.index, x: Math.round(at.x + mark.x), y: Math.round(at.y + mark.y)};
"""


LABELS = "return [...document.querySelectorAll('.yaxislayer-above text')].map(text => text.textContent)"


@pytest.mark.browser
def test_a_replay_that_goes_wrong_shows_when_and_how_and_a_mouse_opens_a_path(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.actions.action_builder import ActionBuilder
    from selenium.webdriver.support.wait import WebDriverWait  # here, because only this lane has a browser

    watched = watched_replay(tmp_path, 300)
    found, run_of_it = watched.to_json(), watched.to_json()["run"]
    whats = {span["what"] for span in run_of_it["spans"]}
    assert any("breaker" in what for what in whats), whats
    assert any("ended" in what for what in whats), whats
    assert run_of_it["tiers"]["fs"]["faults"].keys() == {"failed", "corrupt", "late"}
    assert "dropped: tier_down" in run_of_it["tiers"]["fs"]["lost"]
    (tmp_path / "run.html").write_text(watched.to_html())
    (series,) = drawn(browser, tmp_path / "run.html")
    tiers = {name: tier for name, tier in found["tiers"].items() if name != "gpu"}
    assert_drawn(series, run_of_it, found["hit_tokens"], tiers)
    assert held(browser) == json.loads(json.dumps(found))

    named = browser.execute_script(LABELS)
    assert {each["name"] for each in series if each["row"].startswith("Breakers")} <= set(named), "a line has no name"

    numbers = [request["number"] for request in run_of_it["requests"]]
    mark = browser.execute_script(LONELIEST_MARK, numbers)
    mouse = ActionBuilder(browser)
    mouse.pointer_action.move_to_location(mark["x"], mark["y"]).pause(0.3).click()
    mouse.perform()
    clicked = f"Request {numbers[mark['index']]},"
    WebDriverWait(browser, 60).until(lambda page: clicked in page.find_element("class name", "request").text)
    assert browser.get_log("browser") == []


@pytest.mark.browser
def test_text_is_read_well_on_a_light_and_on_a_dark_page(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page("page", [chart_of("title", "seconds", "blocks", [Series("one", [1, 2], [3, 4])])], {}))
    shades = {}
    for scheme in ("dark", "light"):
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
        drawn(browser, path)
        colours = [browser.execute_script(f"return {each}") for each in (TEXT, BACK)]
        shades[scheme] = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert shades["dark"][0] - shades["dark"][1] > 500
    assert shades["light"][1] - shades["light"][0] > 500


@pytest.mark.parametrize("command", ["replay", "simulate"])
def test_without_a_page_a_run_is_not_in_the_json(trace: Path, tmp_path: Path, command: str) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text("tiers: [{type: gpu}, {type: cpu, cpu_bytes_to_use: 64KiB}]\n")
    options = (command, stack, "--trace", trace, "--block-bytes", "4KiB", "--json", tmp_path / "figures.json")
    without, found = run(*options), run(*options, "--html", tmp_path / "page.html")
    if command == "simulate":
        (without,), (found,) = without["variants"], found["variants"]
    assert found.keys() - without.keys() == {"run"}
    for name in ("requests", "prompt_tokens", "hit_tokens", "blocks", "block_references", "block_hits"):
        assert found[name] == without[name]
    if command == "simulate":
        assert {**found, "run": None, "seconds": None} == {**without, "run": None, "seconds": None}


@pytest.mark.parametrize("command", ["replay", "simulate"])
@pytest.mark.parametrize("missing", ["folder", "library"])
def test_a_page_that_cannot_be_written_is_refused_before_the_run(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, missing: str
) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text("tiers: [{type: gpu}, {type: cpu, cpu_bytes_to_use: 64KiB}]\n")
    at = tmp_path / ("no/page.html" if missing == "folder" else "page.html")
    if missing == "library":
        monkeypatch.setitem(sys.modules, "plotly", None)
        monkeypatch.setattr("kvtier.tools.whatif.page.find_spec", lambda name: None)
    for started in ("kvtier.tools.replay.run.Replay.__init__", "kvtier.tools.whatif.simulate.Simulation.__init__"):
        monkeypatch.setattr(started, lambda *args: pytest.fail("the run began"))
    done = CliRunner().invoke(main, [command, str(stack), "--trace", str(trace), "--html", str(at)])
    assert done.exit_code == 2
    (line,) = done.output.splitlines()
    assert line.startswith("error: --html: " + ("cannot write" if missing == "folder" else "needs a plotting library"))


@pytest.mark.browser
@pytest.mark.parametrize("fault", ["throw new Error('wrong')", FETCH])
def test_a_fault_of_a_page_is_seen(browser: Any, tmp_path: Path, fault: str) -> None:
    path = tmp_path / "page.html"
    path.write_text(page("faulty", [], {}).replace("</body>", f"<script>{fault}</script></body>"))
    with pytest.raises(AssertionError):
        drawn(browser, path)


def test_text_of_a_page_is_text() -> None:
    made = page("<b>", ["</p><script>alert(1)</script>"], {"title": "</script>"})
    assert "<b>" not in made
    assert "<script>alert(1)" not in made
    assert '"\\u003c/script>"' in made


@pytest.mark.parametrize("text", ["<!--<script>", "</script>", "<!-- <script", "<SCRIPT>", "<!DOCTYPE", "&lt;<"])
def test_no_text_of_a_run_begins_a_tag_in_the_page(text: str) -> None:
    """After `<!--<script>` a browser reads on past the end of the script, to the end of the page."""
    given = {"sessions": [text], text: [1]}
    whole = page("a run", ["text"], given)
    figures = whole.partition('id="figures">')[2].partition("</script>")[0]
    assert "<" not in figures
    assert json.loads(figures) == given
