/** Conversations, kept in this browser. Everything read back is checked: it may be of any age. */

import { newId } from "./ids.js";
import { isPacked, unpacked } from "./pictures.js";

const PREFIX = "engine-core.conversation.";
const CURRENT = "engine-core.current";
const MODEL = "engine-core.model";
const THEME = "engine-core.theme";
const KEY = "engine-core.api-key";

export const FORMAT = "engine-core-conversations";
export const SETTINGS = [
  "system", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
  "repetition_penalty", "max_tokens", "seed",
];

/** An empty conversation with the settings of another. */
export function newConversation(settings = {}) {
  const now = new Date().toISOString();
  return {
    id: newId(),
    created: now,
    updated: now,
    settings: { ...settings },
    draft: "",
    title: "",
    pictures: [],
    messages: [],
  };
}

/** What a conversation is called: its name, or the beginning of its first message. */
export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = conversation.messages[0];
  const text = first ? first.content || first.pictures?.[0]?.name : conversation.draft;
  const line = (text ?? "").trim().replace(/\s+/g, " ");
  return line.length > 80 ? `${line.slice(0, 79)}…` : line || "New conversation";
}

export const isEmpty = ({ messages, draft, pictures }) =>
  !messages.length && !draft && !pictures.length;

/** The conversation, whose `pictures` are those of its draft, and all its messages. */
export function* withPictures(conversation) {
  const found = [conversation];
  while (found.length) {
    const { messages = [], versions = [], tail = [] } = found[0];
    yield found.shift();
    found.push(...messages, ...versions, ...tail);
  }
}

/** Whether a conversation has words in its name, its messages or the names of their pictures. */
export function hasWords(conversation, words) {
  const wanted = words.toLocaleLowerCase().split(/\s+/);
  const texts = [titleOf(conversation)];
  for (const { content, pictures = [] } of conversation.messages) {
    texts.push(content, ...pictures.map(({ name }) => name));
  }
  const text = texts.join("\n").toLocaleLowerCase();
  return wanted.every((word) => text.includes(word));
}

/**
 * All versions of an answer, in order. Each but the shown one has what followed it as its `tail`;
 * that of the shown one is given. The answer itself is the version that is shown: its `versions` are
 * the others and `at` is its place among them.
 */
export function versionsOf({ versions = [], at = 0, ...shown }, tail = []) {
  return versions.toSpliced(at, 0, tail.length ? { ...shown, tail } : shown);
}

/** The messages with another version of the answer at `index`, and what followed that one. */
export function withVersion(messages, index, at) {
  const all = versionsOf(messages[index], messages.slice(index + 1));
  const { tail = [], ...shown } = all[at];
  return [...messages.slice(0, index), { ...shown, versions: all.toSpliced(at, 1), at }, ...tail];
}

function checkedMessages(messages) {
  const found = messages.filter(
    (message) =>
      typeof message?.content === "string" &&
      (message.role === "user" || message.role === "assistant"),
  );
  for (const message of found) {
    message.id ??= newId();
    if (message.status === "streaming") message.status = "stopped";
    if (message.role === "user" && message.pictures) {
      message.pictures = checkedPictures(message.pictures);
    } else {
      delete message.pictures;
    }
    if (Array.isArray(message.versions)) {
      message.versions = checkedMessages(message.versions);
      message.at = Math.min(Math.max(0, Math.trunc(message.at) || 0), message.versions.length);
    } else {
      delete message.versions;
    }
    if (Array.isArray(message.tail)) message.tail = checkedMessages(message.tail);
    else delete message.tail;
  }
  return found;
}

const checkedPictures = (pictures) =>
  Array.isArray(pictures) ? pictures.filter((each) => isText(each?.id) && isText(each.name)) : [];

function checked(value) {
  if (typeof value?.id !== "string" || !Array.isArray(value.messages)) return null;
  const wasStreaming = value.messages.at(-1)?.status === "streaming";
  const messages = checkedMessages(value.messages);
  const names = SETTINGS.filter((name) => isText(value.settings?.[name]));
  const settings = Object.fromEntries(names.map((name) => [name, value.settings[name]]));
  const conversation = { ...newConversation(), ...value, settings, messages };
  conversation.draft = String(conversation.draft ?? "");
  conversation.title = String(conversation.title ?? "");
  conversation.pictures = checkedPictures(conversation.pictures);
  const last = messages.at(-1);
  if (wasStreaming && last) {
    // The page was closed while the answer came. If nothing had come, the version before it is
    // shown, and without one the question is asked anew.
    if (!last.content && !last.reasoning && last.versions?.length) {
      const all = versionsOf(last).toSpliced(last.at, 1);
      const at = Math.max(0, last.at - 1);
      messages[messages.length - 1] = { ...all[at], versions: all.toSpliced(at, 1), at };
    } else if (!last.content && !last.reasoning) {
      const [question] = messages.splice(-2);
      if (isEmpty({ ...conversation, messages: [] })) {
        conversation.draft = question.content;
        conversation.pictures = question.pictures ?? [];
      }
    }
  }
  return conversation;
}

/** Every stored conversation, the latest first. */
export function loadConversations() {
  const found = [];
  for (let index = 0; index < localStorage.length; index += 1) {
    const name = localStorage.key(index);
    if (!name.startsWith(PREFIX)) continue;
    try {
      const conversation = checked(JSON.parse(localStorage.getItem(name)));
      if (conversation) found.push(conversation);
    } catch {
      // Not ours, or cut off: left as it is.
    }
  }
  return found.sort((a, b) => (a.updated < b.updated ? 1 : -1));
}

const isText = (value) => typeof value === "string";
const isRecord = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isDate = (value) => isText(value) && !Number.isNaN(Date.parse(value));
const isCount = (value) => Number.isInteger(value) && value >= 0;
const isTime = (value) => value == null || Number.isFinite(value);

// What each field of an exported file may be, and how that is said.
const PICTURES = [
  (value) => Array.isArray(value) && value.every(isPacked),
  'a list of pictures, each with a short "name" and as "data" a data URL of an image or null',
];
const CONVERSATION = {
  id: [(value) => isText(value) && /^[\w-]{1,64}$/.test(value), "an id"],
  created: [isDate, "a date"],
  updated: [isDate, "a date"],
  settings: [isRecord, "an object"],
  draft: [isText, "text"],
  title: [isText, "text"],
  pictures: PICTURES,
  messages: [Array.isArray, "a list"],
};
const MESSAGE = {
  pictures: PICTURES,
  id: [isText, "text"],
  role: [(value) => value === "user" || value === "assistant", '"user" or "assistant"'],
  content: [isText, "text"],
  reasoning: [isText, "text"],
  status: [(value) => ["streaming", "done", "stopped", "error"].includes(value), "a known status"],
  error: [isText, "text"],
  model: [isText, "text"],
  finish_reason: [isText, "text"],
  edited: [(value) => typeof value === "boolean", "true or false"],
  usage: [
    (value) => value === null || (isCount(value?.prompt_tokens) && isCount(value.completion_tokens)),
    "an object with prompt_tokens and completion_tokens",
  ],
  timing: [
    (value) => isRecord(value) && ["first", "last", "total"].every((name) => isTime(value[name])),
    "an object of milliseconds",
  ],
  versions: [Array.isArray, "a list"],
  at: [isCount, "a whole number"],
  tail: [Array.isArray, "a list"],
};

function checkFields(value, fields, needed, place) {
  if (!isRecord(value)) throw new Error(`${place} is not an object.`);
  for (const name of needed) {
    if (!(name in value)) throw new Error(`${place} lacks "${name}".`);
  }
  for (const [name, content] of Object.entries(value)) {
    if (!Object.hasOwn(fields, name)) throw new Error(`${place} has an unknown field "${name}".`);
    const [isRight, wanted] = fields[name];
    if (isRight(content)) continue;
    const offered = (JSON.stringify(content) ?? "nothing").slice(0, 60);
    throw new Error(`${place}: "${name}" is ${offered}; it must be ${wanted}.`);
  }
}

function checkMessages(messages, place, roles) {
  messages.forEach((message, index) => {
    const here = `${place}, message ${index + 1}`;
    checkFields(message, MESSAGE, ["role", "content"], here);
    const role = roles[index % roles.length];
    if (message.role !== role) throw new Error(`${here} is of the role "${message.role}", not "${role}".`);
    if (message.pictures && role !== "user") throw new Error(`${here} has pictures, and is no user's.`);
    checkMessages(message.versions ?? [], `${here}, versions`, ["assistant"]);
    checkMessages(message.tail ?? [], `${here}, what followed`, ["user", "assistant"]);
    if ((message.at ?? 0) > (message.versions?.length ?? 0)) {
      throw new Error(`${here}: "at" is ${message.at}, and there are not as many versions.`);
    }
  });
}

/**
 * The conversations of an exported file. A file with anything wrong is refused as a whole. Their
 * pictures are here, and not stored yet.
 *
 * @throws {Error} What is wrong with it, and where.
 */
export function readExport(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("It is not JSON.");
  }
  if (file?.format !== FORMAT) {
    throw new Error(`It is no export of this page: its "format" is not "${FORMAT}".`);
  }
  if (file.version !== 1) {
    throw new Error(`Its version is ${JSON.stringify(file.version)}; this page reads version 1.`);
  }
  if (!Array.isArray(file.conversations) || !file.conversations.length) {
    throw new Error("It has no list of conversations.");
  }
  return file.conversations.map((conversation, index) => {
    const place = `Conversation ${index + 1}`;
    checkFields(conversation, CONVERSATION, ["id", "created", "updated", "messages"], place);
    for (const [name, value] of Object.entries(conversation.settings ?? {})) {
      if (!SETTINGS.includes(name)) throw new Error(`${place} has an unknown setting "${name}".`);
      if (!isText(value) || (name !== "system" && !Number.isFinite(Number(value)))) {
        throw new Error(`${place}: the setting "${name}" is ${JSON.stringify(value)}, no number.`);
      }
    }
    checkMessages(conversation.messages, place, ["user", "assistant"]);
    for (const each of withPictures(conversation)) {
      try {
        if (each.pictures) each.pictures = each.pictures.map(unpacked);
      } catch {
        throw new Error(`${place} has a picture whose base64 is wrong.`);
      }
    }
    return checked(conversation);
  });
}

/** Stores a conversation; an empty one is not kept. Throws if the browser has no room left. */
export function saveConversation(conversation) {
  const name = PREFIX + conversation.id;
  if (isEmpty(conversation)) localStorage.removeItem(name);
  else localStorage.setItem(name, JSON.stringify(conversation));
}

/** Every stored conversation as the text that it is stored as, whether it can be read or not. */
export const storedTexts = () =>
  Object.keys(localStorage)
    .filter((name) => name.startsWith(PREFIX))
    .map((name) => localStorage.getItem(name) ?? "");

export const deleteConversation = (id) => localStorage.removeItem(PREFIX + id);

/** Which conversation is stored under a name; null if none. */
export const conversationIdOf = (name) =>
  name?.startsWith(PREFIX) ? name.slice(PREFIX.length) : null;

/** The conversation that was open last. */
export const current = {
  get: () => localStorage.getItem(CURRENT),
  set: (id) => localStorage.setItem(CURRENT, id),
};

/** The model's name that was chosen last. */
export const chosenModel = {
  get: () => localStorage.getItem(MODEL),
  set: (name) => localStorage.setItem(MODEL, name),
};

/** The theme that was chosen; null follows the system. */
export const chosenTheme = {
  get: () => localStorage.getItem(THEME),
  set: (theme) =>
    theme ? localStorage.setItem(THEME, theme) : localStorage.removeItem(THEME),
};

/** The API key: in the tab's own storage, so that it is gone with the tab. */
export const apiKey = {
  get: () => sessionStorage.getItem(KEY),
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};
