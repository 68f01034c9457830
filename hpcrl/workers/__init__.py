"""The work of a rank in each role, built by a BuildRole command (hpcrl.workers.rank_loop)."""
