"use strict";
report.section("overview", (root, data) => {
  root.append(report.pairs(data.what));
});
