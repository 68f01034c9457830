"""The environment tools: functions that a model calls, and the formats in which models call them."""
