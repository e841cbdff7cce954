/** How one message is shown. */

import { announce, copyWithButton, el, fitHeight, icon, iconButton } from "./dom.js";
import { MarkdownStream, renderMarkdown } from "./markdown.js";
import { pictureList } from "./pictures.js";

const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

/** Length, speed and waiting time of an answer, as far as they are known. */
export function statistics({ usage, timing, edited }) {
  const parts = edited ? ["edited"] : [];
  if (usage) parts.push(`${usage.completion_tokens} tokens`);
  if (usage && timing?.last > timing?.first && usage.completion_tokens > 1) {
    const rate = (usage.completion_tokens - 1) / ((timing.last - timing.first) / 1000);
    parts.push(`${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s`);
  }
  if (timing?.first != null) parts.push(`first token ${seconds(timing.first)}`);
  if (timing?.total != null) parts.push(`total ${seconds(timing.total)}`);
  if (usage) {
    const { image_tokens: seen, cached_tokens: cached } = usage.prompt_tokens_details ?? {};
    const ofThem = [seen ? `, ${seen} of pictures` : "", cached ? `, ${cached} cached` : ""];
    parts.push(`prompt ${usage.prompt_tokens} tokens${ofThem.join("")}`);
  }
  return parts.join(" · ");
}

/** A message of the user: its pictures and its text. */
export function userMessage(message, { onEdit }) {
  return el(
    "article",
    { class: "message user", "aria-label": "You", "data-id": message.id },
    el(
      "div",
      { class: "bubble" },
      message.pictures?.length ? pictureList(message.pictures) : null,
      message.content,
    ),
    el(
      "div",
      { class: "actions" },
      iconButton("copy", "Copy this message", (event) =>
        copyWithButton(event.currentTarget, message.content),
      ),
      iconButton("edit", "Edit this message", onEdit),
    ),
  );
}

/**
 * The form in which a message is changed. `edit.text` follows what is typed, and `edit.pictures`
 * what is left of them. `choices` are the names
 * of its buttons and what they do with the text; the last one is also Enter, or in a message of
 * several lines (`isLong`) Ctrl and Enter.
 */
export function editor(message, edit, { label, hint, isLong = false, choices, onCancel }) {
  const area = el("textarea", { rows: "1", "aria-label": label });
  area.value = edit.text;
  const use = (choice) => {
    if (area.value.trim() || edit.pictures?.length) choice(area.value);
  };
  const list = () => {
    const made = pictureList(edit.pictures, (picture) => {
      edit.pictures = edit.pictures.filter((each) => each !== picture);
      made.replaceWith(list());
      area.focus();
    });
    return made;
  };
  const [name, send] = choices.at(-1);
  const submit = () => use(send);
  area.addEventListener("input", () => {
    edit.text = area.value;
    fitHeight(area);
  });
  area.addEventListener("keydown", (event) => {
    const isSent = isLong ? event.ctrlKey || event.metaKey : !event.shiftKey;
    if (event.key === "Enter" && isSent && !event.isComposing) {
      event.preventDefault();
      submit();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      onCancel();
    }
  });
  const form = el(
    "form",
    { class: "message editor", "data-id": message.id },
    edit.pictures?.length ? list() : null,
    area,
    el(
      "div",
      { class: "buttons" },
      el("span", { class: "hint" }, hint),
      el("button", { type: "button", class: "plain", onclick: onCancel }, "Cancel"),
      ...choices.slice(0, -1).map(([other, choice]) =>
        el("button", { type: "button", class: "plain", onclick: () => use(choice) }, other),
      ),
      el("button", { type: "submit", class: "primary" }, name),
    ),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  return { form, area };
}

/** An answer: shown whole, or as it comes. */
export class AnswerView {
  #message;
  #stream = null;
  #details;
  #reasoning;
  #prose;
  #note;
  #stats;
  #actions;
  #can;

  /**
   * `can` is what can be done with the answer: `edit`, `showVersion`, and where it is the last one
   * `regenerate` and `goOn`. `onRender` hears of new text.
   */
  constructor(message, can, onRender) {
    this.#message = message;
    this.#can = can;
    this.#reasoning = el("div", { class: "reasoning-text" }, message.reasoning ?? "");
    this.#details = el(
      "details",
      { class: "reasoning", hidden: !message.reasoning },
      el("summary", {}, "Reasoning"),
      this.#reasoning,
    );
    this.#prose = el("div", { class: "prose" });
    this.#note = el("p", { class: "note", hidden: true });
    this.#stats = el("span", { class: "stats" });
    this.#actions = el("div", { class: "actions" });
    this.element = el(
      "article",
      { class: "message answer", "aria-label": "Answer", "data-id": message.id },
      this.#details,
      this.#prose,
      this.#note,
      el("footer", {}, this.#actions, this.#stats),
    );
    if (message.status === "streaming") {
      this.element.setAttribute("aria-busy", "true");
      this.element.classList.add("streaming");
      this.#stream = new MarkdownStream(this.#prose, { onBlocks: announce, onRender });
      this.#stream.append(message.content);
    } else {
      this.#showFinished();
    }
  }

  /** Shows text that has just been added to the message. */
  add(content, reasoning) {
    if (reasoning) {
      this.#details.hidden = false;
      this.#reasoning.append(reasoning);
    }
    if (content) this.#stream.append(content);
    this.#stats.textContent = statistics(this.#message);
    this.#stream.onRender();
  }

  /** The answer is complete, or will never be. */
  finish() {
    this.#stream.finish();
    this.element.removeAttribute("aria-busy");
    this.element.classList.remove("streaming");
    this.#showFinished();
    announce(this.#note.hidden ? "The answer is complete." : this.#note.textContent);
  }

  #showFinished() {
    const message = this.#message;
    if (!this.#stream) renderMarkdown(this.#prose, message.content);
    const note = noteOf(message);
    this.#note.hidden = !note;
    this.#note.textContent = note;
    this.#note.classList.toggle("error", message.status === "error");
    this.#stats.textContent = statistics(message);
    this.#actions.replaceChildren(
      iconButton("copy", "Copy this answer", (event) =>
        copyWithButton(event.currentTarget, message.content),
      ),
    );
    this.#actions.append(iconButton("edit", "Edit this answer", this.#can.edit));
    const isCutOff = message.status !== "done" || message.finish_reason === "length";
    if (this.#can.goOn && isCutOff && message.content.trim()) {
      this.#actions.append(iconButton("continue", "Continue this answer", this.#can.goOn));
    }
    if (this.#can.regenerate) {
      this.#actions.append(iconButton("again", "Regenerate this answer", this.#can.regenerate));
    }
    if (message.versions?.length) this.#actions.append(this.#versions());
  }

  #versions() {
    const { at, versions } = this.#message;
    const step = (name, label, to) => {
      const button = iconButton(name, label, () => this.#can.showVersion(to));
      button.disabled = to < 0 || to > versions.length;
      return button;
    };
    return el(
      "span",
      { class: "versions", role: "group", "aria-label": "Versions of this answer" },
      step("previous", "Previous version", at - 1),
      el("span", {}, `${at + 1}/${versions.length + 1}`),
      step("next", "Next version", at + 1),
    );
  }
}

function noteOf(message) {
  if (message.status === "error") return message.error;
  if (message.status === "stopped") return "Stopped.";
  if (message.finish_reason === "length") return "Cut off at the most tokens allowed.";
  if (!message.content && !message.reasoning) return "The answer is empty.";
  return "";
}
