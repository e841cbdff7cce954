/** Formulas and coloured code, by libraries that are loaded when an answer first needs them. */

import "./vendor/purify.min.js";
import { el } from "./dom.js";

const LONGEST_CODE = 50_000;
// Some languages' patterns take the square of a line's length.
const LONG_LINE = /.{1001}/;
// The page answers to its user at least this often.
const BREAK_AFTER_MS = 100;
const MOST_KEPT = 500;
const PLAIN = /^(?:|text|txt|plain|plaintext|none|output)$/i;

// These would lead or load elsewhere, or mark elements of the page. KaTeX is told not to trust them
// either, but would show the rest of the formula in their place.
const REFUSED = /\\(?:href|url|includegraphics|html(?:Class|Id|Style|Data))(?![a-z])/i;

const FORMULA = {
  ALLOWED_TAGS: [
    "span", "svg", "path", "line", "math", "semantics", "annotation", "menclose", "mfrac", "mi",
    "mlabeledtr", "mn", "mo", "mover", "mpadded", "mphantom", "mroot", "mrow", "ms", "mspace",
    "msqrt", "mstyle", "msub", "msubsup", "msup", "mtable", "mtd", "mtext", "mtr", "munder",
    "munderover", "#text",
  ],
  FORBID_ATTR: ["href", "id", "name", "src", "style", "xlink:href"],
  RETURN_DOM_FRAGMENT: true,
};
const CODE = {
  ALLOWED_TAGS: ["span", "#text"],
  ALLOWED_ATTR: ["class"],
  RETURN_DOM_FRAGMENT: true,
};

/** A library, loaded when something first asks for it; `fill(library, item)` then uses it. */
class Library {
  #load;
  #fill;
  #loaded = null;
  #waiting = null;

  constructor(load, fill) {
    this.#load = load;
    this.#fill = fill;
  }

  /** Fills items; `isLate` if those that are not in the page any more may have been in it. */
  async #fillAll(items, isLate = false) {
    let start = performance.now();
    for (const item of items) {
      if (performance.now() > start + BREAK_AFTER_MS) {
        await new Promise((resolve) => setTimeout(resolve));
        start = performance.now();
        isLate = true;
      }
      if (!isLate || item.node.isConnected) this.#fill(this.#loaded, item);
    }
  }

  /** Fills items now, or when the library has come; if it never does they stay as they are. */
  async use(items) {
    if (!items.length) return;
    if (this.#loaded) {
      await this.#fillAll(items);
    } else if (this.#waiting) {
      this.#waiting = this.#waiting.filter(({ node }) => node.isConnected).concat(items);
    } else {
      this.#waiting = items;
      try {
        this.#loaded = await this.#load();
      } catch {
        return;
      }
      const waiting = this.#waiting;
      this.#waiting = null;
      await this.#fillAll(waiting, true);
      document.dispatchEvent(new Event("filled"));
    }
  }
}

function loadStyle(address) {
  return new Promise((resolve, reject) => {
    const link = el("link", { rel: "stylesheet", href: address, onload: resolve, onerror: reject });
    document.head.append(link);
  });
}

const mathematics = new Library(
  async () => {
    await Promise.all([import("./vendor/katex/katex.min.js"), loadStyle("vendor/katex/katex.min.css")]);
    return globalThis.katex;
  },
  (katex, { node, tex, isDisplay }) => {
    const made = formula(katex, tex, isDisplay);
    if (!made) return;
    node.replaceChildren(made);
    node.classList.add("done");
    if (!isDisplay) return;
    // A formula may be wider than the page, and is scrolled by itself.
    for (const [name, value] of [["tabindex", "0"], ["role", "group"], ["aria-label", "Formula"]]) {
      node.setAttribute(name, value);
    }
  },
);

const made = new Map();

/** A formula as elements; null if KaTeX does not know what it means. */
function formula(katex, tex, displayMode) {
  const key = `${displayMode} ${tex}`;
  if (!made.has(key)) {
    // While an answer is written its last blocks are made again and again.
    if (made.size === MOST_KEPT) made.clear();
    made.set(key, REFUSED.test(tex) ? null : makeFormula(katex, tex, displayMode));
  }
  return made.get(key)?.cloneNode(true);
}

function makeFormula(katex, tex, displayMode) {
  let html;
  try {
    html = katex.renderToString(tex, {
      displayMode,
      maxExpand: 500,
      maxSize: 20,
      strict: "ignore",
      throwOnError: true,
      trust: false,
    });
  } catch {
    return null;
  }
  // The page's policy forbids style attributes in HTML, and allows scripts to set styles.
  const fragment = globalThis.DOMPurify.sanitize(html.replaceAll(' style="', ' data-style="'), FORMULA);
  for (const node of fragment.querySelectorAll("[data-style]")) {
    node.style.cssText = node.dataset.style;
    delete node.dataset.style;
  }
  return fragment;
}

const highlighting = new Library(
  async () => (await import("./vendor/highlight.min.js")).default,
  (highlighter, { node, language }) => {
    if (!highlighter.getLanguage(language)) return;
    const text = node.textContent;
    const { value } = highlighter.highlight(text, { language, ignoreIllegals: true });
    const fragment = globalThis.DOMPurify.sanitize(value, CODE);
    if (fragment.textContent === text) node.replaceChildren(fragment);
  },
);

/** Shows formulas (`{node, tex, isDisplay}`) and colours code (`{node, language}`). */
export function enrich(formulas, code) {
  mathematics.use(formulas);
  highlighting.use(
    code.filter(
      ({ node: { textContent: text }, language }) =>
        !PLAIN.test(language) && text.length <= LONGEST_CODE && !LONG_LINE.test(text),
    ),
  );
}
