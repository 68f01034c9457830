"use strict";
// Messages of a conversation as nodes: texts of models become text nodes only, and tokens may have colours.
(() => {
  const { el, number } = report;
  // Characters that would be invisible, move the cursor or turn the direction of text.
  const ODD = new RegExp("[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e" +
    "\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb]|[\\u{e0000}-\\u{e007f}]", "gu");
  const COLOURS = {
    mismatch: { label: "log-prob, trainer - generator", signed: true }, advantage: { label: "advantage", signed: true },
    lag: { label: "versions behind the trained weights" }, entropy: { label: "entropy" },
  };

  // Text in which control characters are visible.
  function visible(text) {
    const parts = [];
    let at = 0;
    for (const match of text.matchAll(ODD)) {
      const code = match[0].codePointAt(0);
      const name = `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
      if (match.index > at) parts.push(text.slice(at, match.index));
      parts.push(el("span", { class: "odd" }, `[${name}]`));
      at = match.index + match[0].length;
    }
    if (at < text.length) parts.push(text.slice(at));
    return parts;
  }

  const textOf = (message) => (message.segments
    ? message.segments.map((each) => each.text ?? " ... ").join("")
    : (message.text || "") + (message.left_out ? ` ... ${message.tail || ""}` : ""));
  const leftOut = (what) => el("span", { class: "left-out" }, ` [${what} left out here] `);

  function block(value) {
    return el("div", { class: "said-text", dir: "auto" }, visible(value.text || ""),
      value.left_out ? [leftOut(`${number(value.left_out)} characters`), visible(value.tail || "")] : null);
  }

  // Value of a token: a list, or one number for all.
  const valueAt = (segment, name, at) => (Array.isArray(segment[name]) ? segment[name][at] : segment[name]);

  function strongest(messages, name) {
    let found = 0;
    for (const message of messages) {
      for (const segment of message.segments || []) {
        for (const value of [segment[name] ?? 0].flat()) found = Math.max(found, Math.abs(value));
      }
    }
    return found;
  }

  function tokenBlock(message, name, scale, most) {
    const names = Object.keys(COLOURS);
    const parts = message.segments.map((segment) => {
      if (segment.text === undefined) return leftOut(`${number(segment.left_out)} tokens`);
      if (!name || segment[name] === undefined) return visible(segment.text);
      let start = 0;
      return segment.cuts.map((length, at) => {
        if (!length) return null;
        const piece = segment.text.slice(start, start + length);
        start += length;
        const value = valueAt(segment, name, at);
        const share = most ? Math.abs(value) / most : 0;
        const colour = !COLOURS[name].signed ? "138,79,168" : value < 0 ? "200,60,40" : "30,120,180";
        const title = names.filter((each) => segment[each] !== undefined)
          .map((each) => `${COLOURS[each].label}: ${number(valueAt(segment, each, at) / scale[each])}`).join("\n");
        return el("span", { title, style: `background:rgba(${colour},${(0.75 * share).toFixed(3)})` }, visible(piece));
      });
    });
    return el("div", { class: "said-text", dir: "auto" }, parts);
  }

  function messageNode(message, data, colour, most) {
    const told = [message.role, message.name, message.turn ? `turn ${message.turn}` : null,
      message.expert ? "of the environment's expert" : null,
      message.tokens !== undefined ? `${number(message.tokens)} tokens` : null,
      message.reward !== undefined ? `reward ${number(message.reward)}` : null,
      message.advantage !== undefined ? `advantage ${number(message.advantage)}` : null].filter(Boolean);
    const pictures = (message.pictures || []).map((name) => (data.pictures[name]
      ? el("img", { src: data.pictures[name], alt: "a picture of the message" })
      : el("span", { class: "left-out" }, "[a picture that is not in this page]")));
    return el("div", { class: `said said-${message.role === "assistant" ? "model" : "other"}` },
      el("div", { class: "said-head" }, visible(told.join(", "))),
      message.segments ? tokenBlock(message, colour, data.scale, most) : block(message), pictures,
      message.extra ? el("details", { open: true }, el("summary", {}, "tool calls and other keys"), block(message.extra)) : null);
  }

  // Nodes of a conversation; `colour` is a name of COLOURS, or empty.
  function conversation(messages, data, colour) {
    const most = colour ? strongest(messages, colour) : 0;
    return messages.map((message) => messageNode(message, data, colour, most));
  }

  report.conversation = { visible, messages: conversation, textOf, strongest, COLOURS };
})();
