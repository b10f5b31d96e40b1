"""The demonstration: a real server, two real models, and figures that a person can check."""
