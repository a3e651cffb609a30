"""The part of a yard that clients talk to: gateway, placer, watcher. It keeps no state of any sandbox."""
