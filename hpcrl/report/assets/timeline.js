"use strict";
// Section `timeline`: lanes of ranks over one step, and the lives of samples, on two canvases that zoom and pan together.
(() => {
  const { el, replace, duration, number, table } = report;
  const WAITED = "waited for ";
  const SERIES = {
    training: 1, "training the critic": 1, "weight updates": 2, decoding: 3, generation: 3, "slower replicas": 3, validation: 3,
    environments: 4, rewards: 5, "rollout transfer": 6, "log-probs": 7, values: 7, advantages: 7,
  };
  const OPEN_RANKS = 24; // groups with more ranks are drawn as one strip at first
  const STRIP = 64;
  const HEAD = 20;
  const AXIS = 18;
  const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
  const isWait = (name) => name.startsWith(WAITED);

  function series(name) {
    const what = isWait(name) ? name.slice(WAITED.length).replace(/^slower ranks in /, "") : name;
    return SERIES[what] || 8;
  }

  // Colours as canvases need them, in the current theme.
  function palette() {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(name).trim();
    const found = { text: of("--text"), quiet: of("--quiet"), back: of("--back"), line: of("--line"), panel: of("--panel") };
    for (let index = 1; index <= 8; index++) found[index] = of(`--series-${index}`);
    return found;
  }

  // Pieces of a lane from their code: ends, kinds and numbers of merged events.
  function decode(code) {
    const ends = [];
    const kinds = [];
    const counts = [];
    let at = 0;
    for (let index = 0; index < code.length; index += 3) {
      at += code[index];
      ends.push(at);
      kinds.push(code[index + 1]);
      counts.push(code[index + 2]);
    }
    return { ends, kinds, counts };
  }

  // Index of the piece at a time.
  function pieceAt(pieces, time) {
    let low = 0;
    let high = pieces.ends.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (pieces.ends[middle] <= time) low = middle + 1; else high = middle;
    }
    return low;
  }

  const beginOf = (pieces, index) => (index ? pieces.ends[index - 1] : 0);

  // Groups of lanes with equal roles, in the order of their first rank.
  function groupsOf(step) {
    const groups = new Map();
    for (const [rank, host, roles, code, load] of step.lanes) {
      if (!groups.has(roles)) groups.set(roles, { roles, lanes: [] });
      groups.get(roles).lanes.push({ rank, host, roles, pieces: decode(code), load, most: load.reduce((most, value, index) =>
        (index % 3 === 1 ? Math.max(most, value) : most), 0) });
    }
    return [...groups.values()];
  }

  // [running, queued] at a time; null before the first decode chunk.
  function loadAt(load, time) {
    let found = null;
    for (let index = 0; index < load.length && load[index] <= time; index += 3) found = [load[index + 1], load[index + 2]];
    return found;
  }

  function sentence(role) {
    const many = role.ranks === 1 ? "1 rank" : `${role.ranks} ranks`;
    const busy = role.busy.reduce((sum, [, share]) => sum + share, 0);
    const causes = role.waiting.filter(([, share]) => share >= 0.005).slice(0, 3).map(([what, share]) => `${percent(share)} for ${what}`);
    return [el("strong", {}, role.roles), ` (${many}) worked ${percent(busy)} of the step`,
      causes.length ? ` and waited ${causes.join(", ")}` : ""];
  }

  function sharesTable(step) {
    const rows = step.roles.flatMap((role) => [...role.busy.map(([what, share]) => [what, share]),
      ...role.waiting.map(([what, share]) => [WAITED + what, share])].filter(([, share]) => share >= 0.001)
      .map(([what, share], index) => [index ? "" : role.roles, [swatch(what), what], percent(share), duration(share * step.seconds)]));
    return el("details", {}, el("summary", {}, "All shares"),
      table(["Ranks", "What", { label: "Share", number: true }, { label: "Mean per rank", number: true }], rows, "Shares of the step"));
  }

  function swatch(name) {
    return el("span", { class: "swatch", style: `background: var(--series-${series(name)}); opacity: ${isWait(name) ? 0.3 : 1}` });
  }

  function keys(items) {
    return el("p", { class: "values lane-keys" }, items.map(([name, text]) => el("span", {}, swatch(name), text)));
  }

  function legend(names) {
    const busy = names.filter((name) => !isWait(name));
    return keys([...busy.map((name) => [name, name]), [`${WAITED}x`, "pale: waited, in the colour of the cause"]]);
  }

  function stepsTable(steps, choose) {
    const rows = steps.map((step) => [
      el("button", { type: "button", class: "quiet", onclick: () => choose(step.step) }, `step ${step.step}`), duration(step.seconds),
      step.roles.map((role) => {
        const waited = role.waiting.reduce((sum, [, share]) => sum + share, 0);
        const most = role.waiting.length ? `, most for ${role.waiting[0][0]} (${percent(role.waiting[0][1])})` : "";
        return el("div", {}, `${role.roles}: ${percent(waited)}${most}`);
      })]);
    return table(["Step", { label: "Duration", number: true }, "Waited"], rows, "The steps of this page");
  }

  function drawn(times) {
    const [drawnAt, start, end, scored, done] = times;
    const known = (value) => (value === null ? "unknown" : `${number(value / 1e6)} s`);
    return `drawn ${known(drawnAt)}, generated ${known(start)} to ${known(end)}, scored ${known(scored)}, ended ${known(done)}`;
  }

  report.section("timeline", (root, data) => {
    const units = data.units;
    let step = data.steps[data.steps.length - 1];
    let groups = [];
    let rows = [];
    let view = [0, units];
    let cursor = null; // {row, time}, set by keys
    let width = 0;
    const open = new Map();
    const detail = el("p", { class: "values lane-detail", "aria-live": "polite" }, "Point at a lane for details.");
    const words = el("div", {});
    const after = el("div", {});
    const lanes = el("canvas", { tabindex: "0", class: "timeline", role: "application",
      "aria-label": "Lanes of the ranks. Arrow left and right pan, plus and minus zoom, Home shows the whole step, arrow up and " +
        "down choose a lane, comma and full stop the event before and after, Enter opens or closes a group." });
    const samples = el("canvas", { class: "timeline", role: "img", "aria-label": "Lives of samples" });
    const selector = el("select", { onchange: (event) => choose(Number(event.target.value)) }, data.steps.map((each) =>
      el("option", { value: each.step, selected: each === step },
        `step ${each.step}, ${duration(each.seconds)}${each.step === data.slowest ? " (slowest)" : ""}`)));
    const button = (text, label, act) => el("button", { type: "button", "aria-label": label, onclick: act }, text);
    const box = el("div", {}, lanes);
    root.append(
      el("div", { class: "controls" }, el("label", {}, "Step ", selector), button("+", "Zoom in", () => zoom(0.5)),
        button("\u2212", "Zoom out", () => zoom(2)), button("Whole step", "Show the whole step", () => look(0, units)),
        el("span", { class: "quiet-text" }, data.steps.length < data.recorded
          ? `${data.steps.length} of ${data.recorded} recorded steps; others: hpcrl timeline RUN --step N` : "")),
      words, detail, box, after);

    const gutter = () => (width < 500 ? 58 : 150);
    const seconds = (time) => (time / units) * step.seconds;
    const toX = (time) => gutter() + ((time - view[0]) / (view[1] - view[0])) * (width - gutter());
    const toTime = (x) => view[0] + ((x - gutter()) / (width - gutter())) * (view[1] - view[0]);

    function choose(chosen) {
      step = data.steps.find((each) => each.step === chosen);
      selector.value = String(chosen);
      groups = groupsOf(step);
      cursor = null;
      view = [0, units];
      for (const group of groups) if (!open.has(group.roles)) open.set(group.roles, group.lanes.length <= OPEN_RANKS);
      arrange();
      tell();
      redraw();
    }

    // The rows of the canvas from top to bottom.
    function arrange() {
      rows = [{ kind: "lane", top: AXIS, height: 14, label: "pipeline", lane: { rank: null, host: "", roles: "pipeline",
        pieces: decode(step.pipeline), load: [], most: 0 } }];
      let top = AXIS + 16;
      for (const group of groups) {
        rows.push({ kind: "head", top, height: HEAD, group });
        top += HEAD;
        if (!open.get(group.roles)) {
          rows.push({ kind: "strip", top, height: STRIP, group, label: `${group.lanes.length} ranks` });
          top += STRIP + 2;
          continue;
        }
        const height = group.lanes.length <= 8 ? 20 : group.lanes.length <= 40 ? 11 : 5;
        for (const lane of group.lanes) {
          rows.push({ kind: "lane", top, height: height - 1, lane, label: height > 8 ? `rank ${lane.rank} ${lane.host}` : "" });
          top += height;
        }
        top += 4;
      }
    }

    function tell() {
      const odd = [step.complete ? "" : "The run ended in this step.",
        step.omitted ? `${number(step.omitted)} events beyond the limits of a step are missing.` : "",
        step.damaged ? `${step.damaged} damaged lines were left out.` : "",
        step.clocks_unknown ? `The clocks of ${step.clocks_unknown} hosts are unknown: their times may be wrong.` : "",
        step.clock_error_s > 0.001 ? `Times of different hosts may differ by ${duration(step.clock_error_s)}.` : ""].filter(Boolean);
      replace(words, el("ul", {}, step.roles.map((role) => el("li", {}, sentence(role)))), sharesTable(step),
        odd.length ? el("p", { class: "quiet-text" }, odd.join(" ")) : null, legend(step.names));
      const fates = step.fates.map(([fate, count]) => `${number(count)} ${fate}`).join(", ");
      const total = step.fates.reduce((sum, [, count]) => sum + count, 0);
      replace(after,
        el("p", { class: "quiet-text" }, `Events shorter than ${duration(step.merged_below_s)} are merged. Drag or Ctrl+wheel on the lanes, or keys: `,
          el("kbd", {}, "\u2190"), el("kbd", {}, "\u2192"), " pan, ", el("kbd", {}, "+"), el("kbd", {}, "-"), " zoom, ", el("kbd", {}, "\u2191"),
          el("kbd", {}, "\u2193"), " lane, ", el("kbd", {}, ","), el("kbd", {}, "."), " event, ", el("kbd", {}, "Enter"), " group, ", el("kbd", {}, "Home"), " whole step."),
        total ? [el("h2", {}, "Samples"),
          el("p", {}, `${number(total)} samples ended in this step: ${fates}; ${number(step.open)} were unfinished at its end.`,
            step.samples.length < total ? ` ${step.samples.length} are drawn, the longest among them.` : ""),
          keys([["decoding", "generated"], ["rewards", "scored"], [`${WAITED}x`, "waited to be trained or dropped"]]), samples] : null,
        el("h2", {}, "Steps"), stepsTable(data.steps, choose));
    }

    function look(from, to) {
      const span = Math.min(units, Math.max(to - from, units / 2000));
      const start = Math.min(Math.max(from, 0), units - span);
      view = [start, start + span];
      redraw();
    }

    function zoom(factor, around) {
      const middle = around === undefined ? (view[0] + view[1]) / 2 : around;
      look(middle - (middle - view[0]) * factor, middle + (view[1] - middle) * factor);
    }

    function canvasOf(canvas, height) {
      const scale = window.devicePixelRatio || 1;
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.height = `${height}px`;
      const context = canvas.getContext("2d");
      context.scale(scale, scale);
      context.font = "11px system-ui, sans-serif";
      context.textBaseline = "middle";
      return context;
    }

    let waiting = false;
    function redraw() {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => { waiting = false; paint(); });
    }

    function paint() {
      width = box.clientWidth;
      if (!width) return;
      const colours = palette();
      const last = rows[rows.length - 1];
      const context = canvasOf(lanes, last.top + last.height + 4);
      axis(context, colours, last.top + last.height);
      for (const row of rows) {
        if (row.kind === "head") paintHead(context, colours, row);
        else if (row.kind === "strip") paintStrip(context, colours, row);
        else paintLane(context, colours, row);
      }
      if (cursor) {
        const row = rows[cursor.row];
        context.strokeStyle = colours.text;
        context.strokeRect(0.5, row.top - 0.5, width - 1, row.height + 1);
        if (row.kind !== "head") context.strokeRect(toX(cursor.time), row.top - 2, 0.5, row.height + 4);
      }
      if (step.samples.length && samples.isConnected) paintSamples(colours);
    }

    function axis(context, colours, bottom) {
      const span = seconds(view[1] - view[0]);
      const rough = span / Math.max(2, Math.min(8, (width - gutter()) / 90));
      const power = 10 ** Math.floor(Math.log10(rough));
      const gap = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
      context.fillStyle = colours.quiet;
      context.strokeStyle = colours.line;
      for (let at = Math.ceil(seconds(view[0]) / gap) * gap; at <= seconds(view[1]); at += gap) {
        const x = toX((at / step.seconds) * units);
        context.beginPath();
        context.moveTo(x, AXIS - 4);
        context.lineTo(x, bottom);
        context.stroke();
        if (x < width - 30) context.fillText(`${Number(at.toPrecision(4))} s`, x + 2, 7);
      }
    }

    function paintHead(context, colours, row) {
      context.fillStyle = colours.text;
      context.fillText(`${open.get(row.group.roles) ? "\u25be" : "\u25b8"} ${row.group.roles} (${row.group.lanes.length})`, 2, row.top + HEAD / 2 + 1);
    }

    function label(context, colours, row) {
      if (!row.label) return;
      context.save();
      context.beginPath();
      context.rect(0, row.top, gutter() - 4, row.height);
      context.clip();
      context.fillStyle = colours.quiet;
      context.fillText(row.label, 2, row.top + row.height / 2);
      context.restore();
    }

    function paintLane(context, colours, row) {
      label(context, colours, row);
      const { pieces, load, most } = row.lane;
      for (let index = pieceAt(pieces, view[0]); index < pieces.ends.length && beginOf(pieces, index) < view[1]; index++) {
        const name = step.names[pieces.kinds[index]];
        const from = Math.max(toX(beginOf(pieces, index)), gutter());
        const to = Math.min(toX(pieces.ends[index]), width);
        context.globalAlpha = isWait(name) ? 0.16 : 1;
        context.fillStyle = colours[series(name)];
        context.fillRect(from, row.top, Math.max(to - from - (to - from > 3 ? 0.5 : 0), 0.4), row.height);
      }
      context.globalAlpha = 1;
      if (!most || row.height < 10) return;
      context.strokeStyle = colours.back;
      context.beginPath();
      for (let index = 0; index < load.length; index += 3) {
        const y = row.top + row.height - 1 - (load[index + 1] / most) * (row.height - 3);
        const from = Math.min(Math.max(toX(load[index]), gutter()), width);
        const to = Math.min(Math.max(toX(index + 3 < load.length ? load[index + 3] : load[index]), gutter()), width);
        if (to > from) { context.moveTo(from, y); context.lineTo(to, y); }
      }
      context.stroke();
    }

    // The shares of a group's ranks by kind, for each of `count` equal times of the view; work first.
    function densities(group, count) {
      const found = Array.from({ length: count }, () => new Float64Array(step.names.length));
      const size = (view[1] - view[0]) / count;
      for (const { pieces } of group.lanes) {
        for (let index = pieceAt(pieces, view[0]); index < pieces.ends.length && beginOf(pieces, index) < view[1]; index++) {
          const from = Math.max((beginOf(pieces, index) - view[0]) / size, 0);
          const to = Math.min((pieces.ends[index] - view[0]) / size, count);
          for (let at = Math.floor(from); at < to; at++) {
            found[at][pieces.kinds[index]] += (Math.min(at + 1, to) - Math.max(at, from)) / group.lanes.length;
          }
        }
      }
      return found;
    }

    const order = () => step.names.map((_, index) => index).sort((one, other) => isWait(step.names[one]) - isWait(step.names[other]));

    function paintStrip(context, colours, row) {
      label(context, colours, row);
      const count = Math.max(1, Math.floor((width - gutter()) / 2));
      const kinds = order();
      densities(row.group, count).forEach((shares, at) => {
        let y = row.top + row.height;
        for (const kind of kinds) {
          if (!shares[kind]) continue;
          const height = shares[kind] * row.height;
          context.globalAlpha = isWait(step.names[kind]) ? 0.16 : 1;
          context.fillStyle = colours[series(step.names[kind])];
          context.fillRect(gutter() + at * 2, y - height, 2, height);
          y -= height;
        }
      });
      context.globalAlpha = 1;
    }

    function sampleRange() {
      const length = step.seconds * 1e6;
      if (view[1] - view[0] < units) return [(view[0] / units) * length, (view[1] / units) * length];
      return [step.samples.reduce((least, sample) => Math.min(least, sample[8]), 0), length];
    }

    const sampleHeight = () => (step.samples.length <= 100 ? 5 : 3);

    function paintSamples(colours) {
      const height = sampleHeight();
      const context = canvasOf(samples, step.samples.length * height + AXIS);
      const [from, to] = sampleRange();
      const x = (time) => gutter() + ((Math.min(Math.max(time, from), to) - from) / (to - from)) * (width - gutter());
      context.fillStyle = colours.quiet;
      context.fillText(`${number(from / 1e6)} s`, gutter(), 7);
      context.fillText(`${number(to / 1e6)} s`, width - 45, 7);
      step.samples.forEach((sample, index) => {
        const [, start, end, scored, done] = sample.slice(7);
        const parts = [[start, end === null ? done : end, 3, 1], [end, scored === null ? done : scored, 5, 1], [scored, done, 8, 0.3]];
        for (const [begin, until, colour, alpha] of parts) {
          if (begin === null || until === null || until <= begin) continue;
          context.globalAlpha = alpha;
          context.fillStyle = colours[colour];
          context.fillRect(x(begin), AXIS + index * height, Math.max(x(until) - x(begin), 0.3), height - 1);
        }
      });
      context.globalAlpha = 1;
    }

    function tellPiece(row, time) {
      if (row.kind === "head") {
        detail.textContent = `${row.group.roles}, ${row.group.lanes.length} ranks: Enter or a click ${open.get(row.group.roles) ? "closes" : "opens"} the group`;
      } else if (row.kind === "strip") {
        const one = { lanes: row.group.lanes };
        const found = new Map();
        for (const { pieces } of one.lanes) {
          const name = step.names[pieces.kinds[pieceAt(pieces, time)]];
          found.set(name, (found.get(name) || 0) + 1);
        }
        const parts = [...found].sort((a, b) => b[1] - a[1]).slice(0, 4).map(([name, count]) => `${count} ${name}`);
        detail.textContent = `${row.group.roles}, of ${row.group.lanes.length} ranks at ${duration(seconds(time))}: ${parts.join(", ")}`;
      } else {
        const { rank, host, roles, pieces, load } = row.lane;
        const index = pieceAt(pieces, time);
        const begin = beginOf(pieces, index);
        const name = step.names[pieces.kinds[index]];
        const merged = pieces.counts[index] > 1 ? ` and others, ${pieces.counts[index]} events` : "";
        const counts = name === "decoding" ? loadAt(load, time) : null;
        const whose = rank === null ? "the pipeline waited for" : `rank ${rank} (${roles}) on ${host}:`;
        detail.textContent = `${whose} ${name}${merged}, ${duration(seconds(pieces.ends[index] - begin))} from ${number(seconds(begin))} s` +
          (counts ? `; ${counts[0]} requests run, ${counts[1]} wait` : "");
      }
    }

    const rowAt = (y) => rows.find((row) => y >= row.top && y < row.top + row.height + 1);

    function toggle(row) {
      open.set(row.group.roles, !open.get(row.group.roles));
      arrange();
      redraw();
    }

    let held = null; // where a drag began, and whether it has moved
    lanes.addEventListener("pointerdown", (event) => {
      held = { x: event.offsetX, view: [...view], moved: false };
      lanes.setPointerCapture(event.pointerId);
    });
    lanes.addEventListener("pointermove", (event) => {
      if (held && Math.abs(event.offsetX - held.x) > 3) held.moved = true;
      if (held && held.moved) {
        const shift = ((event.offsetX - held.x) / (width - gutter())) * (held.view[1] - held.view[0]);
        look(held.view[0] - shift, held.view[1] - shift);
        return;
      }
      const row = rowAt(event.offsetY);
      lanes.style.cursor = row && row.kind === "head" ? "pointer" : "grab";
      if (row) tellPiece(row, Math.min(Math.max(toTime(event.offsetX), 0), units - 1));
    });
    lanes.addEventListener("pointerup", (event) => {
      const row = rowAt(event.offsetY);
      if (held && !held.moved && row && row.kind === "head") toggle(row);
      held = null;
    });
    lanes.addEventListener("pointercancel", () => { held = null; });
    lanes.addEventListener("dblclick", (event) => zoom(0.4, toTime(event.offsetX)));
    lanes.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) zoom(2 ** (event.deltaY / 200), toTime(event.offsetX));
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        const shift = (event.deltaX / (width - gutter())) * (view[1] - view[0]);
        look(view[0] + shift, view[1] + shift);
      } else return;
      event.preventDefault();
    }, { passive: false });
    lanes.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const span = view[1] - view[0];
      const at = cursor ? cursor.row : -1;
      const row = rows[at];
      if (event.key === "ArrowLeft") look(view[0] - span / 8, view[1] - span / 8);
      else if (event.key === "ArrowRight") look(view[0] + span / 8, view[1] + span / 8);
      else if (event.key === "+" || event.key === "=") zoom(0.5);
      else if (event.key === "-") zoom(2);
      else if (event.key === "Home") look(0, units);
      else if (event.key === "ArrowDown") select(Math.min(at + 1, rows.length - 1));
      else if (event.key === "ArrowUp") select(Math.max(at - 1, 0));
      else if (event.key === "," || event.key === ".") follow(event.key === "." ? 1 : -1);
      else if (event.key === "Enter" && row && row.kind === "head") { toggle(row); tellPiece(row, 0); } else return;
      event.preventDefault();
    });

    function select(index) {
      cursor = { row: index, time: cursor ? cursor.time : (view[0] + view[1]) / 2 };
      tellPiece(rows[index], cursor.time);
      redraw();
    }

    // Go to the event before or after, and move the view if the event is outside.
    function follow(by) {
      if (!cursor || rows[cursor.row].kind !== "lane") return;
      const { pieces } = rows[cursor.row].lane;
      const index = Math.min(Math.max(pieceAt(pieces, cursor.time) + by, 0), pieces.ends.length - 1);
      cursor.time = (beginOf(pieces, index) + pieces.ends[index]) / 2;
      if (cursor.time < view[0] || cursor.time > view[1]) {
        const half = (view[1] - view[0]) / 2;
        look(cursor.time - half, cursor.time + half);
      }
      tellPiece(rows[cursor.row], cursor.time);
      redraw();
    }

    samples.addEventListener("pointermove", (event) => {
      const sample = step.samples[Math.floor((event.offsetY - AXIS) / sampleHeight())];
      if (!sample) return;
      const [name, domain, replica, fate, tokens, turns, lag, ...times] = sample;
      const versions = lag === null ? "" : `, lag ${lag}`;
      detail.textContent = `sample ${name} (prompt.attempt.member) of ${domain || "no domain"}, replica ${replica}, ${fate}${versions}, ${tokens} tokens in ` +
        `${turns} turns: ${drawn(times)}`;
    });

    new ResizeObserver(() => { if (box.clientWidth !== width) redraw(); }).observe(box);
    new MutationObserver(redraw).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    choose(step.step);
  });
})();
