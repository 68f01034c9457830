"""The usual numbers of responses and temperatures of benchmarks in data.val, unless the configuration gives others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpcrl.config.data import DataConfig, DataSource
from hpcrl.spec.benchmarks import BENCHMARK, BENCHMARKS

SAMPLING = ("samples", "temperature")


def sampled_benchmarks(data: Mapping[str, Any]) -> Any:
    """The section eval of a configuration that is not yet checked, with eval.sets.NAME for benchmarks that are usually
    answered several times. Unchanged if it has samples or temperature, in eval or for the set."""
    given = data.get("eval", {})
    sets = given.get("sets", {}) if isinstance(given, dict) else None
    if not isinstance(sets, dict) or any(key in given for key in SAMPLING):
        return given
    found = {}
    for domain, name in _benchmarks(data.get("data")):
        own, usual = sets.get(domain, {}), {key: getattr(BENCHMARKS[name], key) for key in SAMPLING}
        if usual["samples"] > 1 and isinstance(own, dict) and not any(own.get(key) is not None for key in SAMPLING):
            found[domain] = own | usual
    return {**given, "sets": sets | found} if found else given


def _benchmarks(data: Any) -> Iterator[tuple[str, str]]:
    """(domain, name) of the benchmarks in data.val."""
    val = data.val if isinstance(data, DataConfig) else data.get("val") if isinstance(data, dict) else None
    for source in val if isinstance(val, list | tuple) else [val]:
        if isinstance(source, DataSource):
            source = source.model_dump()
        path = source.get("path") if isinstance(source, dict) else source
        domain = source.get("domain") if isinstance(source, dict) else None
        if isinstance(path, str) and (name := path.removeprefix(BENCHMARK)) != path and name in BENCHMARKS:
            yield str(domain or name), name
