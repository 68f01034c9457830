"use strict";
report.section("warnings", (root, data) => {
  const { el } = report;
  if (!data.found.length) {
    root.append(el("p", {}, `Nothing unusual in ${data.steps} steps.`));
    return;
  }
  const since = (found) => {
    if (found.step === null) return "";
    if (found.until === null) return `Since step ${found.step}`;
    return found.until === found.step ? `Step ${found.step}` : `Steps ${found.step} to ${found.until}, not any more`;
  };
  for (const found of data.found) {
    root.append(el("article", { class: found.until === null ? "warning" : "warning over" },
      el("h2", {}, found.title),
      el("p", { class: "quiet-text" }, since(found)),
      el("p", {}, found.text),
      found.metrics.length ? el("p", {}, "Curves: ", found.metrics.map((name, at) => [at ? ", " : "",
        el("a", { href: `#curves/${encodeURIComponent(name)}` }, name)])) : null));
  }
});
