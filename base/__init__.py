"""What every package needs and no package owns: errors, the trace, the configuration, annotations."""

__version__ = "0.1.0"
