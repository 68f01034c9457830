"""Specifications: how a part of hpcrl describes itself to code that does not run it.

A pipeline, algorithm, reward, environment, engine or role has a specification (`kinds`) next to its code, found by name
in its kind's table (`tables`). The schema, `--help`, the checks, the plan and the contract tests are derived from the
specifications; no other code names an entry. A specification imports neither torch nor the described part.
"""
