"use strict";
report.overlaid("curves", (root, runs) => {
  const { el, chart, colour, replace } = report;
  const SHOWN = 60; // names in the list at once
  const MARKED_RUNS = 3; // attempts of more runs would cover the chart
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.data.curves)))].sort();
  const state = { chosen: new Set(runs.flatMap((run) => run.data.defaults)), width: 1, log: false, search: "" };
  const charts = el("div", { class: "charts" });
  const list = el("div", { class: "metric-list" });

  // The curve of a run as [[step, value], ...]; none if the run does not have the metric.
  function points(run, name) {
    const found = run.data.curves[name];
    if (!found) return null;
    const [grid, values] = found;
    return run.data.grids[grid].map((step, at) => [step, values[at]]);
  }

  // Means over `width` points around each point; fewer at both ends. Gaps stay gaps.
  function smooth(curve, width) {
    const half = Math.floor(width / 2);
    return curve.map(([step, value], at) => {
      if (value === null) return [step, null];
      let sum = 0;
      let count = 0;
      for (let near = Math.max(0, at - half); near <= Math.min(curve.length - 1, at + half); near += 1) {
        if (curve[near][1] !== null) { sum += curve[near][1]; count += 1; }
      }
      return [step, sum / count];
    });
  }

  function drawing(name) {
    const series = [];
    const marks = [];
    for (const run of runs) {
      const curve = points(run, name);
      if (curve === null) continue;
      const own = { name: runs.length > 1 ? run.name : name.split("/").slice(-2).join("/"), colour: colour(run.index) };
      if (state.width > 1) series.push({ ...own, points: curve, faint: true });
      series.push({ ...own, points: state.width > 1 ? smooth(curve, state.width) : curve });
      if (runs.length <= MARKED_RUNS) {
        for (const [number, step] of run.data.attempts.slice(1)) {
          marks.push({ x: step, label: `${runs.length > 1 ? `${run.name}: ` : ""}attempt ${number} continues from step ${step}` });
        }
      }
    }
    return el("figure", {}, el("figcaption", {}, name,
      el("button", { type: "button", class: "quiet", "aria-label": `remove ${name}`, onclick: () => { state.chosen.delete(name); redraw(); } }, "×")),
    chart({ series, marks, log: state.log, label: `${name} by step` }));
  }

  function redraw() {
    const chosen = names.filter((name) => state.chosen.has(name));
    const order = runs.length ? runs[0].data.defaults : [];
    const rank = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
    chosen.sort((a, b) => rank(a) - rank(b));
    replace(charts, chosen.length ? chosen.map(drawing) : el("p", { class: "quiet-text" }, "Choose a metric in the list."));
    listed();
  }

  function listed() {
    const words = state.search.toLowerCase().split(/\s+/).filter(Boolean);
    const found = names.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
    replace(list, found.slice(0, SHOWN).map((name) => el("label", {},
      el("input", { type: "checkbox", checked: state.chosen.has(name), onchange: (event) => {
        if (event.target.checked) state.chosen.add(name); else state.chosen.delete(name);
        redraw();
        const again = [...list.querySelectorAll("input")].find((box) => box.dataset.name === name);
        if (again) again.focus();
      }, "data-name": name }), name)),
    found.length > SHOWN ? el("p", { class: "quiet-text" }, `and ${found.length - SHOWN} more: search`) : null,
    found.length ? null : el("p", { class: "quiet-text" }, "No metric has this in its name."));
  }

  const smoothing = el("output", {}, "off");
  const controls = el("div", { class: "controls" },
    el("label", {}, "Search ", el("input", { type: "search", placeholder: "metric", oninput: (event) => { state.search = event.target.value; listed(); } })),
    el("label", {}, "Smoothing ", el("input", { type: "range", min: 0, max: 25, value: 0, "aria-label": "smoothing", oninput: (event) => {
      state.width = 2 * Number(event.target.value) + 1;
      replace(smoothing, state.width > 1 ? `mean of ${state.width}` : "off");
      redraw();
    } }), " ", smoothing),
    el("label", {}, el("input", { type: "checkbox", onchange: (event) => { state.log = event.target.checked; redraw(); } }), " log axis"));
  const notes = [];
  for (const run of runs) {
    if (run.data.steps > run.data.max_points) {
      notes.push(`${run.name}: ${run.data.steps} steps are drawn as ${run.data.max_points} points at most; the lowest and the highest value of each part are kept.`);
    }
    if (run.data.left_out) notes.push(`${run.name}: ${run.data.left_out} metrics are left out.`);
  }
  root.append(controls, el("details", { class: "metrics", open: true }, el("summary", {}, `${names.length} metrics`), list),
    ...notes.map((text) => el("p", { class: "quiet-text" }, text)), charts);
  if (runs.some((run) => run.data.attempts.length > 1)) {
    root.append(el("p", { class: "quiet-text" }, "Dotted vertical lines: an attempt continued from this step."));
  }
  if (matchMedia("(max-width: 700px)").matches) root.querySelector("details.metrics").open = false;
  root.addEventListener("visit", (event) => {
    if (!names.includes(event.detail)) return;
    state.chosen = new Set([event.detail, ...state.chosen]);
    redraw();
    const figure = [...charts.children].find((each) => each.querySelector("figcaption").firstChild.textContent === event.detail);
    if (figure) figure.scrollIntoView({ block: "center" });
  });
  redraw();
});
