"""A plug-in package for hpcrl, like one installed by pip: its entry point in the group `hpcrl.plugins` is ENTRIES.

[project.entry-points."hpcrl.plugins"]
example = "hpcrl_example:ENTRIES"
"""

ENTRIES = {
    "pipeline": {"curriculum": "hpcrl_example.specs:CURRICULUM"},
    "algorithm": {"leave_one_out": "hpcrl_example.specs:LEAVE_ONE_OUT"},
    "reward": {"vowels": "hpcrl_example.specs:VOWELS"},
    "environment": {"echo": "hpcrl_example.specs:ECHO"},
    "training engine": {"noisy": "hpcrl_example.specs:NOISY", "stages": "hpcrl_example.specs:STAGES"},
    "generation engine": {"counting": "hpcrl_example.specs:COUNTING", "columns": "hpcrl_example.specs:COLUMNS"},
    "role": {"witness": "hpcrl_example.specs:WITNESS"},
}
"""Kind -> name -> where the specification is."""
