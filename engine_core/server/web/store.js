/** Conversations, kept in this browser. Everything read back is checked: it may be of any age. */

const PREFIX = "engine-core.conversation.";
const CURRENT = "engine-core.current";
const MODEL = "engine-core.model";
const THEME = "engine-core.theme";
const KEY = "engine-core.api-key";

export const SETTINGS = ["system", "temperature", "top_p", "top_k", "max_tokens", "seed"];

/** An id. Not randomUUID, which browsers keep from pages that are neither https nor localhost. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** An empty conversation with the settings of another. */
export function newConversation(settings = {}) {
  const now = new Date().toISOString();
  return {
    id: newId(),
    created: now,
    updated: now,
    settings: { ...settings },
    draft: "",
    messages: [],
  };
}

/** What a conversation is called: the beginning of its first message. */
export function titleOf(conversation) {
  const text = (conversation.messages[0]?.content ?? conversation.draft).trim();
  const line = text.replace(/\s+/g, " ");
  return line.length > 80 ? `${line.slice(0, 79)}…` : line || "New conversation";
}

export const isEmpty = (conversation) => !conversation.messages.length && !conversation.draft;

function checked(value) {
  if (typeof value?.id !== "string" || !Array.isArray(value.messages)) return null;
  const messages = value.messages.filter(
    (message) =>
      typeof message?.content === "string" &&
      (message.role === "user" || message.role === "assistant"),
  );
  for (const message of messages) message.id ??= newId();
  const conversation = { ...newConversation(), ...value, settings: { ...value.settings }, messages };
  conversation.draft = String(conversation.draft ?? "");
  const last = messages.at(-1);
  if (last?.status === "streaming") {
    // The page was closed while the answer came. If nothing had come, the question is asked anew.
    last.status = "stopped";
    if (!last.content && !last.reasoning) {
      const [question] = messages.splice(-2);
      conversation.draft ||= question.content;
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

/** Stores a conversation; an empty one is not kept. Throws if the browser has no room left. */
export function saveConversation(conversation) {
  const name = PREFIX + conversation.id;
  if (isEmpty(conversation)) localStorage.removeItem(name);
  else localStorage.setItem(name, JSON.stringify(conversation));
}

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
