/**
 * Markdown to DOM, for text that nobody vouches for.
 *
 * HTML in the text is shown as text, images become links (an image would tell its server who reads
 * it), links lead only to http, https and mailto, and DOMPurify lets nothing else through.
 */

import { Marked, Tokenizer } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";
import { el, icon } from "./dom.js";
import { enrich } from "./rich.js";

const escapes = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const escapeHtml = (text) => text.replace(/[&<>"]/g, (sign) => escapes[sign]);

// Tags without attributes that people write in Markdown because it has no sign of its own for them.
const HARMLESS_TAG = /^<\/?(br|sub|sup|kbd)\s*\/?>$/i;

const CLOSERS = { "\\(": "\\)", "\\[": "\\]", $$: "$$" };
const LONGEST_FORMULA = 5000;
const INLINE_FORMULA = /\\\([^]{1,2000}?\\\)|\\\[[^]{1,2000}?\\\]|\$\$[^]{1,2000}?\$\$/g;

// Whether the text is still being written, may have formulas, and has one without an end yet.
let isStreaming = false;
let hasFormulas = false;
let hasOpenFormula = false;

/**
 * The formula with which a text begins: what was written, with its signs, and its kind. One that is
 * still being written reaches to the end of the text. A blank line ends what is no formula.
 */
function formulaAt(text) {
  const closer = CLOSERS[text.slice(0, 2)];
  if (!closer) return null;
  const near = text.slice(0, LONGEST_FORMULA);
  const end = near.indexOf(closer, 2);
  const source = end < 0 ? near : near.slice(0, end + 2);
  if (/\n[ \t]*\n/.test(source) || (end > 0 && !source.slice(2, -2).trim())) return null;
  if (end > 0) return { source, kind: closer === "\\)" ? "inline" : "display" };
  if (!isStreaming || near.length < text.length) return null;
  hasOpenFormula = true;
  return { source, kind: "open" };
}

/** As formulaAt, of a formula that has its lines to itself; `raw` is all of them. */
function formulaLinesAt(text) {
  const indent = /^ {0,3}(?=\\\[|\$\$)/.exec(text)?.[0];
  if (indent === undefined) return null;
  const rest = text.slice(indent.length);
  const found = formulaAt(rest);
  const end = found && /^[ \t]*(?:\n|$)/.exec(rest.slice(found.source.length));
  return end ? { raw: indent + found.source + end[0], ...found } : null;
}

/** Where in the paragraph with which a text begins a formula has its lines to itself; or -1. */
function formulaLinesIn(text) {
  const line = /\n(?:[ \t]*(\n)| {0,3}(?:\\\[|\$\$))/g;
  for (let tries = 0; hasFormulas && tries < 50; tries += 1) {
    const found = line.exec(text);
    if (!found || found[1]) break;
    if (formulaLinesAt(text.slice(found.index + 1))) return found.index + 1;
  }
  return -1;
}

// The kind travels through the sanitiser as a title, which nothing in Markdown gives to code.
const formulaHtml = ({ source, kind }) => `<code title="${kind}">${escapeHtml(source)}</code>`;

const formulas = [
  {
    name: "formula",
    level: "inline",
    start: (text) => text.indexOf("$$"),
    tokenizer(text) {
      const found = formulaAt(text);
      return found && { type: "formula", raw: found.source, ...found };
    },
    renderer: formulaHtml,
  },
  {
    // So that a line of it that begins with "-" begins no list.
    name: "formulaLines",
    level: "block",
    start: formulaLinesIn,
    tokenizer(text) {
      const found = formulaLinesAt(text);
      return found && { type: "formulaLines", ...found };
    },
    renderer: (token) => `<p>${formulaHtml(token)}</p>\n`,
  },
];

let masked = { text: "", mask: "", result: "" };

/** A mask of a text, and of what comes before it, with the text's formulas covered. */
function maskFormulas(text, mask) {
  // Asked for at each sign of a text: what is left of it has the same formulas.
  if (mask !== masked.mask || !masked.text.endsWith(text)) {
    const before = mask.length - text.length;
    const parts = [];
    let at = 0;
    for (const { index, 0: found } of text.matchAll(INLINE_FORMULA)) {
      parts.push(mask.slice(before + at, before + index), "a".repeat(found.length));
      at = index + found.length;
    }
    const result = mask.slice(0, before) + parts.join("") + mask.slice(before + at);
    masked = { text, mask, result };
  }
  return masked.result;
}

const DEEPEST_LIST = 40;
// Whether an address ends it is asked at each of its signs.
const LONG_WORD = /^(?:[A-Za-z0-9.#%&'+/=?{|}^-]|\$(?!\$)){256,}/;
let listDepth = 0;

const marked = new Marked({
  gfm: true,
  extensions: formulas,
  tokenizer: {
    // A line of "=" in a formula makes no heading of what comes before.
    lheading(text) {
      const end = formulaLinesIn(text);
      return end < 0 ? false : Tokenizer.prototype.lheading.call(this, text.slice(0, end));
    },
    // Rows are filled up to the columns of the first one: a few of many columns and many of a few
    // would be millions of cells.
    table(text) {
      const found = this.rules.block.table.exec(text);
      const cells = found && found[1].split("|").length * (found[3] ?? "").split("\n").length;
      return cells > found?.[0].length ? undefined : false;
    },
    // Each level reads again what is in it.
    list(text) {
      if (listDepth === DEEPEST_LIST) return undefined;
      listDepth += 1;
      try {
        return Tokenizer.prototype.list.call(this, text);
      } finally {
        listDepth -= 1;
      }
    },
    inlineText(text) {
      const word = LONG_WORD.exec(text)?.[0];
      return word ? { type: "text", raw: word, text: word, escaped: false } : false;
    },
    // What stands in a formula ends no emphasis. Each sign costs a look at the whole paragraph.
    emStrong(text, mask, before) {
      if (!hasFormulas || mask.length > LONGEST_FORMULA || !/^[*_]/.test(text)) return false;
      return Tokenizer.prototype.emStrong.call(this, text, maskFormulas(text, mask), before);
    },
  },
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

/** The elements of Markdown, their text, and what a library will make of some of them. */
function toFragment(html) {
  const fragment = globalThis.DOMPurify.sanitize(html, ALLOWED);
  const formulas = [];
  const blocks = [];
  for (const link of fragment.querySelectorAll("a[href]")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const code of fragment.querySelectorAll("pre > code")) {
    const language = code.title;
    code.removeAttribute("title");
    blocks.push({ node: code, language });
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
  for (const code of fragment.querySelectorAll("code[title]")) {
    const source = code.textContent;
    const node = el("span", { class: `formula ${code.title}` }, source);
    code.replaceWith(node);
    if (code.title === "open") continue;
    formulas.push({ node, tex: source.slice(2, -2), isDisplay: code.title === "display" });
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = el("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  return { fragment, text: fragment.textContent, enrich: () => enrich(formulas, blocks) };
}

function lex(text, streaming) {
  isStreaming = streaming;
  hasFormulas = /\\[([]|\$\$/.test(text);
  hasOpenFormula = false;
  return marked.lexer(text);
}

// At the end of a text that is still being written: half of a sign that will mean something else.
const HALF_SIGN = /(?<!\\)\\$|(?<!\$)\$$|(?<=(?:^|\n) {0,3})`{1,2}$/;

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
    let text = this.#text.replace(/\r\n?/g, "\n");
    if (!final) text = text.replace(HALF_SIGN, "");
    for (const node of this.#tail) node.remove();
    let tokens;
    try {
      tokens = lex(text.slice(this.#settled), !final);
      // A definition of a link reaches back to blocks that are shown already.
      if (final && this.#settled && Object.keys(tokens.links).length) {
        tokens = lex(text, false);
        this.#element.replaceChildren();
        this.#settled = 0;
      }
      const count = final ? tokens.length : settledCount(tokens);
      const tail = toFragment(marked.parser(tokens.slice(count)));
      tokens = tokens.slice(0, count);
      const end = tokens.reduce((at, { raw }) => at + raw.length, this.#settled);
      // Where a block is complete, a formula without an end is none.
      if (hasOpenFormula && count) tokens = lex(text.slice(this.#settled, end), false);
      const settled = toFragment(marked.parser(tokens));
      this.#settled = end;
      if (settled.text) this.#onBlocks(settled.text);
      this.#tail = [...tail.fragment.childNodes];
      this.#element.append(settled.fragment, tail.fragment);
      settled.enrich();
      tail.enrich();
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
