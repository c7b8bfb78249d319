"""Participants: each module owns one kind of state that runc and CRIU alone do not carry."""
