"""The report of runs: one HTML page that works without a server and without network. Imports no torch."""
