"use strict";
// The frame of the report: navigation between sections, and what sections build their content with. All text goes through
// text nodes and attributes of a fixed kind, so a model's response cannot become markup.
const report = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const FORBIDDEN = new Set(["script", "iframe", "object", "embed", "frame", "link", "meta", "base", "form"]);
  const ADDRESSES = new Set(["href", "src", "xlink:href", "action", "formaction", "poster", "data"]);
  const COLOURS = 8; // --series-1 to --series-8 of page.css
  const renderers = new Map();
  const drawn = new Set();
  let head = { runs: [], sections: [], made: "", version: "", index: "" };
  let chosen = 0; // the run that sections of one run show

  // A section of one run: render(root, data, run), where run has name, path and index.
  function section(name, render) { renderers.set(name, { render, overlaid: false }); }

  // A section that shows all runs of the page in one place: render(root, [{name, path, index, data}, ...]).
  function overlaid(name, render) { renderers.set(name, { render, overlaid: true }); }

  // An element of HTML. Attributes: strings; true for one without a value; null and false are left out; functions are
  // listeners (onclick: event => ...); style takes CSS text. Children: nodes, text, numbers, arrays of these; null is left out.
  function el(tag, attributes, ...children) { return build(document.createElement(tag), tag, attributes, children); }

  // The same for an element of SVG.
  function svg(tag, attributes, ...children) { return build(document.createElementNS(SVG, tag), tag, attributes, children); }

  function build(node, tag, attributes, children) {
    if (FORBIDDEN.has(tag.toLowerCase())) throw new Error(`a section may not create <${tag}>`);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (typeof value === "function") node.addEventListener(name.replace(/^on/, ""), value);
      else if (/^on|^srcdoc$/i.test(name)) throw new Error(`${name} takes a function`);
      else if (name === "style") node.style.cssText = value;
      else if (ADDRESSES.has(name.toLowerCase())) node.setAttribute(name, address(String(value)));
      else node.setAttribute(name, value === true ? "" : String(value));
    }
    put(node, children);
    return node;
  }

  function put(node, children) {
    for (const child of children.flat(Infinity)) {
      if (child !== null && child !== undefined && child !== false) {
        node.append(child instanceof Node ? child : document.createTextNode(String(child)));
      }
    }
  }

  // Addresses inside the page, files beside it, pictures in the data, and files that the page makes; nothing else.
  function address(text) {
    const read = text.replace(/[\x00-\x20]+/g, ""); // browsers leave out tabs and line ends within an address
    const inside = /^(#|blob:|data:image\/(png|jpeg|gif|webp);base64,|data:,)/.test(read);
    if (inside || !/^([a-z][a-z0-9+.-]*:|[\/\\]{2})/i.test(read)) return text;
    throw new Error(`address ${text.slice(0, 40)} leaves the page`);
  }

  // Removes what a node contains and puts new content into it.
  function replace(node, ...children) { node.replaceChildren(); put(node, children); return node; }

  // Two columns of text: [[label, value], ...].
  function pairs(rows) {
    return el("dl", { class: "pairs" }, rows.map(([label, value]) => [el("dt", {}, label), el("dd", {}, value)]));
  }

  // A table that scrolls by itself if it is wider than the page. Columns: labels, or {label, number: true} for right-aligned
  // ones. Rows: arrays of text, numbers or nodes.
  function table(columns, rows, caption) {
    const kinds = columns.map((column) => (typeof column === "string" ? { label: column } : column));
    const cell = (tag, content, kind) => el(tag, { class: kind && kind.number ? "number" : null }, content);
    return el("div", { class: "wide", tabindex: "0", role: "group", "aria-label": caption || "table" },
      el("table", {},
        caption ? el("caption", {}, caption) : null,
        el("thead", {}, el("tr", {}, kinds.map((kind) => cell("th", kind.label, kind)))),
        el("tbody", {}, rows.map((row) => el("tr", {}, row.map((value, at) =>
          cell("td", typeof value === "number" ? number(value) : value, kinds[at])))))));
  }

  // A number with four significant digits.
  function number(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "-";
    if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en-US");
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(2);
    return String(Number(value.toPrecision(4)));
  }

  // Seconds as text: 0.25 s, 45 s, 3 min 20 s, 2 h 05 min.
  function duration(seconds) {
    if (seconds === null || seconds === undefined) return "-";
    if (seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
    const whole = Math.round(seconds);
    if (whole < 60) return `${whole} s`;
    const two = (value) => String(value).padStart(2, "0");
    if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
    return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
  }

  // The colour of a series, by its number from 0.
  function colour(index) { return `var(--series-${(index % COLOURS) + 1})`; }

  // Offers a file that the page makes, such as an export.
  function download(name, text, type) {
    const link = el("a", { href: URL.createObjectURL(new Blob([text], { type: type || "application/json" })), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  function data(run, name) {
    const block = document.getElementById(`data-${run}-${name}`);
    return block === null ? null : JSON.parse(block.textContent);
  }

  function panel(name) { return document.getElementById(`section-${name}`); }

  function draw(name) {
    const root = panel(name);
    if (drawn.has(name)) return;
    drawn.add(name);
    const known = renderers.get(name);
    const having = head.runs.map((run, index) => ({ ...run, index })).filter((run) => run.sections.includes(name));
    try {
      root.replaceChildren();
      if (known.overlaid) {
        known.render(root, having.map((run) => ({ name: run.name, path: run.path, index: run.index, data: data(run.index, name) })));
        return;
      }
      const run = having.find((each) => each.index === chosen) || having[0];
      if (head.runs.length > 1) root.append(chooser(name, having, run));
      const content = el("div", {});
      root.append(content);
      known.render(content, data(run.index, name), { name: run.name, path: run.path, index: run.index });
    } catch (error) {
      root.append(el("p", { class: "problem" }, `This section cannot be shown: ${error.message}`));
      console.error(error);
    }
  }

  function chooser(name, having, run) {
    const options = having.map((each) => el("option", { value: each.index, selected: each.index === run.index }, each.name));
    const change = (event) => {
      chosen = Number(event.target.value);
      for (const each of [...drawn]) if (!renderers.get(each).overlaid) drawn.delete(each);
      draw(name);
      panel(name).querySelector("select").focus();
    };
    return el("label", { class: "chooser" }, "Run ", el("select", { onchange: change }, options));
  }

  // Shows a section; `place` is what follows the name in the address, which the section gets as the event "visit".
  function show(name, focus, place) {
    const names = head.sections.map((each) => each.name);
    const shown = names.includes(name) ? name : names[0];
    for (const each of names) {
      const tab = document.getElementById(`tab-${each}`);
      tab.setAttribute("aria-selected", each === shown ? "true" : "false");
      tab.tabIndex = each === shown ? 0 : -1;
      panel(each).hidden = each !== shown;
      if (each === shown && focus) tab.focus();
      if (each === shown) tab.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
    document.body.dataset.shown = shown;
    if (location.hash.slice(1).split("/")[0] !== shown) history.replaceState(null, "", `#${shown}`);
    draw(shown);
    if (place) panel(shown).dispatchEvent(new CustomEvent("visit", { detail: place }));
  }

  // Shows the section that the address names, such as #curves or #curves/val%2Fscore%2Fmean.
  function follow() {
    const [name, ...rest] = location.hash.slice(1).split("/");
    let place = rest.join("/");
    try { place = decodeURIComponent(place); } catch (error) { /* typed by hand */ }
    show(name, false, place);
  }

  // Arrow keys, Home and End on the tabs; [ and ] or a digit from anywhere but a text field.
  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const target = event.target;
    const names = head.sections.map((each) => each.name);
    const at = names.indexOf(document.body.dataset.shown);
    const onTab = target.getAttribute && target.getAttribute("role") === "tab";
    const writing = /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName || "");
    let next = null;
    if (onTab && event.key === "ArrowRight") next = (at + 1) % names.length;
    else if (onTab && event.key === "ArrowLeft") next = (at + names.length - 1) % names.length;
    else if (onTab && event.key === "Home") next = 0;
    else if (onTab && event.key === "End") next = names.length - 1;
    else if (!writing && event.key === "]") next = (at + 1) % names.length;
    else if (!writing && event.key === "[") next = (at + names.length - 1) % names.length;
    else if (!writing && /^[1-9]$/.test(event.key) && Number(event.key) <= names.length) next = Number(event.key) - 1;
    if (next === null) return;
    event.preventDefault();
    show(names[next], true);
  }

  // A page of `hpcrl serve`: a link to all runs, and loading the page again, which then has the newest steps.
  function live() {
    const EVERY_S = 30;
    let stored = null;
    try { stored = sessionStorage.getItem("hpcrl-follow"); } catch (error) { /* see setTheme */ }
    let timer = null;
    const follow = (on) => {
      clearInterval(timer);
      if (on) timer = setInterval(() => location.reload(), 1000 * EVERY_S);
      try { sessionStorage.setItem("hpcrl-follow", on ? "1" : ""); } catch (error) { /* see setTheme */ }
    };
    follow(stored === "1");
    return [el("a", { href: head.index }, "all runs"), " ",
      el("button", { type: "button", class: "quiet", onclick: () => location.reload() }, "Load again"),
      el("label", {}, el("input", { type: "checkbox", checked: stored === "1", onchange: (event) => follow(event.target.checked) }),
        `every ${EVERY_S} s `)];
  }

  function setTheme(theme) {
    document.documentElement.dataset.theme = theme;
    try { localStorage.setItem("hpcrl-theme", theme); } catch (error) { /* a page from a file may have no storage */ }
  }

  function themeButton() {
    let stored = null;
    try { stored = localStorage.getItem("hpcrl-theme"); } catch (error) { /* see setTheme */ }
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = stored === "dark" || stored === "light" ? stored : dark ? "dark" : "light";
    const swap = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    return el("button", { type: "button", class: "quiet", onclick: swap }, "Dark / light");
  }

  function start() {
    head = JSON.parse(document.getElementById("report-head").textContent);
    head.sections = head.sections.filter((each) => renderers.has(each.name));
    const several = head.runs.length > 1;
    const title = el("header", { class: "top" },
      el("h1", {}, head.runs.map((run, index) => [
        index ? el("span", { class: "comma" }, ", ") : null,
        several ? el("span", { class: "swatch", style: `background:${colour(index)}` }) : null, run.name])),
      el("p", { class: "made" }, `Written ${head.made.slice(0, 16).replace("T", " ")} UTC by hpcrl ${head.version} `,
        head.index ? live() : null,
        themeButton()));
    const tabs = el("div", { class: "tabs", role: "tablist", "aria-label": "Sections" }, head.sections.map((each) =>
      el("button", { type: "button", role: "tab", id: `tab-${each.name}`, "aria-controls": `section-${each.name}`,
        onclick: () => show(each.name) }, each.title)));
    const problems = head.runs.flatMap((run) => run.problems.map((text) => (several ? `${run.name}: ${text}` : text)));
    const notice = problems.length ? el("details", { class: "problem", open: problems.length < 4 },
      el("summary", {}, `${problems.length} file(s) could not be read or are damaged; the rest is shown`),
      el("ul", {}, problems.map((text) => el("li", {}, text)))) : null;
    const main = el("main", {}, head.sections.map((each) =>
      el("section", { id: `section-${each.name}`, role: "tabpanel", "aria-labelledby": `tab-${each.name}`, hidden: true })));
    const help = el("footer", {}, "Keys: ", el("kbd", {}, "["), " and ", el("kbd", {}, "]"), " or ", el("kbd", {}, "1"), " to ",
      el("kbd", {}, "9"), " go from section to section, ", el("kbd", {}, "Tab"), " goes through a section.");
    document.body.append(title, el("nav", {}, tabs), ...(notice ? [notice] : []), main, help);
    document.addEventListener("keydown", onKey);
    addEventListener("hashchange", follow);
    follow();
  }

  return { section, overlaid, el, svg, replace, pairs, table, number, duration, colour, download, show, start };
})();
