// A completion as it is streamed: one object per event.

export class ServerError extends Error {
  // param: the field it is about, where the server names one.
  constructor(message, status = 0, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

export function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export async function* events(body, key, signal) {
  const reply = await asked("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify(body),
    signal,
  });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ServerError("The stream broke off before the answer was complete.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(event.error.message, 200, event.error.param);
      yield event;
    }
  }
}

// The reply, or a ServerError that says why there is none.
export async function asked(path, options) {
  let reply;
  try {
    reply = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.");
  }
  if (reply.ok) return reply;
  const told = await reply.json().catch(() => null);
  const error = told?.error ?? { message: `The server answered with status ${reply.status}.`, param: null };
  throw new ServerError(error.message, reply.status, error.param);
}
