"""The code reward's sandbox: a server process that forks confined children, and its client."""
