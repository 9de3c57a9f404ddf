// Spans of an answer, and the card that shows what competed in one. Text of the model is put into the page by
// textContent only.

const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

/** An element with a class and a text, or with children. */
function make(tag, className = "", ...content) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...content); // strings become text nodes
  return element;
}

/** Text with visible control characters; as `safe` of the engine. */
function safe(text) {
  return text
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/\u007f/g, "\u2421")
    .replace(/[\u0080-\u009f]/g, "\ufffd")
    .replace(/[\u202a-\u202e\u2066-\u2069]/g, (c) => `<U+${c.charCodeAt(0).toString(16).toUpperCase()}>`);
}

/** A span's text on one line, with visible line ends and visible spaces at both ends. */
function visible(text) {
  if (!text) return "(end)";
  const [, before, core, after] = /^( *)(.*?)( *)$/s.exec(text);
  const shown = safe(core).replaceAll("\n", "\\n").replaceAll("\t", "\\t");
  return "␣".repeat(before.length) + shown + "␣".repeat(after.length);
}

/** The level of risk, 0 to 3. A risk that is not a number has the highest. */
function levelOf(span) {
  if (span.risk === null) return span.flagged ? DATA.bounds.length : 0;
  return DATA.bounds.filter((bound) => span.risk >= bound).length;
}

const number = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));

/** What shows a span: the nodes of its text, and its element, in the style of its level, without the white space around. */
function drawn(span) {
  const core = span.text.trim();
  const start = core ? span.text.indexOf(core) : 0;
  const texts = [span.text.slice(0, start), core, span.text.slice(start + core.length)];
  const nodes = texts.map((text) => document.createTextNode(safe(text)));
  const found = { end: span.end, texts, nodes, parts: nodes, element: null };
  if (!core && !span.rivals?.length && !span.reaches_max_risk) return found;
  const blank = core ? "" : span.text.includes("\n") ? " cocoa-line" : span.text ? " cocoa-space" : " cocoa-end";
  const level = `cocoa-level-${levelOf(span)}`;
  const reached = span.reaches_max_risk ? " cocoa-reached" : "";
  const element = make("span", `cocoa-span ${level}${blank}${reached}`, nodes[1]);
  element.tabIndex = -1;
  element.setAttribute("aria-describedby", "card");
  element.measured = span;
  return { ...found, parts: [nodes[0], element, nodes[2]], element };
}

/** Shades the claims to check in a drawn span. Their offsets, in the order of the text, count code points. */
function shade({ end, texts, nodes }, claims) {
  let start = end - [...texts.join("")].length;
  for (const [index, text] of texts.entries()) {
    nodes[index].replaceWith(...cut([...text], start, claims));
    start += [...text].length;
  }
}

/** A text that begins at an offset, with each part of a claim in the style of the claim's level. */
function cut(text, start, claims) {
  const parts = [];
  let at = 0;
  for (const claim of claims) {
    const low = Math.max(claim.start - start, at);
    const high = Math.min(claim.end - start, text.length);
    if (low >= high) continue;
    const level = levelOf({ risk: claim.risk, flagged: true }); // a listed claim has a risk: null is NaN
    parts.push(safe(text.slice(at, low).join("")));
    parts.push(make("span", `claim cocoa-level-${level}`, safe(text.slice(low, high).join(""))));
    at = high;
  }
  return [...parts, safe(text.slice(at).join(""))];
}

/** What the card says of a span. */
function describe(span, absolute) {
  const rivals = span.rivals ?? [];
  const kind = rivals.length ? `chosen from ${rivals.length} competing candidates` : "no other token competed";
  const level = absolute ? `; risk level ${levelOf(span)} of 0 to 3` : "";
  const reached = span.reaches_max_risk ? "; reached max_risk" : "";
  const quote = make("bdi", "cocoa-quote", visible(span.text));
  const parts = [make("p", "", quote, `: ${kind}${level}${reached}`)];
  const values = [
    ["risk", number(span.risk, 3)],
    ["log p", number(span.log_prob, 2)],
    ["ConMLDS", number(span.con_mlds, 3)],
    ["fMLDS", number(span.f_mlds, 3)],
    ["source attention", number(span.source_attention, 3)],
  ];
  const rows = values.map(([name, value]) => make("div", "", make("dt", "", name), make("dd", "", value)));
  parts.push(make("dl", "cocoa-values", ...rows));
  return rivals.length ? [...parts, rivalTable(rivals, span.chosen)] : parts;
}

function rivalTable(rivals, chosen) {
  const heads = ["candidate", "log p", "ConMLDS", "fMLDS", "score", "taken"].map((name) => {
    const head = make("th", "", name);
    head.scope = "col";
    return head;
  });
  const rows = rivals.map((rival, index) => {
    const kept = index === chosen;
    const taken = kept && rival.is_greedy ? "both" : kept ? "kept" : rival.is_greedy ? "greedy" : "";
    const name = make("th", "", make("bdi", "cocoa-clip", visible(rival.text)));
    name.scope = "row";
    const { log_prob, con_mlds, f_mlds, score } = rival;
    const values = [number(log_prob, 2), number(con_mlds, 3), number(f_mlds, 3), number(score, 2), taken];
    return make("tr", kept ? "cocoa-kept" : "", name, ...values.map((value) => make("td", "", value)));
  });
  return make("table", "", make("thead", "", make("tr", "", ...heads)), make("tbody", "", ...rows));
}

/** The one card of the page. It shows the span under the pointer or with the focus. */
const card = {
  shown: null,
  timer: 0,
  show(element) {
    clearTimeout(card.timer);
    card.shown = element;
    $("card").replaceChildren(...describe(element.measured, !element.closest(".raw")));
    $("card").hidden = false;
    card.place();
  },
  place() {
    if (!card.shown) return;
    const [box] = card.shown.getClientRects();
    const { offsetWidth: width, offsetHeight: height } = $("card");
    if (!box) return;
    const above = box.bottom + 4 + height > innerHeight - 8 && box.top - 4 - height > 8;
    $("card").style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
    $("card").style.top = `${above ? box.top - 4 - height : box.bottom + 4}px`;
  },
  hide() {
    clearTimeout(card.timer);
    card.shown = null;
    $("card").hidden = true;
  },
  /** Hides the card unless the pointer comes to it, or a span has the focus. */
  leave() {
    clearTimeout(card.timer);
    const focused = document.activeElement?.measured ? document.activeElement : null;
    card.timer = setTimeout(() => (focused ? card.show(focused) : card.hide()), 150);
  },
};

addEventListener("scroll", card.place, { passive: true });
addEventListener("resize", card.place);
addEventListener("keydown", (event) => event.key === "Escape" && card.hide());
$("card").addEventListener("mouseenter", () => clearTimeout(card.timer));
$("card").addEventListener("mouseleave", card.leave);

/** The text of an answer: one stop for Tab, and arrow keys between its spans. */
function textBox(label) {
  const box = make("div", "cocoa-text");
  box.dir = "auto";
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", label);
  const spanAt = (event) => event.target.closest?.(".cocoa-span");
  box.addEventListener("mouseover", (event) => spanAt(event) && card.show(spanAt(event)));
  box.addEventListener("mouseout", (event) => spanAt(event) && card.leave());
  box.addEventListener("focusin", (event) => {
    for (const one of box.querySelectorAll(".cocoa-span")) one.tabIndex = -1;
    event.target.tabIndex = 0;
    card.show(event.target);
  });
  box.addEventListener("focusout", card.leave);
  box.addEventListener("keydown", (event) => {
    const spans = [...box.querySelectorAll(".cocoa-span")];
    const at = spans.indexOf(event.target);
    const after = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1 };
    const next = { ...after, Home: 0, End: spans.length - 1 }[event.key];
    if (spans[next]) {
      event.preventDefault();
      spans[next].focus();
    }
  });
  return box;
}
