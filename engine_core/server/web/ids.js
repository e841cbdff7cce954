/** Ids of conversations, messages and pictures. */

/** An id. Not randomUUID, which browsers keep from pages that are neither https nor localhost. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
