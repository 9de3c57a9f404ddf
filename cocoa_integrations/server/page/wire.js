"use strict";
// What goes over the wire, and the same request as a command and as a program. Nothing here touches the page.

const CUT = "the connection was cut before the answer was complete";

/** Replaces the browser's own words for an error of the network. */
const because = (words) => (error) => {
  throw error.name === "AbortError" ? error : new Error(words);
};

/** The JSON of each event of a stream; comments are skipped. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(because(CUT));
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const line of parts.flatMap((part) => part.split("\n"))) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

/** The message of a response that is no answer. */
async function problemOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

/** Streams the answer to a request: calls `onChunk` with each chunk, and throws an Error if there is no whole answer. */
async function stream(body, { key, signal, onChunk }) {
  const headers = { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const options = { method: "POST", headers, body: JSON.stringify(body), signal };
  const response = await fetch("v1/chat/completions", options).catch(because("the server cannot be reached"));
  if (!response.ok) throw new Error(await problemOf(response));
  let ended = false;
  for await (const chunk of events(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    ended ||= Boolean(chunk.choices?.[0]?.finish_reason);
    onChunk(chunk);
  }
  if (!ended) throw new Error(CUT);
}

/** The request without what only a stream needs. */
function unstreamed({ stream, stream_options, ...body }) {
  return body;
}

const shellQuoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** The request as a command. It reads the key from the environment. */
function asCurl(body, needsKey) {
  const lines = [
    `curl ${shellQuoted(new URL("v1/chat/completions", document.baseURI).href)}`,
    "-H 'Content-Type: application/json'",
    ...(needsKey ? ['-H "Authorization: Bearer $COCOA_API_KEY"'] : []),
    `-d ${shellQuoted(JSON.stringify(unstreamed(body)))}`,
  ];
  return lines.join(" \\\n  ") + "\n";
}

/** A JSON value as a Python literal. */
function asLiteral(value, indent = "    ") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = indent + "    ";
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const parts = Array.isArray(value)
    ? value.map((one) => asLiteral(one, inner))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${asLiteral(one, inner)}`);
  const line = open + parts.join(", ") + close;
  if (indent.length + line.length < 100 && !line.includes("\n")) return line;
  return `${open}\n${parts.map((part) => `${inner}${part},\n`).join("")}${indent}${close}`;
}

/** The request as a program with OpenAI's client. It reads the key from the environment. */
function asPython(body, needsKey) {
  const { model, messages, ...extra } = unstreamed(body);
  const key = needsKey ? 'os.environ["COCOA_API_KEY"]' : '"none"';
  return `${needsKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(new URL("v1", document.baseURI).href)}, api_key=${key})
answer = client.chat.completions.create(
    model=${asLiteral(model)},
    messages=${asLiteral(messages)},
    extra_body=${asLiteral(extra)},
)
message = answer.choices[0].message
print(message.content)
print(message.cocoa_risk["verdict"])
`;
}
