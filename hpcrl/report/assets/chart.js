"use strict";
// Line charts in SVG. report.chart({series, marks, ...}) gives an element that draws itself in its width.
(() => {
  const { el, svg, number, replace } = report;
  const MARGIN = { left: 54, right: 10, top: 8, bottom: 22 };

  // About `count` round values between low and high, at most.
  function ticks(low, high, count) {
    const rough = (high - low) / count || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
    const first = Math.ceil(low / step);
    const found = [];
    for (let at = 0; at <= 2 * count && (first + at) * step <= high + step * 1e-9; at += 1) {
      found.push(Number(((first + at) * step).toPrecision(12)));
    }
    return found;
  }

  function logTicks(low, high) {
    const found = [];
    const every = Math.max(1, Math.ceil((high - low) / 5));
    for (let power = Math.ceil(low); power <= high; power += every) found.push(power);
    return found.length ? found : [low, high];
  }

  // options: series [{name, colour, points [[x, y], ...], faint, dashed}], x ascending, y null for a gap; marks [{x, label}],
  // vertical lines; log: a logarithmic y axis, which leaves out values that are not above 0; height; xName; label, for screen
  // readers; xRange, yRange [low, high].
  report.chart = (options) => {
    const box = el("div", { class: "chart" });
    let width = 0;
    const redraw = () => {
      if (!box.clientWidth || box.clientWidth === width) return;
      width = box.clientWidth;
      replace(box, picture(options, width));
    };
    new ResizeObserver(redraw).observe(box);
    return box;
  };

  function picture(options, width) {
    const height = options.height || 220;
    const scaled = (value) => (options.log ? Math.log10(value) : value);
    const usable = (y) => y !== null && Number.isFinite(y) && (!options.log || y > 0);
    const xs = [];
    const ys = [];
    for (const series of options.series) {
      for (const [x, y] of series.points) if (usable(y)) { xs.push(x); ys.push(scaled(y)); }
    }
    if (!xs.length) return el("p", { class: "quiet-text" }, options.log ? "No values above 0." : "No values.");
    let [left, right] = options.xRange || extent(xs);
    let [low, high] = options.yRange ? options.yRange.map(scaled) : extent(ys);
    if (left === right) { left -= 1; right += 1; }
    // Rounding alone, as of the means of a constant, is no range.
    const flat = high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high));
    const pad = flat ? Math.abs(low) * 0.1 || 1 : options.yRange ? 0 : (high - low) * 0.05;
    low -= pad;
    high += pad;
    const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
    const px = (x) => MARGIN.left + ((x - left) / (right - left)) * inner.width;
    const py = (y) => MARGIN.top + (1 - (scaled(y) - low) / (high - low)) * inner.height;
    const level = (value) => (options.log ? 10 ** value : value);
    const across = ticks(left, right, Math.max(2, Math.min(8, inner.width / 80))).filter((x) => x >= left && x <= right);
    const up = options.log ? logTicks(low, high) : ticks(low, high, 6);
    const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": options.label || "chart" });
    for (const y of up) {
      const at = py(level(y));
      root.append(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: at, y2: at }),
        svg("text", { class: "tick", x: MARGIN.left - 5, y: at + 4, "text-anchor": "end" }, number(Number(level(y).toPrecision(6)))));
    }
    for (const x of across) {
      root.append(svg("text", { class: "tick", x: px(x), y: height - 6, "text-anchor": "middle" }, number(x)));
    }
    for (const mark of options.marks || []) {
      if (mark.x < left || mark.x > right) continue;
      root.append(svg("line", { class: "mark", x1: px(mark.x), x2: px(mark.x), y1: MARGIN.top, y2: height - MARGIN.bottom },
        svg("title", {}, mark.label)));
    }
    for (const series of options.series) {
      root.append(svg("path", { class: series.faint ? "series faint" : "series", d: path(series.points, usable, px, py),
        style: `stroke:${series.colour}${series.dashed ? ";stroke-dasharray:5 4" : ""}` }));
      const visible = series.points.filter((point) => usable(point[1]));
      if (visible.length < 30 && !series.faint) {
        for (const [x, y] of visible) root.append(svg("circle", { cx: px(x), cy: py(y), r: 2.4, style: `fill:${series.colour}` }));
      }
    }
    return [root, hover(root, options, usable, px, py, left, right, width, height)];
  }

  function extent(values) {
    let low = Infinity;
    let high = -Infinity;
    for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
    return [low, high];
  }

  function path(points, usable, px, py) {
    let text = "";
    let broken = true;
    for (const [x, y] of points) {
      if (!usable(y)) { broken = true; continue; }
      text += `${broken ? "M" : "L"}${px(x).toFixed(1)},${py(y).toFixed(1)}`;
      broken = false;
    }
    return text;
  }

  // The values at the step nearest to the pointer, as text below the chart.
  function hover(root, options, usable, px, py, left, right, width, height) {
    const line = svg("line", { class: "pointer", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden" });
    const note = el("p", { class: "values", "aria-live": "off" }, "\u00a0");
    root.append(line);
    const series = options.series.filter((each) => !each.faint).map((each) => ({ ...each, points: each.points.filter((p) => usable(p[1])) }));
    const steps = [...new Set(series.flatMap((each) => each.points.map((point) => point[0])))].sort((a, b) => a - b);
    const move = (event) => {
      const bounds = root.getBoundingClientRect();
      const x = left + ((event.clientX - bounds.left - MARGIN.left) / (width - MARGIN.left - MARGIN.right)) * (right - left);
      const step = nearest(steps, x);
      if (step === null) return;
      line.setAttribute("x1", px(step));
      line.setAttribute("x2", px(step));
      line.setAttribute("visibility", "visible");
      const here = series.map((each) => [each, each.points.find((point) => point[0] === step)]).filter((pair) => pair[1]);
      replace(note, el("span", {}, `${options.xName || "step"} ${number(step)} `), here.map(([each, point]) => [
        el("span", { class: "swatch", style: `background:${each.colour}` }), `${each.name} ${number(point[1])} `]));
    };
    root.addEventListener("pointermove", move);
    root.addEventListener("pointerdown", move);
    root.addEventListener("pointerleave", () => { line.setAttribute("visibility", "hidden"); replace(note, "\u00a0"); });
    return note;
  }

  function nearest(sorted, x) {
    if (!sorted.length) return null;
    let low = 0;
    let high = sorted.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (sorted[middle] < x) low = middle; else high = middle; }
    return Math.abs(sorted[low] - x) <= Math.abs(sorted[high] - x) ? sorted[low] : sorted[high];
  }
})();
