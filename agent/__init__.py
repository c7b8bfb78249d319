"""What a node does with containerd on behalf of the command line: checkpoint, restore, push, pull."""
