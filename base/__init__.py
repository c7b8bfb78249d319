"""What every package needs and no package owns: errors, the trace, the configuration."""
