"""The rules, pure: a worker's turn, its stages, timers, watermarks, and what they keep in a store."""
