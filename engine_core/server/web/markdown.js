/**
 * Markdown to DOM, for text that nobody vouches for.
 *
 * HTML in the text is shown as text, images become links (an image would tell its server who reads
 * it), links lead only to http, https and mailto, and DOMPurify lets nothing else through.
 */

import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";
import { el, icon } from "./dom.js";

const escapes = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const escapeHtml = (text) => text.replace(/[&<>"]/g, (sign) => escapes[sign]);

// Tags without attributes that people write in Markdown because it has no sign of its own for them.
const HARMLESS_TAG = /^<\/?(br|sub|sup|kbd)\s*\/?>$/i;

const marked = new Marked({
  gfm: true,
  renderer: {
    html({ text, block }) {
      if (HARMLESS_TAG.test(text.trim())) return text;
      if (!block) return escapeHtml(text);
      return `<p>${escapeHtml(text.trim()).replaceAll("\n", "<br>")}</p>`;
    },
    image({ href, text }) {
      return `<a href="${escapeHtml(href)}">${escapeHtml(text || href)}</a>`;
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code({ text, lang }) {
      const language = escapeHtml((lang ?? "").trim().split(/\s/)[0]);
      return `<pre><code title="${language}">${escapeHtml(text)}\n</code></pre>`;
    },
  },
});

const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "kbd",
    "li", "ol", "p", "pre", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["align", "href", "start", "title"],
  // The pattern is applied to every attribute that is not named as safe.
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

function toFragment(html) {
  const fragment = globalThis.DOMPurify.sanitize(html, ALLOWED);
  for (const link of fragment.querySelectorAll("a[href]")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const code of fragment.querySelectorAll("pre > code")) {
    const language = code.title;
    code.removeAttribute("title");
    const pre = code.parentElement;
    pre.tabIndex = 0;
    const copy = el(
      "button",
      { type: "button", class: "icon-button copy-code", "aria-label": "Copy this code", title: "Copy" },
      icon("copy"),
    );
    const block = el(
      "div",
      { class: "code" },
      el("div", { class: "code-bar" }, el("span", {}, language), copy),
    );
    pre.replaceWith(block);
    block.append(pre);
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = el("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

/** How many of the blocks can no longer change when more text comes. */
function settledCount(tokens) {
  // Where a block begins is decided by its first line. That of the last block may be incomplete and
  // may yet make it part of the one before ("2" becomes "2. second item"), but not of an earlier one.
  let blocks = 0;
  for (let index = tokens.length - 1; index >= 0; index -= 1) {
    if (tokens[index].type !== "space") blocks += 1;
    if (blocks === 2) return index;
  }
  return 0;
}

/**
 * Shows Markdown that is still being written. Only its last blocks are made anew when text comes,
 * so that a long answer costs no more a chunk than a short one, and what is selected above stays so.
 */
export class MarkdownStream {
  #element;
  #onBlocks;
  #text = "";
  #settled = 0;
  #tail = [];
  #frame = 0;
  #notBefore = 0;

  /** `onBlocks` is told the plain text of blocks that are complete; `onRender` that there is more. */
  constructor(element, { onBlocks = () => {}, onRender = () => {} } = {}) {
    this.#element = element;
    this.#onBlocks = onBlocks;
    this.onRender = onRender;
  }

  /** Adds text; it is seen in the next frame. */
  append(text) {
    this.#text += text;
    this.#frame ||= requestAnimationFrame(this.#tick);
  }

  /** Shows all text, as final. */
  finish() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.#render(true);
  }

  #tick = (now) => {
    this.#frame = 0;
    if (now < this.#notBefore) {
      this.#frame = requestAnimationFrame(this.#tick);
      return;
    }
    const start = performance.now();
    this.#render(false);
    // A block of tens of thousands of characters takes longer than a frame; the page stays usable.
    this.#notBefore = performance.now() + 3 * (performance.now() - start);
  };

  #render(final) {
    const text = this.#text.replace(/\r\n?/g, "\n");
    for (const node of this.#tail) node.remove();
    let tokens;
    try {
      tokens = marked.lexer(text.slice(this.#settled));
      // A definition of a link reaches back to blocks that are shown already.
      if (final && this.#settled && Object.keys(tokens.links).length) {
        tokens = marked.lexer(text);
        this.#element.replaceChildren();
      }
      const count = final ? tokens.length : settledCount(tokens);
      const settled = toFragment(marked.parser(tokens.slice(0, count)));
      const tail = toFragment(marked.parser(tokens.slice(count)));
      for (const token of tokens.slice(0, count)) this.#settled += token.raw.length;
      if (settled.textContent) this.#onBlocks(settled.textContent);
      this.#tail = [...tail.childNodes];
      this.#element.append(settled, tail);
    } catch {
      // Nested deeper than the parser's stack: shown as it was written.
      this.#tail = [el("p", { class: "plain-text" }, text.slice(this.#settled))];
      this.#element.append(...this.#tail);
    }
    this.onRender();
  }
}

/** Shows complete Markdown in an element. */
export function renderMarkdown(element, text) {
  element.replaceChildren();
  const stream = new MarkdownStream(element);
  stream.append(text);
  stream.finish();
}
