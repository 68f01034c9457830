"""Software engineering tasks: a small repository, a shell in the sandbox, hidden tests."""
