// The form, and one column for each answer.

const FINISHED = {
  eos: "ended by the model",
  stop: "ended by a stop condition",
  length: "cut off by max_new_tokens",
  risk: "stopped by max_risk",
};
const CLOSING = "</think>";
const RAW = ["f_mlds", "con_mlds"];
const count = (value, noun) => `${value} ${noun}${value === 1 ? "" : "s"}`;
let model = "default";
let running = null; // the AbortController of the answers that are being decoded

class Column {
  constructor(name, body) {
    this.body = body;
    this.spans = [];
    this.drawn = [];
    this.content = "";
    this.written = ""; // the generated text so far, reasoning included
    this.verdict = make("p", "cocoa-verdict", "Answering…");
    this.verdict.setAttribute("role", "status");
    this.text = textBox(`Answer by ${name}`);
    this.below = make("div");
    const heading = make("h2", "cocoa-name", name);
    this.element = make("section", "cocoa-answer", heading, this.verdict, this.text, this.below);
    this.element.setAttribute("aria-label", `Answer by ${name}`);
    this.raw = RAW.includes(body.cocoa.risk);
  }

  /** Whether the risk is a raw MLDS, which has no levels. */
  set raw(raw) {
    this.element.classList.toggle("raw", raw);
    $("scale").hidden = raw;
  }

  async run(key, signal) {
    try {
      await stream(this.body, { key, signal, onChunk: (chunk) => this.take(chunk) });
      this.finish();
    } catch (error) {
      if (signal.aborted) this.say(`Stopped after ${count(this.spans.length, "span")}.`);
      else this.fail(error.message);
    }
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const delta = chunk.choices?.[0]?.delta ?? {};
    this.content += delta.content ?? "";
    for (const span of delta.cocoa_spans ?? []) this.add(span);
    if (delta.cocoa_risk) this.report = delta.cocoa_risk;
  }

  add(span) {
    this.spans.push(span);
    const shown = drawn(this.withoutTag(span));
    this.drawn.push(shown);
    const box = span.part === "reasoning" ? this.reasoning() : this.text;
    if (shown.element && !box.querySelector(".cocoa-span")) shown.element.tabIndex = 0;
    box.append(...shown.parts);
  }

  /** The span without the end of the reasoning, if it is the first one of the answer after it. */
  withoutTag(span) {
    const before = this.written.length;
    this.written += span.text;
    if (span.part !== "answer" || this.answers) return span;
    this.answers = true;
    const tag = this.written.lastIndexOf(CLOSING); // none if it is a special token
    const end = tag < 0 ? before : Math.max(before, tag + CLOSING.length);
    return { ...span, text: span.text.slice(end - before).trimStart() };
  }

  /** The box of the reasoning, above the answer; it is made for the first span of a reasoning. */
  reasoning() {
    if (!this.thoughts) {
      this.thoughts = textBox("Reasoning");
      this.thoughts.classList.add("reasoning");
      this.text.before(make("details", "", make("summary", "", "Reasoning"), this.thoughts));
    }
    return this.thoughts;
  }

  say(words) {
    this.verdict.textContent = safe(words);
  }

  fail(message) {
    this.say(`${this.spans.length ? "The answer is incomplete" : "No answer"}: ${message}`);
    this.element.classList.add("failed");
  }

  finish() {
    const report = this.report;
    if (!report) return this.fail("the server sent no risk");
    this.raw = RAW.includes(report.risk_source);
    this.say(report.verdict);
    const checks = report.check ?? [];
    const claims = [...checks].sort((check, other) => check.start - other.start);
    const places = new Set(checks.flatMap((check) => check.spans ?? []));
    for (const [place, span] of this.drawn.entries()) if (places.has(place)) shade(span, claims);
    this.text.classList.add("done");
    this.below.append(...this.checks(checks));
    if (report.tool_calls?.length) this.below.append(...this.toolCalls(report.tool_calls));
    const end = FINISHED[report.finish_reason] ?? report.finish_reason ?? "";
    const tokens = this.usage ? `${count(this.usage.completion_tokens, "token")}, ` : "";
    const sizes = `${tokens}${count(this.spans.length, "span")}, ${count(report.risk_points, "risk point")}`;
    this.below.append(make("p", "summary", `${sizes}${end && `, ${end}`}.`), this.copies());
  }

  checks(checks) {
    if (!checks.length) return this.raw ? [] : [make("p", "cocoa-heading", "No claim of this answer stands out.")];
    const lines = checks.map((check) => {
      const claim = make("button", "", make("bdi", "", safe(check.text)));
      claim.type = "button";
      claim.addEventListener("click", () => this.drawn[check.spans?.[0]]?.element?.focus());
      const reasons = check.reasons?.length ? `: ${safe(check.reasons.join("; "))}` : "";
      return make("li", "", claim, ` (${number(check.risk, 2)})${reasons}`);
    });
    return [make("p", "cocoa-heading", "Check these:"), make("ol", "cocoa-check", ...lines)];
  }

  toolCalls(calls) {
    const shown = calls.map((call) => {
      const risks = Object.entries(call.arguments).map(([name, argument]) => `; ${name} (${number(argument.risk, 2)})`);
      const words = ` (${number(call.risk, 2)})${risks.join("")}${call.error ? `: ${call.error}` : ""}`;
      return make("li", "", make("bdi", "cocoa-quote", safe(call.name ?? "(incomplete)")), safe(words));
    });
    return [make("p", "cocoa-heading", "Tool calls, with their risk and that of each argument:"), make("ul", "calls", ...shown)];
  }

  copies() {
    const copied = make("span", "copied");
    copied.setAttribute("role", "status");
    const buttons = Object.entries({ curl: asCurl, Python: asPython }).map(([name, write]) => {
      const button = make("button", "", `Copy as ${name}`);
      button.type = "button";
      button.addEventListener("click", () => copy(write(this.body, DATA.needs_key), name, copied));
      return button;
    });
    return make("div", "copies", ...buttons, copied);
  }
}

/** Copies a text, or shows it where the browser gives pages no clipboard. */
async function copy(text, name, status) {
  try {
    await navigator.clipboard.writeText(text);
    status.replaceChildren("Copied.");
  } catch {
    const box = make("textarea", "", text);
    box.readOnly = true;
    box.rows = 8;
    box.setAttribute("aria-label", `The request as ${name}`);
    status.replaceChildren(box);
    box.select();
  }
}

/** The settings that were changed, as the object `cocoa`. */
function settings() {
  const fields = [...$("fields").querySelectorAll("[name]")].filter((field) => field.value !== "");
  const valueOf = (field) => (field.type === "number" ? Number(field.value) : field.value);
  return Object.fromEntries(fields.map((field) => [field.name, valueOf(field)]));
}

/** The request for one method. Throws an Error if a field is not JSON. */
function request(method) {
  const passage = $("passage").value.trim();
  const question = $("question").value.trim();
  const system = $("system").value.trim();
  let more = {};
  try {
    more = JSON.parse($("more").value.trim() || "{}");
  } catch (error) {
    throw new Error(`“More fields of the request” is not JSON: ${error.message}`);
  }
  if (typeof more !== "object" || more === null || Array.isArray(more)) {
    throw new Error("“More fields of the request” is not a JSON object");
  }
  const own = { method, ...settings(), ...(passage ? { source: [passage] } : {}), report: "message", candidates: true };
  return {
    model,
    messages: [
      ...(system ? [{ role: "system", content: system }] : []),
      { role: "user", content: passage ? `${passage}\n\n${question}` : question },
    ],
    stream: true,
    stream_options: { include_usage: true },
    ...more,
    cocoa: { ...own, ...more.cocoa },
  };
}

async function ask(event) {
  event.preventDefault();
  if (running) return;
  card.hide();
  $("problem").textContent = $("same").textContent = $("kinds").textContent = "";
  let columns;
  try {
    const methods = [...new Set([$("method").value, $("compared").value].filter(Boolean))];
    columns = methods.map((method) => new Column(method, request(method)));
  } catch (error) {
    $("problem").textContent = safe(error.message);
    return;
  }
  $("answers").replaceChildren(...columns.map((column) => column.element));
  $("answers").classList.toggle("cocoa-many", columns.length > 1);
  $("legend").hidden = false;
  running = new AbortController();
  $("ask").disabled = true;
  $("stop").disabled = false;
  await Promise.all(columns.map((column) => column.run($("key").value, running.signal)));
  running = null;
  $("ask").disabled = false;
  $("stop").disabled = true;
  const texts = columns.filter((column) => column.report).map((column) => column.content);
  if (texts.length > 1 && texts.every((text) => text === texts[0])) $("same").textContent = "The answers are the same.";
  const kinds = [...new Set(columns.map((column) => column.report?.risk_source).filter(Boolean))];
  if (kinds.length < 2) return;
  const named = kinds.map((kind) => DATA.sources[kind] ?? kind).join("; ");
  $("kinds").textContent = safe(`The risks of these answers are of different kinds, so do not compare them: ${named}.`);
}

/** Shows the name of the model, once it is loaded and the key is right. */
async function greet() {
  const key = $("key").value;
  if (DATA.needs_key && !key) {
    $("model").textContent = "This server needs an API key.";
    return;
  }
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const response = await fetch("v1/models", { headers }).catch(() => null);
  if (response?.ok) {
    model = (await response.json()).data[0].id;
    $("model").textContent = `Model: ${safe(model)}`;
    return;
  }
  $("model").textContent = response ? safe(await problemOf(response)) : "The server cannot be reached.";
  if (response?.status === 503) setTimeout(greet, 1000); // the model is being loaded
}

function fill() {
  for (const name of DATA.methods) {
    $("method").append(new Option(name, name, name === DATA.method, name === DATA.method));
    $("compared").append(new Option(name, name));
  }
  for (const setting of DATA.settings) {
    const field = make(setting.choices ? "select" : "input");
    if (setting.choices) {
      const others = setting.choices.filter((choice) => choice !== setting.default);
      field.append(new Option(setting.default, ""), ...others.map((choice) => new Option(choice, choice)));
    } else Object.assign(field, { type: "number", step: setting.step, placeholder: setting.default ?? "" });
    Object.assign(field, { name: setting.name, id: `setting-${setting.name}`, title: setting.description });
    const label = make("label", "", setting.name);
    label.htmlFor = field.id;
    $("fields").append(make("p", "", label, field));
  }
  const ranges = [0, ...DATA.bounds].map((low, level) => [low, DATA.bounds[level] ?? 1]);
  $("levels").append(...ranges.map(([low, high], level) => {
    const shown = make("span", `cocoa-level-${level}`, `${low.toFixed(2)}–${high.toFixed(2)}`);
    return make("li", "", `${level} `, shown);
  }));
  $("key-field").hidden = !DATA.needs_key;
  $("key").value = sessionStorage.getItem("cocoa-key") ?? "";
}

$("form").addEventListener("submit", ask);
$("stop").addEventListener("click", () => running?.abort());
$("every").addEventListener("change", () => $("answers").classList.toggle("every", $("every").checked));
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
$("key").addEventListener("change", () => {
  sessionStorage.setItem("cocoa-key", $("key").value);
  greet();
});
fill();
greet();
