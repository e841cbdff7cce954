/** The server's OpenAI-compatible interface. */

/** What the server refused or reported; `status` is that of HTTP, 0 if there was no answer. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.name = "ApiError";
    this.status = status;
  }
}

const address = (path) => new URL(path, document.baseURI);

async function request(path, key, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(address(path), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw new ApiError(await errorMessage(response), response.status);
  return response;
}

async function errorMessage(response) {
  const fallback = `The server answered ${response.status} ${response.statusText}`.trim() + ".";
  let text = "";
  try {
    text = await response.text();
    return messageOf(JSON.parse(text)) ?? fallback;
  } catch {
    return text.trim() && text.length < 300 && !text.trimStart().startsWith("<")
      ? `${fallback} ${text.trim()}`
      : fallback;
  }
}

function messageOf(body) {
  const error = body?.error ?? body?.detail;
  if (typeof error === "string") return error;
  if (typeof error?.message === "string") return error.message;
  return error ? JSON.stringify(error) : null;
}

/** The names under which the server serves its model, each with what may be in a message. */
export async function listModels(key) {
  const response = await request("v1/models", key);
  const body = await response.json().catch(() => null);
  const models = body?.data?.map(({ id, input_modalities }) => [id, input_modalities ?? ["text"]]);
  if (!models?.length) throw new ApiError("The server names no model at /v1/models.");
  return new Map(models);
}

/**
 * Asks for an answer and yields its chunks as they come. To abort `signal` closes the connection,
 * which is how the server learns that nobody waits any more.
 */
export async function* streamChat(body, key, signal) {
  const response = await request("v1/chat/completions", key, {
    method: "POST",
    headers: { "Content-Type": "application/json", Accept: "text/event-stream" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      let chunk;
      try {
        chunk = JSON.parse(data);
      } catch {
        throw new ApiError("The server sent a chunk that is not JSON.");
      }
      if (chunk.error) throw new ApiError(messageOf(chunk), chunk.error.code ?? 0);
      yield chunk;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError("The connection broke before the answer was complete.");
  }
}

/** The data of each server-sent event of a stream (WHATWG HTML, 9.2.6). */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer += value;
      // A lone "\r" at the end may be half of a "\r\n".
      const lines = buffer.split(/\r\n|\n|\r(?!$)/);
      buffer = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    // Whoever stops reading closes the connection, so that the server does not go on for nobody.
    reader.cancel().catch(() => {});
  }
}
