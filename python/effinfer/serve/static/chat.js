"use strict";

const element = (id) => document.getElementById(id);
let messages = [];
let controller = null;

function headers() {
  const key = element("key").value;
  const all = { "Content-Type": "application/json" };
  return key ? { ...all, Authorization: `Bearer ${key}` } : all;
}

function show(kind, text) {
  const node = document.createElement("p");
  node.className = `message ${kind}`;
  node.textContent = text; // never as HTML: a model may write anything
  element("messages").append(node);
  node.scrollIntoView({ block: "end" });
  return node;
}

function setRunning(running) {
  element("send").hidden = running;
  element("stop").hidden = !running;
}

function requestBody(conversation) {
  const system = element("system").value.trim();
  const most = Number(element("max-tokens").value);
  return JSON.stringify({
    messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation],
    temperature: Number(element("temperature").value),
    ...(most > 0 ? { max_completion_tokens: most } : {}),
    stream: true,
    stream_options: { include_usage: true },
  });
}

// The data of server-sent events, as objects.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function answer() {
  const conversation = messages; // another may begin before this answer ends
  const mine = controller = new AbortController();
  setRunning(true);
  element("status").textContent = "";
  const thoughts = show("thoughts", "");
  const node = show("assistant", "");
  let first = 0;
  let usage = null;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: requestBody(conversation), signal: mine.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) usage = event.usage;
      const delta = event.choices[0]?.delta ?? {};
      if (!delta.content && !delta.reasoning_content) continue;
      first ||= performance.now();
      thoughts.textContent += delta.reasoning_content ?? "";
      node.textContent += delta.content ?? "";
      node.scrollIntoView({ block: "end" });
    }
    const seconds = (performance.now() - first) / 1000;
    const rate = usage && seconds > 0 ? `, ${((usage.completion_tokens - 1) / seconds).toFixed(1)} a second` : "";
    element("status").textContent = usage ? `${usage.completion_tokens} tokens${rate}` : "";
  } catch (error) {
    if (error.name === "AbortError") element("status").textContent = "stopped";
    else show("error", error.message);
  } finally {
    if (!thoughts.textContent) thoughts.remove();
    if (node.textContent) conversation.push({ role: "assistant", content: node.textContent });
    else { node.remove(); conversation.pop(); } // a question without an answer is asked again
    if (controller === mine) {
      controller = null;
      setRunning(false);
    }
    element("input").focus();
  }
}

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = element("input").value.trim();
  if (!text || controller) return;
  element("input").value = "";
  messages.push({ role: "user", content: text });
  show("user", text);
  answer();
});
element("input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  element("form").requestSubmit();
});
element("stop").addEventListener("click", () => controller?.abort());
element("clear").addEventListener("click", () => {
  controller?.abort();
  messages = [];
  element("messages").replaceChildren();
  element("status").textContent = "";
});
fetch("v1/models", { headers: headers() })
  .then((response) => response.json())
  .then((list) => { if (list.data) document.title = element("model").textContent = list.data[0].id; })
  .catch(() => {});
