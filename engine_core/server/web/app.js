/** The page: conversations on the left, the open one in the middle, its settings on the right. */

import { ApiError, listModels, streamChat } from "./api.js";
import { announce, byId, copyWithButton, el, fitHeight, iconButton } from "./dom.js";
import { newId } from "./ids.js";
import { AnswerView, editor, userMessage } from "./message.js";
import * as pictures from "./pictures.js";
import * as store from "./store.js";

const SAVE_EVERY_MS = 1000;
const AT_END_PX = 64;
const LARGEST_IMPORT = 200_000_000;

const prompt = byId("prompt");
const scroller = byId("scroller");
const settingsForm = byId("settings-form");

/** Every conversation by id. */
const conversations = new Map();
/** The answers that are being made, by the id of their conversation. */
const runs = new Map();
/** Sent messages that are being edited, by the id of their conversation: `{id, text}`. */
const edits = new Map();
/** Pictures that are being read for a conversation, by its id: when they are. */
const readings = new Map();
/** Errors to be shown, by the id of their conversation. */
const alerts = new Map();

let open = store.newConversation();
/** What a message may have, by the name of a model. */
let models = new Map();
let atEnd = true;

function showAlert() {
  const text = alerts.get(open.id) ?? "";
  byId("alert").hidden = !text;
  byId("alert-text").textContent = text;
}

function setAlert(conversation, text) {
  if (text) alerts.set(conversation.id, text);
  else alerts.delete(conversation.id);
  showAlert();
}

function save(conversation) {
  try {
    store.saveConversation(conversation);
  } catch {
    setAlert(
      conversation,
      "The browser has no room left to store this conversation. Export it, or delete others.",
    );
  }
}

function renderList() {
  const words = byId("search").value.trim();
  const shown = [...conversations.values()]
    .filter((conversation) => conversation === open || !store.isEmpty(conversation))
    .filter((conversation) => !words || store.hasWords(conversation, words))
    .sort((a, b) => (a.updated < b.updated ? 1 : -1));
  byId("no-match").hidden = shown.length > 0;
  byId("conversations").replaceChildren(
    ...shown.map((conversation) => {
      const title = store.titleOf(conversation);
      return el(
        "li",
        { class: runs.has(conversation.id) ? "running" : null, "data-id": conversation.id },
        el(
          "button",
          {
            type: "button",
            class: "conversation",
            "aria-current": conversation === open ? "true" : null,
            onclick: () => show(conversation),
          },
          title,
        ),
        store.isEmpty(conversation)
          ? null
          : el(
              "span",
              { class: "row-actions" },
              rowButton("edit", "Rename", title, () => askForName(conversation)),
              rowButton("trash", "Delete", title, () => askToDelete(conversation)),
            ),
      );
    }),
  );
}

function rowButton(name, verb, title, onclick) {
  const button = iconButton(name, `${verb} “${title}”`, onclick);
  button.title = verb;
  return button;
}

function show(conversation) {
  open = conversation;
  conversations.set(conversation.id, conversation);
  store.current.set(conversation.id);
  prompt.value = conversation.draft;
  fitHeight(prompt);
  showAttached();
  fillSettings();
  closeSidebar();
  atEnd = true;
  render();
  if (!edits.has(open.id) && !sidebarLiesAbove.matches) prompt.focus();
}

function startConversation() {
  show(store.isEmpty(open) ? open : store.newConversation(open.settings));
}

function askForName(conversation) {
  const field = byId("rename-name");
  field.value = store.titleOf(conversation);
  byId("rename-form").onsubmit = (event) => {
    event.preventDefault();
    byId("rename-dialog").close();
    conversation.title = field.value.trim().replace(/\s+/g, " ");
    save(conversation);
    renderList();
    showTitle();
    document.querySelector(`[data-id="${conversation.id}"] button`)?.focus();
  };
  byId("rename-dialog").showModal();
  field.select();
}

function askToDelete(conversation) {
  byId("delete-name").textContent = store.titleOf(conversation);
  const dialog = byId("delete-dialog");
  byId("delete-form").onsubmit = (event) => {
    event.preventDefault();
    dialog.close();
    remove(conversation);
  };
  dialog.showModal();
}

function remove(conversation) {
  runs.get(conversation.id)?.controller.abort();
  runs.delete(conversation.id);
  conversations.delete(conversation.id);
  store.deleteConversation(conversation.id);
  dropPictures();
  if (conversation === open) {
    const [next] = [...conversations.values()].sort((a, b) => (a.updated < b.updated ? 1 : -1));
    show(next ?? store.newConversation(conversation.settings));
  } else {
    renderList();
  }
}

function download(name, value) {
  const file = new Blob([JSON.stringify(value, null, 2)], { type: "application/json" });
  const link = el("a", { href: URL.createObjectURL(file), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

async function exportConversations(chosen, name) {
  const exported = structuredClone(chosen);
  for (const conversation of exported) {
    for (const each of store.withPictures(conversation)) {
      if (each.pictures?.length) each.pictures = await pictures.packed(each.pictures);
      else delete each.pictures;
    }
  }
  download(`${name}.json`, {
    format: store.FORMAT,
    version: 1,
    exported: new Date().toISOString(),
    conversations: exported,
  });
}

/** Adds the conversations of exported files; one that cannot be read or stored adds none. */
async function importFiles(files) {
  const added = [];
  closeSidebar();
  try {
    const found = [];
    for (const file of files) {
      try {
        if (file.size > LARGEST_IMPORT) throw new Error("It is larger than 200 MB.");
        found.push(...store.readExport(await file.text()));
      } catch (error) {
        throw new Error(`${file.name} was not imported. ${error.message}`);
      }
    }
    for (const conversation of found) {
      const here = conversations.get(conversation.id);
      if (here?.updated === conversation.updated) continue;
      // Another state of a conversation that is here stands beside it.
      if (here) conversation.id = newId();
      added.push(conversation);
      try {
        store.saveConversation(conversation);
        for (const each of store.withPictures(conversation)) {
          await Promise.all((each.pictures ?? []).map(pictures.storePicture));
        }
      } catch {
        throw new Error("The browser has no room left for these conversations. None was imported.");
      }
      conversations.set(conversation.id, conversation);
    }
    if (!added.length) throw new Error("These conversations are all here already.");
  } catch (error) {
    for (const { id } of added) {
      conversations.delete(id);
      store.deleteConversation(id);
    }
    dropPictures();
    setAlert(open, error.message);
    return;
  }
  dropPictures();
  setAlert(open, "");
  byId("search").value = "";
  show(added[0]);
  announce(`${added.length} conversation${added.length > 1 ? "s" : ""} imported.`);
}

const day = () => new Date().toISOString().slice(0, 10);

function render() {
  const run = runs.get(open.id);
  const edit = edits.get(open.id);
  const last = open.messages.length - 1;
  let area = null;
  if (run) run.view = null;
  byId("messages").replaceChildren(
    ...open.messages.map((message, index) => {
      if (edit?.id === message.id && !run) {
        const made = editor(message, edit, {
          ...(message.role === "user" ? questionEditor(index) : answerEditor(message, index)),
          onCancel: () => stopEditing(open),
        });
        area = made.area;
        return made.form;
      }
      const onEdit = () => startEditing(message);
      if (message.role === "user") return userMessage(message, { onEdit });
      const can = {
        edit: onEdit,
        showVersion: (at) => showVersion(open, index, at),
        regenerate: index === last && index > 0 ? () => regenerate(open) : null,
        goOn: index === last && index > 0 ? () => continueAnswer(open, message.content) : null,
      };
      const view = new AnswerView(message, can, followEnd);
      if (run?.answer === message) run.view = view;
      return view.element;
    }),
  );
  byId("welcome").hidden = open.messages.length > 0;
  byId("export").disabled = !open.messages.length;
  showControls();
  showTitle();
  showAlert();
  if (area) {
    fitHeight(area);
    area.focus();
  }
  followEnd();
}

function showTitle() {
  document.title = open.messages.length ? `${store.titleOf(open)} – engine-core` : "engine-core";
}

function questionEditor(index) {
  const following = open.messages.length - 1 - index;
  return {
    label: "Edit your message",
    hint: following > 1 ? `Sending removes the ${following} messages after this one.` : "",
    choices: [["Send", (text) => sendEdited(open, index, text, edits.get(open.id).pictures)]],
  };
}

function answerEditor(answer, index) {
  const choices = [["Save", (text) => saveAnswer(open, answer, text)]];
  const isLast = index === open.messages.length - 1;
  if (isLast && index > 0) choices.push(["Continue", (text) => continueAnswer(open, text)]);
  const hint = isLast ? "The model can go on where your text ends (Ctrl Enter)." : "";
  return { label: "Edit the answer", hint, isLong: true, choices };
}

/** What depends on whether an answer is being made. */
function showControls() {
  const running = runs.has(open.id);
  const focused = document.activeElement;
  byId("messages").classList.toggle("answering", running);
  byId("send").hidden = running;
  byId("stop").hidden = !running;
  if (focused === byId("send") || focused === byId("stop")) prompt.focus();
  renderList();
}

function startEditing(message) {
  if (runs.has(open.id)) return;
  edits.set(open.id, { id: message.id, text: message.content, pictures: message.pictures });
  atEnd = false;
  render();
}

function stopEditing(conversation) {
  edits.delete(conversation.id);
  render();
  prompt.focus();
}

function saveAnswer(conversation, answer, text) {
  if (text !== answer.content) {
    Object.assign(answer, { content: text, edited: true, status: "done" });
    for (const name of ["error", "finish_reason", "timing", "usage"]) delete answer[name];
    save(conversation);
  }
  stopEditing(conversation);
}

function showVersion(conversation, index, at) {
  if (runs.has(conversation.id)) return;
  const isLater = at > conversation.messages[index].at;
  conversation.messages = store.withVersion(conversation.messages, index, at);
  edits.delete(conversation.id);
  save(conversation);
  atEnd = false;
  render();
  const steps = [...byId("messages").children[index].querySelectorAll(".versions button")];
  if (isLater) steps.reverse();
  steps.find((button) => !button.disabled).focus();
  announce(`Version ${at + 1} of ${conversation.messages[index].versions.length + 1}.`);
}

function followEnd() {
  if (atEnd) scroller.scrollTop = scroller.scrollHeight;
  const below = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
  byId("to-end").hidden = below < 2 * AT_END_PX;
}

/** A message of the user; without pictures it has no list of them. */
const question = (content, shown) => ({
  id: newId(),
  role: "user",
  content: content.trim(),
  ...(shown?.length ? { pictures: shown } : {}),
});

function send() {
  const conversation = open;
  const reading = readings.get(conversation.id);
  if (reading) {
    // What was chosen before is sent with it.
    reading.then((isWhole) => isWhole && conversation === open && send());
    return;
  }
  const typed = prompt.value;
  const shown = conversation.pictures;
  if ((!typed.trim() && !shown.length) || runs.has(conversation.id) || !settingsAreValid()) return;
  setDraft(conversation, "", []);
  edits.delete(conversation.id);
  prompt.focus();
  generate(conversation, [...conversation.messages, question(typed, shown)], {
    // What was typed comes back, before anything typed since.
    restore: () =>
      setDraft(conversation, [typed, conversation.draft].filter(Boolean).join("\n"), [
        ...shown,
        ...conversation.pictures,
      ]),
    retry: () => {
      if (open === conversation) send();
    },
  });
}

function sendEdited(conversation, index, text, shown) {
  if (!settingsAreValid()) return;
  const original = conversation.messages[index];
  edits.delete(conversation.id);
  generate(conversation, [...conversation.messages.slice(0, index), question(text, shown)], {
    restore: () => edits.set(conversation.id, { id: original.id, text, pictures: shown }),
    retry: () => sendEdited(conversation, index, text, shown),
  });
  if (conversation === open) prompt.focus();
}

function regenerate(conversation) {
  if (runs.has(conversation.id) || !settingsAreValid()) return;
  edits.delete(conversation.id);
  const versions = store.versionsOf(conversation.messages.at(-1));
  generate(conversation, conversation.messages.slice(0, -1), {
    begun: { versions, at: versions.length },
    restore: () => {},
    retry: () => regenerate(conversation),
  });
  if (conversation === open) prompt.focus();
}

/** Has the model go on after a text, which takes the place of the last answer. */
function continueAnswer(conversation, text) {
  if (runs.has(conversation.id) || !settingsAreValid()) return;
  edits.delete(conversation.id);
  const original = conversation.messages.at(-1);
  const begun = { content: text, reasoning: original.reasoning ?? "" };
  if (text !== original.content || original.edited) begun.edited = true;
  // Text that is cut or changed stays as a version of its own.
  const versions = store.versionsOf(original);
  if (!text.startsWith(original.content)) Object.assign(begun, { versions, at: versions.length });
  else if (original.versions) Object.assign(begun, { versions: original.versions, at: original.at });
  generate(conversation, conversation.messages.slice(0, -1), {
    begun,
    restore: () => {
      if (text !== original.content) edits.set(conversation.id, { id: original.id, text });
    },
    retry: () => continueAnswer(conversation, text),
  });
  if (conversation === open) prompt.focus();
}

function setDraft(conversation, text, shown) {
  conversation.draft = text;
  conversation.pictures = shown;
  if (conversation !== open) return;
  prompt.value = text;
  fitHeight(prompt);
  showAttached();
}

/** The pictures that the next message will have. */
function showAttached() {
  const shown = open.pictures;
  const list = pictures.pictureList(shown, (picture) => {
    const next = shown[shown.indexOf(picture) + 1];
    open.pictures = shown.filter((each) => each !== picture);
    save(open);
    dropPictures();
    showAttached();
    renderList();
    const buttons = byId("attached").querySelectorAll(".icon-button");
    (buttons[open.pictures.indexOf(next)] ?? prompt).focus();
    announce(`${picture.name} removed.`);
  });
  byId("attached").replaceChildren(...(shown.length ? [list] : []));
}

const takesPictures = () => models.get(selectedModel())?.includes("image");

/** Adds files to the message that is being written, as far as they are pictures. */
function attach(files) {
  const conversation = open;
  if (models.size && !takesPictures()) {
    setAlert(conversation, `${selectedModel()} takes no pictures, only text.`);
    return;
  }
  setAlert(conversation, "");
  const before = readings.get(conversation.id);
  const reading = readFiles(conversation, files, before).finally(() => {
    if (readings.get(conversation.id) === reading) readings.delete(conversation.id);
  });
  readings.set(conversation.id, reading);
}

async function readFiles(conversation, files, before) {
  await before;
  const problems = [];
  for (const file of files) {
    let picture;
    try {
      picture = await pictures.readPicture(file);
    } catch (error) {
      problems.push(error.message);
      continue;
    }
    if (!conversations.has(conversation.id)) return false;
    conversation.pictures = [...conversation.pictures, picture];
    if (conversation === open) showAttached();
    // The conversation first: a picture that none names may be dropped at any time.
    save(conversation);
    renderList();
    announce(`${picture.name} attached.`);
    try {
      await pictures.storePicture(picture);
    } catch {
      problems.push(
        `The browser has no room left to store ${picture.name}. It can be sent, and is gone when ` +
          "this page is closed. Export the conversation, or delete others.",
      );
    }
  }
  if (problems.length) setAlert(conversation, problems.join("\n"));
  return !problems.length;
}

/** Forgets the pictures that no conversation has any more, nor may have again when a run fails. */
function dropPictures() {
  if (runs.size) return;
  const here = new Set();
  for (const conversation of conversations.values()) {
    for (const each of store.withPictures(conversation)) {
      for (const { id } of each.pictures ?? []) here.add(id);
    }
  }
  for (const edit of edits.values()) for (const { id } of edit.pictures ?? []) here.add(id);
  pictures.dropOthers(store.storedTexts(), (id) => here.has(id));
}

async function requestBody(conversation, messages, beginning) {
  const { system, ...sampling } = conversation.settings;
  const body = { model: selectedModel() };
  if (!takesPictures() && messages.some((message) => message.pictures?.length)) {
    throw new ApiError(
      `${body.model} takes no pictures, only text. Edit the messages that have some, or begin a ` +
        "new conversation.",
    );
  }
  body.messages = await Promise.all(
    messages.map(async (message) => ({
      role: message.role,
      content: await pictures.contentOf(message),
    })),
  );
  if (beginning) {
    body.messages.push({ role: "assistant", content: beginning });
    body.continue_final_message = true;
    body.add_generation_prompt = false;
  }
  if (system?.trim()) body.messages.unshift({ role: "system", content: system });
  for (const [name, value] of Object.entries(sampling)) {
    if (value !== "" && value != null) body[name] = Number(value);
  }
  return body;
}

/**
 * Asks for an answer to the messages and makes them and it the conversation's. `begun` is what it
 * has before: a beginning that the model is to go on with, other versions. If not a word of it
 * comes, the conversation is put back as it was, and so (by `restore`) is what was typed; `retry`
 * sends the same again once a key is given.
 */
async function generate(conversation, messages, { begun = {}, restore, retry }) {
  const before = { messages: conversation.messages, updated: conversation.updated };
  const answer = {
    id: newId(),
    role: "assistant",
    content: "",
    reasoning: "",
    status: "streaming",
    timing: { first: null, last: null, total: null },
    ...begun,
  };
  const { content, reasoning } = answer;
  const run = { answer, view: null, controller: new AbortController() };
  runs.set(conversation.id, run);
  conversation.messages = [...messages, answer];
  conversation.updated = new Date().toISOString();
  setAlert(conversation, "");
  if (conversation === open) {
    atEnd = true;
    render();
  } else {
    renderList();
  }
  save(conversation);

  let failure = null;
  try {
    if (!models.size) await loadModels();
    await receive(conversation, run, await requestBody(conversation, messages, content));
    if (answer.status === "streaming") {
      throw new ApiError("The connection closed before the answer was complete.");
    }
  } catch (error) {
    failure = error;
  }

  runs.delete(conversation.id);
  if (!conversations.has(conversation.id)) return;
  const stopped = run.controller.signal.aborted;
  const nothingCame = answer.content === content && answer.reasoning === reasoning;
  if (failure && nothingCame) {
    Object.assign(conversation, before);
    restore();
    setAlert(conversation, stopped ? "" : failure.message);
    if (stopped) announce("Stopped.");
    if (conversation === open) render();
    else renderList();
    save(conversation);
    if (failure.status === 401) askForKey(failure.message, retry);
    return;
  }
  if (failure) answer.status = stopped ? "stopped" : "error";
  if (answer.status === "error") answer.error = failure.message;
  save(conversation);
  run.view?.finish();
  showControls();
}

/** Reads the answer into the run's message. */
async function receive(conversation, run, body) {
  const { answer, controller } = run;
  answer.model = body.model;
  const started = performance.now();
  const now = () => Math.round((performance.now() - started) * 10) / 10;
  let saved = started;
  try {
    for await (const chunk of streamChat(body, store.apiKey.get(), controller.signal)) {
      if (chunk.usage) answer.usage = chunk.usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      const content = choice.delta?.content ?? "";
      const reasoning = choice.delta?.reasoning_content ?? "";
      if (content || reasoning) {
        answer.timing.last = now();
        answer.timing.first ??= answer.timing.last;
        answer.content += content;
        answer.reasoning += reasoning;
        run.view?.add(content, reasoning);
      }
      if (choice.finish_reason) {
        answer.finish_reason = choice.finish_reason;
        answer.status = "done";
      }
      if (performance.now() - saved > SAVE_EVERY_MS) {
        saved = performance.now();
        save(conversation);
      }
    }
  } finally {
    answer.timing.total = now();
  }
}

const stop = () => runs.get(open.id)?.controller.abort();

async function loadModels() {
  models = await listModels(store.apiKey.get());
  const names = [...models.keys()];
  const wanted = store.chosenModel.get();
  const choice = byId("model-choice");
  choice.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  choice.value = models.has(wanted) ? wanted : names[0];
  choice.hidden = names.length < 2;
  byId("model-name").hidden = names.length > 1;
  byId("model-name").textContent = names[0];
  byId("attach").hidden = !takesPictures();
}

const selectedModel = () => byId("model-choice").value;

async function connect() {
  try {
    await loadModels();
    setAlert(open, "");
  } catch (error) {
    byId("model-name").textContent = "Not connected";
    if (error.status === 401) askForKey(error.message, connect);
    else setAlert(open, error.message);
  }
}

function askForKey(reason, then) {
  const dialog = byId("key-dialog");
  byId("key-reason").textContent = store.apiKey.get() ? reason : "The server asks for a key.";
  byId("key").value = "";
  byId("key-form").onsubmit = (event) => {
    event.preventDefault();
    store.apiKey.set(byId("key").value.trim());
    byId("forget-key").hidden = false;
    dialog.close();
    then();
  };
  if (!dialog.open) dialog.showModal();
}

function fillSettings() {
  for (const name of store.SETTINGS) {
    settingsForm.elements[name].value = open.settings[name] ?? "";
  }
  checkSettings();
}

function checkSettings() {
  const wrong = [...settingsForm.elements].filter((field) => field.willValidate && !field.validity.valid);
  for (const name of store.SETTINGS) {
    const field = settingsForm.elements[name];
    field.setAttribute("aria-invalid", String(wrong.includes(field)));
  }
  const [field] = wrong;
  byId("settings-error").hidden = !field;
  byId("settings-error").textContent = field
    ? `${field.labels[0].firstChild.textContent.trim()}: ${field.validationMessage}`
    : "";
  return field;
}

function settingsAreValid() {
  const wrong = checkSettings();
  if (!wrong) return true;
  openSettings();
  wrong.focus();
  return false;
}

function openSettings() {
  closeSidebar();
  byId("settings").hidden = false;
  byId("open-settings").setAttribute("aria-expanded", "true");
  updateScrim();
}

function closeSettings() {
  if (byId("settings").hidden) return;
  const focused = byId("settings").contains(document.activeElement);
  byId("settings").hidden = true;
  byId("open-settings").setAttribute("aria-expanded", "false");
  updateScrim();
  if (focused) byId("open-settings").focus();
}

// On a narrow page these panels lie above the conversation.
const sidebarLiesAbove = matchMedia("(max-width: 48rem)");
const settingsLieAbove = matchMedia("(max-width: 68rem)");

function openSidebar() {
  closeSettings();
  document.body.classList.add("sidebar-open");
  byId("open-sidebar").setAttribute("aria-expanded", "true");
  updateScrim();
  byId("close-sidebar").focus();
}

function closeSidebar() {
  if (!document.body.classList.contains("sidebar-open")) return;
  document.body.classList.remove("sidebar-open");
  byId("open-sidebar").setAttribute("aria-expanded", "false");
  updateScrim();
  byId("open-sidebar").focus();
}

function updateScrim() {
  const sidebar = sidebarLiesAbove.matches && document.body.classList.contains("sidebar-open");
  const settings = settingsLieAbove.matches && !byId("settings").hidden;
  byId("scrim").hidden = !sidebar && !settings;
  byId("page").inert = sidebar || settings;
  byId("sidebar").inert = settings || (sidebarLiesAbove.matches && !sidebar);
}

const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  const chosen = store.chosenTheme.get();
  return chosen ? chosen === "dark" : systemIsDark.matches;
}

function showTheme() {
  const chosen = store.chosenTheme.get();
  if (chosen) document.documentElement.dataset.theme = chosen;
  else delete document.documentElement.dataset.theme;
  byId("theme").setAttribute("aria-label", `Switch to the ${isDark() ? "light" : "dark"} theme`);
}

function switchTheme() {
  const dark = !isDark();
  // Back at what the system says, the page follows the system again.
  store.chosenTheme.set(dark === systemIsDark.matches ? null : dark ? "dark" : "light");
  showTheme();
}

let draftTimer = 0;
prompt.addEventListener("input", () => {
  fitHeight(prompt);
  open.draft = prompt.value;
  const conversation = open;
  clearTimeout(draftTimer);
  draftTimer = setTimeout(() => save(conversation), 250);
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || document.querySelector("dialog[open]")) return;
  if (document.body.classList.contains("sidebar-open")) closeSidebar();
  else if (settingsLieAbove.matches && !byId("settings").hidden) closeSettings();
  else stop();
});

byId("new-conversation").addEventListener("click", startConversation);
byId("export").addEventListener("click", () =>
  exportConversations([open], `conversation-${day()}`),
);
byId("export-all").addEventListener("click", () =>
  exportConversations(
    [...conversations.values()].filter((conversation) => !store.isEmpty(conversation)),
    `conversations-${day()}`,
  ),
);
byId("import").addEventListener("click", () => byId("import-file").click());
byId("import-file").addEventListener("change", async (event) => {
  await importFiles([...event.target.files]);
  event.target.value = ""; // so that the same file can be chosen again
});
byId("search").addEventListener("input", () => renderList());
byId("search").addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !event.target.value) return;
  event.stopPropagation();
  event.preventDefault();
  event.target.value = "";
  renderList();
});
byId("rename-cancel").addEventListener("click", () => byId("rename-dialog").close());
byId("delete-cancel").addEventListener("click", () => byId("delete-dialog").close());
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("forget-key").addEventListener("click", () => {
  store.apiKey.set(null);
  byId("forget-key").hidden = true;
  announce("The key is forgotten.");
});
byId("close-alert").addEventListener("click", () => {
  setAlert(open, "");
  prompt.focus();
});
byId("model-choice").addEventListener("change", () => {
  store.chosenModel.set(selectedModel());
  byId("attach").hidden = !takesPictures();
});

byId("attach").addEventListener("click", () => byId("attach-file").click());
byId("attach-file").addEventListener("change", (event) => {
  attach([...event.target.files]);
  event.target.value = ""; // so that the same file can be chosen again
  prompt.focus();
});
document.addEventListener("paste", (event) => {
  const { files, types } = event.clipboardData;
  // Text that is copied from a document may come with a picture of it.
  if (!files.length || types.includes("text/plain")) return;
  if (document.querySelector("dialog[open]")) return;
  event.preventDefault();
  attach([...files]);
});
const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
document.addEventListener("dragover", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  document.body.classList.add("dropping");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dropping");
});
document.addEventListener("drop", (event) => {
  document.body.classList.remove("dropping");
  if (!hasFiles(event)) return;
  // Else the browser would leave the page for the file.
  event.preventDefault();
  attach([...event.dataTransfer.files]);
});

byId("messages").addEventListener("click", (event) => {
  const button = event.target.closest(".copy-code");
  if (!button) return;
  copyWithButton(button, button.closest(".code").querySelector("code").textContent);
});

settingsForm.addEventListener("input", () => {
  for (const name of store.SETTINGS) {
    const field = settingsForm.elements[name];
    if (field.validity.valid) open.settings[name] = field.value;
  }
  checkSettings();
  save(open);
});
settingsForm.addEventListener("submit", (event) => event.preventDefault());
byId("reset-settings").addEventListener("click", () => {
  open.settings = {};
  fillSettings();
  save(open);
});
byId("open-settings").addEventListener("click", () => {
  if (byId("settings").hidden) {
    openSettings();
    settingsForm.elements.system.focus();
  } else {
    closeSettings();
  }
});
byId("close-settings").addEventListener("click", closeSettings);
byId("open-sidebar").addEventListener("click", openSidebar);
byId("close-sidebar").addEventListener("click", closeSidebar);
byId("scrim").addEventListener("click", () => {
  closeSidebar();
  closeSettings();
});
sidebarLiesAbove.addEventListener("change", updateScrim);
settingsLieAbove.addEventListener("change", updateScrim);

byId("theme").addEventListener("click", switchTheme);
systemIsDark.addEventListener("change", showTheme);

scroller.addEventListener("scroll", () => {
  atEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < AT_END_PX;
  followEnd();
});
byId("to-end").addEventListener("click", () => {
  atEnd = true;
  followEnd();
  prompt.focus();
});
new ResizeObserver(followEnd).observe(scroller);
// Formulas, and then their fonts, may come after the text around them.
document.addEventListener("filled", followEnd);
document.fonts.addEventListener("loadingdone", followEnd);

addEventListener("pagehide", () => {
  clearTimeout(draftTimer);
  save(open);
  for (const [id, run] of runs) {
    save(conversations.get(id));
    run.controller.abort();
  }
});
addEventListener("storage", (event) => {
  // Another tab changed a conversation. One that is open here and in use stays as it is here.
  if (event.key === "engine-core.theme") showTheme();
  const id = store.conversationIdOf(event.key);
  if (!id || id === open.id || runs.has(id)) return;
  if (event.newValue === null) conversations.delete(id);
  for (const stored of store.loadConversations()) {
    if (stored.id === id) conversations.set(id, stored);
  }
  renderList();
});

for (const conversation of store.loadConversations()) {
  conversations.set(conversation.id, conversation);
}
dropPictures();
showTheme();
updateScrim();
byId("forget-key").hidden = !store.apiKey.get();
show(conversations.get(store.current.get()) ?? open);
connect();
