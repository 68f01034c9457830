"""Specifications: how a part of hpcrl describes itself to code that does not run it.

A pipeline, algorithm, reward, environment, engine or role has a specification beside its code (`kinds`), found by name
in the table of its kind (`tables`). The schema, `--help`, the checks, the plan and the contract tests are derived from
the specifications; nothing else names an entry. A specification imports neither torch nor the described part.
"""
