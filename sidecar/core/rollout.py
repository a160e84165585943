"""A rollout's steps: what begins it, what moves it on, what ends it."""
