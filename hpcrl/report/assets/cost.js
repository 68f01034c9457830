"use strict";
report.section("cost", (root, data) => {
  const { el, pairs, table, number, duration } = report;
  const right = (label) => ({ label, number: true });
  const known = (value) => (value === null || value === undefined ? "-" : number(value));
  const hours = (entry) => [known(entry.node_hours), known(entry.gpu_hours), known(entry.core_hours), known(entry.kwh)];
  const units = ["Node-hours", "GPU-hours", "Core-hours", "kWh"].map(right);
  const when = (seconds) => (seconds === null ? "-" : new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " "));
  const percent = (share) => `${(100 * share).toFixed(1)} %`;

  root.append(pairs(data.told));
  if (data.notes.length) root.append(el("ul", {}, data.notes.map((text) => el("li", {}, text))));
  root.append(el("h2", {}, "Attempts"), table([right(""), "Job", "Began (UTC)", "Time", ...units, "Time from"],
    data.attempts.map((attempt) => [attempt.attempt, attempt.job === null ? "-" : `${attempt.job}, restart ${attempt.restarts || 0}`,
      when(attempt.began), attempt.seconds === null ? "-" : duration(attempt.seconds) + (attempt.runs ? ", runs" : ""),
      ...hours(attempt), attempt.from]),
    "From accounting: the whole time of a job's start, as Slurm has it. From records: from the attempt's begin to its end."));
  if (data.jobs.length) {
    root.append(el("h2", {}, "Jobs"), table([right("Job"), right("Starts"), right("Without an attempt"), ...units],
      data.jobs.map((job) => [job.job, job.starts, job.starts_without_attempt, ...hours(job)])));
  }
  const split = data.split;
  const phases = split ? Object.entries(split.phases) : [];
  if (!phases.length) return;
  const whole = phases.reduce((sum, entry) => sum + entry[1], 0);
  root.append(el("h2", {}, `${split.unit} by phase`),
    table(["Phase", right(split.unit), right("Share")], phases.map(([name, value]) => [name, number(value), percent(value / whole)]),
      `${data.measured[0].toUpperCase()}${data.measured.slice(1)}.`));
  if (!split.roles.length) return;
  const names = phases.map((entry) => entry[0]).filter((name) => split.roles.some((role) => name in role.hours));
  root.append(el("h2", {}, `${split.unit} by role`),
    table(["Roles", right("Ranks"), right("All"), ...names.map(right), right("Idle")], split.roles.map((role) => {
      const all = Object.values(role.hours).reduce((sum, value) => sum + value, 0);
      return [role.roles, role.ranks, number(all), ...names.map((name) => known(role.hours[name])), percent((role.hours.wait || 0) / all)];
    }), `Of steps only. ${percent(split.idle)} of these ${split.unit} were idle: the ranks waited; the timeline shows for what.`));
});
