"""Actions of the tests in the web page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


def expect(subject: Any) -> Any:
    """Playwright's assertion, which waits; imported late, as it may not be installed."""
    from playwright.sync_api import expect

    return expect(subject)


def ask(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def answers(page: Page) -> Locator:
    return page.locator(".answer:not(.streaming)")


def in_answer(page: Page, text: str) -> Locator:
    """The paragraph of an answer with this text, not its copy that a screen reader reads."""
    return page.locator(".prose").get_by_text(text, exact=True)


def ask_and_wait(page: Page, text: str) -> None:
    before = answers(page).count()
    ask(page, text)
    expect(answers(page)).to_have_count(before + 1)
