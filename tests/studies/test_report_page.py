"""Tests the page of a report in a browser: it shows the verdict at once, and it requests nothing."""

import pytest

from pretrainax.studies.report import write_report
from tests.support.browser import Browser
from tests.support.made_studies import whole_study

SIZES = """{
    bottom: document.querySelector(".verdict").getBoundingClientRect().bottom,
    text: document.querySelector(".verdict").innerText,
    width: document.documentElement.scrollWidth,
    pictures: [...document.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect().width),
}"""


@pytest.mark.parametrize("width, height", [(1400, 800), (420, 800)])
def test_the_verdict_is_visible_without_scrolling_and_the_page_needs_no_network(width, height, tmp_path):
    sentence = write_report(str(tmp_path), *whole_study())
    report = tmp_path / "report.html"
    with Browser(tmp_path / "profile") as browser:
        page = browser.open(report, width, height, SIZES)
    assert page.requests == [report.as_uri()] and page.errors == []
    assert page.value["text"] == sentence and page.value["bottom"] < height
    assert page.value["width"] <= width and max(page.value["pictures"]) <= width
    (tmp_path / "screenshot.png").write_bytes(page.screenshot)
