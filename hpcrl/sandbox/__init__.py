"""The sandbox of the code reward: a server process that forks confined children, and its client."""
