// Requests to the server: token, errors, retries while it is busy, jobs with events.
import { note } from "./messages.js";

const TRIES = 6, LONGEST_WAIT = 30, STORE = "vitrail-token";
let token = storedToken();

export class Problem extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function storedToken() {
  try {
    return sessionStorage.getItem(STORE);
  } catch {
    return null;
  }
}

export function useToken(newToken) {
  token = newToken;
  try {
    sessionStorage.setItem(STORE, newToken);
  } catch {
    // Without storage the token lasts as long as the page.
  }
}

export async function get(path, signal) {
  return (await send(path, { signal })).json();
}

export async function getBlob(path, signal) {
  return (await send(path, { signal })).blob();
}

export async function post(path, fields, signal) {
  const body = new FormData();
  for (const [name, value] of Object.entries(fields)) {
    if (value !== null && value !== undefined) body.append(name, value);
  }
  return send(path, { method: "POST", body, signal });
}

// Runs long work as a job. onEvent(event, data) is called for each event on the way; aborting the signal cancels the job.
export async function job(path, fields, signal, onEvent) {
  const started = await (await post(path, { ...fields, wait: "false" }, signal)).json();
  const stop = () => send(`/api/jobs/${started.job}`, { method: "DELETE", keepalive: true }).catch(() => {});
  signal.addEventListener("abort", stop);
  try {
    const answer = await send(started.events, { signal });
    for await (const [event, data] of events(answer.body)) {
      if (event === "done") return data;
      if (event === "failed") throw new Problem(data.error, data.status);
      if (event === "cancelled") throw new DOMException("cancelled", "AbortError");
      onEvent(event, data);
    }
    throw new Problem("The server closed the connection without an answer: try again.");
  } finally {
    signal.removeEventListener("abort", stop);
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const [, event, data] = /^event: (.+)\ndata: (.+)$/.exec(block) ?? []; // otherwise a comment
      if (event) yield [event, JSON.parse(data)];
    }
  }
}

async function send(path, options) {
  for (let tries = 1; ; tries++) {
    const answer = await request(path, options);
    if (answer.ok) return answer;
    if (answer.status !== 429 || tries === TRIES) throw await toProblem(answer);
    const wait = Math.min(Number(answer.headers.get("Retry-After")) || 1, LONGEST_WAIT);
    note(`The server is busy: trying again in ${wait} s…`, true);
    try {
      await pause(1000 * wait, options.signal);
    } finally {
      note("");
    }
  }
}

async function request(path, options) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  try {
    return await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server does not answer: check that `vitrail serve` is still running, then try again.");
  }
}

async function toProblem(answer) {
  if (answer.status === 401) {
    return new Problem("This server requires a token: open the URL that `vitrail serve` printed, or enter the token here.", 401);
  }
  const { error } = await answer.json().catch(() => ({})); // not every error comes from the application itself
  return new Problem(error || `The server answered with status ${answer.status}.`, answer.status);
}

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new DOMException("cancelled", "AbortError"));
    });
  });
}
