"""Tasks of software engineering: a small repository, a shell in the sandbox, hidden tests."""
