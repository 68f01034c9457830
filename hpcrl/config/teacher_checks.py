"""Checks of teachers by domain, and their keys that nothing reads."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.schema import Config
from hpcrl.config.teacher_paths import DEFAULT, PATH, PATHS, teacher_of
from hpcrl.spec.problems import Path, Problem, dotted


def check_teacher_paths(config: Config) -> Iterator[Problem]:
    """Report two ways to name teachers, and weights of a domain that no teacher judges."""
    teacher = config.teacher
    if teacher.source != "folder":
        return
    if teacher.path is not None and teacher.paths:
        text = "teacher.path is given, too; give one of them (teacher.paths.default is for all other domains)"
        yield Problem(PATHS, f"{dotted(PATHS)}: {text}", (PATH,))
        return
    for domain, weights in config.loss.items() if teacher.paths else ():
        if domain != DEFAULT and weights.divergence and (why := lacks_teacher(config, domain)):
            yield Problem(("loss", domain, "divergence"), why, (PATHS,))


def lacks_teacher(config: Config, domain: str) -> str:
    """Why the tokens of a domain cannot learn from a teacher; empty if they can, or need not."""
    weight = config.loss_of(domain).divergence
    if not weight or not config.teacher.paths or teacher_of(config.teacher, domain) is not None:
        return ""
    has = ", ".join(config.teacher.paths)
    return (
        f"loss.{domain}.divergence: {weight:g}, but no teacher judges the domain {domain} (teacher.paths has: {has}); "
        f"give teacher.paths.{domain} or teacher.paths.default, or use loss.{domain}.divergence=0"
    )


def unread_teachers(config: Config) -> Iterator[tuple[Path, Path, str]]:
    """(key, key whose value is the cause, reason) of teachers from which no domain learns."""
    if config.teacher.source != "folder":  # nothing reads any of them
        return
    others = [domain for domain in config.loss if domain not in config.teacher.paths]
    for domain in config.teacher.paths:
        if domain != DEFAULT and not config.loss_of(domain).divergence:
            yield (*PATHS, domain), ("loss",), f"loss.{domain}.divergence is 0"
        elif domain == DEFAULT and not any(config.loss_of(each).divergence for each in (DEFAULT, *others)):
            yield (*PATHS, domain), ("loss",), "the divergence is 0 in all domains without a teacher of their own"
