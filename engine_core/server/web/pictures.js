/**
 * Pictures that are sent with messages. Conversations name them by id; what they show is kept in
 * IndexedDB, which has far more room than the storage of the conversations.
 */

import { el, iconButton } from "./dom.js";
import { newId } from "./ids.js";

const STORE = "pictures";
/** What every server takes; other pictures that the browser knows are drawn anew. */
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
const LARGEST_FILE = 100_000_000;
const MOST_PIXELS = 100_000_000;
/** A picture of more bytes is sent smaller: a request has some megabytes for all of them. */
const MOST_BYTES = 1_500_000;
const DRAWN_PIXELS = 4_000_000;
const NAME_LENGTH = 80;

/** By id, what was shown or sent since the page was opened: `{blob, url}`. */
const known = new Map();
let database = null;

function opened() {
  database ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("engine-core", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE);
    request.onsuccess = () => {
      request.result.onversionchange = () => request.result.close();
      resolve(request.result);
    };
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("Another tab keeps the database."));
  });
  return database;
}

async function inStore(mode, work) {
  const transaction = (await opened()).transaction(STORE, mode);
  const request = work(transaction.objectStore(STORE));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

function remember(id, blob) {
  known.set(id, { blob, url: URL.createObjectURL(blob) });
  return known.get(id);
}

/** Stores a picture. Rejects if the browser has no room; until the page is closed it is here still. */
export const storePicture = ({ id }) =>
  inStore("readwrite", (store) => store.put(known.get(id).blob, id));

/** What a picture shows, as `{blob, url}`; null if the browser no longer has it. */
async function find({ id }) {
  if (known.has(id)) return known.get(id);
  const blob = await inStore("readonly", (store) => store.get(id)).catch(() => null);
  return known.get(id) ?? (blob instanceof Blob ? remember(id, blob) : null);
}

/** Drops every picture whose id is not in the texts that are stored, nor `isHere`. */
export async function dropOthers(texts, isHere) {
  const isNamed = (id) => isHere(id) || texts.some((text) => text.includes(id));
  for (const [id, { url }] of known) {
    if (isNamed(id)) continue;
    URL.revokeObjectURL(url);
    known.delete(id);
  }
  try {
    const ids = await inStore("readonly", (store) => store.getAllKeys());
    const dropped = ids.filter((id) => !isNamed(id));
    if (!dropped.length) return;
    await inStore("readwrite", (store) => dropped.forEach((id) => store.delete(id)));
  } catch {
    // A browser that keeps no pictures has none to drop.
  }
}

/** A file as a picture, `{id, name}`. @throws {Error} It is none, or too large. */
export async function readPicture(file) {
  const name = nameOf(file);
  if (file.size > LARGEST_FILE) {
    throw new Error(`${name} has ${Math.round(file.size / 1e6)} MB; 100 MB are taken at most.`);
  }
  let blob;
  try {
    // A copy: the file may change or go.
    blob = new Blob([await file.arrayBuffer()], { type: file.type });
  } catch {
    throw new Error(`${name} cannot be read.`);
  }
  const url = URL.createObjectURL(blob);
  try {
    const image = await loaded(url, name);
    const pixels = image.naturalWidth * image.naturalHeight;
    if (!pixels) throw new Error(`${name} does not say how large it is.`);
    if (pixels > MOST_PIXELS) {
      const size = `${image.naturalWidth} × ${image.naturalHeight}`;
      throw new Error(`${name} has ${size} pixels; 100 million are taken at most.`);
    }
    const isKnown = TYPES.includes(blob.type);
    if (!isKnown) blob = await drawn(image, "image/png", name);
    if (blob.size > MOST_BYTES) blob = await drawn(image, "image/jpeg", name);
  } finally {
    URL.revokeObjectURL(url);
  }
  const picture = { id: newId(), name };
  remember(picture.id, blob);
  return picture;
}

function nameOf({ name }) {
  // What is pasted is called image.png, whatever it shows.
  const text = name && name !== "image.png" ? name : "Pasted picture";
  return text.length > NAME_LENGTH ? `${text.slice(0, NAME_LENGTH - 1)}…` : text;
}

function loaded(url, name) {
  return new Promise((resolve, reject) => {
    const image = new Image();
    image.onload = () => resolve(image);
    image.onerror = () => reject(new Error(`${name} is no picture that this browser can show.`));
    image.src = url;
  });
}

/** The picture in another format, and smaller if it is large; what is transparent becomes white. */
async function drawn(image, type, name) {
  const { naturalWidth: width, naturalHeight: height } = image;
  const scale = Math.min(1, Math.sqrt(DRAWN_PIXELS / (width * height)));
  const canvas = el("canvas", {
    width: Math.max(1, Math.round(width * scale)),
    height: Math.max(1, Math.round(height * scale)),
  });
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, type, 0.9));
  if (!blob) throw new Error(`${name} cannot be drawn smaller.`);
  return blob;
}

/** A picture as a data URL. @throws {Error} The browser no longer has it. */
export async function dataUrl(picture) {
  const found = await find(picture);
  if (!found) {
    throw new Error(
      `“${picture.name}” is no longer in this browser. Edit its message to go on without it.`,
    );
  }
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`“${picture.name}” cannot be read.`));
    reader.readAsDataURL(found.blob);
  });
}

/** A message's content as OpenAI has it: text, or parts where it has pictures. */
export async function contentOf({ content, pictures }) {
  if (!pictures?.length) return content;
  const urls = await Promise.all(pictures.map(dataUrl));
  const parts = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return content ? [...parts, { type: "text", text: content }] : parts;
}

/** Pictures for an export: `{name, data}`, a data URL, or null for one that is lost. */
export const packed = (pictures) =>
  Promise.all(
    pictures.map(async (picture) => ({
      name: picture.name,
      data: await dataUrl(picture).catch(() => null),
    })),
  );

export const isPacked = (value) =>
  typeof value?.name === "string" &&
  value.name.length <= NAME_LENGTH &&
  Object.keys(value).length === 2 &&
  (value.data === null ||
    (typeof value.data === "string" &&
      TYPES.some((type) => value.data.startsWith(`data:${type};base64,`))));

/** A picture of an export, with an id of its own. @throws {Error} Its base64 is wrong. */
export function unpacked({ name, data }) {
  const picture = { id: newId(), name };
  if (data !== null) {
    const [head, content] = data.split(",", 2);
    const bytes = Uint8Array.from(atob(content), (char) => char.charCodeAt(0));
    remember(picture.id, new Blob([bytes], { type: head.slice(5, -7) }));
  }
  return picture;
}

export const isStorable = ({ id }) => known.has(id);

/** A list of small pictures; one that is pressed is shown larger. With `onRemove` each can go. */
export function pictureList(pictures, onRemove) {
  return el(
    "ul",
    { class: "pictures", "aria-label": "Pictures" },
    ...pictures.map((picture) => {
      const image = el("img", { alt: picture.name, decoding: "async" });
      const enlarge = (event) => {
        const isLarge = event.currentTarget.classList.toggle("large");
        event.currentTarget.setAttribute("aria-expanded", String(isLarge));
      };
      const button = el(
        "button",
        { type: "button", class: "picture", title: picture.name, "aria-expanded": "false", onclick: enlarge },
        image,
      );
      find(picture).then((found) => {
        if (found) image.src = found.url;
        else button.replaceWith(el("span", { class: "hint" }, `${picture.name} (no longer in this browser)`));
      });
      const remove = onRemove
        ? iconButton("close", `Remove ${picture.name}`, () => onRemove(picture))
        : null;
      return el("li", {}, button, remove);
    }),
  );
}
