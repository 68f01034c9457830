"use strict";
(() => {
  const { el, pairs, table, number, duration } = report;

  const when = (seconds) => (seconds === null ? "-" : new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " "));

  // [3, 4, 5, 9] as text: 3 to 5, 9.
  function ranges(steps) {
    const parts = [];
    for (let at = 0; at < steps.length;) {
      let end = at;
      while (end + 1 < steps.length && steps[end + 1] === steps[end] + 1) end += 1;
      parts.push(end > at ? `${steps[at]} to ${steps[end]}` : `${steps[at]}`);
      at = end + 1;
    }
    return parts.join(", ");
  }

  function steps(attempt) {
    if (attempt.resumed_from === null) return "-";
    if (attempt.last_step === null || attempt.last_step <= attempt.resumed_from) return "none";
    return `${attempt.resumed_from + 1} to ${attempt.last_step}`;
  }

  function attempts(data) {
    const rows = data.attempts.map((attempt) => [
      attempt.number, attempt.where || "-", when(attempt.began), attempt.end === "running" ? "runs" : when(attempt.ended), steps(attempt),
      [el("strong", {}, attempt.end), attempt.why ? `: ${attempt.why}` : ""], ranges(attempt.lost_steps) || "none",
      attempt.restart_s === null ? "-" : [duration(attempt.restart_s),
        attempt.waited_s === null ? "" : `, of which ${duration(attempt.waited_s)} before it began`],
    ]);
    const changed = data.attempts.filter((attempt) => attempt.changes.length);
    return [
      el("h2", {}, "Attempts"),
      table([{ label: "", number: true }, "Owner", "Began (UTC)", "Ended (UTC)", "Steps", "End", "Lost steps", "Restart took"], rows,
        "A restart took the time from the end of the previous attempt to the first complete step. Lost steps were computed again, or left for a branch."),
      changed.length ? el("h3", {}, "Changed at an attempt") : null,
      changed.map((attempt) => el("div", {}, el("p", {}, `Attempt ${attempt.number}`),
        el("ul", {}, attempt.changes.map((text) => el("li", {}, text))))),
    ];
  }

  function hours(data) {
    const total = data.hours.reduce((sum, phase) => sum + phase.seconds, 0);
    const columns = ["Phase", { label: "Time", number: true }, { label: "Share", number: true }, { label: "Node-hours", number: true },
      { label: "GPU-hours", number: true }, "Ranks that work"];
    const line = (phase) => [phase.name, duration(phase.seconds), `${((100 * phase.seconds) / total).toFixed(1)} %`,
      number(phase.node_hours), data.gpus ? number(phase.gpu_hours) : "-", phase.ranks || ""];
    const sum = { name: "all", seconds: total, node_hours: (total * data.nodes) / 3600, gpu_hours: (total * data.gpus) / 3600, ranks: "" };
    return [
      el("h2", {}, "Where the time went"),
      table(columns, [...data.hours, sum].map(line),
        `Hours of ${data.nodes} node(s) and ${data.gpus} GPU(s), which the job holds in every phase; without time in the queue.`),
      data.layout_changed ? el("p", { class: "quiet-text" }, "The layout changed between attempts; the hours are those of the newest.") : null,
    ];
  }

  report.section("overview", (root, data) => {
    root.append(pairs(data.what));
    const parts = [
      data.evaluation ? [el("h2", {}, "Scores"), table(data.evaluation.columns, data.evaluation.rows)] : null,
      data.branches.length ? [el("h2", {}, "Branches"), el("ul", {}, data.branches.map((text) => el("li", {}, text)))] : null,
      data.attempts.length ? attempts(data) : [el("h2", {}, "Attempts"), el("p", {}, "None: the run never started.")],
      data.hours.length ? hours(data) : null,
      data.errors.length ? [el("h2", {}, "Errors that cost samples"),
        table([{ label: "Samples", number: true }, "Source", "Error", "First (UTC)", "Last (UTC)"], data.errors)] : null,
      data.arguments.length ? [el("h2", {}, "Arguments"), el("pre", {}, data.arguments.join("\n"))] : null,
      data.plan ? el("details", {}, el("summary", {}, "Plan of the newest attempt"), el("pre", {}, data.plan)) : null,
    ];
    root.append(...parts.flat(Infinity).filter((part) => part !== null));
  });
})();
