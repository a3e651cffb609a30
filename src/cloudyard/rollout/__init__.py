"""Rollouts: an agent tries a task in a sandbox of its own, and the task's tests give a reward.

Built on the SDK alone: a rollout can do nothing that a user could not. Start with `runner.run`.
"""
