"""What a rank does in each role; built by a BuildRole command (hpcrl.roles.worker)."""
