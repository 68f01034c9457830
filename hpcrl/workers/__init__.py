"""A rank's work in each role, built by a BuildRole command (hpcrl.workers.rank_loop)."""
