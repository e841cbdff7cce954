/** Small helpers around the DOM. */

/** The element of an id. */
export const byId = (id) => document.getElementById(id);

/**
 * A new element. Attributes that are functions are listeners (`onclick`); those that are false,
 * null or undefined are left out. Children are nodes or text, never HTML.
 */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

/** An icon of the sprite in index.html. */
export function icon(name) {
  const namespace = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(namespace, "svg");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(namespace, "use");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

/** A button with an icon alone; the label is read aloud and shown on hover. */
export function iconButton(name, label, onclick) {
  return el(
    "button",
    { type: "button", class: "icon-button", "aria-label": label, title: label, onclick },
    icon(name),
  );
}

/** Makes a textarea as high as its text; the style sheet limits it. */
export function fitHeight(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
}

/** Says a text to screen readers, after what was said before. */
export function announce(text) {
  const status = byId("status");
  while (status.childElementCount > 20) status.firstElementChild.remove();
  if (text.trim()) status.append(el("p", {}, text));
}

/** Puts text on the clipboard. */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Browsers offer the clipboard only to https and localhost; a server in the local network is
  // often neither.
  const area = el("textarea", { class: "hidden", readonly: true });
  area.value = text;
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  if (!copied) throw new Error("The browser does not allow copying.");
}

/** Copies, and shows on the button that it did. */
export async function copyWithButton(button, text) {
  const label = button.getAttribute("aria-label");
  let mark = "check";
  try {
    await copyText(text);
    announce("Copied");
  } catch {
    mark = "close";
    announce("Copying failed");
  }
  button.replaceChildren(icon(mark));
  setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  button.setAttribute("aria-label", label);
}
