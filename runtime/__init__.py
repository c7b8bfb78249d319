"""The engine: checkpoint and restore of one container on this node, through runc and CRIU."""
