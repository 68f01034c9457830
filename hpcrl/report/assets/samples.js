"use strict";
// Section samples: what the model writes, and why a response has its reward. Texts of models become text nodes only.
(() => {
  const { el, replace, number } = report;
  const { visible, messages: conversation, textOf, strongest, COLOURS } = report.conversation;
  const KINDS = [
    ["training", "training", (item) => item.kind === "training"],
    ["truncated", "training: truncated", (item) => item.kind === "training" && item.finish === "length"],
    ["aborted", "training: aborted", (item) => item.kind === "training" && item.finish === "abort"],
    ["broken", "training: environment failed", (item) => item.kind === "training" && item.failed],
    ["unweighted", "training: weight 0 in the loss", (item) => item.kind === "training" && item.weight === 0],
    ["filtered", "prompts filtered out", (item) => item.outcome === "filtered"],
    ["too_long", "prompts too long", (item) => item.outcome === "too_long"],
    ["failed", "prompts that failed", (item) => item.outcome === "failed"],
    ["validation", "validation", (item) => item.kind === "validation"],
    ["cut", "validation: truncated", (item) => item.kind === "validation" && item.finish === "length"],
    ["error", "validation: with an error", (item) => item.kind === "validation" && Boolean(item.error)],
    ["episodes", "validation episodes", (item) => item.kind === "episodes"],
  ];
  const worth = (item) => item.reward ?? item.score ?? null;
  const SORTS = {
    "by step": (a, b) => a.step - b.step || a.place - b.place,
    "newest step first": (a, b) => b.step - a.step || a.place - b.place,
    "highest reward first": (a, b) => nullLast(worth(a), worth(b), -1),
    "lowest reward first": (a, b) => nullLast(worth(a), worth(b), 1),
    "longest first": (a, b) => nullLast(a.tokens, b.tokens, -1),
    "shortest first": (a, b) => nullLast(a.tokens, b.tokens, 1),
    "highest advantage first": (a, b) => nullLast(a.advantage, b.advantage, -1),
    "largest log-prob mismatch first": (a, b) => nullLast(a.mismatch, b.mismatch, -1),
  };

  function nullLast(left, right, sign) {
    const [a, b] = [left ?? null, right ?? null];
    if (a === null || b === null) return (a === null) - (b === null);
    return sign * (a - b);
  }

  const allText = (messages) => (messages || []).map(textOf).join("\n");
  const short = (text, length) => {
    const line = text.slice(0, 4 * length).replace(/\s+/g, " ").trim();
    return line.length > length ? `${line.slice(0, length)}...` : line;
  };

  // A list of choices beside what is chosen, with j and k. rows(): [{key, label, item}]; detail(item, key): nodes.
  function browser(label, rows, detail, chosen) {
    const list = el("div", { class: "sample-list", role: "listbox", "aria-label": label, tabindex: "0" });
    const shown = el("div", { class: "sample-detail", "aria-live": "polite" });
    let found = [];
    let at = -1;
    function choose(place, quiet) {
      if (!found.length) { at = -1; replace(shown, el("p", { class: "quiet-text" }, "Nothing matches.")); return; }
      at = Math.max(0, Math.min(found.length - 1, place));
      for (const node of list.children) node.setAttribute("aria-selected", "false");
      const node = list.children[at];
      node.setAttribute("aria-selected", "true");
      list.scrollTop = Math.max(0, node.offsetTop - list.clientHeight / 2);
      replace(shown, detail(found[at].item, found[at].key));
      if (!quiet && chosen) chosen(found[at].key);
    }
    function update(key, quiet) {
      found = rows();
      replace(list, found.map((row, place) =>
        el("div", { role: "option", class: "sample-row", "aria-selected": "false", onclick: () => choose(place) }, row.label)));
      choose(Math.max(0, found.findIndex((row) => row.key === key)), quiet);
    }
    const step = (by) => choose(at + by);
    list.addEventListener("keydown", (event) => {
      const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
      if (by) { event.preventDefault(); step(by); }
    });
    const buttons = el("div", { class: "bar" },
      el("button", { type: "button", onclick: () => step(-1) }, "Previous (k)"),
      el("button", { type: "button", onclick: () => step(1) }, "Next (j)"));
    return { node: el("div", { class: "sample-browser" }, el("div", {}, buttons, list), shown), update, step,
      redraw: () => choose(at, true), count: () => found.length, current: () => (found[at] || {}).key };
  }

  const options = (pairs, value) => pairs.map(([key, label]) => el("option", { value: key, selected: key === value }, label));
  const labelled = (label, node) => el("label", { class: "field" }, `${label} `, node);

  function itemsOf(runs) {
    const items = [];
    for (const run of runs) {
      for (const kind of ["training", "ended", "validation", "episodes"]) {
        for (const sample of run.data[kind]) {
          const key = runs.length > 1 ? `${run.index}:${sample.id}` : sample.id;
          items.push({ ...sample, kind, run, key, place: items.length });
        }
      }
    }
    return items;
  }

  const promptOf = (item) => item.run.data.prompts[item.prompt] || [];
  const searched = (item) => (item.searched ??= [item.id, item.reason, item.answer, item.extracted, item.error, allText(promptOf(item)),
    allText(item.said)].filter(Boolean).join(" ").toLowerCase());
  const labels = (item) => [item.domain || item.set || "", ...(item.tags || [])].filter(Boolean);
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

  function facts(item) {
    const parts = Object.entries(item.parts || {}).map(([name, value]) => `${name} ${number(value)}`).join(", ");
    const rows = [
      ["step", `${item.step}${labels(item).length ? `, ${labels(item).join(", ")}` : ""}`],
      ["prompt", item.uid === undefined ? null
        : `${item.uid}${item.attempt ? `, attempt ${item.attempt}` : ""}${item.member === undefined ? "" : `, member ${item.member}`}`],
      ["reward", item.reward === undefined ? null : number(item.reward)], ["parts", parts || null],
      ["score", item.score === undefined ? null : number(item.score)], ["answer", item.answer],
      ["extracted", item.extracted === undefined ? null : `${item.extracted} (the answer that the reward found)`],
      ["error", item.error],
      ["advantage", item.advantage === undefined ? null : `${number(item.advantage)} (mean over tokens)`],
      ["ended by", item.finish ? { stop: "stop", length: "length: truncated", abort: "abort" }[item.finish] : null],
      ["tokens", item.tokens === null || item.tokens === undefined ? null
        : `${number(item.tokens)}${item.all_tokens ? ` of the model, ${number(item.all_tokens)} in all` : ""}`],
      ["weights", item.versions ? `version ${[...new Set(item.versions)].join(" to ")}, lag ${[...new Set(item.lag)].join(" to ")}` : null],
      ["mismatch", item.mismatch === undefined ? null : `${number(item.mismatch)} (mean |log-prob of trainer - generator|)`],
      ["weight", item.weight === undefined || item.weight === 1 ? null : `${number(item.weight)} in the loss`],
      ["failed", item.failed ? "the environment failed: nothing is learned from this sample" : null],
      ["outcome", item.outcome], ["reason", item.reason],
      ["rewards", item.rewards ? item.rewards.map(number).join(", ") || "none" : null],
    ];
    return report.pairs(rows.filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([label, value]) => [label, visible(String(value))]));
  }

  function samplesView(items, runs, openPrompt) {
    const kinds = KINDS.map(([name, label, test]) => [name, label, test, items.filter(test).length]).filter((each) => each[3]);
    const start = { kind: kinds[0][0], run: "", label: "", sort: "by step", text: "" };
    let state = { ...start };
    let colour = "mismatch";
    const ranges = ["step", "reward", "tokens"];
    const within = (value, name) => {
      const [low, high] = [state[`${name}-low`], state[`${name}-high`]];
      if (low === undefined && high === undefined) return true;
      return value !== null && value !== undefined && value >= (low ?? -Infinity) && value <= (high ?? Infinity);
    };
    const test = (item) => (kinds.find((each) => each[0] === state.kind) || kinds[0])[2](item)
      && (!state.run || String(item.run.index) === state.run) && (!state.label || labels(item).includes(state.label))
      && within(item.step, "step") && within(worth(item), "reward") && within(item.tokens, "tokens")
      && (!state.text || searched(item).includes(state.text.toLowerCase()));
    const row = (item) => [el("b", {}, `step ${item.step}`),
      ` ${worth(item) === null ? item.outcome || "" : `reward ${number(worth(item))}`} `,
      runs.length > 1 ? `${item.run.name} ` : null, el("bdi", {}, visible(short(allText(item.said) || item.reason || "", 70)))];
    const rows = () => items.filter(test).sort((a, b) => SORTS[state.sort](a, b) || a.place - b.place)
      .map((item) => ({ key: item.key, label: row(item), item }));
    const view = browser("samples", rows, detail, (key) => history.replaceState(null, "", `#samples/${encodeURIComponent(key)}`));

    function detail(item) {
      const has = Object.keys(COLOURS).filter((name) => (item.said || []).some((message) =>
        (message.segments || []).some((segment) => segment[name] !== undefined)));
      const shown = has.includes(colour) ? colour : "";
      const pick = has.length ? labelled("Colour of tokens", el("select", { "aria-label": "colour of tokens",
        onchange: (event) => { colour = event.target.value; view.redraw(); } },
      options([["", "none"], ...has.map((name) => [name, COLOURS[name].label])], shown))) : null;
      const most = shown ? strongest(item.said, shown) / item.run.data.scale[shown] : 0;
      const group = items.filter((each) => each.kind === item.kind && each.run === item.run && each.step === item.step
        && each.prompt !== undefined && each.prompt === item.prompt && each.set === item.set);
      const link = el("a", { href: `#samples/${encodeURIComponent(item.key)}` }, "Link to this sample");
      return [el("div", { class: "bar" }, link, pick,
        item.prompt ? el("button", { type: "button", onclick: () => openPrompt(item) }, "The same prompt over steps") : null),
      shown ? el("p", { class: "quiet-text" }, COLOURS[shown].signed ? "Blue is above 0, red below; " : "",
        `the strongest colour in this sample is ${number(most)}`) : null,
      facts(item),
      group.length > 1 ? el("p", { class: "bar" }, "Group: ", group.map((each) => el("button", { type: "button",
        class: each === item ? "chosen quiet" : "quiet", onclick: () => open(each.key) }, number(worth(each))))) : null,
      item.kind === "ended" ? el("p", {}, "The run keeps no responses to prompts that it did not train on.") : null,
      conversation(promptOf(item), item.run.data, ""), conversation(item.said || [], item.run.data, shown)];
    }

    const count = el("span", { class: "quiet-text", role: "status" });
    const form = el("div", { class: "bar filters" });
    function update(key, quiet) {
      view.update(key, quiet);
      replace(count, `${number(view.count())} samples`);
    }
    const set = (name, value) => { state[name] = value; update(view.current()); };
    const limit = (name, end, label) => el("input", { type: "number", step: "any", class: "narrow", "aria-label": label,
      placeholder: end, value: state[`${name}-${end === "from" ? "low" : "high"}`],
      oninput: (event) => set(`${name}-${end === "from" ? "low" : "high"}`,
        event.target.value === "" ? undefined : Number(event.target.value)) });
    function drawForm() {
      const tags = [...new Set(items.flatMap(labels))].sort();
      const select = (name, pairs) => el("select", { "aria-label": name, onchange: (event) => set(name, event.target.value) },
        options(pairs, state[name]));
      replace(form, labelled("Show", select("kind", kinds.map(([name, label, , size]) => [name, `${label} (${size})`]))),
        runs.length > 1 ? labelled("Run", select("run", [["", "all"], ...runs.map((run) => [String(run.index), run.name])])) : null,
        tags.length > 1 ? labelled("Domain", select("label", [["", "all"], ...tags.map((tag) => [tag, short(tag, 40)])])) : null,
        ranges.map((name) => el("span", { class: "field" }, `${name === "tokens" ? "Length" : name[0].toUpperCase() + name.slice(1)} `,
          limit(name, "from", `${name} from`), " ", limit(name, "to", `${name} to`))),
        labelled("Sort", select("sort", Object.keys(SORTS).map((name) => [name, name]))),
        el("input", { type: "search", placeholder: "Search text (/)", "aria-label": "search text", value: state.text,
          oninput: (event) => set("text", event.target.value) }),
        el("button", { type: "button", class: "quiet", onclick: () => { state = { ...start }; drawForm(); update(); } }, "All"), count);
    }
    // Shows a sample, without the filters if they hide it.
    function open(key, quiet) {
      const item = items.find((each) => each.key === key);
      if (item && !test(item)) {
        state = { ...start, kind: (kinds.find((each) => each[2](item)) || kinds[0])[0] };
        drawForm();
      }
      update(item ? key : undefined, quiet || !item);
      return Boolean(item);
    }
    drawForm();
    return { node: el("div", {}, form, view.node), open, step: view.step,
      search: () => form.querySelector("input[type=search]").focus() };
  }

  // All samples of a prompt, by step.
  function promptView(items) {
    const groups = new Map();
    for (const item of items) {
      if (!item.prompt) continue;
      const key = `${item.run.index} ${item.kind} ${item.set || ""} ${item.prompt}`;
      groups.set(key, [...(groups.get(key) || []), item]);
    }
    const steps = (group) => new Set(group.map((item) => item.step)).size;
    const rows = () => [...groups].sort((a, b) => steps(b[1]) - steps(a[1])).map(([key, group]) => ({ key, item: group,
      label: [el("b", {}, `${steps(group)} step${steps(group) > 1 ? "s" : ""}`), ` ${group[0].kind} `,
        el("bdi", {}, visible(short(allText(promptOf(group[0])).slice(-200), 70)))] }));
    const detail = (group) => {
      const ordered = [...group].sort(SORTS["by step"]);
      return [conversation(promptOf(group[0]), group[0].run.data, ""),
        group[0].answer ? el("p", {}, "Answer: ", visible(group[0].answer)) : null,
        ordered.map((item) => el("details", { class: "one-response" },
          el("summary", {}, el("b", {}, `step ${item.step}`), ` reward ${number(worth(item))} `,
            item.tokens ? `${number(item.tokens)} tokens ` : null, el("bdi", {}, visible(short(allText(item.said), 90)))),
          conversation(item.said, item.run.data, "")))];
    };
    const view = browser("prompts", rows, detail);
    return { node: view.node, step: view.step, open: (item) =>
      view.update(item ? `${item.run.index} ${item.kind} ${item.set || ""} ${item.prompt}` : undefined, true) };
  }

  // Two validations beside each other.
  function pairView(items, runs) {
    const valid = items.filter((item) => item.kind === "validation");
    const sides = [];
    for (const run of runs) {
      for (const step of [...new Set(valid.filter((item) => item.run === run).map((item) => item.step))].sort((a, b) => a - b)) {
        sides.push({ run, step, label: `${runs.length > 1 ? `${run.name}, ` : ""}step ${step}` });
      }
    }
    if (sides.length < 2) return null;
    const last = (run) => sides.findLastIndex((side) => side.run === run);
    const many = runs.filter((run) => last(run) >= 0);
    const state = many.length > 1 ? { left: last(many[0]), right: last(many[1]) } : { left: 0, right: sides.length - 1 };
    state.order = "largest change first";
    const orders = { "largest change first": (a, b) => Math.abs(b.change) - Math.abs(a.change),
      "most improved first": (a, b) => b.change - a.change, "most worsened first": (a, b) => a.change - b.change };
    const side = (at) => {
      const found = new Map();
      for (const item of valid.filter((each) => each.run === sides[at].run && each.step === sides[at].step)) {
        const key = `${item.set} ${item.prompt}`;
        found.set(key, [...(found.get(key) || []), item]);
      }
      return found;
    };
    const rows = () => {
      const [left, right] = [side(state.left), side(state.right)];
      const score = (group) => mean(group.map((item) => item.score ?? 0));
      return [...left.keys()].filter((key) => right.has(key)).map((key) => {
        const pair = { left: left.get(key), right: right.get(key), from: score(left.get(key)), to: score(right.get(key)) };
        return { key, pair: { ...pair, change: pair.to - pair.from } };
      }).sort((a, b) => orders[state.order](a.pair, b.pair)).map(({ key, pair }) => ({ key, item: pair,
        label: [el("b", { class: pair.change > 0 ? "better" : pair.change < 0 ? "worse" : null },
          `${number(pair.from)} to ${number(pair.to)}`), " ", el("bdi", {}, visible(short(allText(promptOf(pair.left[0])).slice(-200), 70)))] }));
    };
    const column = (group, label) => el("div", {}, el("h3", {}, label), group.map((item) => el("div", {},
      el("p", { class: "quiet-text" }, `score ${number(item.score)}`, item.finish === "length" ? ", truncated" : null,
        item.greedy ? ", greedy" : null, item.extracted ? [", found ", visible(item.extracted)] : null, item.error ? [", error: ", visible(item.error)] : null),
      conversation(item.said, item.run.data, ""))));
    const detail = (pair) => [conversation(promptOf(pair.left[0]), pair.left[0].run.data, ""),
      pair.left[0].answer ? el("p", {}, "Answer: ", visible(pair.left[0].answer)) : null,
      el("div", { class: "two-columns" }, column(pair.left, sides[state.left].label), column(pair.right, sides[state.right].label))];
    const view = browser("prompts of both validations", rows, detail);
    const count = el("span", { class: "quiet-text", role: "status" });
    const update = () => {
      view.update(view.current(), true);
      replace(count, `${number(view.count())} prompts in both`);
    };
    const pick = (name) => el("select", { "aria-label": name, onchange: (event) => { state[name] = Number(event.target.value); update(); } },
      options(sides.map((each, at) => [at, each.label]), state[name]));
    const order = el("select", { "aria-label": "order", onchange: (event) => { state.order = event.target.value; update(); } },
      options(Object.keys(orders).map((name) => [name, name]), state.order));
    return { node: el("div", {}, el("div", { class: "bar filters" }, labelled("Left", pick("left")), labelled("Right", pick("right")),
      labelled("Sort", order), count), view.node), step: view.step, open: update };
  }

  function about(run, several) {
    const { training, validation, tokens, pictures_left_out: missing } = run.data.about;
    const told = [];
    if (training.num_steps) {
      told.push(`${number(run.data.training.length)} of ${number(training.total)} training samples; choice: ${training.choice}.`);
    }
    if (run.data.validation.length) {
      told.push(`Validation: ${validation.steps.length} of ${validation.num_steps} steps; choice: ${validation.choice}.`);
    }
    if (training.num_steps && !tokens) told.push("No tokenizer in the run's folder of the model: texts are without colours of tokens.");
    if (missing) told.push(`${missing} pictures are left out for their size, or cannot be read.`);
    return el("p", { class: "quiet-text" }, several ? `${run.name}: ` : null, told.join(" "));
  }

  function draw(root, runs) {
    const items = itemsOf(runs);
    const content = el("div", {});
    const views = {};
    let shown = null;
    const tabs = el("div", { class: "bar", role: "group", "aria-label": "views" });
    function show(name, key) {
      shown = views[name];
      for (const button of tabs.children) button.setAttribute("aria-pressed", button.dataset.view === name ? "true" : "false");
      replace(content, shown.node);
      return shown.open(key, key === undefined);
    }
    views.samples = samplesView(items, runs, (item) => show("prompts", item));
    views.prompts = promptView(items);
    const pairs = pairView(items, runs);
    if (pairs) views.pairs = pairs;
    const titles = { samples: "Samples", prompts: "The same prompt over steps", pairs: "Side by side" };
    replace(tabs, Object.keys(views).map((name) =>
      el("button", { type: "button", "data-view": name, onclick: () => show(name) }, titles[name])));
    root.append(...runs.map((run) => about(run, runs.length > 1)), tabs, content);
    const missing = el("p", { class: "problem", hidden: true }, "The sample of this address is not in this page.");
    root.append(missing);
    const follow = () => {
      const [section, ...rest] = location.hash.slice(1).split("/");
      if (section === "samples" && rest.length) missing.hidden = show("samples", decoded(rest.join("/")));
    };
    show("samples");
    follow();
    addEventListener("hashchange", follow);
    document.addEventListener("keydown", (event) => {
      const writing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName || "");
      if (document.body.dataset.shown !== "samples" || writing || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "j") shown.step(1);
      else if (event.key === "k") shown.step(-1);
      else if (event.key === "/" && shown.search) { event.preventDefault(); shown.search(); }
    });
  }

  function decoded(text) {
    try { return decodeURIComponent(text); } catch (error) { return text; }
  }

  // #sample=ID is a short form of #samples/ID.
  function expand() {
    if (location.hash.startsWith("#sample=")) history.replaceState(null, "", `#samples/${location.hash.slice(8)}`);
  }
  expand();
  addEventListener("hashchange", expand);
  report.overlaid("samples", draw);
})();
